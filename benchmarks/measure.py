"""How everything here is timed: CPU seconds of one thread, arms in turn within each round, ratios within a round.

CPU seconds, because the cores may be shared; a busy neighbour still costs some through caches and memory bandwidth,
which is why arms alternate and only ratios are judged. On a GPU, which has no neighbours, it is seconds by the wall.
"""

import gc
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch

from benchmarks.record import Spread

Quantities = Mapping[str, float]
Rounds = dict[str, dict[str, list[float]]]


class RedCheckError(Exception):
    """Two arms that must agree do not, so their times compare nothing: no number is reported."""


def check(holds: bool, what: str, checks: list[str]) -> None:
    """Enter `what` among the checks that held.

    Raises:
        RedCheckError: it does not hold.
    """
    if not holds:
        raise RedCheckError(what)
    if what not in checks:
        checks.append(what)


def progress(case: Mapping[str, object]) -> None:
    """Say which case begins."""
    print("  " + ", ".join(f"{name} {value}" for name, value in case.items()), file=sys.stderr, flush=True)


def cpu_seconds(function: Callable[[], object]) -> float:
    start = time.process_time()
    function()
    return time.process_time() - start


def device_seconds(function: Callable[[], object], device: torch.device) -> float:
    """Seconds by the wall until the device has done it."""
    start = wall_clock(device)
    function()
    return wall_clock(device) - start


def wall_clock(device: torch.device) -> float:
    """Now, when the device has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def interleave(arms: Mapping[str, Callable[[], Quantities]], repeats: int, warmup: int = 1) -> Rounds:
    """Run every arm once a round, each round beginning with the next arm: {arm: {quantity: one value a round}}."""
    names = list(arms)
    rounds: Rounds = {name: {} for name in names}
    for number in range(-warmup, repeats):
        turn = number % len(names)
        with _without_gc():
            measured = {name: arms[name]() for name in names[turn:] + names[:turn]}
        for name, quantities in measured.items() if number >= 0 else ():
            for quantity, value in quantities.items():
                rounds[name].setdefault(quantity, []).append(value)
    return rounds


def ratio(rounds: Rounds, arm: str, baseline: str, quantity: str) -> Spread:
    """Arm over baseline, round by round."""
    pairs = zip(rounds[arm][quantity], rounds[baseline][quantity], strict=True)
    return Spread.of([one / other for one, other in pairs])


@contextmanager
def _without_gc() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
