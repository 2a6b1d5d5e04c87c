"""Cheap gradients: a few tracked steps from the equilibrium instead of the inverse Jacobian."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from deqkit.adjoint._base import AttachedAdjoint, OnBackward
from deqkit.adjoint._graph import Equation
from deqkit.solve import Solution
from deqkit.solve._fixed_point import check_together
from deqkit.solve._solver import check_count, check_damping


@dataclasses.dataclass(frozen=True, slots=True)
class Phantom(AttachedAdjoint):
    """Backpropagate through `steps` steps z <- (1 - damping) z + damping f(z) that start at z* (Geng et al. 2021).

    In effect the first terms of the Neumann series of (I - J)^-1: biased, but close when f contracts well. Keeps
    `steps` evaluations of f in memory. The value returned is z* itself.
    """

    steps: int = 5
    damping: float = 1.0
    """Weight of f(z) in each step, in (0, 1]."""

    def __post_init__(self) -> None:
        check_count("steps", self.steps)
        check_damping("damping", self.damping)

    def _attach(
        self, equation: Equation, z_BPN: Tensor, solution: Solution | None, on_backward: OnBackward | None
    ) -> Tensor:
        fixed_BPN = z_BPN
        for step in range(self.steps):
            value_BPN = equation(z_BPN)
            if step == 0 and solution is not None:
                check_together(lambda: equation(fixed_BPN), fixed_BPN, solution, equation.rounding, value_BPN.detach())
            z_BPN = torch.lerp(z_BPN, value_BPN, self.damping)
        return fixed_BPN + (z_BPN - z_BPN.detach())
