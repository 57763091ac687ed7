"""FLOPs of Mixture-of-Recursions against torch's own counter: whole layers for all, middle ones for who goes on."""

import pytest
import torch

from benchmarks.ceiling import counted_flops
from tests.baselines import MIXTURES, baseline
from tests.families import random_ids
from unspoken.analysis.flops import model_flops, training_flops

ROWS, LENGTH = 3, 11
EAGER = {"attn_implementation": "eager"}  # matrix products, which the counter sees


@pytest.mark.parametrize("name", ["llama_tied", "gpt_neox", "qwen3_moe"])
@pytest.mark.parametrize("kind", [kind for kind in MIXTURES if "experts" not in kind])  # theirs is asked of filling too
@torch.no_grad()
def test_a_forward_is_what_torch_counts(kind, name):
    model, ids, found = baseline(kind, name, **EAGER), random_ids(ROWS, LENGTH, seed=7), []
    seen = counted_flops(lambda: found.append(model.model(ids, use_cache=False)))
    lengths, flops = found[0].latents.lengths, model_flops(model)
    assert 0 < lengths.float().mean() < 2 and seen == flops.steps(lengths, is_dense=True)
    assert flops.steps(lengths) < seen


@pytest.mark.parametrize("kind", list(MIXTURES))
@torch.no_grad()
def test_a_step_that_trains_is_counted_from_what_its_tokens_took(kind):
    """What fills short rows is computed and not counted."""
    model, ids, outputs = baseline(kind, **EAGER).train(), random_ids(1, LENGTH, seed=7), []

    def step():
        with torch.enable_grad():
            outputs.append(model(ids, labels=ids))
            outputs[0].loss.backward()

    seen, flops = counted_flops(step), model_flops(model)
    lengths = outputs[0].latents.lengths
    counts = flops._counts(lengths) | {"latent_targets": 0}
    summary = {"tokens": LENGTH, "pass_tokens": LENGTH + counts["latent_steps"], "target_tokens": LENGTH - 1, **counts}
    masked = 3 * (flops.steps(lengths, is_dense=True) - flops.steps(lengths))
    assert training_flops(flops, summary, LENGTH, False) == pytest.approx(seen - masked, rel=1e-9)


@torch.no_grad()
def test_decoding_costs_what_the_last_token_takes():
    flops = model_flops(baseline("mor", **EAGER))
    lengths = torch.zeros(1, LENGTH, dtype=torch.long)
    assert flops.decode_steps(lengths) == flops.decode(LENGTH) == flops.decode(LENGTH, 0.0)
    assert flops.decode_steps(lengths + 2) == flops.decode(LENGTH, 2.0)
    shared = model_flops(baseline("mor with shared keys", **EAGER))
    assert shared.decode_steps(lengths + 2) == shared.decode(LENGTH, 2.0)
    assert shared.cache_entries(2.0) == 1 and flops.cache_entries(2.0) == 1 + 2 * 2 / 4
