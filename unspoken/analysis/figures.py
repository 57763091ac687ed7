"""Plots as inline SVG that takes the page's fonts and follows its light or dark colours.

matplotlib draws; what should follow the page is drawn in a placeholder colour that becomes `currentColor`. Data
colours are middle tones that read on both backgrounds.
"""

import hashlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from unspoken.analysis.numbers import short_count, signed

COLOURS = ("#4c8dd6", "#e0763a", "#3fa57a", "#a86fd1", "#c9a227", "#d65c7a")
_INK = "#010203"  # becomes currentColor
_STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "svg.hashsalt": "unspoken",
    "font.family": "sans-serif",
    "font.size": 10,
    "text.color": _INK,
    "axes.labelcolor": _INK,
    "axes.edgecolor": _INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.formatter.useoffset": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "axes.grid.axis": "y",
    "grid.color": _INK,
    "grid.alpha": 0.12,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "legend.frameon": False,
    "lines.linewidth": 1.8,
}


@dataclass(frozen=True)
class Series:
    """One line. `level` is a horizontal line at one height instead; the same `colour` marks one run in all plots."""

    name: str
    xs: Sequence[float] = ()
    ys: Sequence[float] = ()
    colour: int = 0
    level: float | None = None
    dashed: bool = False
    markers: bool = False


@dataclass(frozen=True)
class Estimate:
    """One row of an interval plot."""

    name: str
    value: float
    interval: tuple[float, float] | None = None
    colour: int = 0


@dataclass(frozen=True)
class Frame:
    """What stands around the data.

    y_focus: quantiles of the ys that the axis must show, to cut off a steep start. min_y_span: the axis shows at least
    so much, so that noise looks like noise. whole_x: ticks at whole numbers. x_counts: ticks like 1.2M. marks: named
    places on the x axis.
    """

    title: str
    x_label: str = ""
    y_label: str = ""
    whole_x: bool = False
    x_counts: bool = False
    y_focus: tuple[float, float] = (0.0, 1.0)
    min_y_span: float = 0.0
    marks: Sequence[tuple[float, str]] = ()


def line_plot(series: Sequence[Series], frame: Frame) -> str:
    """Lines over a shared x, as SVG text."""
    with mpl.rc_context(_STYLE):
        figure = Figure(figsize=(6.2, 3.5), layout="constrained")
        axes = figure.subplots()
        for one in series:
            style: dict[str, Any] = {
                "color": COLOURS[one.colour % len(COLOURS)],
                "ls": "--" if one.dashed else "-",
                "label": one.name,
            }
            if one.level is not None:
                axes.axhline(one.level, **style)
            else:
                axes.plot(one.xs, one.ys, marker="o" if one.markers else None, ms=4, **style)
        for place, name in frame.marks:
            axes.axvline(place, color=_INK, alpha=0.4, ls=":", lw=1.2)
            axes.annotate(name, (place, 1), (4, -4), xycoords=("data", "axes fraction"), textcoords="offset points",
                          va="top", fontsize=9, alpha=0.8)  # fmt: skip
        _focus(axes, series, frame.y_focus)
        low, high = axes.get_ylim()
        missing = max(0.0, frame.min_y_span - (high - low)) / 2
        axes.set_ylim(low - missing, high + missing)
        _finish_axes(axes, frame)
        if len(series) > 1:
            axes.legend(fontsize=9)
        return _svg(figure)


def interval_plot(estimates: Sequence[Estimate], frame: Frame) -> str:
    """Estimates with their intervals, one a row, against a line at zero."""
    with mpl.rc_context({**_STYLE, "axes.grid.axis": "x", "axes.spines.left": False}):
        figure = Figure(figsize=(6.2, 0.95 + 0.46 * len(estimates)), layout="constrained")
        axes = figure.subplots()
        axes.axvline(0, color=_INK, lw=1)
        for row, one in enumerate(estimates):
            colour = COLOURS[one.colour % len(COLOURS)]
            low, high = one.interval or (one.value, one.value)
            axes.plot([low, high], [row, row], color=colour, lw=6, alpha=0.45, solid_capstyle="round")
            axes.plot([one.value], [row], "o", color=colour, ms=7)
            axes.annotate(signed(one.value), (one.value, row), (0, 8), textcoords="offset points", ha="center",
                          fontsize=9)  # fmt: skip
        axes.set_yticks(range(len(estimates)), [one.name for one in estimates])
        axes.tick_params(axis="y", length=0)
        axes.xaxis.set_major_locator(MaxNLocator(5))
        axes.set_ylim(len(estimates) - 0.5, -0.75)
        axes.margins(x=0.12)
        _finish_axes(axes, frame)
        return _svg(figure)


def _finish_axes(axes: Axes, frame: Frame) -> None:
    axes.set_title(frame.title)
    axes.set_xlabel(frame.x_label)
    axes.set_ylabel(frame.y_label)
    if frame.whole_x:
        axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    if frame.x_counts:
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: short_count(value)))


def _focus(axes: Axes, series: Sequence[Series], quantiles: tuple[float, float]) -> None:
    if quantiles == (0.0, 1.0):
        return
    ys = sorted(y for one in series for y in one.ys)
    if len(ys) > 2:
        low, high = (ys[round(q * (len(ys) - 1))] for q in quantiles)
        margin = 0.06 * (high - low) or 0.1
        axes.set_ylim(low - margin, high + margin)


def _svg(figure: Figure) -> str:
    """The drawing alone: no XML header, no fixed size, ids that are this figure's own."""
    file = io.StringIO()
    figure.savefig(file, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    svg = file.getvalue()
    svg = svg[svg.index("<svg") :].replace(_INK, "currentColor")
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    own = f"f{hashlib.sha256(svg.encode()).hexdigest()[:8]}-"
    return re.sub(r'(\bid="|href="#|url\(#)', rf"\g<1>{own}", svg)
