"""Figures as the page shows them: a title, a legend that wraps, the drawing, and what it means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deqkit.report.chart import Bars, Chart
from deqkit.report.draw import COLOURS, DASHES, PART_STYLES, draw, draw_bars
from deqkit.report.markup import Html, element, join


def chart_figure(*charts: Chart, name: str, title: str, caption: str) -> Html:
    """A figure of one or more panels. The caption says what one sees, and what it means for this run."""
    panels = "; ".join(f"{chart.y} against {chart.x}" for chart in charts)
    drawing = draw(charts, name=name, title=f"{title}: {panels}")
    return _figure(list(_keys(charts)), drawing, title=title, caption=caption)


def bars_figure(bars: Bars, *, name: str, title: str, caption: str) -> Html:
    keys = [
        (_box(COLOURS[colour], opacity=opacity), label)
        for (colour, opacity), label in zip(PART_STYLES, bars.labels, strict=False)
    ]
    drawing = draw_bars(bars, name=name, title=f"{title}: {'; '.join(f'{bar.text} {bar.total}' for bar in bars.bars)}")
    return _figure(keys, drawing, title=title, caption=caption)


def _figure(keys: Sequence[tuple[Html, str]], drawing: Html, *, title: str, caption: str) -> Html:
    legend = element("ul", *(element("li", swatch, text) for swatch, text in keys), class_="legend") if keys else ""
    name = element("p", title, class_="title")
    return element("figure", name, legend, drawing, element("figcaption", caption))


def _keys(charts: Sequence[Chart]) -> Iterator[tuple[Html, str]]:
    """A swatch and a text for everything that has a name, each name once."""
    keys = {text: swatch for text, swatch in _all_keys(charts) if text}
    return ((swatch, text) for text, swatch in keys.items())


def _all_keys(charts: Sequence[Chart]) -> Iterator[tuple[str, Html]]:
    for series in (series for chart in charts for series in chart.series):
        colour = COLOURS[series.colour % len(COLOURS)]
        swatch = _dot(colour) if series.kind == "points" else _line(colour, DASHES[series.dash % len(DASHES)])
        yield series.label, swatch
    for mark in (mark for chart in charts for mark in chart.marks):
        yield mark.text, _line(COLOURS[mark.colour], "1.2 2.2")
    for shade, phase in ((i, phase) for chart in charts for i, phase in enumerate(chart.phases)):
        yield phase.text, _box("var(--shade)", opacity=1 - 0.4 * shade)


def _swatch(*shapes: Html) -> Html:
    return element("svg", join(shapes), class_="swatch", viewBox="0 0 22 10", aria_hidden="true")


def _line(colour: str, dash: str) -> Html:
    style = f"stroke:{colour};stroke-width:2;stroke-dasharray:{dash or 'none'}"
    return _swatch(element("path", d="M0 5H22", style=style))


def _dot(colour: str) -> Html:
    return _swatch(
        element("path", d="M0 5H22", style=f"stroke:{colour};stroke-width:1.2"),
        element("circle", cx="11", cy="5", r="3.4", style=f"fill:{colour}"),
    )


def _box(colour: str, opacity: float = 1.0) -> Html:
    return _swatch(
        element("rect", x="4", y="0", width="14", height="10", rx="2", style=f"fill:{colour};opacity:{opacity:g}"),
        element("rect", x="4.5", y=".5", width="13", height="9", rx="1.5", style="stroke:var(--line)"),
    )
