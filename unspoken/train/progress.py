"""What a run has done and used so far: the counts that a checkpoint carries on, and the clock behind them."""

import time
from dataclasses import dataclass, replace
from typing import Protocol

from unspoken.train.parallel import Ranks


@dataclass
class Progress:
    """What has been done so far, over all resumes. `pass_tokens` counts a token once for each run of the backbone over
    it: its passes, latent steps, loops or pauses. From `latent_steps` on: see `latent/counts.py`, 0 for a model without
    them.

    CPU seconds are this process's own here, and those of all processes in rows and records.
    """

    step: int = 0
    tokens: int = 0
    target_tokens: int = 0
    pass_tokens: int = 0
    latent_steps: int = 0
    latent_targets: int = 0
    gates: int = 0
    attention_keys: int = 0
    train_seconds: float = 0.0
    train_cpu_seconds: float = 0.0
    wall_seconds: float = 0.0
    cpu_seconds: float = 0.0

    def over(self, ranks: Ranks) -> "Progress":
        """With the CPU seconds of all processes. All of them call it."""
        train, whole = ranks.sum([self.train_cpu_seconds, self.cpu_seconds])
        return replace(self, train_cpu_seconds=train, cpu_seconds=whole)


class Timed(Protocol):
    wall_seconds: float
    cpu_seconds: float


class Clock:
    """Wall and CPU seconds since it was made or last read."""

    def __init__(self) -> None:
        self.wall, self.cpu = time.perf_counter(), time.process_time()

    def lap(self) -> tuple[float, float]:
        wall, cpu = self.wall, self.cpu
        self.wall, self.cpu = time.perf_counter(), time.process_time()
        return self.wall - wall, self.cpu - cpu

    def add_to(self, progress: Timed) -> None:
        seconds, cpu_seconds = self.lap()
        progress.wall_seconds += seconds
        progress.cpu_seconds += cpu_seconds
