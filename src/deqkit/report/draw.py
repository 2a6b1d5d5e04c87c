"""Charts as SVG that takes its colours and letters from the page, so that one drawing serves light, dark and print."""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from deqkit.report.chart import Bars, Chart, Mark, Series
from deqkit.report.markup import Html

WIDTH, HEIGHT = 440, 240  # about a phone's width: letters keep their size there
LETTER = 7.2  # the width of a digit, in fonts that are wide
MAX_LETTERS = 48
NUM_COLOURS = 6
DASHES = ("", "6 3", "2 2.5", "9 3 2 3")
"""Dash patterns of SVG, for curves and the legend."""
PART_STYLES = ((0, 1.0), (0, 0.45), (5, 1.0), (5, 0.45))
"""Colours and opacities of the parts of a bar."""
# Colours that stand for variables of the page's style sheet, and are replaced by them in the drawing.
_NAMES = [*(f"c{i}" for i in range(NUM_COLOURS)), "ink", "muted", "line", "shade", "page"]
_HEX = {name: f"#fe00{number:02x}" for number, name in enumerate(_NAMES)}
COLOURS = [f"var(--c{i})" for i in range(NUM_COLOURS)]
_SETTINGS: Any = {
    "svg.fonttype": "none",  # letters stay letters: small, and in the page's font
    "svg.hashsalt": "deqkit",  # the same figure is the same text
    "font.size": 12,
    "path.simplify": True,
    "axes.unicode_minus": True,
}
_LONG = re.compile(r"-?\d+\.\d{2,}")
_NO_METADATA = {"Date": None, "Creator": None, "Format": None, "Type": None}


def draw(charts: Sequence[Chart], *, name: str, title: str) -> Html:
    """Panels one above the other, with a common horizontal axis.

    Args:
        name: unique on the page; ids inside the drawing begin with it.
        title: what a screen reader says.
    """
    height = HEIGHT if len(charts) == 1 else 145 * len(charts)
    with matplotlib.rc_context(_SETTINGS):
        canvas = Figure(figsize=(WIDTH / 72, height / 72), dpi=72)
        panels = canvas.subplots(len(charts), 1, sharex=True, squeeze=False)[:, 0]
        for axes, chart in zip(panels, charts, strict=True):
            _draw_chart(axes, chart, last=chart is charts[-1])
        _set_margins(canvas, list(panels), height)
        return _svg(canvas, name, title)


def draw_bars(bars: Bars, *, name: str, title: str) -> Html:
    """Horizontal bars in parts, each with its name above and its sum behind."""
    longest = max(sum(bar.parts) for bar in bars.bars)
    with matplotlib.rc_context(_SETTINGS):
        canvas = Figure(figsize=(WIDTH / 72, (16 + 52 * len(bars.bars)) / 72), dpi=72)
        axes = canvas.add_axes((0.01, 0.0, 0.98, 1.0))
        axes.set(xlim=(0, longest * 1.28), ylim=(len(bars.bars) - 0.3, -0.7))
        axes.axis("off")
        for row, bar in enumerate(bars.bars):
            start = 0.0
            for (colour, opacity), length in zip(PART_STYLES, bar.parts, strict=False):
                axes.barh(row, length, left=start, height=0.42, color=_HEX[f"c{colour}"], alpha=opacity)
                start += length
            axes.text(0, row - 0.34, _cut(bar.text), color=_HEX["ink"], va="bottom", parse_math=False)
            axes.text(start + longest * 0.015, row, bar.total, color=_HEX["ink"], va="center")
        return _svg(canvas, name, title)


def _cut(text: str) -> str:
    """What fits above a bar; the table beside it has the whole name."""
    return text if len(text) <= MAX_LETTERS else f"{text[: MAX_LETTERS - 1]}…"


def _set_margins(canvas: Figure, panels: list[Axes], height: float) -> None:
    """Room for the labels. matplotlib's own layout would take longer than everything else together."""
    widest = max(len(label) for axes in panels for label in _labels(axes))
    left, right, above, below = 8 + LETTER * widest, 14, 22, 38
    between, room = 36, (height - above - below) / len(panels)
    canvas.subplots_adjust(
        left=left / WIDTH,
        right=1 - right / WIDTH,
        top=1 - above / height,
        bottom=below / height,
        hspace=between / (room - between * (len(panels) - 1) / len(panels)),
    )


def _labels(axes: Axes) -> list[str]:
    low, high = sorted(axes.get_ylim())
    formatter = axes.yaxis.get_major_formatter()
    return [formatter(tick) for tick in axes.get_yticks() if low <= tick <= high] or [""]


