"""What further runs of tokens cost, counted from how many each token took: exact, without the forward itself."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from unspoken.config import AdaptiveLatentConfig, RecursionsConfig

COUNTS = ("latent_steps", "latent_targets", "gates", "attention_keys")
Reads = Literal["below", "own", "first"]


@dataclass(frozen=True)
class StepRule:
    """How a method goes on.

    num_gates: that the deepest token meets, 0 where no router is asked; first_gates: that every token meets. reads: the
    runs whose keys a query sees: its own and those below, its own, or the first. num_outer: layers before those that
    run again, and as many after.
    """

    num_gates: int
    first_gates: int = 1
    reads: Reads = "below"
    num_outer: int = 0


def step_rule(config: Any) -> StepRule | None:
    """That of a model with this configuration; None where all tokens run alike."""
    if isinstance(config, RecursionsConfig):
        gates = (1, 1) if config.recursion_router == "token_choice" else (config.num_recursions, 2)
        return StepRule(*gates, reads="own" if config.kv_mode == "own" else "first", num_outer=1)
    if isinstance(config, AdaptiveLatentConfig):
        is_asked = config.router != "none" and config.exit_at_step is None
        return StepRule(config.max_latent_steps if is_asked else 0)
    return None


def step_counts(
    lengths: Tensor, windows: Sequence[int | None], rule: StepRule, has_target: Tensor | None = None
) -> Tensor:
    """The numbers that `COUNTS` names, int64 [4], of one pass whose tokens took so many further runs.

    latent_steps: runs of tokens beyond their first, and latent_targets those of tokens that have a target; gates: how
    often a router was asked; attention_keys: keys that the queries of all runs may see, summed over the layers.

    lengths int64 [B, T], whole rows from their first token on; every column counts as a token, a row as one document.
    windows: each layer's, None for all. has_target bool [B, T].
    """
    asked = (lengths + rule.first_gates).clamp(max=rule.num_gates)
    targets = lengths if has_target is None else lengths * has_target
    inner = windows[rule.num_outer : len(windows) - rule.num_outer]
    outer = Counter(windows) - Counter(inner)
    keys = [num_visible(lengths, window, rule.reads) * count for window, count in Counter(inner).items()]
    keys += [num_visible(torch.zeros_like(lengths), window) * count for window, count in outer.items()]
    return torch.stack([lengths.sum(), targets.sum(), asked.sum(), torch.stack(keys).sum()])


def num_visible(lengths: Tensor, window: int | None = None, reads: Reads = "below") -> Tensor:
    """Keys that the queries of all runs may see in one layer, int64 []. Oracle: `latent/visibility.py`, counted.

    Of each token u <= t within the window, a query (t, k) sees min(1 + length_u, k) entries; reading its own run alone,
    one where u ran as often; reading the first, one.
    """
    runs = lengths + 1
    total = torch.zeros((), dtype=torch.long, device=lengths.device)
    for step in range(1, int(runs.max()) + 1 if runs.numel() else 0):
        match reads:
            case "below":
                seen = runs.clamp(max=step)
            case "own":
                seen = (runs >= step).long()
            case "first":
                seen = torch.ones_like(runs)
        entries = seen.cumsum(1)
        if window is not None and window < entries.shape[1]:
            entries[:, window:] -= entries[:, :-window].clone()
        total += entries[runs >= step].sum()
    return total
