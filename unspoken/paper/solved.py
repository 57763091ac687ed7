"""How many problems a study's models solve: tables and a plot. Empty where no arm learns problems."""

from collections.abc import Mapping, Sequence
from statistics import mean

from unspoken.analysis.figures import Frame, Series, line_plot
from unspoken.analysis.numbers import scientific
from unspoken.analysis.page import Cell
from unspoken.analysis.solved import Gain, Solved, accuracy_rows, gain
from unspoken.paper.results import COUNTED, Result, Results
from unspoken.paper.study import Comparison

CAPTION = (
    "Right answers to held-out problems in %, greedily, averaged over seeds, each seed's in brackets. majority: the "
    "most frequent answer of each task. FLOPs: of all stages of training, counted."
)
GAIN_CAPTION = (
    "Right answers of the arm before the minus sign less those of the arm behind it, in percentage points: with its "
    "95 % interval over problems, and each seed's own."
)
Rows = tuple[Sequence[str], Sequence[Sequence[str | Cell]]]  # headers and rows


def solved_tables(results: Results) -> list[Rows]:
    """A table, if any, as headers and rows: each arm that learns problems, by task."""
    arms = {arm: solved for arm in results.arms if (solved := _solved(results, arm))}
    if not arms:
        return []
    headers, (majority, *rows) = accuracy_rows(arms)
    costs = [[scientific(_flops(results, arm)), str(len(seeds))] for arm, seeds in arms.items()]
    return [(["arm", *headers[1:], "FLOPs", "seeds"], [[*majority, "", ""], *([*a, *b] for a, b in zip(rows, costs))])]


def gain_tables(results: Results) -> list[Rows]:
    """A table, if any: each comparison of arms that learn problems."""
    rows: list[list[str | Cell]] = []
    for comparison, found in _gains(results):
        outcome = ("better" if found.mean > 0 else "worse") if found.is_clear else "unclear"
        by_seed = ", ".join(f"{value:+.1f}" for value in found.by_seed.values())
        rows.append([comparison.name, Cell(str(comparison), "text"), Cell(str(found), outcome), by_seed])
    return [(["", "comparison", "right answers", "by seed"], rows)] if rows else []


def plot_solved(results: Results) -> str | None:
    """Right answers against all training compute, as SVG: each comparison a line from one arm to the other."""
    series = []
    for colour, (comparison, _) in enumerate(_gains(results)):
        ends = [comparison.minus.arm, comparison.of.arm]
        shares = [100 * mean(one.whole["accuracy"] for one in _solved(results, arm).values()) for arm in ends]
        flops = [_flops(results, arm) for arm in ends]
        name = f"{comparison.name}: {ends[0]} to {ends[1]}"
        series.append(Series(name, flops, shares, colour, markers=True))
    if not series:
        return None
    frame = Frame("Right answers against all training compute", "cumulative training FLOPs", "%", x_counts=True)
    return line_plot(series, frame)


def _gains(results: Results) -> list[tuple[Comparison, Gain]]:
    found = []
    for comparison in results.study.comparisons:
        sides = [_solved(results, term.arm) for term in comparison]
        if all(sides) and (difference := gain(*sides)) is not None:
            found.append((comparison, difference))
    return found


def _solved(results: Results, arm: str) -> Mapping[int, Solved]:
    runs: Mapping[int, Result] = results.of(arm, None)
    return {seed: run.solved for seed, run in runs.items() if run.solved is not None}


def _flops(results: Results, arm: str) -> float:
    return mean(results.cumulative(run, COUNTED) for run in results.of(arm, None).values())
