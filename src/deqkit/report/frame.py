"""Figures as the page shows them: a title, a legend that wraps, the drawing, and what it means."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from deqkit.report.chart import Bars, Chart
from deqkit.report.draw import COLOURS, DASHES, draw, draw_bars
from deqkit.report.markup import Html, element, join


def chart_figure(*charts: Chart, name: str, title: str, caption: str) -> Html:
    """A figure of one or more panels. The caption says what one sees, and what it means for this run."""
    drawing = draw(charts, name=name, title=f"{title}. {caption}")
    return _figure(list(_keys(charts)), drawing, title=title, caption=caption)


def bars_figure(bars: Bars, *, name: str, title: str, caption: str) -> Html:
    keys = [(_box(COLOURS[i]), label) for i, label in enumerate(bars.labels)]
    drawing = draw_bars(bars, name=name, title=f"{title}. {caption}")
    return _figure(keys, drawing, title=title, caption=caption)


def _figure(keys: Sequence[tuple[Html, str]], drawing: Html, *, title: str, caption: str) -> Html:
    legend = element("ul", *(element("li", swatch, text) for swatch, text in keys), class_="legend") if keys else ""
    name = element("p", title, class_="title")
    return element("figure", name, legend, drawing, element("figcaption", caption))


def _keys(charts: Sequence[Chart]) -> Iterator[tuple[Html, str]]:
    """A swatch and a text for everything that has a name, each name once."""
    seen: set[str] = set()
    for swatch, text in (key for chart in charts for key in _chart_keys(chart)):
        if text and text not in seen:
            seen.add(text)
            yield swatch, text


def _chart_keys(chart: Chart) -> Iterator[tuple[Html, str]]:
    for series in chart.series:
        colour = COLOURS[series.colour % len(COLOURS)]
        swatch = _dot(colour) if series.kind == "points" else _line(colour, DASHES[series.dash % len(DASHES)])
        yield swatch, series.label
    for mark in chart.marks:
        yield _line(COLOURS[mark.colour], "1.2 2.2"), mark.text
    for shade, phase in enumerate(chart.phases):
        yield _box("var(--shade)", opacity=1 - 0.4 * shade), phase.text


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
        element("rect", x="4", y="0", width="14", height="10", rx="2", style=f"fill:{colour};opacity:{opacity:g}")
    )
