"""What a figure shows, apart from how it is drawn."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

MAX_POINTS = 240  # more cannot be told apart in a figure this wide

Kind = Literal["line", "faint", "points"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Series:
    """A curve. Those without a label do not occur in the legend."""

    xs: Sequence[float]
    ys: Sequence[float]
    label: str = ""
    colour: int = 0
    """Which of the colours of the page: see `draw.COLOURS`."""
    kind: Kind = "line"
    dash: int = 0
    """Which of the dash patterns; 0 is solid. Curves differ by more than colour."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """A straight line across, at a value of x or y."""

    at: float
    text: str
    colour: int = 0
    """That of the curve that it concerns."""
    axis: Literal["x", "y"] = "y"


@dataclass(frozen=True, kw_only=True, slots=True)
class Phase:
    """A part of training that is different, shaded."""

    start: float
    end: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Chart:
    """One panel."""

    series: Sequence[Series]
    x: str
    """What runs to the right."""
    y: str
    """What runs upwards."""
    log_x: bool = False
    log_y: bool = False
    from_zero: bool = False
    percent: bool = False
    marks: Sequence[Mark] = ()
    phases: Sequence[Phase] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A row of a bar chart, in parts that add up."""

    text: str
    parts: Sequence[float]
    total: str
    """The sum, as it is written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Bars:
    """Rows of bars that share a scale."""

    bars: Sequence[Bar]
    labels: Sequence[str] = field(default=())
    """Names of the parts."""


def smoothed(values: Sequence[float]) -> list[float]:
    """The mean over a window of about a fortieth of the curve on either side, shorter at the ends."""
    reach = len(values) // 40
    sums = [0.0]
    for value in values:
        sums.append(sums[-1] + value)
    windows = [(max(0, i - reach), min(len(values), i + reach + 1)) for i in range(len(values))]
    return [(sums[end] - sums[start]) / (end - start) for start, end in windows]


def noisy(xs: Sequence[float], ys: Sequence[float], *, label: str, colour: int, dash: int = 0) -> list[Series]:
    """A noisy quantity: as it was, faint, and smoothed."""
    faint = Series(xs=xs, ys=ys, colour=colour, kind="faint")
    return [thinned(faint), thinned(Series(xs=xs, ys=smoothed(ys), label=label, colour=colour, dash=dash))]


def thinned(series: Series, limit: int = MAX_POINTS) -> Series:
    """The same curve with no more points than can be seen; of a faint one the extremes are kept."""
    size = len(series.xs)
    if size <= limit:
        return series
    bins = limit // 2 if series.kind == "faint" else limit
    edges = [size * i // bins for i in range(bins + 1)]
    chosen: list[int] = []
    for start, end in zip(edges, edges[1:], strict=False):
        inside = range(start, end)
        if series.kind == "faint":
            extremes = {min(inside, key=series.ys.__getitem__), max(inside, key=series.ys.__getitem__)}
            chosen.extend(sorted(extremes))
        else:
            chosen.append(end - 1 if end == size else start)
    return replace(series, xs=[series.xs[i] for i in chosen], ys=[series.ys[i] for i in chosen])


def tail(values: Sequence[float]) -> list[float]:
    """The last fifth, at least one."""
    return list(values[-max(1, len(values) // 5) :])


def typical(values: Sequence[float]) -> float:
    """The median of the last fifth: where a quantity stands at the end."""
    return statistics.median(tail(values))
