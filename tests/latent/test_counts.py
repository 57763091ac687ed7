"""What latent steps cost, counted from their lengths, against the mask that the backbone gets."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.families import adaptive_model
from unspoken.latent.counts import StepRule, num_visible, step_counts, step_rule
from unspoken.latent.visibility import Entries, joined, visible, visible_first_steps

DEEPEST = 3


def marked(lengths: Tensor, window: int | None, reads: str) -> int:
    """The keys that the masks mark for the queries of every run, one run after the other."""
    columns = torch.arange(lengths.shape[1]).expand_as(lengths)
    total, parts = 0, []
    for step in range(1, DEEPEST + 2):
        takes_part = lengths >= step - 1
        parts.append(Entries(columns, takes_part * step))
        if reads == "first" and step > 1:
            seen = visible_first_steps(parts[0], parts[-1], window)
        else:
            lowest = step if reads == "own" else 1
            seen = visible(joined(parts), lengths.shape[1], step, window, lowest)
        total += int(seen[takes_part].sum())
    return total


@st.composite
def rows(draw) -> Tensor:
    batch, num_tokens = draw(st.integers(1, 3)), draw(st.integers(1, 9))
    row = st.lists(st.integers(0, DEEPEST), min_size=num_tokens, max_size=num_tokens)
    return torch.tensor(draw(st.lists(row, min_size=batch, max_size=batch)))


@given(lengths=rows(), window=st.sampled_from([None, 1, 3, 20]), reads=st.sampled_from(["below", "own", "first"]))
@settings(max_examples=200, deadline=None, derandomize=True)
def test_visible_keys_are_those_of_the_mask(lengths, window, reads):
    assert int(num_visible(lengths, window, reads)) == marked(lengths, window, reads)


def test_counts_by_hand():
    """Two layers, one of which sees two tokens; the third token's first run sees 1 + 1 + 1 entries, or 1 + 1."""
    lengths, has_target = torch.tensor([[0, 2, 1]]), torch.tensor([[True, True, False]])
    whole, windowed = 1 + (2 + 3 + 4) + (3 + 5), 1 + (2 + 3 + 4) + (2 + 4)
    assert step_counts(lengths, [None, 2], StepRule(2), has_target).tolist() == [3, 2, 1 + 2 + 2, whole + windowed]
    assert step_counts(lengths, [None], StepRule(0)).tolist() == [3, 3, 0, whole]


@pytest.mark.parametrize("fields", [{}, {"router": "none"}, {"exit_at_step": 2}, {"max_latent_steps": 0}])
@torch.no_grad()
def test_gates_are_those_that_were_asked(fields):
    model = adaptive_model("llama", exit_threshold=0.15, router_bias=0.3, **fields)
    latents = model(torch.arange(22).view(2, 11) + 3, keeps_steps=True).latents
    asked = sum(len(step.gate) for step in latents.steps if step.gate is not None)
    assert int(step_counts(latents.lengths, [None], step_rule(model.config))[2]) == asked
