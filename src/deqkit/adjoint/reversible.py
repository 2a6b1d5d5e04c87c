"""An iteration that can be run backwards: exact gradients of the steps taken, in constant memory."""

from __future__ import annotations

import dataclasses
import functools
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deqkit.adjoint._base import AbstractAdjoint, OnBackward
from deqkit.adjoint._graph import Equation, Linearised, Touched, gradients_up_to, refuse_transforms
from deqkit.solve import FixedPointIteration, NumericalWarning, Solution, Status, Tolerance, fixed_point
from deqkit.solve._fixed_point import FunctionProblem, iterate
from deqkit.solve._loop import LoopOptions
from deqkit.solve._packing import Packing, check_batch_first, map_tensors

# B samples, P groups of positions, N numbers in a group


@dataclasses.dataclass(frozen=True, slots=True)
class Reversible(AbstractAdjoint):
    """y' = (1 - b) y + b f(z), z' = (1 - b) z + b f(y') from y = z = z0 (McCallum et al. 2025), b = `damping`.

    The backward pass recomputes the states from the last pair, so the gradient is that of the steps taken whether or
    not they converged, and nothing is stored per step. Each step costs two evaluations of f, each backward step two
    evaluations and two products. Errors of the recomputation grow by 1 / (1 - b) a step; sums of float32 states are
    therefore kept in float64. `max_steps` bounds the evaluations of the steps; one more measures what is returned. It
    runs its own forward pass, so a DEQ that uses it takes no solver. No second derivatives.
    """

    damping: float = 0.5
    owns_forward = True

    def __post_init__(self) -> None:
        if not 0 < self.damping < 1:
            raise ValueError(f"damping must be in (0, 1) for the step to be reversible, got {self.damping!r}")

    def attach(
        self,
        f: Callable[..., Any],
        z: Any,
        args: tuple[Any, ...] = (),
        *,
        solution: Solution | None = None,
        on_backward: OnBackward | None = None,
    ) -> Any:
        raise TypeError("Reversible differentiates its own iteration and cannot be attached to another solver's result")

    def solve(
        self, f: Callable[..., Any], z0: Any, args: tuple[Any, ...], *, tol: Tolerance, max_steps: int, compact: bool
    ) -> tuple[Any, Solution]:
        if max_steps < 2:
            raise ValueError(
                f"a reversible step takes two evaluations of f: max_steps must be at least 2, got {max_steps}"
            )
        refuse_transforms("Reversible")
        packing = Packing.of(z0, causal=False)
        check_batch_first(args, packing.batch_size)
        equation = Equation(f, packing, args)
        z0_BPN = packing.pack(z0)
        start_BPN = z0_BPN.detach().to(torch.float64)
        pair = (start_BPN, start_BPN)
        num_steps_B = num_pairs_B = torch.zeros(packing.batch_size, dtype=torch.int64, device=packing.device)
        share, left = self.damping, max_steps // 2
        while True:
            inner = self._iterate(f, packing, pair, args, _scaled(tol, share), left, compact)
            pair = inner.z
            num_steps_B, num_pairs_B = num_steps_B + inner.num_steps, num_pairs_B + inner.num_evals
            z_BPN = pair[1].to(z0_BPN.dtype)
            judged: dict[str, Any] = {"solver": FixedPointIteration(), "tol": tol, "max_steps": 1, "throw": False}
            solution = fixed_point(f, packing.unpack(z_BPN), args, **judged)
            left = max_steps // 2 - int(num_pairs_B.max()) if num_pairs_B.numel() else 0
            if left < 1 or inner.status is not Status.CONVERGED or solution.status is Status.CONVERGED:
                break
            share /= 2  # y and z lie so far apart that z alone does not meet the tolerance: go on
        solution.num_steps = num_steps_B
        solution.num_evals = solution.num_evals + 2 * num_pairs_B
        if torch.is_grad_enabled():
            linearised = Linearised(equation, z_BPN)
            touched = linearised.touched(equation.inputs)
            if touched.tensors or z0_BPN.requires_grad:
                _warn_if_no_step(num_steps_B)
                # A way to what f closes over: so the backward pass is run, and refuses, if that gradient is asked for.
                way = linearised.value if touched.closed_over else None
                inputs = (way, z0_BPN, *touched.routes)
                z_BPN = _Reversed.apply(self.damping, equation, pair, num_steps_B, touched, *inputs)
        return packing.unpack(z_BPN, give_away=True), solution  # pyright: ignore[reportArgumentType]

    def _iterate(
        self,
        f: Callable[..., Any],
        packing: Packing,
        pair: tuple[Tensor, Tensor],
        args: tuple[Any, ...],
        tol: Tolerance,
        max_steps: int,
        compact: bool,
    ) -> Solution:
        """The loop on pairs (y, z)."""
        b, dtype = self.damping, packing.work_dtype

        def advance(pair: tuple[Tensor, Tensor], *rest: Any) -> tuple[Tensor, Tensor]:
            y_BPN, z_BPN = pair
            evaluate = lambda at: packing.pack(f(packing.unpack(at.to(dtype)), *rest)).to(at.dtype)  # noqa: E731
            y_BPN = (1 - b) * y_BPN + b * evaluate(z_BPN)
            return y_BPN, (1 - b) * z_BPN + b * evaluate(y_BPN)

        pairs = Packing.of(pair, causal=False)
        options = LoopOptions(tol=tol, max_steps=max_steps, compact=compact)
        with torch.no_grad():
            problem = functools.partial(FunctionProblem, advance, pairs, args, computes_in=packing.dtype)
            solution = iterate(problem, pairs.pack(pair), FixedPointIteration(), options, pairs)
        solution.z = pairs.unpack(solution.z)
        return solution


