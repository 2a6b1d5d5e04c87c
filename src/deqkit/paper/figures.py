"""Figures of the document, drawn from what results hold under "figure" or "figures".

A line figure has `x`, `y`, `log_x`, `log_y` and `series`, each with `label`, `x`, `y`; a bar figure has `kind: bars`,
`y` and `bars`, each with `label`, `value` and perhaps `points`. Several, side by side, have titles.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from deqkit.report.draw import label_of

WIDTH, ALONE, HEIGHT = 4.6, 6.4, 3.1  # inches: of a panel beside another, of one alone, of all
MAX_POINTS = 300
MARKED = 16
"""Curves with no more points than this show them."""
# Okabe and Ito's colours, which colour-blind readers can tell apart, in an order of falling contrast with white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P")
INK, MUTED, LINE = "#222222", "#555555", "#dddddd"
_SETTINGS: Any = {
    "svg.fonttype": "path",  # the same letters on every machine
    "svg.hashsalt": "deqkit",  # the same figure is the same text
    "font.size": 9.5,
    "axes.edgecolor": MUTED,
    "axes.labelcolor": INK,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
}
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def panels_of(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels that a result describes; none for most."""
    if "figures" in numbers:
        return list(numbers["figures"])
    return [numbers["figure"]] if "figure" in numbers else []


def draw(panels: Sequence[dict[str, Any]], *, form: str = "svg") -> bytes:
    """The panels side by side, in a row of at most two."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    with matplotlib.rc_context(_SETTINGS):
        canvas = Figure(
            figsize=(WIDTH * columns if columns > 1 else ALONE, HEIGHT * rows), layout="constrained", facecolor="white"
        )
        grid = canvas.subplots(rows, columns, squeeze=False).flatten()
        for axes in grid[len(panels) :]:
            axes.axis("off")
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel)
        buffer = io.BytesIO()
        metadata = _NO_METADATA if form == "svg" else None
        canvas.savefig(buffer, format=form, metadata=metadata, dpi=150)
    return buffer.getvalue()


def _draw_panel(axes: Axes, panel: dict[str, Any]) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=3, which="major")
    if panel.get("kind") == "bars":
        _draw_bars(axes, panel)
    else:
        _draw_lines(axes, panel)
    if "title" in panel:
        axes.set_title(panel["title"], fontsize=10, loc="left", parse_math=False)


def _draw_lines(axes: Axes, panel: dict[str, Any]) -> None:
    for number, series in enumerate(panel["series"]):
        xs, ys = _thin(series["x"]), _thin(series["y"])
        few = len(xs) <= MARKED
        axes.plot(
            xs,
            ys,
            label=series["label"],
            color=COLOURS[number % len(COLOURS)],
            linestyle=DASHES[number % len(DASHES)],
            linewidth=1.7,
            marker=MARKERS[number % len(MARKERS)] if few else None,
            markersize=4.5,
        )
    axes.set_xlabel(panel["x"], parse_math=False)
    axes.set_ylabel(panel["y"], parse_math=False)
    axes.grid(color=LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    _scale(axes.xaxis, log=panel.get("log_x", False))
    _scale(axes.yaxis, log=panel.get("log_y", False))
    if len(panel["series"]) > 1:
        axes.legend(frameon=False, fontsize=8.5)


def _thin(values: Sequence[float]) -> list[float]:
    if len(values) <= MAX_POINTS:
        return list(values)
    return [values[round(i * (len(values) - 1) / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]


def _draw_bars(axes: Axes, panel: dict[str, Any]) -> None:
    """Horizontal, so that names have room; the best known value of each is written behind it."""
    bars, log = panel["bars"], panel.get("log_y", False)
    values = [bar["value"] for bar in bars]
    left = 10 ** _below(min(values)) if log else 0.0
    thickness = 0.6 * min(1, len(bars) / 4)  # two bars are no thicker than four
    for row, bar in enumerate(bars):
        axes.barh(row, bar["value"] - left, left=left, height=thickness, color=COLOURS[0 if row == 0 else 5])
        points = bar.get("points", ())
        if len(points) > 1:
            axes.plot(points, [row] * len(points), "o", color=INK, markersize=3.5, linestyle="none")
        far = max([bar["value"], *points])
        axes.annotate(_value(bar["value"]), (far, row), (5, 0), textcoords="offset points", va="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [bar["label"] for bar in bars])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.invert_yaxis()
    axes.set_xlabel(panel["y"], parse_math=False)
    _scale(axes.xaxis, log=log)
    axes.set_xlim(left, max(values) * (8 if log else 1.2))


def _below(value: float) -> int:
    """A power of ten clearly below a value."""
    power = 0
    while 10**power > value / 3:
        power -= 1
    return power


def _value(value: float) -> str:
    return (
        f"{value:.1e}".replace("e-0", "e-") if 0 < value < 1e-3 else f"{value:,.0f}" if value >= 300 else f"{value:.3g}"
    )


def _scale(axis: Any, *, log: bool) -> None:
    if log:
        axis._set_axes_scale("log")
        low, high = axis.get_view_interval()
        subs = (1, 2, 5) if high < 30 * low else (1, 3) if high < 300 * low else (1,)
        axis.set_major_locator(LogLocator(subs=subs, numticks=8))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: label_of(value)))
