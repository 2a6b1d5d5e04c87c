"""The cheapest gradient: one application of f."""

from __future__ import annotations

import dataclasses

from torch import Tensor

from deqkit.adjoint._base import AttachedAdjoint, OnBackward
from deqkit.adjoint._graph import Equation
from deqkit.adjoint.phantom import Phantom
from deqkit.solve import Solution


@dataclasses.dataclass(frozen=True, slots=True)
class OneStep(AttachedAdjoint):
    """(I - J)^-1 replaced by I: the gradient of f at z*, z* held fixed ("Jacobian-free", Fung et al. 2022).

    No backward solve and one evaluation of f in memory. A descent direction when f contracts, poor when the spectral
    radius of J exceeds one.
    """

    def _attach(
        self, equation: Equation, z_BPN: Tensor, solution: Solution | None, on_backward: OnBackward | None
    ) -> Tensor:
        return Phantom(steps=1)._attach(equation, z_BPN, solution, on_backward)
