"""PonderLM-2: refined thoughts and the recurrence equal their oracles; decoding is the recurrence."""

from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import DynamicCache, StaticCache

from tests.baselines import baseline
from tests.equivalence.test_latent_training import gradients
from tests.equivalence.test_packing import documents, packed
from tests.equivalence.test_padding import padded, rows_of, token_positions
from tests.equivalence.test_training import batch_of_rows
from tests.families import ALL, MOE, REPRESENTATIVE, plain_model, random_ids
from tests.models.test_save_load import assert_same_weights, reload
from tests.oracle import close
from unspoken import convert
from unspoken.errors import CacheError
from unspoken.eval.thinking import grid_backbone
from unspoken.latent import reference
from unspoken.models.backbone import input_multiplier

KINDS = ["ponder2", "ponder2 with two thoughts"]
CLOSE = {"gemma2": 1e-5}  # its softmax is in float32
TOLERANCE = 1e-9


def parts(model: Any, input_ids: Tensor) -> tuple[Any, Tensor, int]:
    """Grid backbone, what enters the first layer [1, T, d], and the number of thoughts."""
    embeds = model.model.embed(input_ids, None) * input_multiplier(model.config.text_config)
    return grid_backbone(model.model), embeds, model.config.num_latent_thoughts


def refined(model: Any, input_ids: Tensor, num_refinements: int) -> tuple[Tensor, list[list[Tensor]]]:
    """The oracle's logits [B, T, V], and each row's stages."""
    backbone, embeds, count = parts(model, input_ids)
    rows = [reference.refined_thoughts(backbone, row, count, num_refinements) for row in embeds.split(1)]
    return head(model, torch.cat([states for states, _ in rows])), [stages for _, stages in rows]


def recurrent(model: Any, input_ids: Tensor, prompts: list[Any] | None = None) -> Tensor:
    backbone, embeds, count = parts(model, input_ids)
    rows = embeds.split(1)
    states = [reference.thoughts(backbone, row, count, p) for row, p in zip(rows, prompts or [None] * len(rows))]
    return head(model, torch.cat(states))


def head(model: Any, states: Tensor) -> Tensor:
    return model.transform(model.lm_head(states))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("kind", KINDS)
@torch.no_grad()
def test_forwards_and_decoding_equal_the_oracles(kind, name):
    model, ids, tolerance = baseline(kind, name), random_ids(2, 7), CLOSE.get(name, TOLERANCE)
    for n in (0, 2):
        close(model(ids, num_refinements=n, use_cache=False).logits, refined(model, ids, n)[0], tolerance)
    exact = recurrent(model, ids)
    close(model(ids, num_passes="exact", use_cache=False).logits, exact, tolerance)
    close(model(ids, num_refinements=7 * model.config.num_latent_thoughts, use_cache=False).logits, exact, tolerance)
    cache = DynamicCache()
    steps = [model(ids[:, t : t + 1], cache=cache).logits for t in range(7)]
    close(torch.cat(steps, dim=1), exact, tolerance)
    assert cache.get_seq_length() == 7
    prompt, stages = refined(model, ids[:, :4], 3)
    expected = recurrent(model, ids, stages)
    cache = DynamicCache()
    close(model(ids[:, :4], cache=cache).logits, prompt, tolerance)
    rest = [model(ids[:, t : t + 1], cache=cache).logits for t in range(4, 7)]
    close(torch.cat(rest, dim=1), expected[:, 4:], tolerance)


@pytest.mark.parametrize("name", REPRESENTATIVE)
@torch.no_grad()
def test_a_second_turn_is_refined_over_the_first(name):
    """Enough refinements of every part are the recurrence over the whole."""
    model, ids = baseline("ponder2", name), random_ids(2, 7)
    cache, logits = DynamicCache(), []
    for piece in ids.split([3, 4], dim=1):
        logits.append(model(piece, cache=cache, num_refinements=4).logits)
    close(torch.cat(logits, dim=1), recurrent(model, ids), TOLERANCE)


@pytest.mark.parametrize("name", REPRESENTATIVE)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_flow_through_all_runs(kind, name):
    model, ids = baseline(kind, name), random_ids(1, 5)
    model(ids, num_refinements=2, use_cache=False).logits.square().mean().backward()
    found = gradients(model)
    refined(model, ids, 2)[0].square().mean().backward()
    for parameter, expected in gradients(model).items():
        close(found[parameter], expected, 1e-6)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("name", REPRESENTATIVE)
@torch.no_grad()
def test_a_padded_row_equals_the_row_alone(name, side):
    model, rows = baseline("ponder2", name), rows_of()
    ids, mask = padded(rows, side)
    for passes in (None, "exact"):
        options = {"use_cache": False, "num_passes": passes}
        logits = model(ids, attention_mask=mask, position_ids=token_positions(mask), **options).logits
        for i, row in enumerate(rows):
            close(logits[i][mask[i].bool()], model(row, **options).logits[0])


