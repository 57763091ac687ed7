"""SIGINT and SIGTERM as a wish to save and stop."""

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM)


class Stop:
    """True once a signal has come."""

    def __init__(self) -> None:
        self.number = 0

    def __bool__(self) -> bool:
        return bool(self.number)


@contextmanager
def stop_on_signal(say: Callable[[str], None], stop: Stop, after: str = "this step") -> Iterator[None]:
    """Meanwhile a signal sets `stop`, for the run to end `after` what it is doing; a second one ends it at once."""
    before: dict[int, Any] = {number: signal.getsignal(number) for number in SIGNALS}

    def note(number: int, _frame: object) -> None:
        stop.number = number
        signal.signal(number, before[number])
        say(f"stopping after {after}; once more ends it at once")

    for number in SIGNALS:
        signal.signal(number, note)
    try:
        yield
    finally:
        for number in SIGNALS:
            signal.signal(number, before[number])
