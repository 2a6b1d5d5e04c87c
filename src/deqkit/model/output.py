"""What a `SequenceModel` returns."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from deqkit.solve import Solution

# B samples, T positions, D width


class Equation(NamedTuple):
    """What was solved, to look at or to penalise: with `f, args = equation.bind()`, z is near f(z, *args)."""

    bind: Callable[[], tuple[Callable[..., Any], tuple[Any, ...]]]
    z: Any


@dataclass(kw_only=True, slots=True)
class ModelOutput:
    """What a `SequenceModel` returns."""

    z: Any
    """The state at all positions of this segment: (B, T, D), for a trellis cell the pair (h, c)."""
    hidden: Tensor
    """What the softmax sees, (B, T, D)."""
    memory: tuple[Any, ...]
    """Pass it with the next segment. Detached; one entry a cell."""
    solutions: tuple[Solution, ...]
    """One solve for every subsequence, in order; empty for a stack."""
    equations: tuple[Equation, ...] = ()
    """What each of them solved."""
    start_error: Tensor | None = None
    """In training with a learned start: the guess's squared distance from z, relative to z. What its weights learn."""
    layers: tuple[Tensor, ...] = ()
    """With `layers_every`, what the softmax would see after earlier layers, (B, T, D) each."""
    layer_losses: tuple[Tensor, ...] = ()
    """With targets, the loss of each of these."""
    nll: Tensor | None = None
    """Negative log-likelihood of every target in token order, (B, T); None without targets."""
    loss: Tensor | None = None
    """Mean of `nll` over the targets that are not padding (negative); None without targets."""

    @property
    def solution(self) -> Solution | None:
        """The solve; with subsequences the one that ended with the largest residual. None for a stack."""
        return max(self.solutions, key=lambda s: float(s.residual.max()), default=None)
