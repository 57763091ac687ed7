"""The gap between a rollout and its scoring: log-probabilities of the same tokens, by decoding and by parallel passes.

    d_t = log p_train(y_t) - log p_rollout(y_t)       of a completion's tokens, T of them
    s   = exp(sum_t d_t / T)                          GSPO's ratio, were the rollout's probabilities the old policy's

GSPO clips s at a few ten-thousandths around 1. A trainer that scores by k passes what the recurrence has sampled is off
by more, so the old policy is scored as the new one is; how far both are from what sampled stands here, at every step.
Adaptive models compute in parallel what they decode. Their gap is rounding, until rounding flips a halting decision: a
token whose reach lies at the threshold then takes another number of latent steps in scoring than in the rollout, and
what follows it reads other keys. So their tokens before any flip and those behind one are told apart.
"""

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class RolloutGap:
    """Of all tokens of a batch: `mean` (signed), `mean_abs` and `max_abs` of d_t, nats; and of all completions `ratio`,
    the mean of s, and `ratio_spread`, the largest |log s|.

    Of a model with latent steps: `flipped`, the share of tokens at or behind a flipped halting decision of their row,
    and `max_abs_unflipped`, the largest |d_t| of the others."""

    mean: float
    mean_abs: float
    max_abs: float
    ratio: float
    ratio_spread: float
    flipped: float | None = None
    max_abs_unflipped: float | None = None

    @classmethod
    def of(cls, scored: Tensor, sampled: Tensor, mask: Tensor, is_flipped: Tensor | None = None) -> "RolloutGap":
        """scored, sampled [B, T]: log-probabilities by the trainer's forward and by the rollout; mask [B, T].
        is_flipped [B, T]: see `flipped`."""
        mask = mask.bool()
        lengths = mask.sum(-1)
        gap = (scored - sampled).double().masked_fill(~mask, 0.0)
        if not mask.any():
            return cls(0.0, 0.0, 0.0, 1.0, 0.0, *((0.0, 0.0) if is_flipped is not None else ()))
        logs = (gap.sum(-1) / lengths.clamp(min=1))[lengths > 0]
        return cls(
            float(gap.sum() / mask.sum()),
            float(gap.abs().sum() / mask.sum()),
            float(gap.abs().max()),
            float(logs.exp().mean()),
            float(logs.abs().max()),
            *(() if is_flipped is None else _of_flips(gap, mask, is_flipped.bool())),
        )

    def row(self) -> dict[str, float]:
        """What there is, by name."""
        return {name: value for name, value in vars(self).items() if value is not None}


def _of_flips(gap: Tensor, mask: Tensor, is_flipped: Tensor) -> tuple[float, float]:
    share = float((is_flipped & mask).sum() / mask.sum())
    return share, float(gap.abs().masked_fill(is_flipped, 0.0).max())


def flipped_tokens(sampled: Tensor, scored: Tensor, attention_mask: Tensor, num_completion: int) -> Tensor:
    """Which tokens of completions were scored from another number of latent steps than they were sampled from, that of
    the token before them or an earlier one's: [B, num_completion].

    scored [B, T]: latent steps of each token of prompts and completions; attention_mask [B, T]. sampled [B, S], S < T:
    without the last token, which is never taken in, and the pads behind it.
    """
    num_taken_in, num_prompt = sampled.shape[1], scored.shape[1] - num_completion
    is_flip = (sampled != scored[:, :num_taken_in]) & attention_mask[:, :num_taken_in].bool()
    is_behind = is_flip.cumsum(-1)[:, num_prompt - 1 :] > 0
    return torch.nn.functional.pad(is_behind, (0, num_completion - is_behind.shape[1]))


def truncated_weights(scored: Tensor, sampled: Tensor, mask: Tensor, limit: float) -> Tensor:
    """What a completion's advantage is multiplied with to correct for the gap, [B]: s, at most `limit` and at least its
    inverse. GSPO's length-normalised ratio, as everything else here weighs completions, not tokens."""
    lengths = mask.sum(-1).clamp(min=1)
    logs = ((scored - sampled) * mask).sum(-1) / lengths
    return torch.exp(logs).clamp(1 / limit, limit)
