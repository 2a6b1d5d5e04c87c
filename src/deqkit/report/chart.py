"""What a figure shows, apart from how it is drawn."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

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


def smoothed(
    values: Sequence[float],
    average: Callable[[Sequence[float]], float] = statistics.fmean,
    *,
    at: Sequence[int] | None = None,
) -> list[float]:
    """The average over a window of a fortieth of the curve on either side, shorter at the ends.

    Args:
        average: the mean, or the median for a quantity with outliers.
        at: the places where it is wanted; all if left out.
    """
    reach = len(values) // 40
    return [average(values[max(0, i - reach) : i + reach + 1]) for i in (range(len(values)) if at is None else at)]


def smooth(xs: Sequence[float], ys: Sequence[float], *, outliers: bool = False, **style: Any) -> Series:
    """A noisy quantity, smoothed, at no more points than can be seen."""
    chosen = _spread(len(xs))
    line = smoothed(ys, statistics.median if outliers else statistics.fmean, at=chosen)
    return Series(xs=[xs[i] for i in chosen], ys=line, **style)


def noisy(
    xs: Sequence[float], ys: Sequence[float], *, label: str, colour: int, dash: int = 0, outliers: bool = False
) -> list[Series]:
    """A noisy quantity: as it was, faint, and smoothed."""
    line = smooth(xs, ys, outliers=outliers, label=label, colour=colour, dash=dash)
    return [thinned(Series(xs=xs, ys=ys, colour=colour, kind="faint")), line]


def thinned(series: Series) -> Series:
    """The same curve with no more points than can be seen; of a faint one the extremes are kept."""
    size = len(series.xs)
    if size <= MAX_POINTS:
        return series
    chosen = _extremes(series.ys) if series.kind == "faint" else _spread(size)
    return replace(series, xs=[series.xs[i] for i in chosen], ys=[series.ys[i] for i in chosen])


def _spread(size: int) -> list[int]:
    """Places from the first to the last, evenly."""
    if size <= MAX_POINTS:
        return list(range(size))
    return [round(i * (size - 1) / (MAX_POINTS - 1)) for i in range(MAX_POINTS)]


def _extremes(values: Sequence[float]) -> list[int]:
    """The places of the smallest and the largest value of every part of a curve."""
    num_parts = MAX_POINTS // 2
    edges = [len(values) * i // num_parts for i in range(num_parts + 1)]
    chosen: list[int] = []
    for start, end in zip(edges, edges[1:], strict=False):
        extremes = (pick(range(start, end), key=values.__getitem__) for pick in (min, max))
        chosen.extend(sorted(set(extremes)))
    return chosen


def tail(values: Sequence[float]) -> list[float]:
    """The last fifth, at least one."""
    return list(values[-max(1, len(values) // 5) :])


def typical(values: Sequence[float]) -> float:
    """The median of the last fifth: where a quantity stands at the end."""
    return statistics.median(tail(values))
