"""The models that ours are compared with: forward = oracle, decoding = forward, and no token knows what it may not."""

import pytest
import torch
from transformers import DynamicCache, StaticCache

from tests.baselines import CONFIGS, MIXTURES, baseline, oracle
from tests.equivalence.test_latent_training import gradients
from tests.equivalence.test_packing import assert_equal_alone, documents, packed
from tests.equivalence.test_padding import padded, rows_of, token_positions
from tests.equivalence.test_training import batch_of_rows
from tests.families import ALL, MOE, REPRESENTATIVE, plain_model, random_ids, tiny_model
from tests.models.test_save_load import assert_same_weights, reload
from tests.oracle import close
from unspoken import convert
from unspoken.errors import CacheError

KINDS = [*CONFIGS, *MIXTURES]
PLAIN_KINDS = ["looped", "pause", "ponder", "mor", "mor by experts with shared keys"]
CLOSE = {"gemma2": 1e-5}  # its softmax is in float32
ONE_RUN = {"looped": {"num_loops": 1}, "pause": {"num_pauses": 0}, "ponder": {"num_ponder_steps": 0}}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_forward_and_decoding_equal_the_oracle(kind, name):
    model, ids, tolerance = baseline(kind, name), random_ids(2, 9), CLOSE.get(name, 1e-10)
    expected = oracle(model, ids)
    close(model(ids, use_cache=False).logits, expected, tolerance)
    for pieces in ([1] * 9, [4, 1, 4]):
        cache, logits = DynamicCache(), []
        for piece in ids.split(pieces, dim=1):
            logits.append(model(piece, cache=cache).logits)
        close(torch.cat(logits, dim=1), expected, tolerance)
        assert cache.get_seq_length() == 9


@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "looped with a gate"])  # which training alone reads
def test_gradients_equal_the_oracles(kind, name):
    model, ids = baseline(kind, name), random_ids(2, 8, seed=7)  # a seed with tokens of every depth
    model(ids, use_cache=False).logits.square().mean().backward()
    found = gradients(model)
    oracle(model, ids).square().mean().backward()
    for parameter, expected in gradients(model).items():
        close(found[parameter], expected, 1e-6)
    assert all(gradient.abs().max() > 0 for gradient in found.values()), "a parameter without effect"


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_padded_row_equals_the_row_alone(kind, name, side):
    model, rows = baseline(kind, name), rows_of()
    ids, mask = padded(rows, side)
    for options in ({"position_ids": token_positions(mask)}, {}):  # without them, positions count the pads
        logits = model(ids, attention_mask=mask, use_cache=False, **options).logits
        for i, row in enumerate(rows):
            close(logits[i][mask[i].bool()], model(row, use_cache=False).logits[0])  # rotations are in float32


@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_packed_documents_equal_documents_alone(kind, name):
    model, rows = baseline(kind, name), documents()
    ids, positions = packed(rows)
    for mask in (None, torch.ones_like(ids)):
        outputs = model(ids, position_ids=positions, attention_mask=mask, use_cache=False)
        alone = lambda document, **options: model(document, use_cache=False)  # noqa: E731  # it has no passes to count
        assert_equal_alone(alone, rows, outputs, 1e-10)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_what_comes_later_changes_nothing(kind):
    model, ids = baseline(kind, "mistral"), random_ids(1, 9)
    before = model(ids, use_cache=False).logits
    for t in range(1, 9):
        edited = torch.cat([ids[:, :t], random_ids(1, 9 - t, seed=t)], dim=1)
        close(model(edited, use_cache=False).logits[:, :t], before[:, :t], 1e-12)


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 5}],
    ids=["greedy", "beams", "prompt lookup", "chunks"],
)
@pytest.mark.parametrize("kind", PLAIN_KINDS)
@torch.no_grad()
def test_generating_over_a_cache_equals_generating_without(kind, options):
    model, ids = baseline(kind, "llama_tied"), torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])
    alike = {"max_new_tokens": 8, "do_sample": False, "num_beams": options.get("num_beams", 1)}
    expected = model.generate(ids, use_cache=False, **alike)
    assert torch.equal(model.generate(ids, **{**alike, **options}), expected)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@torch.no_grad()
def test_a_left_padded_batch_generates_what_each_row_does(kind):
    model, rows = baseline(kind, "gemma3_text"), rows_of()
    ids, mask = padded(rows, "left")
    together = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)[:, ids.shape[1] :]
    for row, found in zip(rows, together):
        alone = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=6, do_sample=False)
        assert torch.equal(alone[0, row.shape[1] :], found[: alone.shape[1] - row.shape[1]])


@pytest.mark.parametrize("name", MOE)
@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_routers_are_balanced_run_by_run(kind, name):
    model = baseline(kind, name, output_router_logits=True).train()
    output = model(**batch_of_rows((7, 4)))
    assert output.aux_loss.isfinite()
    assert output.aux_loss > 0
    output.loss.backward()
    gradients(model)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
def test_checkpointing_changes_nothing(kind):
    model, batch = baseline(kind).train(), batch_of_rows((7, 4))
    loss = model(**batch).loss
    loss.backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    model(**batch).loss.backward()
    for name, gradient in gradients(model).items():
        close(gradient, expected[name], 1e-12)


@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("kind", list(ONE_RUN))
@torch.no_grad()
def test_one_run_is_the_plain_model(kind, name):
    source, ids = plain_model(name), random_ids(2, 9)
    expected = source(ids, use_cache=False).logits
    assert torch.equal(convert(source, kind, **ONE_RUN[kind])(ids, use_cache=False).logits, expected)


@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_a_model_survives_its_folder(kind, tmp_path):
    model, ids = baseline(kind, "llama_tied", torch.float32), random_ids(2, 7)
    model.save_pretrained(tmp_path)
    loaded = reload(tmp_path)
    assert type(loaded) is type(model)
    assert_same_weights(model, loaded)
    assert torch.equal(loaded(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@pytest.mark.parametrize("kind", PLAIN_KINDS)
@torch.no_grad()
def test_caches_that_do_not_fit_are_refused(kind):
    model, ids = baseline(kind, "llama", torch.float32), random_ids(1, 4)
    with pytest.raises(CacheError, match="StaticCache has one entry a token"):
        model(ids, cache=StaticCache(model.config, max_cache_len=16))
    theirs = tiny_model("llama", torch.float32)(ids, use_cache=True).cache
    with pytest.raises(CacheError, match="4 tokens of a"):
        model(ids, cache=theirs)
    with pytest.raises(ValueError, match="has one pass"):
        model(ids, num_passes=2)
