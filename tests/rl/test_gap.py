"""The gap's numbers by hand."""

import math

import pytest
import torch

from unspoken.rl.gap import RolloutGap, flipped_tokens, truncated_weights

SCORED = torch.tensor([[-1.0, -2.0, -9.0], [-1.5, -1.0, -0.5]])
SAMPLED = torch.tensor([[-1.2, -1.9, 0.0], [-1.5, -1.0, -0.2]])
MASK = torch.tensor([[1, 1, 0], [1, 1, 1]])


def test_tokens_and_completions_by_hand():
    gap = RolloutGap.of(SCORED, SAMPLED, MASK)
    assert gap.mean == pytest.approx((0.2 - 0.1 - 0.3) / 5)
    assert gap.mean_abs == pytest.approx((0.2 + 0.1 + 0.3) / 5)
    assert gap.max_abs == pytest.approx(0.3)
    assert gap.ratio == pytest.approx((math.exp(0.05) + math.exp(-0.1)) / 2)
    assert gap.ratio_spread == pytest.approx(0.1)


def test_no_token_is_no_gap():
    assert RolloutGap.of(SCORED, SAMPLED, torch.zeros_like(MASK)).row() == {
        "mean": 0.0, "mean_abs": 0.0, "max_abs": 0.0, "ratio": 1.0, "ratio_spread": 0.0
    }  # fmt: skip


def test_weights_are_ratios_between_two_limits():
    weights = truncated_weights(SCORED, SAMPLED, MASK, 2.0)
    torch.testing.assert_close(weights, torch.tensor([0.05, -0.1]).exp())
    far = truncated_weights(SCORED + torch.tensor([[9.0], [-9.0]]), SAMPLED, MASK, 2.0)
    assert far.tolist() == [2.0, 0.5]


def test_tokens_before_a_flip_are_told_from_those_behind_it():
    """Two prompt tokens (one a pad), three of a completion; the last is sampled and never taken in."""
    sampled = torch.tensor([[0, 1, 2, 0], [3, 1, 0, 0]])
    scored = torch.tensor([[0, 1, 1, 0, 9], [0, 1, 0, 0, 9]])
    mask = torch.tensor([[1, 1, 1, 1, 0], [0, 1, 1, 1, 1]])
    is_flipped = flipped_tokens(sampled, scored, mask, 3)
    assert is_flipped.tolist() == [[False, True, True], [False, False, False]]
    gap = RolloutGap.of(SCORED, SAMPLED, MASK, is_flipped)
    assert gap.flipped == pytest.approx(1 / 5)
    assert gap.max_abs_unflipped == pytest.approx(0.3)
    padded = torch.nn.functional.pad(scored, (0, 2)), torch.nn.functional.pad(mask, (0, 2))
    assert flipped_tokens(sampled, *padded, 5).tolist() == [[False, True, True, False, False], [False] * 5]
    nowhere = RolloutGap.of(SCORED, SAMPLED, torch.zeros_like(MASK), is_flipped)
    assert nowhere.row()["flipped"] == 0.0
