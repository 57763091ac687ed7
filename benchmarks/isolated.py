"""Cases that must not cost each other: each in a process of its own, with a time limit, reporting as it goes.

A child writes one line for each thing that it found; what it has written stands, whatever becomes of it afterwards.
"""

import gc
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MARK = "report "
PLANNED, DONE, FAILED, SKIPPED = "planned", "done", "failed", "skipped"


@dataclass
class Findings:
    """What children reported: `values` of the things done, and a line for each that failed or was skipped."""

    values: list[Any] = field(default_factory=list)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def __iadd__(self, other: "Findings") -> "Findings":
        self.values += other.values
        self.failed += other.failed
        self.skipped += other.skipped
        return self


def say(kind: str, what: str, value: Any = None) -> None:
    """A child's report on `what`; the latest one stands."""
    print(MARK + json.dumps([kind, what, value]), flush=True)


def plan(names: Sequence[str]) -> None:
    """A child's word on what it will report on, so that what it does not come to is named."""
    for name in names:
        say(PLANNED, name)


def attempt(what: str, function: Callable[[], Any]) -> None:
    """Do it in a child and report its value, or why there is none."""
    values: list[Any] = []
    if succeeds(what, lambda: values.append(function())):
        say(DONE, what, values[0])


def succeeds(what: str, function: Callable[[], object]) -> bool:
    """Do it in a child; a failure is reported and does no more. Memory that does not suffice is none."""
    import torch

    try:
        function()
    except torch.OutOfMemoryError:
        say(SKIPPED, what, "does not fit in the device's memory")
    except Exception as error:
        traceback.print_exc()
        message = (str(error).strip().splitlines() or [""])[0]
        say(FAILED, what, f"{type(error).__name__}: {message[:300]}")
    else:
        return True
    gc.collect()
    torch.cuda.empty_cache()
    return False


def run_isolated(name: str, arguments: Sequence[str], seconds: float) -> Findings:
    """Run Python with these arguments as a child, for so long at most; what it found. `name` is for messages.

    Its error output goes where ours does. To be stopped by the clock is to skip what was planned; to crash is to fail.
    """
    with tempfile.TemporaryFile("w+") as output:
        child = subprocess.Popen(
            [sys.executable, *arguments], cwd=ROOT, stdout=output, text=True, start_new_session=True
        )
        try:
            status: int | None = child.wait(max(0.0, seconds))
        except subprocess.TimeoutExpired:
            status = None
        finally:
            _end(child)
        output.seek(0)
        reports = [
            json.loads(line.removeprefix(MARK)) for line in output if line.startswith(MARK) and line.endswith("\n")
        ]
    found = Findings()
    for what, (kind, value) in {what: (kind, value) for kind, what, value in reports}.items():
        if kind == DONE:
            found.values.append(value)
        elif kind == FAILED:
            found.failed.append(f"{what}: {value}")
        else:
            found.skipped.append(f"{what}: {'not reached' if kind == PLANNED else value}")
    if status is None:
        found.skipped.append(f"{name}: stopped after {seconds:.0f} s")
    elif status != 0:
        found.failed.append(f"{name}: the process ended with status {status}")
    return found


def _end(child: subprocess.Popen) -> None:
    """With the processes that it started: a compiler's."""
    if child.poll() is None:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()