def _scaled(tol: Tolerance, share: float) -> Tolerance:
    """A pair moves by `damping` of the residual, so its tolerance is smaller by as much."""
    return dataclasses.replace(tol, rtol=share * tol.rtol, atol=share * tol.atol)


class _Reversed(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        b: float,
        equation: Equation,
        pair: tuple[Tensor, Tensor],
        num_steps_B: Tensor,
        touched: Touched,
        way_BPN: Tensor | None,
        z0_BPN: Tensor,
        *routes: Tensor,
    ) -> Tensor:
        ctx.b, ctx.equation, ctx.touched = b, equation, touched
        ctx.save_for_backward(*pair, num_steps_B, z0_BPN, *touched.tensors)
        return pair[1].to(z0_BPN.dtype, copy=True)

    @staticmethod
    def backward(ctx: Any, grad_BPN: Tensor) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        refuse_transforms("the backward pass of Reversible", grad_BPN)
        ctx.touched.refuse_gradients_of_closures("Reversible")
        with torch.no_grad():
            grads = _Reversed._run_backwards(ctx, grad_BPN)
        if torch.is_grad_enabled():
            anchor = torch.empty(0, device=grad_BPN.device, requires_grad=True)
            grads = [None if g is None else _Once.apply(g, anchor) for g in grads]
        return None, None, None, None, None, None, *grads

    @staticmethod
    def _run_backwards(ctx: Any, grad_BPN: Tensor) -> list[Tensor | None]:
        """The gradients of z0 and of all that f touches."""
        y_BPN, z_BPN, num_steps_B, z0_BPN, *touched = ctx.saved_tensors
        b, dtype = ctx.b, grad_BPN.dtype
        # Inputs as leaves: what they were made from gets its gradient once, from the sum over all steps.
        fresh = {id(t): t.detach().requires_grad_() for t in ctx.equation.inputs}
        known = (ctx.equation.args, ctx.equation.parameters)
        args, parameters = map_tensors(lambda t: fresh.get(id(t), t), known)
        equation = ctx.equation.again(args=args, parameters=parameters)
        instead = {place: fresh[id(t)] for place, t in enumerate(touched, 1) if id(t) in fresh}
        totals: list[Tensor | None] = [None] * len(touched)

        def back(at_BPN: Tensor, weight_BPN: Tensor) -> tuple[Tensor, Tensor]:
            """f at a point and J'w there; adds (df/dtheta)'w to the totals."""
            linearised = Linearised(equation, at_BPN.to(dtype))
            product_BPN, *parts = gradients_up_to(
                linearised.value, [linearised.source, *touched], weight_BPN, instead=instead, create_graph=False
            )
            for place, part in enumerate(parts):
                if part is not None:
                    total = totals[place]
                    totals[place] = part if total is None else total + part
            return linearised.value.detach().to(y_BPN.dtype), torch.zeros_like(
                weight_BPN
            ) if product_BPN is None else product_BPN

        grad_y_BPN, grad_z_BPN = torch.zeros_like(grad_BPN), grad_BPN
        weights: list[float] = []  # how much each step matters, from the last to the first
        for step in range(int(num_steps_B.max()) if num_steps_B.numel() else 0, 0, -1):
            weights.append(float(torch.linalg.vector_norm(grad_y_BPN) + torch.linalg.vector_norm(grad_z_BPN)))
            took_B11 = (num_steps_B >= step).view(-1, 1, 1)  # samples stop on their own
            value_BPN, product_BPN = back(y_BPN, torch.where(took_B11, b * grad_z_BPN, 0))
            z_BPN = torch.where(took_B11, (z_BPN - b * value_BPN) / (1 - b), z_BPN)
            grad_y_BPN = grad_y_BPN + product_BPN
            grad_z_BPN = torch.where(took_B11, (1 - b) * grad_z_BPN, grad_z_BPN)
            value_BPN, product_BPN = back(z_BPN, torch.where(took_B11, b * grad_y_BPN, 0))
            y_BPN = torch.where(took_B11, (y_BPN - b * value_BPN) / (1 - b), y_BPN)
            grad_z_BPN = grad_z_BPN + product_BPN
            grad_y_BPN = torch.where(took_B11, (1 - b) * grad_y_BPN, grad_y_BPN)
        _warn_if_lost(y_BPN, z_BPN, z0_BPN, b, weights)
        return [grad_y_BPN + grad_z_BPN, *totals]


