"""Both methods in one: every token takes latent steps, and z_final of the token before is recycled into its input."""

import pytest
import torch
from transformers import DynamicCache

from tests.equivalence.test_latent_training import assert_same, gradients
from tests.equivalence.test_packing import assert_equal_alone, documents, packed
from tests.equivalence.test_training import batch_of_rows
from tests.families import ALL, REPRESENTATIVE, adaptive_recycler_model, random_ids
from tests.oracle import adaptive_oracle, close, embed, grid_body
from unspoken.latent import reference

CLOSE = {"gemma2": 1e-5}  # its softmax is in float32
LENGTH = 7


def thinking(name: str, **fields):
    return adaptive_recycler_model(name, exit_threshold=0.15, router_bias=0.3, **fields)


@pytest.mark.parametrize("name", ALL)
@torch.no_grad()
def test_recurrence_passes_and_decoding_equal_the_oracle(name):
    model, ids, tolerance = thinking(name), random_ids(2, LENGTH), CLOSE.get(name, 1e-10)
    exact, parallel = model(ids, num_passes="exact"), model(ids, num_passes=LENGTH)
    cache, steps = DynamicCache(), []
    for piece in ids.split(1, dim=1):
        steps.append(model(piece, cache=cache, use_cache=True).logits)
    for row in range(2):
        expected, lengths = adaptive_oracle(model, ids[row : row + 1])
        for output in (exact, parallel):
            close(output.logits[row : row + 1], expected, tolerance)
            assert output.latents.lengths[row].tolist() == lengths
        close(torch.cat(steps, dim=1)[row : row + 1], expected, tolerance)
    assert 0 < exact.latents.lengths.float().mean() < model.config.max_latent_steps, "no decision was tested"
    one_pass = model(ids, num_passes=1)
    assert (one_pass.logits[:, 1:] - exact.logits[:, 1:]).abs().max() > 1e-3, "nothing was recycled"


@pytest.mark.parametrize("name", REPRESENTATIVE)
def test_gradients_of_as_many_passes_as_tokens_equal_the_recurrences(name):
    model, ids = thinking(name), random_ids(1, 5)
    model(ids, num_passes=5).logits.square().sum().backward()
    found = gradients(model)
    model.zero_grad()
    hidden, _, _ = reference.latent_steps(
        grid_body(model),
        lambda state, step: torch.sigmoid(model.model.router(state, step)).squeeze(),
        embed(model, ids),
        model.config.max_latent_steps,
        model.config.exit_threshold,
        adapter=model.model.adapter,
    )
    model.transform(model.lm_head(hidden)).square().sum().backward()
    expected = gradients(model)
    assert expected["model.router.gates.0.weight"].abs().max() > 1e-6
    assert expected["model.adapter.proj.weight"].abs().max() > 1e-6
    assert_same(found, expected)


@pytest.mark.parametrize("name", ["llama_tied", "gemma3_text"])
def test_checkpointing_changes_nothing(name):
    model, batch = thinking(name, adaptive_loss_weight=3.0, adaptive_loss_exponent=0.5).train(), batch_of_rows((7, 4))
    loss = model(**batch).loss
    loss.backward()
    expected = gradients(model)
    model.gradient_checkpointing_enable()
    again = model(**batch).loss
    again.backward()
    assert torch.equal(loss, again)
    assert_same(gradients(model), expected, tolerance=1e-12)


@pytest.mark.parametrize("name", REPRESENTATIVE)
@torch.no_grad()
def test_packed_documents_equal_documents_alone(name):
    model, rows = thinking(name), documents()
    ids, positions = packed(rows)
    assert_equal_alone(model, rows, model(ids, position_ids=positions, num_passes=3))


@pytest.mark.parametrize(
    "options",
    [{}, {"num_beams": 3}, {"prompt_lookup_num_tokens": 3}, {"prefill_chunk_size": 5}],
    ids=["greedy", "beams", "prompt lookup", "chunks"],
)
@torch.no_grad()
def test_generating_over_a_cache_equals_generating_without(options):
    model, ids = thinking("llama_tied"), torch.tensor([[5, 6, 7, 8, 9, 5, 6, 7, 8, 9, 5, 6]])
    alike = {"max_new_tokens": 8, "do_sample": False, "num_beams": options.get("num_beams", 1)}
    expected = model.generate(ids, use_cache=False, **alike)
    assert torch.equal(model.generate(ids, **{**alike, **options}), expected)
