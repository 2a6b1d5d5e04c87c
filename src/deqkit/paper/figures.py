"""Figures of the documents, drawn from panels: what results hold under "figure" or "figures", or docs/plots.py makes.

A line figure has `x`, `y`, `log_x`, `log_y` and `series`, each with `label`, `x`, `y` and perhaps `colour` and `style`,
numbers that curves which belong together share. With `kind: points` they are not joined and have no legend: a panel
of `kind: legend` with the same `series`, but no values, is that of all panels beside it. A bar figure has `kind: bars`,
`y` and `bars`, each with `label`, `value` and perhaps `points`, `colour` and `parts`, which the figure's `parts` names;
a value to compare with is its `mark`. Bars whose lengths would tell nothing, of close values or on a logarithmic scale,
are drawn as their `points`. Several, side by side, have titles.
"""

from __future__ import annotations

import io
import math
import re
import statistics
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from deqkit.report.draw import label_of

WIDTH, ALONE, HEIGHT = 4.6, 6.4, 3.1  # inches: of a panel beside another, of one alone, of all
LEGEND_ROW = 0.19  # inches, of a legend below
MAX_POINTS = 300
MARKED = 16
"""Curves with no more points than this show them."""
ROOM = 3
"""A legend of more curves than this finds no free place among them, and stands below."""
FEW = 6
"""Values on a logarithmic axis that are each worth a tick."""
CLOSE = 1.25
"""Values within this factor of each other differ by too little for bars from zero."""
LEAST_SPAN = 0.04
"""What the axis of a dot plot shows at least, as a share of the values: noise is not to look like an effect."""
SETTLED, BEYOND, WORTH = 0.05, 1.25, 0.5
"""A curve is at rest when it stays within the first share of the height of the panel; the x-axis ends so much further,
if that leaves no more than the last share of it."""
# Okabe and Ito's colours, which colour-blind readers can tell apart, in an order of falling contrast with white.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1.5, 1.5)), (0, (6, 2, 1.5, 2)))
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "*", "<", ">", "d", "p", "h", "1", "x")
APART: Any = {"linestyle": "none", "markersize": 6.5, "fillstyle": "none", "markeredgewidth": 1.3}
"""Points that are not joined: hollow, so that none hides another."""
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


_HASHED = re.compile(rb"\b[mp][0-9a-f]{10}\b")


def panels_of(numbers: dict[str, Any]) -> list[dict[str, Any]]:
    """The panels that a result describes; none for most."""
    if "figures" in numbers:
        return list(numbers["figures"])
    return [numbers["figure"]] if "figure" in numbers else []