class _Once(torch.autograd.Function):
    """A gradient that must not be differentiated again."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, anchor: Tensor) -> Tensor:
        return grad.view_as(grad)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        raise RuntimeError("Reversible has no second derivative; use Implicit or Unrolled for it")


def _warn_if_no_step(num_steps_B: Tensor) -> None:
    if num := int((num_steps_B == 0).sum()):
        warnings.warn(
            f"{num} of {num_steps_B.numel()} samples took no step: their start was within the tolerance, or no step "
            "improved it. Reversible differentiates the steps taken, so weights and inputs get no gradient from them. "
            "Begin elsewhere than at a solution, tighten tol, or use Implicit",
            NumericalWarning,
            stacklevel=2,
        )


def _warn_if_lost(y_BPN: Tensor, z_BPN: Tensor, z0_BPN: Tensor, b: float, weights: list[float]) -> None:
    """The steps were recomputed from the last to the first, so they should end where the iteration began.

    How far off that is tells the errors on the way, which grew by 1 / (1 - b) a step. An error matters as far as
    gradients are still of some size at its step.
    """
    scale = 1 + torch.linalg.vector_norm(z0_BPN)
    off = max(float(torch.linalg.vector_norm(t - z0_BPN) / scale) for t in (y_BPN, z_BPN))
    steps = len(weights)
    damage = max((off * (1 - b) ** (steps - 1 - k) * w for k, w in enumerate(weights)), default=0.0)
    if not damage <= 1e-4 * max(weights, default=1.0):
        warnings.warn(
            f"Reversible recomputed its first state with a relative error of {off:.1e}, so gradients are doubtful: "
            "take fewer steps (a looser tol or a smaller max_steps), lower damping, or use Implicit",
            NumericalWarning,
            stacklevel=2,
        )
