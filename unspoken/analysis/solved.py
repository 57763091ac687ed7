"""Right answers to problems (`unspoken eval --problems --log-samples`): whose are more, on the same problems.

A gain is paired: what makes a problem hard drops out. Its interval is over problems drawn anew, of answers averaged
over seeds; what the seed does is seen beside it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from unspoken.analysis.compare import Outcome
from unspoken.errors import UnspokenError
from unspoken.eval.perplexity import interval
from unspoken.eval.problem_run import SAMPLES, SCORES


@dataclass(frozen=True)
class Solved:
    """One model's answers. tasks: each task's scores, as the evaluation wrote them; whole: those of all; right: 1 or 0
    by the problem's line in its file, whose content `sha256` tells."""

    folder: Path
    tasks: Mapping[str, Mapping[str, Any]]
    whole: Mapping[str, Any]
    right: Mapping[str, float]
    sha256: str


@dataclass(frozen=True)
class Gain:
    """Right answers of one side less those of the other, in percentage points: `mean` with 95 % of it over redrawn
    problems, and each seed's own."""

    mean: float
    interval: tuple[float, float]
    by_seed: Mapping[int, float]

    @property
    def outcome(self) -> Outcome:
        """UNCLEAR where the interval holds zero, or the seeds do not agree on the sign."""
        low, high = self.interval
        if low <= 0 <= high or not all(value * self.mean > 0 for value in self.by_seed.values()):
            return Outcome.UNCLEAR
        return Outcome.BETTER if self.mean > 0 else Outcome.WORSE

    def __str__(self) -> str:
        return f"{self.mean:+.1f} [{self.interval[0]:+.1f}, {self.interval[1]:+.1f}]"


def read_solved(folder: Path) -> Solved | None:
    """What an evaluation left, None where there is none.

    Raises:
        UnspokenError: its files are damaged.
    """
    scores, samples = folder / SCORES, folder / SAMPLES
    if not (scores.is_file() and samples.is_file()):
        return None
    try:
        found = json.loads(scores.read_text(encoding="utf-8"))
        rows = [json.loads(line) for line in samples.read_text(encoding="utf-8").split("\n") if line]
        right = {row["place"].rpartition(":")[2]: float(row["reward"] >= 1) for row in rows}
        for scores_of in (found["all"], *found["tasks"].values()):
            scores_of["accuracy"], scores_of["majority"]
        return Solved(folder, found["tasks"], found["all"], right, found["data"]["sha256"])
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UnspokenError(f"{folder}: {SCORES} and {SAMPLES} cannot be read ({error}); evaluate again") from error


def gain(of: Mapping[int, Solved], minus: Mapping[int, Solved]) -> Gain | None:
    """Over the seeds that both have, each {seed: answers}; None if they share none.

    Raises:
        UnspokenError: they were not asked the same problems.
    """
    by_seed = {seed: _differences(of[seed], minus[seed]) for seed in of if seed in minus}
    if not by_seed:
        return None
    over_seeds = 100 * np.mean(list(by_seed.values()), axis=0)
    spread = interval(over_seeds, np.ones_like(over_seeds)) or (-100.0, 100.0)
    return Gain(float(over_seeds.mean()), spread, {seed: 100 * float(mean(one)) for seed, one in by_seed.items()})


def accuracy_rows(models: Mapping[str, Mapping[int, Solved]]) -> tuple[list[str], list[list[str]]]:
    """Headers and rows of a table of models, each {seed: answers}: right answers in % by task and of all, averaged over
    seeds, each seed's in brackets. The first row is of the most frequent answer of each task; none without models."""
    found = [one for seeds in models.values() for one in seeds.values()]
    tasks = list(dict.fromkeys(task for one in found for task in one.tasks))
    rows = [[name, *_cells(list(seeds.values()), tasks, "accuracy")] for name, seeds in models.items() if seeds]
    majority = [["majority", *_cells(found[:1], tasks, "majority")]] if found else []
    return ["model", *tasks, "all"], majority + rows


def _cells(answers: Sequence[Solved], tasks: Sequence[str], key: str) -> list[str]:
    columns = [[one.tasks.get(task, {}).get(key) for one in answers] for task in tasks]
    return [_shares(column) for column in [*columns, [one.whole[key] for one in answers]]]


def _shares(values: Sequence[float | None]) -> str:
    known = [100 * value for value in values if value is not None]
    if len(known) < len(values):
        return ""
    each = ", ".join(f"{value:.1f}" for value in known)
    return f"{mean(known):.1f}" + (f" ({each})" if len(known) > 1 else "")


def _differences(of: Solved, minus: Solved) -> list[float]:
    if of.sha256 != minus.sha256 or of.right.keys() != minus.right.keys():
        raise UnspokenError(f"{of.folder} and {minus.folder} were asked different problems")
    return [of.right[place] - minus.right[place] for place in of.right]
