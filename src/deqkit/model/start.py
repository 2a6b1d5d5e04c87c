"""Where solves begin: a guess of the equilibrium that is trained with the model."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

# B samples, T positions, D input width, S numbers in the state of a position, k taps

TAPS = 3
"""The guess at a position is a linear map of its input and of those before it, so many in all."""


class _Zeros(nn.Linear):
    """Begins at zero without drawing random numbers: a seed means the same weights and dropout as without it."""

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.weight)
        nn.init.zeros_(self.bias)


class LearnedStart(nn.Module):
    """A guess of z* from the embedded input. It begins at zero, where solves without it begin.

    The equilibrium does not depend on it, so its weights learn from one thing alone: how far the guess is from the z
    that was found. No gradient of that reaches anything else.
    """

    def __init__(self, input_width: int, state_width: int) -> None:
        super().__init__()
        self.map = _Zeros(TAPS * input_width, state_width)

    def forward(self, x_BTD: Tensor) -> Tensor:
        """The guess at every position, (B, T, S); positions before the first count as zeros."""
        length = x_BTD.shape[1]
        padded = F.pad(x_BTD.detach(), (0, 0, TAPS - 1, 0))
        return self.map(torch.cat([padded[:, tap : tap + length] for tap in range(TAPS)], -1))


def like_state(guess_BTS: Tensor, state: Any) -> Any:
    """The guess, detached, in the structure of a state."""
    guess_BTS = guess_BTS.detach()
    if isinstance(state, Tensor):
        return guess_BTS
    return tuple(guess_BTS.split([part.shape[-1] for part in state], -1))


def start_error(guess_BTS: Tensor, z: Any) -> Tensor:
    """How far a guess is from what was found: the square of the distance, relative to that of z itself."""
    z_BTS = (z if isinstance(z, Tensor) else torch.cat(z, -1)).detach()
    return (guess_BTS - z_BTS).square().sum() / z_BTS.square().sum().clamp_min(torch.finfo(z_BTS.dtype).tiny)
