"""What a benchmark leaves behind: its numbers, and everything needed to judge or repeat them. One JSON file each."""

import json
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
PACKAGES = ("torch", "transformers", "unspoken")


@dataclass(frozen=True)
class Spread:
    """Median and quartiles of a repeated measurement."""

    median: float
    low: float
    high: float
    repeats: int

    @classmethod
    def of(cls, values: Sequence[float]) -> "Spread":
        if len(values) == 1:
            return cls(values[0], values[0], values[0], 1)
        low, median, high = statistics.quantiles(values, n=4, method="inclusive")
        return cls(median, low, high, len(values))


@dataclass(frozen=True)
class Target:
    """What a ratio should be: `at_least` or `at_most` a number, and for which arm of which case it was set."""

    at_least: float | None = None
    at_most: float | None = None

    def is_met(self, ratio: float) -> bool:
        return (self.at_least is None or ratio >= self.at_least) and (self.at_most is None or ratio <= self.at_most)

    def __str__(self) -> str:
        if self.at_least is not None and self.at_most is not None:
            return f"{self.at_least} to {self.at_most}"
        return f">= {self.at_least}" if self.at_least is not None else f"<= {self.at_most}"


@dataclass(frozen=True)
class Row:
    """One arm in one case. `ratio` is this arm over `baseline`, paired within each round.

    `ceiling` is what the hardware's measured rates would allow, in the row's unit.
    """

    case: dict[str, Any]
    arm: str
    unit: str
    value: Spread
    baseline: str | None = None
    ratio: Spread | None = None
    target: Target | None = None
    ceiling: float | None = None


@dataclass
class Result:
    """A benchmark's rows. `checks` say which equalities of the arms held before any number was reported; `failed` and
    `skipped`, with the reason, what of a benchmark of several parts is missing."""

    name: str
    question: str
    method: str
    ceiling: str
    settings: dict[str, Any]
    checks: list[str]
    rows: list[Row]
    environment: dict[str, Any] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def save(self, folder: Path) -> Path:
        folder.mkdir(parents=True, exist_ok=True)
        path = folder / f"{self.name}.json"
        path.write_text(json.dumps(asdict(self), indent=1) + "\n", encoding="utf-8")
        return path

    @classmethod
    def load(cls, path: Path) -> "Result":
        values = json.loads(path.read_text(encoding="utf-8"))
        values["rows"] = [read_row(row) for row in values["rows"]]
        return cls(**values)


def environment(load_before: float, command: str = "python -m benchmarks.run") -> dict[str, Any]:
    """Where and with what a benchmark ran. `load_before` is the 1-minute load average at its start; the arguments of
    this process are added to `command`."""
    import torch

    return {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "command": f"{command} {shlex.join(sys.argv[1:])}".strip(),
        "commit": _commit(),
        "cpu": _cpu_name(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "amx_bf16": "amx_bf16" in _proc("cpuinfo"),
        "cores": os.cpu_count(),
        "threads_used": torch.get_num_threads(),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "load_average": [round(load_before, 2), round(os.getloadavg()[0], 2)],
        "python": platform.python_version(),
        **{package: version(package) for package in PACKAGES},
    }


def read_row(values: dict[str, Any]) -> Row:
    """A row from what `asdict` made of it."""
    values = dict(values)
    for name, kind in (("value", Spread), ("ratio", Spread), ("target", Target)):
        if values[name] is not None:
            values[name] = kind(**values[name])
    return Row(**values)


def _commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    run = subprocess.run(command, cwd=Path(__file__).parent, capture_output=True, text=True, check=False)
    return run.stdout.strip() or "unknown"


def _cpu_name() -> str:
    names = [line.split(":", 1)[1].strip() for line in _proc("cpuinfo").splitlines() if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()


def _proc(name: str) -> str:
    path = Path("/proc") / name
    return path.read_text(encoding="utf-8") if path.exists() else ""
