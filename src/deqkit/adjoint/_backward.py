"""The backward pass of an equilibrium: one recorded evaluation of f and one linear solve."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deqkit.adjoint._base import OnBackward
from deqkit.adjoint._error import curvature_from_one, gradient_error, next_tolerance
from deqkit.adjoint._graph import (
    Equation,
    Gates,
    Linearised,
    TakesParameters,
    Touched,
    refuse_transforms,
    transposed_product,
    twice_differentiable,
)
from deqkit.solve import (
    AbstractSolver,
    Evaluation,
    Fallback,
    NonFiniteError,
    NumericalWarning,
    Solution,
    Status,
    Tolerance,
)
from deqkit.solve._fixed_point import check_settings, check_together, iterate, join
from deqkit.solve._loop import LoopOptions
from deqkit.solve._packing import Packing, tensors_in
from deqkit.solve._solution import raise_if_failed

# B samples, P groups of positions, N numbers in a group


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearSolve:
    """How y = J'y + v is solved."""

    solver: AbstractSolver | Fallback
    tol: Tolerance
    max_steps: int
    compact: bool = True
    grad_rtol: float | None = None
    start: Callable[[Tensor], Tensor] | None = None
    """Where the solve begins, given v; without it at v, the first term of the Neumann series."""

    def __post_init__(self) -> None:
        check_settings(self.solver, self.tol, self.max_steps)
        if self.solver.group != "sample":
            raise ValueError('gradients flow back in time: a backward solver needs group="sample"')


