"""Timing several calls side by side.

Comparisons are interleaved: every round runs every candidate once, in a changing order, so that what else the machine
does meets all of them alike.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

ClockName = Literal["cpu", "wall"]
CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}
"""Processor time of the process, which a busy machine disturbs least, or wall time."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one call, round after round."""

    seconds: tuple[float, ...]

    @property
    def median(self) -> float:
        return statistics.median(self.seconds)

    @property
    def spread(self) -> tuple[float, float]:
        """The quartiles; the extremes if there are fewer than four rounds."""
        if len(self.seconds) < 4:
            return min(self.seconds), max(self.seconds)
        low, _, high = statistics.quantiles(self.seconds, n=4, method="inclusive")
        return low, high

    def plain(self) -> dict[str, Any]:
        return {"median": self.median, "spread": list(self.spread), "rounds": len(self.seconds)}


def interleaved(
    calls: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 5,
    warm_up: int = 1,
    clock: ClockName = "cpu",
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Timing]:
    """Time several calls side by side: in every round each of them once, every round starting with another.

    Args:
        warm_up: rounds before those that count.
        on_round: called before every round with how many are done, and of how many.
    """
    if rounds < 1 or warm_up < 0:
        raise ValueError(f"rounds must be at least 1 and warm_up at least 0, got {rounds} and {warm_up}")
    now, names = CLOCKS[clock], list(calls)
    seconds: dict[str, list[float]] = {name: [] for name in names}
    for number in range(warm_up + rounds):
        on_round(number, warm_up + rounds)
        gc.collect()
        turn = number % max(len(names), 1)
        for name in (*names[turn:], *names[:turn]):
            began = now()
            calls[name]()
            if number >= warm_up:
                seconds[name].append(now() - began)
    return {name: Timing(tuple(values)) for name, values in seconds.items()}


def ratio(ours: Timing, theirs: Timing) -> dict[str, float]:
    """How many times as long ours takes: the median over rounds of the ratio in each, and its quartiles."""
    in_rounds = Timing(tuple(a / b for a, b in zip(ours.seconds, theirs.seconds, strict=True)))
    low, high = in_rounds.spread
    return {"ratio": in_rounds.median, "low": low, "high": high}


def compare_steps(
    steps: Mapping[str, Callable[[], Any]],
    *,
    rounds: int = 5,
    clock: ClockName = "cpu",
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Time steps of several models, interleaved, after two rounds that do not count: in the first there is no memory
    yet, and a compiled model compiles in both.

    Returns:
        `seconds`: for every name the median and the quartiles. `ratios`: how many times as long the first takes as
        each of the others, from the ratios within rounds.
    """
    timings = interleaved(steps, rounds=rounds, warm_up=2, clock=clock, on_round=on_round)
    first, *others = timings
    return {
        "seconds": {name: timing.plain() for name, timing in timings.items()},
        "ratios": {other: ratio(timings[first], timings[other]) for other in others},
    }
