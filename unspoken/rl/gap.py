"""The gap between a rollout and its scoring: log-probabilities of the same tokens, by decoding and by parallel passes.

    d_t = log p_train(y_t) - log p_rollout(y_t)       of a completion's tokens, T of them
    s   = exp(sum_t d_t / T)                          GSPO's ratio, were the rollout's probabilities the old policy's

GSPO clips s at a few ten-thousandths around 1. A trainer that scores by k passes what the recurrence has sampled is off
by more, so the old policy is scored as the new one is; how far both are from what sampled stands here, at every step.
Adaptive models compute in parallel what they decode: their gap is rounding, but where a halting decision flips.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RolloutGap:
    """Of all tokens of a batch: `mean` (signed), `mean_abs` and `max_abs` of d_t, nats; and of all completions `ratio`,
    the mean of s, and `ratio_spread`, the largest |log s|."""

    mean: float
    mean_abs: float
    max_abs: float
    ratio: float
    ratio_spread: float

    @classmethod
    def of(cls, scored: Tensor, sampled: Tensor, mask: Tensor) -> "RolloutGap":
        """scored, sampled [B, T]: log-probabilities by the trainer's forward and by the rollout; mask [B, T]."""
        mask = mask.bool()
        lengths = mask.sum(-1)
        gap = (scored - sampled).double().masked_fill(~mask, 0.0)
        if not mask.any():
            return cls(0.0, 0.0, 0.0, 1.0, 0.0)
        logs = (gap.sum(-1) / lengths.clamp(min=1))[lengths > 0]
        return cls(
            float(gap.sum() / mask.sum()),
            float(gap.abs().sum() / mask.sum()),
            float(gap.abs().max()),
            float(logs.exp().mean()),
            float(logs.abs().max()),
        )


def truncated_weights(scored: Tensor, sampled: Tensor, mask: Tensor, limit: float) -> Tensor:
    """What a completion's advantage is multiplied with to correct for the gap, [B]: s, at most `limit` and at least its
    inverse. GSPO's length-normalised ratio, as everything else here weighs completions, not tokens."""
    lengths = mask.sum(-1).clamp(min=1)
    logs = ((scored - sampled) * mask).sum(-1) / lengths
    return torch.exp(logs).clamp(1 / limit, limit)
