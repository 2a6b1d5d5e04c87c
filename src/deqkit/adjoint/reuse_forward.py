"""The inverse Jacobian that the forward solve has already built, put to use in the backward solve."""

from __future__ import annotations

import dataclasses
from typing import Any

from torch import Tensor

from deqkit.adjoint._backward import BackwardPass, LinearSolve
from deqkit.adjoint._base import AttachedAdjoint, OnBackward
from deqkit.adjoint._graph import Equation
from deqkit.adjoint.implicit import Implicit
from deqkit.solve import AbstractSolver, Anderson, Broyden, Evaluation, Fallback, Solution, Tolerance
from deqkit.solve._fixed_point import check_settings
from deqkit.solve._packing import Borrowed
from deqkit.solve._solver import check_count
from deqkit.solve.broyden import BroydenMemory

# B samples, P groups of positions, N numbers in a group


@dataclasses.dataclass(frozen=True, slots=True)
class ReuseForward(AttachedAdjoint):
    """SHINE (Ramzi et al. 2022): the forward `Broyden` inverse starts and preconditions the backward solve.

    `refine` bounds the vector-Jacobian products that correct it; they stop as soon as the true residual of
    `y = J'y + v` meets `tol`. With `refine=1` the inverse is used as it is and the one product only measures it. The
    forward solver must be `Broyden`; its memory (up to 2 * memory states) is kept until the backward pass.
    """

    refine: int = 5
    _: dataclasses.KW_ONLY
    tol: Tolerance = dataclasses.field(default_factory=Tolerance)
    compact: bool = True
    """As for `Implicit`."""
    needs_solver_state = True

    def __post_init__(self) -> None:
        check_count("refine", self.refine)
        check_settings(tol=self.tol)

    def check_solver(self, solver: AbstractSolver | Fallback) -> None:
        if not isinstance(solver, Broyden) or solver.group != "sample":
            raise ValueError(
                'ReuseForward needs the memory of a forward Broyden(group="sample"), which has a transpose; '
                f"got solver={solver!r}"
            )

    def without_compaction(self) -> ReuseForward:
        return dataclasses.replace(self, compact=False)

    def _attach(
        self, equation: Equation, z_BPN: Tensor, solution: Solution | None, on_backward: OnBackward | None
    ) -> Tensor:
        if not z_BPN.numel():  # of nothing, nothing is remembered
            return Implicit()._attach(equation, z_BPN, solution, on_backward)
        parts = None if solution is None else solution.solver_state
        if not parts or not isinstance(parts[0][1], BroydenMemory):
            raise ValueError(
                "ReuseForward needs the memory of a forward Broyden solve: use DEQ(solver=Broyden(), "
                "adjoint=ReuseForward()), or fixed_point(solver=Broyden(), keep_solver_state=True)"
            )
        memory = BroydenMemory.gather(parts)
        if memory.dz_BPMN.shape[1] != 1:
            raise ValueError(
                'ReuseForward needs group="sample" in the forward Broyden: a prefix inverse has no transpose'
            )
        method = LinearSolve(
            solver=_Preconditioned(memory),
            tol=self.tol,
            max_steps=self.refine,
            compact=self.compact,
            start=memory.apply_transposed,
        )
        return BackwardPass(method, equation, solution, on_backward).attach(z_BPN)


class _Preconditioned(AbstractSolver):
    """Anderson on y + P (J'y + v - y), P the forward solve's estimate of (I - J)^-T."""

    def __init__(self, memory: BroydenMemory) -> None:
        self._memory = dataclasses.replace(memory, last=None)
        self._inner = Anderson()

    def init(self, z_BPN: Tensor, tol: Tolerance) -> tuple[Borrowed, Any]:
        return Borrowed(self._memory), self._inner.init(z_BPN, tol)  # another backward pass may follow

    def step(self, at: Evaluation, state: tuple[Borrowed, Any]) -> tuple[Tensor, Any]:
        memory, inner = state
        better_BPN = memory.value.apply_transposed(at.residual_BPN)
        better = dataclasses.replace(at, fz_BPN=at.z_BPN + better_BPN, residual_BPN=better_BPN)
        proposed_BPN, inner = self._inner.step(better, inner)
        return proposed_BPN, (memory, inner)
