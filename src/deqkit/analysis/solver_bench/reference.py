"""The float64 equilibrium and gradient every row is compared with, by code that shares nothing with the libraries.

Both are plain iterations run to rounding: z <- f(z), then y <- J^T y + dl/dz, then dl/dtheta = (df/dtheta)^T y.
Slow, but there is nothing in them to get wrong.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from deqkit.analysis.solver_bench.measure import State, initial_state

ITERATION_TOL = 1e-12
"""Relative change at which an iteration is done; rounding in float64 leaves about 1e-15."""
ACCEPTED_TOL = 1e-8
"""A reference less settled than this is refused: the rows it would judge are at 1e-3 to 1e-4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """The gradient to compare with, and how far its two iterations were taken."""

    gradient: Tensor
    """dl/dtheta of all parameters, flattened and joined, in float64."""
    forward_residual: float
    backward_residual: float
    num_evals: int
    num_vjps: int


def reference_gradient(
    cell: nn.Module, x: Tensor, loss: Callable[[State], Tensor], *, max_steps: int = 4000
) -> Reference | None:
    """The gradient of `loss` at the equilibrium of `cell`, in float64.

    Returns:
        The reference, or None when plain iteration does not settle (the cell is no contraction near its equilibrium).
    """
    cell = copy.deepcopy(cell).double()
    cell.zero_grad(set_to_none=True)
    x = x.double()
    with torch.no_grad():
        leaves, spec = tree_flatten(initial_state(cell, x))

    def unpack(parts: list[Tensor]) -> State:
        return tree_unflatten(parts, spec)

    with torch.no_grad():
        z, forward_residual, num_evals = _iterate(lambda z: tree_leaves(cell(unpack(z), x)), leaves, max_steps)
    if not forward_residual <= ACCEPTED_TOL:  # NaN is refused too
        return None
    z = [part.requires_grad_() for part in z]
    source = torch.autograd.grad(loss(unpack(z)), z, materialize_grads=True)
    f_z = tree_leaves(cell(unpack(z), x))

    def adjoint(y: list[Tensor]) -> list[Tensor]:
        products = torch.autograd.grad(f_z, z, y, retain_graph=True, materialize_grads=True)
        return [product + part for product, part in zip(products, source, strict=True)]

    y, backward_residual, num_vjps = _iterate(adjoint, list(source), max_steps)
    if not backward_residual <= ACCEPTED_TOL:
        return None
    gradients = torch.autograd.grad(f_z, list(cell.parameters()), y, materialize_grads=True)
    return Reference(
        gradient=torch.cat([gradient.flatten() for gradient in gradients]),
        forward_residual=forward_residual,
        backward_residual=backward_residual,
        num_evals=num_evals,
        num_vjps=num_vjps,
    )


def relative_residual(f_z: State, z: State) -> float:
    """|f(z) - z| / |f(z)| of the worst sample, over the whole state."""
    f_z_BN, z_BN = _join(tree_leaves(f_z)), _join(tree_leaves(z))
    return ((f_z_BN - z_BN).norm(dim=1) / f_z_BN.norm(dim=1)).max().item()


def joined_gradient(cell: nn.Module) -> Tensor:
    """The `.grad` of all parameters, flattened and joined, in float64."""
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in cell.parameters()]
    return torch.cat([gradient.flatten().double() for gradient in gradients])


def _iterate(
    f: Callable[[list[Tensor]], list[Tensor]], z: list[Tensor], max_steps: int
) -> tuple[list[Tensor], float, int]:
    residual = float("inf")
    for step in range(1, max_steps + 1):
        f_z = f(z)
        residual = relative_residual(f_z, z)
        z = f_z
        if not residual > ITERATION_TOL:  # also stops at NaN, which the caller refuses
            return z, residual, step
    return z, residual, max_steps


def _join(leaves: list[Tensor]) -> Tensor:
    return torch.cat([leaf.flatten(1) for leaf in leaves], dim=1)
