"""The contract of a gradient rule."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deqkit.adjoint._graph import Equation, refuse_transforms
from deqkit.solve import AbstractSolver, Fallback, Solution, Tolerance
from deqkit.solve._packing import Packing

OnBackward = Callable[[Solution], None]


class AbstractAdjoint(abc.ABC):
    """How gradients pass through an equilibrium. Adjoints are frozen values and keep nothing between calls.

    Most rules take a solution that any solver found and attach a gradient to it. A rule that differentiates the very
    iteration it runs (`Unrolled`, `Reversible`) has `owns_forward` and is asked for the solution instead.
    """

    owns_forward: bool = False
    needs_solver_state: bool = False
    """Whether `attach` needs `solution.solver_state`, the memory of the forward solver."""

    @abc.abstractmethod
    def attach(
        self,
        f: Callable[..., Any],
        z: Any,
        args: tuple[Any, ...] = (),
        *,
        solution: Solution | None = None,
        on_backward: OnBackward | None = None,
    ) -> Any:
        """The state `z`, unchanged in value, with gradients to all that f touches: parameters, args, closures.

        Args:
            f, args: the function whose fixed point z is, and its further arguments (batch first).
            z: a fixed point, as `fixed_point` returns it.
            solution: where it came from. The backward pass reports into it (`backward`, `grad_error`).
            on_backward: called with the solution after every backward solve.
        """

    def check_solver(self, solver: AbstractSolver | Fallback) -> None:  # noqa: B027, most rules take any
        """Raise a ValueError if gradients cannot be attached to what this forward solver finds."""

    def without_compaction(self) -> AbstractAdjoint:
        """The rule for a DEQ whose samples stay in the batch, in the backward solve too if it has one."""
        return self

    def tighter(
        self, f: Callable[..., Any], solution: Solution, args: tuple[Any, ...], tol: Tolerance, max_steps: int
    ) -> Tolerance | None:
        """The tolerance to which a forward solve to `tol` should go on before gradients are attached; None if it may
        stop."""
        return None

    def solve(
        self, f: Callable[..., Any], z0: Any, args: tuple[Any, ...], *, tol: Tolerance, max_steps: int, compact: bool
    ) -> tuple[Any, Solution]:
        """Iterate from z0 and return the differentiable state; only for rules that own the forward pass."""
        raise TypeError(f"{type(self).__name__} has no iteration of its own")


class AttachedAdjoint(AbstractAdjoint):
    """A rule that attaches gradients to a given state."""

    def attach(
        self,
        f: Callable[..., Any],
        z: Any,
        args: tuple[Any, ...] = (),
        *,
        solution: Solution | None = None,
        on_backward: OnBackward | None = None,
    ) -> Any:
        if not torch.is_grad_enabled():
            return z
        refuse_transforms(type(self).__name__)
        packing = Packing.of(z, causal=False)
        z_BPN = packing.pack(z).detach()
        if solution is not None and solution.z is z:
            solution.z = packing.unpack(z_BPN)  # one copy of the state instead of two, if packing had to copy
        attached_BPN = self._attach(Equation(f, packing, args), z_BPN, solution, on_backward)
        return packing.unpack(attached_BPN, give_away=True)

    @abc.abstractmethod
    def _attach(
        self, equation: Equation, z_BPN: Tensor, solution: Solution | None, on_backward: OnBackward | None
    ) -> Tensor: ...