def draw(panels: Sequence[dict[str, Any]], *, form: str = "svg") -> bytes:
    """The panels side by side, in a row of at most two."""
    columns = min(2, len(panels))
    rows = -(-len(panels) // columns)
    height = HEIGHT + LEGEND_ROW * max(map(_legend_rows, panels))
    with matplotlib.rc_context(_SETTINGS):
        canvas = Figure(
            figsize=(WIDTH * columns if columns > 1 else ALONE, height * rows), layout="constrained", facecolor="white"
        )
        grid = canvas.subplots(rows, columns, squeeze=False).flatten()
        for axes in grid[len(panels) :]:
            axes.axis("off")
        for axes, panel in zip(grid, panels, strict=False):
            _draw_panel(axes, panel)
        buffer = io.BytesIO()
        metadata = _NO_METADATA if form == "svg" else None
        canvas.savefig(buffer, format=form, metadata=metadata, dpi=150)
    return _with_counted_ids(buffer.getvalue()) if form == "svg" else buffer.getvalue()


def _with_counted_ids(svg: bytes) -> bytes:
    """matplotlib names clips and marks by a hash of their coordinates, whose last bits are those of a machine."""
    names: dict[bytes, bytes] = {}
    return _HASHED.sub(lambda match: names.setdefault(match[0], b"%c%d" % (match[0][0], len(names))), svg)


def _draw_panel(axes: Axes, panel: dict[str, Any]) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(length=3, which="major")
    match panel.get("kind"):
        case "bars" if _are_dots(panel):
            _draw_dots(axes, panel)
        case "bars":
            _draw_bars(axes, panel)
        case "legend":
            _draw_legend(axes, panel)
        case None | "points":
            _draw_lines(axes, panel)
        case kind:
            raise ValueError(f"kind of a panel must be bars, points, legend or left out, got {kind!r}")
    if "title" in panel:
        axes.set_title(panel["title"], fontsize=10, loc="left", parse_math=False)


def _draw_lines(axes: Axes, panel: dict[str, Any]) -> None:
    joined = panel.get("kind") != "points"
    series, label = panel["series"], panel["x"]
    if joined and (end := _at_rest(panel)) is not None:
        label += f" (followed up to {max(one['x'][-1] for one in series):,})"
        series = [_up_to(one, end) for one in series]
    _draw_series(axes, series, joined=joined)
    axes.set_xlabel(label, parse_math=False)
    axes.set_ylabel(panel["y"], parse_math=False)
    axes.grid(color=LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    _scale(axes.xaxis, log=panel.get("log_x", False))
    _scale(axes.yaxis, log=panel.get("log_y", False))
    if joined and panel.get("log_x", False):
        _tick_few(axes, sorted({x for one in series for x in one["x"]}))
    if _legend_rows(panel):
        axes.legend(frameon=False, fontsize=8.5, loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    elif joined and len(panel["series"]) > 1:
        axes.legend(frameon=False, fontsize=8.5)


def _legend_rows(panel: dict[str, Any]) -> int:
    """Below the panel; 0 if its legend is within, or if it has none."""
    below = panel.get("kind") is None and len(panel["series"]) > ROOM
    return -(-len(panel["series"]) // 2) if below else 0


def _at_rest(panel: dict[str, Any]) -> float | None:
    """Where the x-axis may end because no long curve changes after it; None if it is needed to its end."""
    series = panel["series"]
    if panel.get("log_x", False) or min(len(one["x"]) for one in series) <= MARKED:
        return None
    change = math.log if panel.get("log_y", False) else float
    heights = [[change(y) for y in one["y"]] for one in series]
    span = max(map(max, heights)) - min(map(min, heights))
    ends = []
    for one, ys in zip(series, heights, strict=True):
        moving = [x for x, y in zip(one["x"], ys, strict=True) if abs(y - ys[-1]) > SETTLED * span]
        ends.append(moving[-1] if moving else one["x"][0])
    end = BEYOND * max(ends)
    return end if end < WORTH * max(one["x"][-1] for one in series) else None


def _up_to(series: dict[str, Any], end: float) -> dict[str, Any]:
    count = sum(x <= end for x in series["x"])
    return {**series, "x": series["x"][:count], "y": series["y"][:count]}


def _tick_few(axes: Axes, xs: Sequence[float]) -> None:
    """Ticks where something was measured, if that is in few places."""
    if len(xs) <= FEW:
        axes.set_xticks(xs, [f"{x:,g}" for x in xs])


def _draw_legend(axes: Axes, panel: dict[str, Any]) -> None:
    _draw_series(axes, [{**series, "x": [], "y": []} for series in panel["series"]], joined=False)
    axes.axis("off")
    axes.legend(frameon=False, fontsize=8.5, loc="center")


def _draw_series(axes: Axes, several: Sequence[dict[str, Any]], *, joined: bool) -> None:
    for number, series in enumerate(several):
        xs, ys = _thin(series["x"]), _thin(series["y"])
        few = len(xs) <= MARKED
        style = series.get("style", number)
        line = {"linestyle": DASHES[style % len(DASHES)], "linewidth": 1.7, "markersize": 4.5}
        axes.plot(
            xs,
            ys,
            label=series["label"],
            color=COLOURS[series.get("colour", number) % len(COLOURS)],
            marker=MARKERS[style % len(MARKERS)] if few else None,
            **(line if joined else APART),
        )


def _thin(values: Sequence[float]) -> list[float]:
    if len(values) <= MAX_POINTS:
        return list(values)
    return [values[round(i * (len(values) - 1) / (MAX_POINTS - 1))] for i in range(MAX_POINTS)]


def _are_dots(panel: dict[str, Any]) -> bool:
    """Whether bars would be of no use: they compare lengths, which a logarithm has none of and close values share."""
    bars = panel["bars"]
    if not all("points" in bar for bar in bars):
        return False
    values = [point for bar in bars for point in bar["points"]]
    return panel.get("log_y", False) or 0 < max(values) <= CLOSE * min(values)


def _draw_dots(axes: Axes, panel: dict[str, Any]) -> None:
    """A dot a seed, and above them a mark at their mean, with its value."""
    log, bars = panel.get("log_y", False), panel["bars"]
    means = [statistics.fmean(bar["points"]) for bar in bars]
    for row, (bar, mean) in enumerate(zip(bars, means, strict=True)):
        points, colour = bar["points"], COLOURS[0 if row == 0 else 1]
        axes.plot(points, [row] * len(points), "o", color=colour, **APART)
        if len(points) > 1:
            axes.plot([mean] * 2, [row - 0.2, row + 0.2], color=colour, linewidth=1.7)
        told = ("mean " if len(points) > 1 else "") + (_value(mean, means) if log else f"{mean:#.4g}")
        axes.annotate(told, (mean, row - 0.2), (0, 3), textcoords="offset points", ha="center", fontsize=9)
    axes.set_yticks(range(len(bars)), [bar["label"] for bar in bars])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(bars) - 0.4, -0.8)
    axes.grid(color=LINE, linewidth=0.7)
    axes.set_axisbelow(True)
    axes.set_xlabel(panel["y"] if log else f"{panel['y']} (the axis does not begin at zero)", parse_math=False)
    _scale(axes.xaxis, log=log)
    axes.set_xlim(*_room([point for bar in bars for point in bar["points"]], log=log))


def _room(values: Sequence[float], *, log: bool) -> tuple[float, float]:
    """An axis for these values and the words above them."""
    low, high = min(values), max(values)
    if log:
        return low / 8, high * 8
    middle, half = (low + high) / 2, max(0.75 * (high - low), LEAST_SPAN / 2 * high)
    return middle - half, middle + half


def _draw_bars(axes: Axes, panel: dict[str, Any]) -> None:
    """Horizontal, so that names have room; the best known value of each is written behind it."""
    bars, log = panel["bars"], panel.get("log_y", False)
    values = [bar["value"] for bar in bars]
    furthest = max(values + [point for bar in bars for point in bar.get("points", ())])
    assert not (log and "parts" in panel), "lengths add up on a linear scale only"
    left = 10 ** _below(min(values)) if log else 0.0
    thickness = 0.6 * min(1, len(bars) / 4)  # two bars are no thicker than four
    for row, bar in enumerate(bars):
        colour = 0 if "parts" in bar else bar.get("colour", 0 if row == 0 else 5)
        start = left
        for number, length in enumerate(bar.get("parts", [bar["value"] - left]), start=colour):
            axes.barh(row, length, left=start, height=thickness, color=COLOURS[number])
            start += length
        points = bar.get("points", ())
        if len(points) > 1:
            axes.plot(points, [row] * len(points), "o", color=INK, markersize=3.5, linestyle="none")
        far = max([bar["value"], *points])
        axes.annotate(
            _value(bar["value"], values), (far, row), (5, 0), textcoords="offset points", va="center", fontsize=9
        )
    axes.set_yticks(range(len(bars)), [bar["label"] for bar in bars])
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.invert_yaxis()
    axes.set_xlabel(panel["y"], parse_math=False)
    _scale(axes.xaxis, log=log)
    axes.set_xlim(left, furthest * (8 if log else 1.2))
    if "mark" in panel:
        axes.axvline(panel["mark"], color=INK, linewidth=1.0, linestyle=DASHES[2])
    if "parts" in panel:
        handles = [Patch(color=COLOURS[number], label=name) for number, name in enumerate(panel["parts"])]
        axes.legend(handles=handles, frameon=False, fontsize=8.5)


def _below(value: float) -> int:
    """A power of ten clearly below a value."""
    power = 0
    while 10**power > value / 3:
        power -= 1
    return power


def _value(value: float, beside: Sequence[float]) -> str:
    """Short, but long enough to tell bars of nearly the same length apart."""
    if 0 < value < 1e-3:
        return f"{value:.1e}".replace("e-0", "e-")
    if value >= 300:
        return f"{value:,.0f}"
    close = any(other != value and abs(other - value) < 0.02 * abs(value) for other in beside)
    return f"{value:.4g}" if close else f"{value:.3g}"


def _scale(axis: Any, *, log: bool) -> None:
    if log:
        axis._set_axes_scale("log")
        low, high = axis.get_view_interval()
        subs = (1, 2, 5) if high < 30 * low else (1, 3) if high < 300 * low else (1,)
        if high < 3 * low:  # these would be one label or none
            subs = (1, 1.5, 2, 3, 5, 7)
        axis.set_major_locator(LogLocator(subs=subs, numticks=8))
        axis.set_minor_locator(NullLocator())
    else:
        axis.set_major_locator(MaxNLocator(6, steps=[1, 2, 2.5, 5, 10]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: label_of(value)))
