"""Plain iteration: what a stack of weight-tied layers does."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from deqkit.solve._solver import AbstractSolver, Evaluation, check_damping, check_group
from deqkit.solve._tolerance import Tolerance


@dataclasses.dataclass(frozen=True, slots=True)
class FixedPointIteration(AbstractSolver):
    """z' = (1 - damping) z + damping f(z). Causal as it is, needs no memory, and converges only if f contracts.

    The residual reported is always that of f itself: damping does not make it look smaller.
    """

    damping: float = 1.0
    """Weight of f(z) in the step; 1 is the plain iteration. Needed when J has eigenvalues below -1."""
    _: dataclasses.KW_ONLY
    group: str = "sample"
    """`"prefix"` judges every position by itself and those before it, so that stopping does not leak either."""

    def __post_init__(self) -> None:
        check_damping("damping", self.damping)
        check_group(self.group)

    def init(self, z_BPN: Tensor, tol: Tolerance) -> None:
        return None

    def step(self, at: Evaluation, state: None) -> tuple[Tensor, None]:
        return (at.fz_BPN if self.damping == 1 else torch.lerp(at.z_BPN, at.fz_BPN, self.damping)), None