class BackwardPass:
    """One equilibrium and the linear solve that its backward pass will run."""

    def __init__(
        self, method: LinearSolve, equation: Equation, solution: Solution | None, on_backward: OnBackward | None
    ) -> None:
        self.method, self.equation, self.solution, self.on_backward = method, equation, solution, on_backward
        self.touched = Touched(tensors=[])

    def attach(self, z_BPN: Tensor) -> Tensor:
        z_BPN = z_BPN.detach()
        linearised = Linearised(self.equation, z_BPN)
        if self.solution is not None:
            check_together(
                lambda: self.equation(z_BPN), z_BPN, self.solution, self.equation.rounding, linearised.value.detach()
            )
        self.touched = linearised.touched(self.equation.inputs)
        if not self.touched.tensors:
            return z_BPN
        # A copy, so that the caller may change the result in place: the backward pass still needs z*.
        return _Equilibrium.apply(self, linearised, z_BPN, linearised.value, *self.touched.routes).clone()  # pyright: ignore

    def solve(self, v_BPN: Tensor, linearised: Linearised) -> Tensor:
        """y = J'y + v, without a graph."""
        if bool((~torch.isfinite(v_BPN)).any()):
            raise NonFiniteError(
                "the gradient that reached the equilibrium is already inf or nan: it comes from the loss or a layer "
                "after the DEQ, not from its solve",
                self._empty(v_BPN),
            )
        method = self.method
        y_BPN = v_BPN if method.start is None else method.start(v_BPN)
        solved = self._run(y_BPN, v_BPN, linearised, method.tol, method.max_steps)
        tol = method.tol
        while (tol := self._tighter(solved, tol)) is not None:
            left = method.max_steps - int(solved.num_evals.max())
            solved = join(solved, self._run(solved.z, v_BPN, linearised, tol, left))
        y_BPN = solved.z
        solved.z = self.equation.packing.unpack(y_BPN)
        if self.solution is not None:
            self.solution.backward = solved
        raise_if_failed(solved, where="the backward solve (products with the Jacobian of f)", above=Status.STALLED)
        if self.solution is not None:
            size_B, given_B = (
                torch.linalg.vector_norm(x.detach(), dim=(1, 2), dtype=torch.float64) for x in (y_BPN, v_BPN)
            )
            curvature = self._curvature(v_BPN, y_BPN, linearised, solved)
            self.solution.grad_error = gradient_error(self.solution, solved, size_B, given_B, curvature)
            self._warn_if_inexact(self.solution)
        if self.on_backward is not None:
            self.on_backward(solved)
        return y_BPN

    def _warn_if_inexact(self, solution: Solution) -> None:
        asked, error = self.method.grad_rtol, solution.grad_error
        if asked is not None and error is not None and not error <= asked:
            warnings.warn(
                f"the estimated relative error of the gradient is {error:.2g}, above grad_rtol={asked:g}: raise "
                f"max_steps (forward {solution.describe()}; backward {solution.backward!r})",
                NumericalWarning,
                stacklevel=2,
            )

    def _run(self, y_BPN: Tensor, v_BPN: Tensor, linearised: Linearised, tol: Tolerance, max_steps: int) -> Solution:
        method = self.method
        options = LoopOptions(tol=tol, max_steps=max_steps, compact=method.compact)
        packing = Packing.of(v_BPN, causal=False)
        with torch.no_grad():
            make_problem = functools.partial(TransposedProblem, self.equation, linearised, v_BPN)
            return iterate(make_problem, y_BPN, method.solver, options, packing)

    def _curvature(self, v_BPN: Tensor, y_BPN: Tensor, linearised: Linearised, solved: Solution) -> Tensor | None:
        """What J changes near z*, for the estimate of the gradient's error: of one sample, which costs a batch little.

        None where it was not seen in the forward solve that a sample can be evaluated without the others.
        """
        assert self.solution is not None
        if self.solution.curvature is not None:
            return self.solution.curvature
        if not (self.method.compact and self.solution.independent):
            return None
        with torch.no_grad():
            return curvature_from_one(self.equation, linearised, v_BPN, y_BPN, self.solution, solved)

    def _tighter(self, solved: Solution, tol: Tolerance) -> Tolerance | None:
        """The tolerance to go on with, after `tol`, until the asked accuracy holds; None when it does or cannot."""
        method = self.method
        if method.grad_rtol is None or solved.status is not Status.CONVERGED or not solved.codes.numel():
            return None
        error = float((solved.amplification.nan_to_num(1.0) * solved.residual).square().mean().sqrt())
        return next_tolerance(solved, tol, error, method.grad_rtol, method.max_steps)

    def differentiate(
        self, v_BPN: Tensor, z_BPN: Tensor, linearised: Linearised, touched: list[Tensor]
    ) -> list[Tensor | None]:
        """The gradients of all that f touches, with a graph of their own for derivatives of higher order.

        y is an equilibrium too, of y -> J(z*)'y + v, so this is the same rule once more.
        """
        if self.touched.in_another:
            raise RuntimeError(
                "second derivatives of an equilibrium inside another: the inner f closes over the state of the outer "
                "one; pass that state to the inner DEQ as an argument"
            )
        self.touched.refuse_gradients_of_closures("a backward pass with create_graph=True")
        gates = Gates()
        known = (z_BPN, v_BPN, self.equation.args, self.equation.parameters)
        z_BPN, v_BPN, args, parameters = gates.put_before(known)
        equation = self.equation.again(args=args, parameters=parameters)
        with twice_differentiable():
            value_BPN = equation(z_BPN)
        _require_same_value(value_BPN, linearised.value, self.equation)
        y_BPN = self.solve(v_BPN, linearised)
        outer = BackwardPass(
            dataclasses.replace(self.method, start=None),
            Equation(_Adjoint(equation), Packing.of(y_BPN, causal=False), (z_BPN, v_BPN, *args)),
            None,
            self.on_backward,
        )
        return gates.partial_derivatives(value_BPN, touched, outer.attach(y_BPN))

    def _empty(self, v_BPN: Tensor) -> Solution:
        size = v_BPN.shape[0]
        nan_B, zero_B = v_BPN.new_full((size,), float("nan")), torch.zeros(size, dtype=torch.int64)
        bad_B = ~torch.isfinite(v_BPN).flatten(1).all(1)
        return Solution(
            z=self.equation.packing.unpack(v_BPN.detach()),
            residual=nan_B,
            residual_norm=nan_B,
            codes=torch.where(bad_B, Status.NONFINITE.severity, Status.MAX_STEPS.severity),
            num_steps=zero_B,
            num_evals=zero_B,
            amplification=nan_B,
            seconds_in_f=0.0,
            seconds_outside_f=0.0,
        )


