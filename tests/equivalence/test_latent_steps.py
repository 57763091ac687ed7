"""Adaptive latent CoT: all tokens of a step at once = token by token, step by step, with the same decisions."""

import pytest
import torch
from transformers import DynamicCache

from tests.families import ALL, adaptive_model, random_ids
from tests.oracle import adaptive_oracle

THRESHOLD = 0.15
CLOSE = {"gemma2": 1e-5}  # its softmax is in float32


@pytest.fixture(params=ALL)
def model(request):
    return adaptive_model(request.param, exit_threshold=THRESHOLD, router_bias=0.3)


@pytest.mark.parametrize("length", [1, 9])
@torch.no_grad()
def test_parallel_steps_equal_the_oracle(model, length):
    ids = random_ids(2, length)
    output = model(ids)
    for row in range(2):
        expected, lengths = adaptive_oracle(model, ids[row : row + 1])
        torch.testing.assert_close(output.logits[row : row + 1], expected, rtol=0, atol=_tolerance(model))
        assert output.latents.lengths[row].tolist() == lengths
    if length > 1:
        assert 0 < output.latents.lengths.float().mean() < model.config.max_latent_steps, "no decision was tested"


@pytest.mark.parametrize("pieces", [[1] * 9, [4, 1, 4]], ids=["token by token", "chunks"])
@torch.no_grad()
def test_decoding_over_a_cache_equals_one_forward(model, pieces):
    ids = random_ids(2, 9)
    expected = model(ids)
    cache, logits = DynamicCache(), []
    for piece in ids.split(pieces, dim=1):
        logits.append(model(piece, cache=cache, use_cache=True).logits)
    torch.testing.assert_close(torch.cat(logits, dim=1), expected.logits, rtol=0, atol=_tolerance(model))
    table = cache.layers[-1]
    assert table.latent_steps.tolist() == expected.latents.lengths.sum(-1).tolist()
    assert len(table.entries) == 9 + int(table.latent_steps.max()), "a row costs a slot a step, and no more"


def _tolerance(model) -> float:
    return CLOSE.get(model.config.text_config.model_type, 1e-12)