def _draw_chart(axes: Axes, chart: Chart, *, last: bool) -> None:
    for shade, phase in enumerate(chart.phases):
        axes.axvspan(phase.start, phase.end, color=_HEX["shade"], alpha=1 - 0.4 * shade, linewidth=0)
    for series in chart.series:
        _draw_series(axes, series)
    for mark in chart.marks:
        _draw_mark(axes, mark)
    _set_scales(axes, chart)
    axes.grid(axis="y", color=_HEX["line"], linewidth=0.8)
    axes.set_axisbelow(True)
    axes.tick_params(length=0, colors=_HEX["muted"], which="both", labelsize=11.5)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.spines["bottom"].set_color(_HEX["line"])
    axes.set_title(chart.y, loc="left", color=_HEX["muted"], fontsize=11.5, parse_math=False)
    if last:
        axes.set_xlabel(chart.x, loc="right", color=_HEX["muted"], fontsize=11.5, parse_math=False)


def _draw_series(axes: Axes, series: Series) -> None:
    colour = _HEX[f"c{series.colour % NUM_COLOURS}"]
    if series.kind == "faint":
        axes.plot(series.xs, series.ys, color=colour, linewidth=0.9, alpha=0.28)
        return
    (line,) = axes.plot(series.xs, series.ys, color=colour, linewidth=1.9, solid_capstyle="round")
    if series.kind == "points" or len(series.xs) == 1:
        line.set(marker="o", markersize=5.5, linewidth=1.2)
    if pattern := _pattern(series.dash):
        line.set_linestyle((0, [length / line.get_linewidth() for length in pattern]))


def _pattern(dash: int) -> list[float]:
    return [float(length) for length in DASHES[dash % len(DASHES)].split()]


def _draw_mark(axes: Axes, mark: Mark) -> None:
    line = axes.axhline if mark.axis == "y" else axes.axvline
    line(mark.at, color=_HEX[f"c{mark.colour}"], linewidth=1.1, linestyle=(0, (1.2, 2.2)))


def _set_scales(axes: Axes, chart: Chart) -> None:
    axes.set(xscale="log" if chart.log_x else "linear", yscale="log" if chart.log_y else "linear")
    for axis, is_log in ((axes.xaxis, chart.log_x), (axes.yaxis, chart.log_y)):
        if is_log:
            low, high = axis.get_view_interval()
            # within a few powers of ten these alone would be hardly a label
            subs = (1, 2, 5) if high < 10 * low else (1, 3) if high < 100 * low else (1,)
            axis.set_major_locator(LogLocator(subs=subs, numticks=7))
            axis.set_minor_locator(NullLocator())
        else:
            axis.set_major_locator(MaxNLocator(6 if axis is axes.xaxis else 4, steps=[1, 2, 2.5, 5, 10]))
        axis.set_major_formatter(FuncFormatter(lambda value, _: label_of(value)))
    if chart.percent:
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{100 * value:g}%"))
        axes.set_ylim(0, min(1, max(0.05, 1.1 * max(max(series.ys) for series in chart.series))))
    elif chart.from_zero:
        axes.set_ylim(bottom=0)
    axes.margins(x=0.01)


def label_of(value: float) -> str:
    """A tick's label: powers of ten below a thousandth and from a million up, thousands as k."""
    if value != 0 and (abs(value) < 0.000999 or abs(value) >= 1e6):
        mantissa, exponent = f"{value:.1e}".split("e")
        power = "10" + str(int(exponent)).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))
        times = mantissa.removesuffix(".0")
        return power if times == "1" else f"{times}·{power}"
    return f"{value / 1000:g}k" if abs(value) >= 1000 else f"{value:g}"


def _svg(canvas: Figure, name: str, title: str) -> Html:
    buffer = io.StringIO()
    canvas.savefig(buffer, format="svg", transparent=True, metadata=_NO_METADATA)
    return Html(_for_the_page(buffer.getvalue(), name, title))


def _adapted(tag: str, name: str) -> str:
    tag = " ".join(tag.split()).replace("xlink:href", "href")
    tag = re.sub(r'\bid="', f'id="{name}-', tag)
    tag = re.sub(r'(href="|url\()#', rf"\1#{name}-", tag)
    for variable, colour in _HEX.items():
        tag = tag.replace(colour, f"var(--{variable})")
    return _LONG.sub(lambda match: f"{float(match[0]):.1f}".removesuffix(".0"), tag)


def _for_the_page(svg: str, name: str, title: str) -> str:
    """Inline SVG: no declarations, ids of its own, colours by variable, and no more digits than can be seen."""
    svg = svg[svg.index("<svg") :]
    box = re.search(r'viewBox="[^"]*"', svg)
    assert box is not None
    body = svg[svg.index(">") + 1 :].rstrip()
    body = re.sub(r"<!--.*?-->\s*", "", body, flags=re.DOTALL)
    body = re.sub(r"<[^>]*>", lambda tag: _adapted(tag[0], name), body)  # text between tags stays as it is
    body = re.sub(r">\s*\n\s*<", "><", body)
    return f'<svg {box[0]} role="img" aria-label="{html.escape(title)}">{body}'
