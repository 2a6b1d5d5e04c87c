"""Linear maps whose weight may be normalised, and how all weights start."""

from __future__ import annotations

from typing import Literal

import torch
from torch import nn
from torch.nn.utils import parametrizations

Normalisation = Literal["none", "weight", "spectral"]


def make_linear(
    num_inputs: int,
    num_outputs: int,
    *,
    bias: bool = True,
    normalise: Normalisation = "none",
    std: float | None = None,
    gain: float = 1.0,
) -> nn.Linear:
    """A linear map that starts at N(0, std), bias zero.

    The weight is drawn before the normalisation is put on, so the weight that is used is the one that was drawn (with
    spectral norm: divided by its largest singular value). A normalised weight is computed whenever `.weight` is read;
    cells read it once per solve, in `bind`.

    Args:
        normalise: "weight" for w = g v / ||v|| per output, "spectral" for w = v / sigma(v).
        std: standard deviation of the weights; 1 / sqrt(num_inputs) if left out.
        gain: factor on the standard deviation.
    """
    linear = nn.Linear(num_inputs, num_outputs, bias=bias)
    nn.init.normal_(linear.weight, std=gain * (num_inputs**-0.5 if std is None else std))
    if bias:
        nn.init.zeros_(linear.bias)
    if normalise == "weight":
        parametrizations.weight_norm(linear, dim=0)
    elif normalise == "spectral":
        with torch.random.fork_rng():  # its start vectors must not change what is drawn next
            parametrizations.spectral_norm(linear)
    elif normalise != "none":
        raise ValueError(f'normalise must be "none", "weight" or "spectral", got {normalise!r}')
    return linear
