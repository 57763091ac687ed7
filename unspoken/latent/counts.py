"""What latent steps cost, counted from how many of them each token took: exact, without the forward itself."""

from collections import Counter
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

COUNTS = ("latent_steps", "latent_targets", "gates", "attention_keys")


def step_counts(
    lengths: Tensor, windows: Sequence[int | None], num_gates: int, has_target: Tensor | None = None
) -> Tensor:
    """The numbers that `COUNTS` names, int64 [4], of one pass whose tokens took so many latent steps.

    latent_steps: runs of tokens beyond their first, and latent_targets those of tokens that have a target; gates: how
    often a router was asked; attention_keys: keys that the queries of all runs may see, summed over the layers.

    lengths int64 [B, T], whole rows from their first token on; every column counts as a token, a row as one document.
    windows: each layer's, None for all. num_gates: gates that the deepest token meets. has_target bool [B, T].
    """
    asked = (lengths + 1).clamp(max=num_gates) if num_gates else torch.zeros_like(lengths)
    targets = lengths if has_target is None else lengths * has_target
    keys = sum(num_visible(lengths, window) * count for window, count in Counter(windows).items())
    return torch.stack([lengths.sum(), targets.sum(), asked.sum(), torch.as_tensor(keys).to(lengths)])


def num_gates(config: Any) -> int:
    """How many gates the deepest token of such a model meets; 0 where no router is asked."""
    return 0 if config.router == "none" or config.exit_at_step is not None else config.max_latent_steps


def num_visible(lengths: Tensor, window: int | None = None) -> Tensor:
    """Keys that the queries of all runs may see in one layer, int64 []. Oracle: `visibility.visible`, counted.

    A query (t, k) sees min(1 + length_u, k) entries of each token u <= t within the window.
    """
    runs = lengths + 1
    total = torch.zeros((), dtype=torch.long, device=lengths.device)
    for step in range(1, int(runs.max()) + 1 if runs.numel() else 0):
        entries = runs.clamp(max=step).cumsum(1)
        if window is not None and window < entries.shape[1]:
            entries[:, window:] -= entries[:, :-window].clone()
        total += entries[runs >= step].sum()
    return total
