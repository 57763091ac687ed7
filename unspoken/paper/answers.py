"""What the runs of a study on a task say right: a table and a plot. Empty for a study on text."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from unspoken.analysis.figures import Frame, Series, line_plot
from unspoken.analysis.page import Cell
from unspoken.eval.perplexity import EXACT
from unspoken.paper.results import Result, Results

CAPTION = (
    "Samples whose answer is right, in %, averaged over seeds, each seed's in brackets. k=n: as many parallel passes "
    "as in training; exact: the recurrence that decoding runs."
)


def lengths(results: Results) -> list[str]:
    """The lengths that every run was measured at, the trained one first."""
    for result in results.all:
        if (task := _task(result)) is not None:
            return list(task["lengths"])
    return []


def answer_tables(results: Results) -> list[tuple[list[str], list[list[str | Cell]]]]:
    """A table, if any, as headers and rows: each arm with as many passes as in training, and exactly."""
    if not lengths(results):
        return []
    headers = ["arm", "passes", *(f"length {length}" for length in lengths(results))]
    rows: list[list[str | Cell]] = []
    for budget in results.budgets:
        for arm in results.arms:
            runs = results.of(arm, budget)
            for name in _names(runs):
                rates = [_shares(runs, length, name) for length in lengths(results)]
                rows.append([arm, name, *(_cell(shares) for shares in rates)])
    return [(headers, rows)]


def plot_answers(results: Results) -> str:
    """Right answers by length, as SVG: solid the exact recurrence, dashed as many passes as in training."""
    series = []
    for colour, arm in enumerate(results.arms):
        runs = results.of(arm, results.budgets[-1])
        for name in _names(runs):
            ys = [100 * mean(_shares(runs, length, name)) for length in lengths(results)]
            xs = [float(length) for length in lengths(results)]
            is_dashed = name != EXACT and len(_names(runs)) > 1
            series.append(Series(f"{arm} {name}", xs, ys, colour, dashed=is_dashed, markers=True))
    trained = _trained_length(results)
    return line_plot(
        series, Frame("Right answers by length", "length", "%", whole_x=True, marks=[(trained, "longest in training")])
    )


def _names(runs: Mapping[int, Result]) -> list[str]:
    """Passes as in training, and the exact recurrence where there is one."""
    found: dict[str, Any] = {}
    for result in runs.values():
        found |= result.losses
    trained = f"k={next(iter(runs.values())).run.num_passes}" if runs else ""
    return [name for name in (trained, EXACT) if name in found]


def _shares(runs: Mapping[int, Result], length: str, name: str) -> list[float]:
    tasks = [task for result in runs.values() if (task := _task(result)) is not None]
    return [task["lengths"][length]["answer"][name]["share"] for task in tasks]


def _trained_length(results: Results) -> int:
    return next(task["settings"]["max_length"] for result in results.all if (task := _task(result)) is not None)


def _task(result: Result) -> dict[str, Any] | None:
    return (result.evaluation or {}).get("task")


def _cell(shares: Sequence[float]) -> str:
    each = ", ".join(f"{100 * share:.1f}" for share in shares)
    return f"{100 * mean(shares):.1f}" + (f" ({each})" if len(shares) > 1 else "")
