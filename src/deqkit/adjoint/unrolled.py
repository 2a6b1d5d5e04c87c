"""The layer-by-layer counterpart: plain iteration with ordinary backpropagation."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch.utils.checkpoint import checkpoint

from deqkit.adjoint._base import AbstractAdjoint, OnBackward
from deqkit.adjoint._graph import Equation
from deqkit.solve import FixedPointIteration, Solution, Tolerance, fixed_point
from deqkit.solve._packing import Packing
from deqkit.solve._solver import check_count


@dataclasses.dataclass(frozen=True, slots=True)
class Unrolled(AbstractAdjoint):
    """`steps` applications of f from z0, i.e. a weight-tied network of that depth, backpropagated step by step.

    Exact for the network it is; memory grows with `steps`. It runs its own forward pass, so a DEQ that uses it takes
    no solver. One more evaluation without gradient measures the residual.
    """

    steps: int
    checkpoint: bool = False
    """Keep only the state between steps and evaluate f again in the backward pass."""
    owns_forward = True

    def __post_init__(self) -> None:
        check_count("steps", self.steps)

    def attach(
        self,
        f: Callable[..., Any],
        z: Any,
        args: tuple[Any, ...] = (),
        *,
        solution: Solution | None = None,
        on_backward: OnBackward | None = None,
    ) -> Any:
        """`steps` steps from z. Unlike the other rules this moves z, since its value is what it differentiates."""
        packing = Packing.of(z, causal=False)
        equation = Equation(f, packing, args)
        z_BPN = packing.pack(z)
        if self.checkpoint and torch.is_grad_enabled():
            equation = equation.again()  # it will be evaluated in the backward pass too
        for _ in range(self.steps):
            if self.checkpoint and torch.is_grad_enabled():
                z_BPN = checkpoint(equation, z_BPN, use_reentrant=False)
            else:
                z_BPN = equation(z_BPN)
        return packing.unpack(z_BPN)

    def solve(
        self, f: Callable[..., Any], z0: Any, args: tuple[Any, ...], *, tol: Tolerance, max_steps: int, compact: bool
    ) -> tuple[Any, Solution]:
        z = self.attach(f, z0, args)
        solution = fixed_point(f, z, args, solver=FixedPointIteration(), tol=tol, max_steps=1, throw=False)
        solution.num_steps = solution.num_steps + self.steps
        solution.num_evals = solution.num_evals + self.steps
        return z, solution
