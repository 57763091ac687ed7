"""How many problems a study's models solve: tables and a plot. Empty where no arm learns problems."""

from collections.abc import Sequence
from statistics import mean

from unspoken.analysis.figures import Frame, Series, line_plot
from unspoken.analysis.numbers import scientific
from unspoken.analysis.page import Cell
from unspoken.analysis.solved import accuracy_rows
from unspoken.paper.results import COUNTED, Results

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
    arms = {arm: solved for arm in results.arms if (solved := results.solved(arm))}
    if not arms:
        return []
    headers, (majority, *rows) = accuracy_rows(arms)
    costs = [[scientific(_flops(results, arm)), str(len(seeds))] for arm, seeds in arms.items()]
    return [(["arm", *headers[1:], "FLOPs", "seeds"], [[*majority, "", ""], *([*a, *b] for a, b in zip(rows, costs))])]


def gain_tables(results: Results) -> list[Rows]:
    """A table, if any: each comparison of arms that learn problems."""
    rows: list[list[str | Cell]] = []
    for found in results.gains:
        what: list[str | Cell] = [found.comparison.name, Cell(str(found.comparison), "text")]
        if found.gain is None:
            rows.append([*what, Cell(found.missing, "text"), ""])
        else:
            by_seed = ", ".join(f"{value:+.1f}" for value in found.gain.by_seed.values())
            rows.append([*what, Cell(str(found.gain), found.gain.outcome.value), by_seed])
    return [(["", "comparison", "right answers", "by seed"], rows)] if rows else []


def plot_solved(results: Results) -> str | None:
    """Right answers against all training compute, as SVG: each comparison a line from one arm to the other."""
    series = []
    for colour, found in enumerate(one for one in results.gains if one.gain):
        ends = [found.comparison.minus.arm, found.comparison.of.arm]
        shares = [100 * mean(one.whole["accuracy"] for one in results.solved(arm).values()) for arm in ends]
        flops = [_flops(results, arm) for arm in ends]
        name = f"{found.comparison.name}: {ends[0]} to {ends[1]}"
        series.append(Series(name, flops, shares, colour, markers=True))
    if not series:
        return None
    frame = Frame("Right answers against all training compute", "cumulative training FLOPs", "%", x_counts=True)
    return line_plot(series, frame)


def _flops(results: Results, arm: str) -> float:
    return mean(results.cumulative(run, COUNTED) for run in results.of(arm, None).values())
