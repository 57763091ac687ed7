"""What the latent steps of a study's runs came to: a table and a plot. Empty for a study without them."""

from collections.abc import Mapping, Sequence
from statistics import mean
from typing import Any

from unspoken.analysis.figures import Frame, Series, line_plot
from unspoken.analysis.numbers import short_count
from unspoken.analysis.page import Cell
from unspoken.analysis.runs import Run as RunFolder
from unspoken.paper.results import Result, Results

HEADERS = ("arm", "latent steps/token", "pruned", "at the end of training", "gate at cut", "FLOPs/token")
CAPTION = (
    "Averaged over seeds, each seed's in brackets. Latent steps/token, and the share of allowed steps that were "
    "pruned: on held-out text. At the end of training: latent steps a token in the last tenth of the steps; gate at "
    "cut: the mean gate of tokens that a cut stopped, there. FLOPs/token: of decoding, at half the sequence length."
)
END = 0.1  # of the training steps


def latent_tables(results: Results) -> list[tuple[list[str], list[list[str | Cell]]]]:
    """A table, if any, as headers and rows."""
    rows: list[list[str | Cell]] = []
    for budget in results.budgets:
        for arm in results.arms:
            runs = results.of(arm, budget)
            if not any(_evaluated(result, "latent_length") is not None for result in runs.values()):
                continue
            rows.append([
                arm if budget is None else f"{arm}, {short_count(budget)}",
                _cell([_evaluated(result, "latent_length") for result in runs.values()], "{:.2f}"),
                _cell([_evaluated(result, "prune_ratio") for result in runs.values()], "{:.0%}"),
                _cell([_at_end(result.folder, "latent_length") for result in runs.values()], "{:.2f}"),
                _cell([_at_end(result.folder, "gate_at_cut") for result in runs.values()], "{:.3f}"),
                _cell([r.flops.decode_per_token if r.flops else None for r in runs.values()], "{:.3g}", each=False),
            ])  # fmt: skip
    return [(list(HEADERS), rows)] if rows else []


def plot_latent_lengths(results: Results) -> str | None:
    """Latent steps a token over training, as SVG, of each arm's first seed; None where no run has any."""
    series = []
    for colour, arm in enumerate(results.arms):
        runs = results.of(arm, results.budgets[-1])
        points = _points(next(iter(runs.values())).folder, "latent_length") if runs else []
        if points:
            series.append(Series(arm, [tokens for tokens, _ in points], [value for _, value in points], colour))
    if not series:
        return None
    return line_plot(series, Frame("Latent steps while it learns", "tokens", "latent steps a token", x_counts=True))


def _points(folder: RunFolder | None, column: str) -> list[tuple[float, float]]:
    """(tokens, value) of the training rows that have the column."""
    rows = folder.metrics if folder else []
    return [(row["tokens"], row[column]) for row in rows if row.get("kind") == "train" and row.get(column) is not None]


def _at_end(folder: RunFolder | None, column: str) -> float | None:
    points = _points(folder, column)
    late = [value for tokens, value in points if tokens >= (1 - END) * points[-1][0]]
    return mean(late) if late else None


def _evaluated(result: Result, name: str) -> float | None:
    """A number of the model as it decodes; of a task's samples at the trained length."""
    losses: Sequence[Mapping[str, Any]] = list(result.losses.values())
    return losses[-1].get(name) if losses else None


def _cell(values: Sequence[float | None], form: str, each: bool = True) -> str:
    found = [value for value in values if value is not None]
    if not found:
        return ""
    brackets = f" ({', '.join(map(form.format, found))})" if each and len(found) > 1 else ""
    return form.format(mean(found)) + brackets
