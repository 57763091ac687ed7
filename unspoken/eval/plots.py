"""Pictures of an evaluation, as PNG files. Uses matplotlib without a display."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from unspoken.data.tasks import Task
from unspoken.eval.depth import DepthCurve
from unspoken.eval.perplexity import EXACT, Loss
from unspoken.eval.tasks import LengthResult, Rate

_SIZE_INCHES = (6.4, 4.0)
_WIDE_INCHES = (10.0, 4.0)
_DPI = 150


def plot_losses(losses: Sequence[Loss], title: str, path: Path) -> None:
    """Loss by number of passes, with 95 % intervals over documents."""
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    places = range(len(losses))
    for place, loss in zip(places, losses):
        low, high = loss.interval or (loss.loss, loss.loss)
        axes.plot([place, place], [low, high], color="0.6", lw=4, solid_capstyle="butt", zorder=1)
    axes.scatter(places, [loss.loss for loss in losses], zorder=2)
    axes.set_xticks(places, [loss.name for loss in losses])
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    figure.savefig(path, dpi=_DPI)


def plot_depth(curve: DepthCurve, title: str, path: Path) -> None:
    """Loss against recycle depth, with the exact recurrence as the level it approaches."""
    figure = Figure(figsize=_SIZE_INCHES, layout="constrained")
    axes = figure.subplots()
    axes.plot(curve.depths, curve.losses, marker="o", ms=3, label="k parallel passes")
    if curve.exact is not None:
        axes.axhline(curve.exact, color="C1", ls="--", label="exact recurrence")
    axes.axvline(curve.num_train_passes, color="0.6", ls=":", label="passes in training")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("recycle depth k")
    axes.set_ylabel("loss (nats per token)")
    axes.set_title(title)
    axes.legend()
    figure.savefig(path, dpi=_DPI)


def plot_task(results: Sequence[LengthResult], task: Task, title: str, path: Path) -> None:
    """Right answers by length, and right targets by position at the greatest length, with 95 % intervals."""
    figure = Figure(figsize=_WIDE_INCHES, layout="constrained")
    by_length, by_position = figure.subplots(1, 2, sharey=True)
    longest = results[-1]
    for name in longest.answers:
        style = {"color": "black", "ls": "--"} if name == EXACT else {}
        rates = [result.answers[name] for result in results]
        _draw_rates(by_length, [result.length for result in results], rates, label=name, **style)
        rates = longest.positions[name]
        _draw_rates(by_position, range(1, len(rates) + 1), rates, label=name, **style)
    for axes in (by_length, by_position):
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
        if axes is by_length or task.answer == "last":  # then a position is the length up to it
            axes.axvline(task.max_length, color="0.6", ls=":", label="longest in training")
    by_length.set(xlabel="length", ylabel="right", ylim=(-0.02, 1.02), title="answer")
    by_position.set(xlabel="target", title=f"by target, length {longest.length}")
    by_length.legend()
    figure.suptitle(title)
    figure.savefig(path, dpi=_DPI)


def _draw_rates(axes: Axes, places: Sequence[int], rates: Sequence[Rate], **style: Any) -> None:
    intervals = [rate.interval for rate in rates]
    line = axes.plot(places, [rate.share for rate in rates], marker="o", ms=3, **style)[0]
    lows, highs = [low for low, _ in intervals], [high for _, high in intervals]
    axes.fill_between(places, lows, highs, color=line.get_color(), alpha=0.15, lw=0)
