"""Checks of configurations: one clear ValueError for a value that cannot be meant."""

from __future__ import annotations

import math
from typing import Any, get_args

from deqkit.layers.linear import Normalisation


def check_rates(**rates: float) -> None:
    """Raise unless every rate is a probability below one."""
    for name, rate in rates.items():
        if not 0 <= rate < 1:
            raise ValueError(f"{name} must be at least 0 and below 1, got {rate!r}")


def check_whole(least: int, **values: Any) -> None:
    """Raise unless every value is a whole number of at least `least`."""
    for name, value in values.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            raise ValueError(f"{name} must be a whole number of at least {least}, got {value!r}")


def check_scale(**scales: float) -> None:
    """Raise unless every scale is a positive number."""
    for name, scale in scales.items():
        if not (isinstance(scale, int | float) and 0 < scale < math.inf):
            raise ValueError(f"{name} must be a positive number, got {scale!r}")


def check_weights(normalise: Any, init_std: Any) -> None:
    """Raise unless these say how weights are normalised and how they start."""
    if normalise not in get_args(Normalisation):
        kinds = ", ".join(map(repr, get_args(Normalisation)))
        raise ValueError(f"normalise must be one of {kinds}, got {normalise!r}")
    if init_std is not None and not (isinstance(init_std, int | float) and math.isfinite(init_std) and init_std >= 0):
        raise ValueError(f"init_std must be a finite number of at least 0, or None, got {init_std!r}")