@pytest.mark.parametrize("name", REPRESENTATIVE)
@torch.no_grad()
def test_packed_documents_equal_documents_alone(name):
    model, rows = baseline("ponder2", name), documents()
    ids, positions = packed(rows)
    logits = model(ids, position_ids=positions, use_cache=False).logits
    for r, row in enumerate(rows):
        alone = [model(document, use_cache=False).logits[0] for document in row]
        close(logits[r], torch.cat(alone), TOLERANCE)
    with pytest.raises(ValueError, match="one document a row"):
        model(ids, position_ids=positions, num_passes="exact", use_cache=False)


@pytest.mark.parametrize("passes", [None, "exact"])
@torch.no_grad()
def test_what_comes_later_changes_nothing(passes):
    model, ids = baseline("ponder2", "mistral"), random_ids(1, 7)
    before = model(ids, num_passes=passes, use_cache=False).logits
    for t in range(1, 7):
        edited = torch.cat([ids[:, :t], random_ids(1, 7 - t, seed=t)], dim=1)
        close(model(edited, num_passes=passes, use_cache=False).logits[:, :t], before[:, :t], 1e-12)


@pytest.mark.parametrize("options", [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}], ids=str)
@torch.no_grad()
def test_generating_over_a_cache_equals_generating_without(options):
    model, ids = baseline("ponder2", "llama_tied"), torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])
    alike = {"max_new_tokens": 8, "do_sample": False, "num_beams": options.get("num_beams", 1)}
    expected = model.generate(ids, use_cache=False, **alike)
    assert torch.equal(model.generate(ids, **{**alike, **options}), expected)
    with pytest.raises(ValueError, match="prefill_chunk_size would change how"):
        model.generate(ids, prefill_chunk_size=4, **alike)


@torch.no_grad()
def test_a_left_padded_batch_generates_what_each_row_does():
    model, rows = baseline("ponder2", "gemma3_text"), rows_of()
    ids, mask = padded(rows, "left")
    together = model.generate(ids, attention_mask=mask, max_new_tokens=6, do_sample=False)[:, ids.shape[1] :]
    for row, found in zip(rows, together):
        alone = model.generate(row, attention_mask=torch.ones_like(row), max_new_tokens=6, do_sample=False)
        assert torch.equal(alone[0, row.shape[1] :], found[: alone.shape[1] - row.shape[1]])


def test_training_draws_how_often_it_refines(monkeypatch):
    model, ids = baseline("ponder2").train(), random_ids(1, 5)
    seen = []
    base, original = model.model, model.model._refined
    monkeypatch.setattr(base, "_refined", lambda tokens, cache, n: seen.append(n) or original(tokens, cache, n))
    torch.manual_seed(0)
    for _ in range(12):
        model(ids)
    assert set(seen) == {2, 3}
    seen.clear()
    model.eval()(ids)
    model.train()(ids, num_refinements=1)
    assert seen == [3, 1]


@pytest.mark.parametrize("name", MOE)
def test_routers_are_balanced_run_by_run(name):
    model = baseline("ponder2", name, output_router_logits=True).train()
    output = model(**batch_of_rows((7, 4)))
    assert output.aux_loss.isfinite()
    assert output.aux_loss > 0
    output.loss.backward()
    gradients(model)


def test_checkpointing_changes_nothing():
    model, batch = baseline("ponder2").train(), batch_of_rows((7, 4))
    model(**batch, num_refinements=2).loss.backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    model(**batch, num_refinements=2).loss.backward()
    for name, gradient in gradients(model).items():
        close(gradient, expected[name], 1e-12)


@torch.no_grad()
def test_a_model_survives_its_folder(tmp_path):
    model, ids = baseline("ponder2", "llama_tied", torch.float32), random_ids(2, 7)
    model.save_pretrained(tmp_path)
    loaded = reload(tmp_path)
    assert type(loaded) is type(model)
    assert loaded.config.train_refinements == [2, 3]
    assert_same_weights(model, loaded)
    assert torch.equal(loaded(ids, use_cache=False).logits, model(ids, use_cache=False).logits)


@torch.no_grad()
def test_what_does_not_fit_is_refused():
    model, ids = convert(plain_model("llama", torch.float32), "ponder2"), random_ids(1, 4)
    with pytest.raises(CacheError, match="StaticCache has one entry a token"):
        model(ids, cache=StaticCache(model.config, max_cache_len=16))
    with pytest.raises(ValueError, match="one pass, of num_refinements"):
        model(ids, num_passes=2)
