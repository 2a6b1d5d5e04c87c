"""The implicit function theorem: the gradient of the equilibrium itself, from z* alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from deqkit.adjoint._backward import BackwardPass, LinearSolve
from deqkit.adjoint._base import AttachedAdjoint, OnBackward
from deqkit.adjoint._graph import Equation
from deqkit.solve import AbstractSolver, Anderson, Fallback, Solution, Tolerance
from deqkit.solve._packing import Packing


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Implicit(AttachedAdjoint):
    """Theorem 1 of the paper: dl/dtheta = y' df/dtheta, where y solves `y = J'y + dl/dz*` and J = df/dz at z*.

    The backward pass keeps one evaluation of f and solves the linear system by vector-Jacobian products, each sample
    to its own relative tolerance. Derivatives of any order are right: the backward pass is itself an equilibrium.
    """

    solver: AbstractSolver | Fallback = dataclasses.field(default_factory=Anderson)
    """Any solver; `GMRES()` needs the fewest products, `Anderson()` the least memory."""
    tol: Tolerance = dataclasses.field(default_factory=Tolerance)
    """Relative to the size of y, sample by sample, so it does not depend on the scale of the loss."""
    max_steps: int = 40
    """Upper bound on the vector-Jacobian products of one backward solve."""
    compact: bool = True
    """Let samples leave the backward solve when they are done (it needs `args`; f is evaluated again for the rest)."""

    def __post_init__(self) -> None:
        self._method()

    def _method(self) -> LinearSolve:
        return LinearSolve(solver=self.solver, tol=self.tol, max_steps=self.max_steps, compact=self.compact)

    def _attach(
        self,
        f: Callable[..., Any],
        z: Any,
        args: tuple[Any, ...],
        packing: Packing,
        solution: Solution | None,
        on_backward: OnBackward | None,
    ) -> Any:
        backward = BackwardPass(self._method(), Equation(f, packing, args), solution, on_backward)
        return packing.unpack(backward.attach(packing.pack(z)))
