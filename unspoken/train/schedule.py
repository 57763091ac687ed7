"""What an optimizer step is, as pure functions of its number: its learning rate and its number of passes.

Nothing here is kept or counted, so a resumed run and every rank of a distributed one agree without talking. Steps
count from 0.
"""

import math
from collections.abc import Sequence

from unspoken.data.frozen_random import hash_share
from unspoken.train.recipe import OptimSection


class LearningRate:
    """Linear warm-up, then a cosine (or nothing) down to `min_learning_rate_ratio` of the peak at the last step."""

    def __init__(self, optim: OptimSection, num_steps: int):
        self.optim = optim
        self.num_steps = num_steps
        if optim.warmup_steps is not None:
            self.num_warmup_steps = optim.warmup_steps
        else:
            self.num_warmup_steps = round((optim.warmup_fraction or 0.0) * num_steps)
        self.num_adapter_warmup_steps = self.num_warmup_steps
        if optim.adapter_warmup_fraction is not None:
            self.num_adapter_warmup_steps = round(optim.adapter_warmup_fraction * num_steps)

    def at(self, step: int) -> float:
        """The learning rate of all parameters but the adapter's."""
        return self.optim.learning_rate * _ramp(step, self.num_warmup_steps) * self._decay(step)

    def adapter_at(self, step: int) -> float:
        peak = self.optim.learning_rate * self.optim.adapter_learning_rate_factor
        return peak * _ramp(step, self.num_adapter_warmup_steps) * self._decay(step)

    def _decay(self, step: int) -> float:
        if self.optim.schedule == "constant" or step < self.num_warmup_steps:
            return 1.0
        progress = (step - self.num_warmup_steps) / max(1, self.num_steps - 1 - self.num_warmup_steps)
        floor = self.optim.min_learning_rate_ratio
        return floor + (1 - floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, progress)))


def is_uncut(step: int, num_steps: int, no_cut_fraction: float) -> bool:
    """Whether the step is among the first ones, in which no token's latent steps are cut."""
    return step < round(no_cut_fraction * num_steps)


def _ramp(step: int, num_warmup_steps: int) -> float:
    """1/n, 2/n, ..., 1: the first step learns already."""
    return min(1.0, (step + 1) / num_warmup_steps) if num_warmup_steps else 1.0


def drawn_at(step: int, seed: int, choices: Sequence[int]) -> int:
    """One of the choices, each equally often, for an optimizer step: as `passes_at`, by a hash."""
    return choices[int(_share(step, seed) * len(choices))]


def passes_at(step: int, seed: int, num_train_passes: int, third_pass_fraction: float) -> int:
    """The number of passes of an optimizer step: `num_train_passes`, and one more on that fraction of the steps.

    A hash of (seed, step) decides, not a generator: it stays the same in every version of every library.
    """
    if third_pass_fraction == 0.0:
        return num_train_passes
    return num_train_passes + (_share(step, seed) < third_pass_fraction)


def _share(step: int, seed: int) -> float:
    """A number in [0, 1) for each step and seed."""
    return hash_share(f"{seed} {step}".encode())
