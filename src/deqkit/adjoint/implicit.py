"""The implicit function theorem: the gradient of the equilibrium itself, from z* alone."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from torch import Tensor

from deqkit.adjoint._backward import BackwardPass, LinearSolve
from deqkit.adjoint._base import AttachedAdjoint, OnBackward
from deqkit.adjoint._error import curvature_ahead, forward_error, next_tolerance
from deqkit.adjoint._graph import Equation
from deqkit.solve import AbstractSolver, Anderson, Fallback, Solution, Status, Tolerance
from deqkit.solve._packing import Packing


@dataclasses.dataclass(frozen=True, slots=True)
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
    _: dataclasses.KW_ONLY
    compact: bool = True
    """Let samples leave the backward solve when they are done (it needs `args`; f is evaluated again for the rest)."""

    grad_rtol: float | None = None
    """Tighten both solves, within their `max_steps`, until the estimated relative error of the gradient is at most
    this; a `NumericalWarning` tells when they did not suffice. It costs two evaluations and products per look at how J
    changes near z*."""

    def __post_init__(self) -> None:
        self._method()
        if self.grad_rtol is not None and not 0 < self.grad_rtol < 1:
            raise ValueError(f"grad_rtol must be in (0, 1), got {self.grad_rtol!r}")

    def _method(self) -> LinearSolve:
        return LinearSolve(
            solver=self.solver,
            tol=self.tol,
            max_steps=self.max_steps,
            compact=self.compact,
            grad_rtol=self.grad_rtol,
        )

    def without_compaction(self) -> Implicit:
        return dataclasses.replace(self, compact=False)

    def tighter(
        self, f: Callable[..., Any], solution: Solution, args: tuple[Any, ...], tol: Tolerance, max_steps: int
    ) -> Tolerance | None:
        if self.grad_rtol is None or solution.status is not Status.CONVERGED or not solution.codes.numel():
            return None
        packing = Packing.of(solution.z, causal=False)
        solution.curvature = curvature_ahead(Equation(f, packing, args), packing.pack(solution.z), solution)
        return next_tolerance(solution, tol, forward_error(solution), self.grad_rtol, max_steps)

    def _attach(
        self, equation: Equation, z_BPN: Tensor, solution: Solution | None, on_backward: OnBackward | None
    ) -> Tensor:
        return BackwardPass(self._method(), equation, solution, on_backward).attach(z_BPN)
