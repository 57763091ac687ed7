"""FLOPs of the models that ours are compared with, against torch's own counter."""

import pytest
import torch

from benchmarks.ceiling import counted_flops as counted
from tests.analysis.test_flops import LENGTH
from tests.baselines import CONFIGS, RECURRENT, baseline
from tests.families import random_ids
from unspoken.analysis.flops import Attention, model_flops, training_flops

FAMILIES = ["llama_tied", "gpt_neox", "qwen3_moe"]


@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("kind", [*CONFIGS, *RECURRENT])
@torch.no_grad()
def test_a_forward_is_what_torch_counts(kind, name):
    model, ids = baseline(kind, name, attn_implementation="eager"), random_ids(2, LENGTH)
    seen = counted(lambda: model(ids, use_cache=False))
    flops = model_flops(model)
    assert seen == 2 * (flops.passes(LENGTH, is_dense=True) + LENGTH * flops.head)


@pytest.mark.parametrize("kind", [*CONFIGS, *RECURRENT])
@torch.no_grad()
def test_decoding_a_token_is_what_torch_counts(kind):
    model, ids = baseline(kind, attn_implementation="eager"), random_ids(1, LENGTH)
    cache = model(ids[:, :-1], use_cache=True).cache
    seen, flops = counted(lambda: model(ids[:, -1:], cache=cache)), model_flops(model)
    slots = flops.runs[-1]
    # A token's own later slots, where they run together, are masked and computed.
    unseen = 0 if kind in RECURRENT else slots * (slots - 1) // 2
    assert seen == flops.decode(LENGTH) + sum(layer.flops_per_key * unseen for layer in flops.attention)


@pytest.mark.parametrize("kind", ["looped", "pause", "ponder"])
def test_a_training_step_is_what_torch_counts(kind):
    """The logits of PonderLM's distributions are computed once more in the backward, which is not looked at."""
    model, ids = baseline(kind, attn_implementation="eager").train(), random_ids(2, LENGTH)

    def step():
        model(ids, labels=ids).loss.backward()

    seen = counted(step)
    flops = model_flops(model)
    recomputed = 2 * (len(flops.runs) - 1) * flops.between // 2 * LENGTH
    targets, tokens = 2 * (LENGTH - 1), 2 * LENGTH
    assert seen == pytest.approx(
        3 * (2 * flops.passes(LENGTH, is_dense=True) + targets * flops.head) + recomputed, rel=1e-9
    )
    summary = {"tokens": tokens, "pass_tokens": tokens * sum(flops.runs), "target_tokens": targets}
    masked = flops.passes(LENGTH, is_dense=True) - flops.passes(LENGTH)
    assert training_flops(flops, summary, LENGTH, False) == pytest.approx(seen - recomputed - 6 * masked, rel=1e-9)


def test_every_exit_of_a_looped_model_has_a_loss():
    """Its logits are made once more in the backward, which is not looked at; the last loop has no gate."""
    model, ids = baseline("looped with a gate", attn_implementation="eager").train(), random_ids(2, LENGTH)

    def step():
        model(ids, labels=ids).loss.backward()

    flops, targets, seen = model_flops(model), 2 * (LENGTH - 1), counted(step)
    runs = 2 * flops.passes(LENGTH, is_dense=True)
    assert seen == 3 * runs + (3 + 1) * targets * 3 * flops.head
    summary = {"tokens": 2 * LENGTH, "pass_tokens": 6 * LENGTH, "target_tokens": targets}
    masked = runs - 2 * flops.passes(LENGTH)
    expected = seen - targets * 3 * flops.head - 3 * masked
    assert training_flops(flops, summary, LENGTH, False) == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("num_refinements", [2, 3])
def test_refinements_are_counted_as_they_were_drawn(num_refinements):
    model, ids = baseline("ponder2", attn_implementation="eager").train(), random_ids(2, LENGTH)

    def step():
        model(ids, labels=ids, num_refinements=num_refinements).loss.backward()

    seen = counted(step)
    flops, tokens, targets = model_flops(model), 2 * LENGTH, 2 * (LENGTH - 1)
    runs = model.model.runs_of_pass(num_refinements)
    summary = {"tokens": tokens, "pass_tokens": tokens * sum(runs), "target_tokens": targets}
    masked = sum(flops.run(LENGTH, slots, is_dense=True) - flops.run(LENGTH, slots) for slots in runs)
    assert training_flops(flops, summary, LENGTH, False) == pytest.approx(seen - 6 * masked, rel=1e-9)


@pytest.mark.parametrize("window", [None, 3, 20])
def test_slots_see_all_slots_of_the_tokens_before(window):
    """Counted one by one; a window counts tokens."""
    attention, slots = Attention(4, window), 3
    seen = [sum(min(t, (window or 99) - 1) * slots + own for own in range(1, slots + 1)) for t in range(LENGTH)]
    assert attention.over(LENGTH, slots) == 4 * sum(seen)
    assert [attention.at(t + 1, slots) for t in range(LENGTH)] == [4 * keys for keys in seen]