class _Adjoint(TakesParameters):
    """The function y -> J(z)'y + v, whose equilibrium y is; differentiable in z, v and all that f takes."""

    def __init__(self, equation: Equation) -> None:
        self._equation = equation
        self.parameters = equation.parameters

    def __call__(self, z: Tensor, *args: Any) -> Tensor:
        y_BPN, (z_BPN, v_BPN, *rest) = z, args
        if not z_BPN.requires_grad:  # cut off, in a solve for some of the samples
            z_BPN = z_BPN.detach().requires_grad_()
        with torch.enable_grad(), twice_differentiable():
            value_BPN = self._equation.again(args=tuple(rest))(z_BPN)
        return transposed_product(value_BPN, z_BPN, y_BPN, create_graph=True) + v_BPN

    def again(self, parameters: dict[str, Tensor] | None = None) -> _Adjoint:
        return _Adjoint(self._equation.again(parameters=parameters))


class _Equilibrium(torch.autograd.Function):
    """z*, whose gradient v is turned into y before it enters the graph of f.

    In a plain backward pass y goes on through the one recorded evaluation of f. That graph treats z* as a constant,
    so a differentiable backward pass evaluates f anew at the connected z* and sends gradients straight to the
    tensors f touches.
    """

    @staticmethod
    def forward(
        ctx: Any, backward: BackwardPass, linearised: Linearised, z_BPN: Tensor, value_BPN: Tensor, *routes: Tensor
    ) -> Tensor:
        ctx.backward_pass, ctx.linearised = backward, linearised
        ctx.set_materialize_grads(False)
        output_BPN = z_BPN.view_as(z_BPN)
        ctx.save_for_backward(output_BPN, *backward.touched.tensors)
        return output_BPN

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_transforms("the backward pass of an equilibrium", *grads)
        z_BPN, *touched = ctx.saved_tensors
        if grads[0] is None:  # behind a closed gate
            return None, None, None, None, *(None for _ in touched)
        if not torch.is_grad_enabled():
            y_BPN = ctx.backward_pass.solve(grads[0], ctx.linearised)
            return None, None, None, y_BPN, *(None for _ in touched)
        to_touched = ctx.backward_pass.differentiate(grads[0], z_BPN, ctx.linearised, touched)
        return None, None, None, None, *to_touched


class TransposedProblem:
    """y = J'y + v for the loop: one evaluation is one vector-Jacobian product."""

    def __init__(self, equation: Equation, linearised: Linearised, v_BPN: Tensor) -> None:
        self._equation, self._linearised = equation, linearised
        self._v_BPN = v_BPN.detach()
        self.can_compact = bool(tensors_in(equation.args))

    def evaluate(self, z_BPN: Tensor) -> Tensor:
        return self._linearised.transposed(z_BPN) + self._v_BPN

    def worth_compacting(self, num_left: int, num_now: int) -> bool:
        return 2 * num_left <= num_now  # the rest is evaluated again, which costs about one product

    def keep(self, index: Tensor, at: Evaluation) -> None:
        self._equation = self._equation.again(index=index)
        self._v_BPN = self._v_BPN.index_select(0, index)
        kept = Linearised(self._equation, self._linearised.source.detach().index_select(0, index))
        _require_same_value(kept.value, self._linearised.value.index_select(0, index), self._equation)
        self._linearised = kept


def _require_same_value(new_BPN: Tensor, old_BPN: Tensor, equation: Equation) -> None:
    with torch.no_grad():
        if torch.linalg.vector_norm(new_BPN - old_BPN) > equation.rounding * torch.linalg.vector_norm(old_BPN):
            raise RuntimeError(
                "f changed between the forward and the backward pass, which evaluates it again: call backward before "
                "the optimiser's step and before changes of mode, or use compact=False"
            )
