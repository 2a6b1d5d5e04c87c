"""Small problems in float64, and both sides of the theorems' equalities, computed in ways that share little."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deqkit.adjoint import Implicit
from deqkit.deq import DEQ
from deqkit.layers import TransformerCell, TransformerConfig
from deqkit.solve import GMRES, Tolerance

# B samples, T positions, G = 3 x width of all heads

SPIRAL_ANGLE = 2.0
TIGHT = Tolerance(rtol=1e-12, patience=300)
NUM_LAYERS = 400  # of the unrolled network; |eigenvalues| of J here are 0.9 at most, and 0.9^400 is below rounding


class TanhCell(nn.Module):
    """f(z, x) = tanh(A z + B x + b) with ||A|| = `gain`."""

    def __init__(self, width: int, num_inputs: int, *, gain: float = 0.8) -> None:
        super().__init__()
        state = torch.randn(width, width)
        self.state = nn.Parameter(gain * state / torch.linalg.matrix_norm(state, 2))
        self.input = nn.Parameter(torch.randn(width, num_inputs) / num_inputs**0.5)
        self.bias = nn.Parameter(0.1 * torch.randn(width))

    def initial_state(self, x: Tensor) -> Tensor:
        return x.new_zeros(*x.shape[:-1], self.bias.numel())

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.state.mT + x @ self.input.mT + self.bias)


class Spiral(nn.Module):
    """f(z) = A tanh(z) + b in the plane, A a rotation times `gain`: plain iteration turns around the equilibrium."""

    def __init__(self, gain: float) -> None:
        super().__init__()
        cos, sin = math.cos(SPIRAL_ANGLE), math.sin(SPIRAL_ANGLE)
        self.matrix = gain * torch.tensor([[cos, -sin], [sin, cos]], dtype=torch.float64)
        self.shift = torch.tensor([0.6, 0.4], dtype=torch.float64)
        self.visited: list[list[float]] = []

    def forward(self, z: Tensor) -> Tensor:
        point = z[0].tolist()
        # Newton-Krylov looks at f a tiny step away to learn of its Jacobian: not a point of its path.
        if not self.visited or math.dist(point, self.visited[-1]) > 1e-6:
            self.visited.append(point)
        return torch.tanh(z) @ self.matrix.mT + self.shift


def relative_difference(ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """||a - b|| / ||b|| over all tensors together."""
    apart = torch.stack([(a - b).detach().square().sum() for a, b in zip(ours, theirs, strict=True)]).sum()
    size = torch.stack([b.detach().square().sum() for b in theirs]).sum()
    return float((apart / size).sqrt())


def side_by_side(*sides: Sequence[Tensor], count: int = 3) -> list[str]:
    """The largest entries that the first tensor of the first side has, and what every other side has there, to eight
    places."""
    flat = [side[0].detach().flatten() for side in sides]
    places = flat[0].abs().topk(count).indices
    return [", ".join(f"{value:+.8f}" for value in values[places].tolist()) for values in flat]


def problems() -> dict[str, tuple[nn.Module, Tensor]]:
    """The cells that are looked at, each with its input, in float64."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        config = TransformerConfig(width=8, num_heads=2, hidden_width=16, init_std=None)
        transformer = TransformerCell(config).double()
        u_BTG = torch.randn(2, 6, 3 * config.attention_width, dtype=torch.float64)
        return {
            "tanh cell": (TanhCell(10, 6).double(), torch.randn(3, 6, dtype=torch.float64)),
            "transformer cell": (transformer, u_BTG),
        }


def direction(z: Tensor) -> Tensor:
    """dl/dz* of a fixed random linear loss; the mean of a layer-normalised state would be constant."""
    return torch.randn(z.shape, dtype=z.dtype, generator=torch.Generator().manual_seed(1))


def implicit_gradients(cell: nn.Module, x: Tensor, **settings: Any) -> tuple[Tensor, list[Tensor]]:
    """The equilibrium, and the gradients of x and of the parameters as the library computes them."""
    adjoint = Implicit(solver=settings.pop("adjoint_solver", GMRES()), tol=TIGHT, max_steps=600)
    deq = DEQ(cell, tol=TIGHT, max_steps=600, adjoint=adjoint, **settings)
    x = x.detach().requires_grad_()
    z = deq(x)
    parameters = touched(cell, z)
    return z.detach(), list(torch.autograd.grad(z, [x, *parameters], direction(z)))


def dense_gradients(cell: nn.Module, x: Tensor, z: Tensor) -> list[Tensor]:
    """The theorem's right side, letter by letter: -dl/dz* (J_g)^-1 df/d(.), with J_g = J_f - I as a matrix."""
    x = x.detach().requires_grad_()
    y = torch.empty_like(z)
    for sample in range(z.shape[0]):
        own = slice(sample, sample + 1)
        jacobian = torch.autograd.functional.jacobian(lambda at, own=own: cell(at, x[own].detach()), z[own])
        size = z[own].numel()
        j_g = jacobian.reshape(size, size) - torch.eye(size, dtype=z.dtype)
        y[own] = -torch.linalg.solve(j_g.mT, direction(z)[own].flatten()).view_as(z[own])
    value = cell(z, x)
    return list(torch.autograd.grad(value, [x, *touched(cell, value)], y))


def unrolled_gradients(cell: nn.Module, x: Tensor) -> list[Tensor]:
    """Backpropagation through a network of many tied layers."""
    x = x.detach().requires_grad_()
    z = cell.initial_state(x)  # pyright: ignore[reportCallIssue]
    for _ in range(NUM_LAYERS):
        z = cell(z, x)
    return list(torch.autograd.grad(z, [x, *touched(cell, z)], direction(z)))


def touched(cell: nn.Module, value: Tensor) -> list[Tensor]:
    """The parameters that a value depends on: a cell that is given its injection does not use its own."""
    parameters = list(cell.parameters())
    grads = torch.autograd.grad(value.sum(), parameters, retain_graph=True, allow_unused=True)
    return [p for p, grad in zip(parameters, grads, strict=True) if grad is not None]


def block_matrices(layers: Sequence[nn.Linear]) -> tuple[Tensor, Tensor, Tensor]:
    """W_z, W_x and b of appendix C: layer i reads the block of layer i - 1."""
    sizes = [layer.out_features for layer in layers]
    starts = [0, *itertools.accumulate(sizes)]
    total = starts[-1]
    first = layers[0].weight
    w_z, w_x = first.new_zeros(total, total), first.new_zeros(total, layers[0].in_features)
    w_x[: sizes[0]] = first
    for i in range(1, len(layers)):
        w_z[starts[i] : starts[i + 1], starts[i - 1] : starts[i]] = layers[i].weight
    return w_z, w_x, torch.cat([layer.bias for layer in layers])
