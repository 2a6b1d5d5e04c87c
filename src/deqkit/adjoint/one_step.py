"""The cheapest gradient: one application of f."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from deqkit.adjoint._base import AttachedAdjoint, OnBackward
from deqkit.adjoint.phantom import Phantom
from deqkit.solve import Solution
from deqkit.solve._packing import Packing


@dataclasses.dataclass(frozen=True, slots=True)
class OneStep(AttachedAdjoint):
    """(I - J)^-1 replaced by I: the gradient of f at z*, z* held fixed ("Jacobian-free", Fung et al. 2022).

    No backward solve and one evaluation of f in memory. A descent direction when f contracts, poor when the spectral
    radius of J exceeds one.
    """

    def _attach(
        self,
        f: Callable[..., Any],
        z: Any,
        args: tuple[Any, ...],
        packing: Packing,
        solution: Solution | None,
        on_backward: OnBackward | None,
    ) -> Any:
        return Phantom(steps=1).attach(f, z, args, solution=solution, on_backward=on_backward)
