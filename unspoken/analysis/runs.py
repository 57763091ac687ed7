"""What a run folder holds, read for a report. Whatever is missing or damaged is named, and the rest is shown."""

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from unspoken.errors import UnspokenError
from unspoken.eval.report import TASK_SCORES
from unspoken.train.metrics import JSONL, read_metrics

RESOLVED, SUMMARY, EVALUATION, VERIFICATION, GENERATIONS = (
    "resolved.yaml",
    "summary.json",
    "eval.json",
    "verify.json",
    "generations.jsonl",
)


@dataclass(frozen=True)
class Run:
    """One run folder. A part is None or empty where its file is absent; `missing` has a line for each such file."""

    name: str
    folder: Path
    recipe: dict[str, Any] | None = None
    summary: dict[str, Any] | None = None
    metrics: list[dict[str, Any]] = field(default_factory=list)
    evaluation: dict[str, Any] | None = None
    verification: dict[str, Any] | None = None
    generations: list[dict[str, Any]] = field(default_factory=list)
    missing: tuple[str, ...] = ()

    @property
    def num_passes(self) -> int:
        """Passes in training; 1 for a plain model, and where nothing says."""
        return ((self.recipe or {}).get("model") or {}).get("num_train_passes") or 1

    @property
    def flops_per_token(self) -> float | None:
        """Training FLOPs that a token cost in this run, over all its passes."""
        if not self.summary or not self.summary.get("tokens"):
            return None
        return self.summary["train_flops"] / self.summary["tokens"]

    def curve(self, pass_number: int, kind: str = "eval") -> tuple[list[float], list[float]]:
        """(tokens, loss of that pass) of the logged rows that have it."""
        key = f"loss_pass_{pass_number}"
        rows = [row for row in self.metrics if row.get("kind") == kind and row.get(key) is not None]
        return [row["tokens"] for row in rows], [row[key] for row in rows]


def read_run(folder: Path, name: str = "", wanted: tuple[str, ...] = (RESOLVED, SUMMARY, JSONL, EVALUATION)) -> Run:
    """Read what a folder has. `wanted` files that are absent are named in `missing`; others are optional.

    Raises:
        UnspokenError: no such folder.
    """
    folder = Path(folder)
    if not folder.is_dir():
        raise UnspokenError(f"no such run folder: {folder}")
    missing: list[str] = []

    def read(file: str, parse: Callable[[Path], Any], empty: Any = None) -> Any:
        places = [place for place in (folder / file, folder / "model" / file) if place.is_file()]
        if not places:
            if file in wanted:
                missing.append(f"{folder / file} is not there")
            return empty
        try:
            return parse(places[0])
        except (OSError, ValueError, KeyError, yaml.YAMLError, UnspokenError) as error:
            missing.append(f"{places[0]} cannot be read: {str(error).splitlines()[0]}")
            return empty

    parts = {
        "recipe": read(RESOLVED, lambda path: _with_keys(yaml.safe_load(path.read_text(encoding="utf-8")), "model")),
        "summary": read(SUMMARY, _json_with_keys("tokens", "train_flops")),
        "metrics": read(JSONL, lambda path: read_metrics(path.parent), []),
        "evaluation": read(EVALUATION, _json_with_keys("results", "rows", "data", "model")),
        "verification": read(VERIFICATION, _json_with_keys("checks")),
        "generations": read(GENERATIONS, _json_lines, []),
    }
    return Run(name or folder.name, folder, **parts, missing=tuple(missing))


def read_task_scores(folder: Path) -> dict[str, Any] | None:
    """What `unspoken eval --tasks` has left in a folder; None where it is not there or damaged."""
    try:
        return _json_with_keys("rows")(folder / TASK_SCORES)
    except (OSError, ValueError):
        return None


def _with_keys(value: Any, *keys: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ValueError(f"a mapping is expected, not {type(value).__name__}")
    if absent := [key for key in keys if key not in value]:
        raise ValueError(f"it has no {absent[0]!r}")
    return value


def _json_with_keys(*keys: str) -> Callable[[Path], dict[str, Any]]:
    return lambda path: _with_keys(json.loads(path.read_text(encoding="utf-8")), *keys)


def _json_lines(path: Path) -> list[dict[str, Any]]:
    return [_with_keys(json.loads(line)) for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
