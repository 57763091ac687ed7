"""Pictures of an evaluation, as PNG files. Uses matplotlib without a display."""

from collections.abc import Sequence
from pathlib import Path

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from unspoken.eval.depth import DepthCurve
from unspoken.eval.perplexity import Loss

_SIZE_INCHES = (6.4, 4.0)
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
