"""Small cells in float64, the settings under which a gradient is exact, and independent ways to compute it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deqkit import DEQ, Tolerance
from deqkit.adjoint import AbstractAdjoint, Implicit
from deqkit.solve import GMRES, Anderson, Broyden, FixedPointIteration, NewtonKrylov

# B samples, N numbers in a state

TIGHT = Tolerance(rtol=1e-12)  # a little above what float64 can reach on these cells
FULL_BUDGET = Tolerance(rtol=1e-30, patience=10**6)  # never satisfied: a solve takes all its steps
BACKWARD_SOLVERS = {
    "anderson": Anderson(),
    "broyden": Broyden(memory=40),
    "gmres": GMRES(),
    "plain": FixedPointIteration(),
    "newton-krylov": NewtonKrylov(),
}
EXACT = Implicit(solver=GMRES(), tol=TIGHT, max_steps=200)


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def matrix(width: int, *, norm: float, seed: int) -> Tensor:
    """A random matrix with this spectral norm; it is neither symmetric nor normal."""
    weight_NN = normal(width, width, seed=seed)
    return norm * weight_NN / torch.linalg.matrix_norm(weight_NN, 2)


class TanhCell(nn.Module):
    """f(z, x) = tanh(W z + x + b): contracts at the rate ||W|| or faster."""

    def __init__(self, width: int = 4, *, norm: float = 0.6, seed: int = 0, dtype: torch.dtype = torch.float64) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix(width, norm=norm, seed=seed).to(dtype))
        self.bias = nn.Parameter(normal(width, seed=seed + 1, dtype=dtype))

    def forward(self, z_BN: Tensor, x_BN: Tensor) -> Tensor:
        return torch.tanh(z_BN @ self.weight.mT + x_BN + self.bias)


class AffineCell(nn.Module):
    """f(z, x) = A z + x, whose fixed point and gradients have closed forms."""

    def __init__(self, width: int = 5, *, norm: float = 0.7, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix(width, norm=norm, seed=seed))

    def forward(self, z_BN: Tensor, x_BN: Tensor) -> Tensor:
        return z_BN @ self.weight.mT + x_BN

    def inverse(self) -> Tensor:
        """(I - A)^-1, dense."""
        return torch.linalg.inv(torch.eye(self.weight.shape[0], dtype=torch.float64) - self.weight.detach())


class RatedCell(nn.Module):
    """f(z, x, rate) = rate tanh(Q z) + x with Q orthogonal: each sample is as hard as its rate is close to one."""

    def __init__(self, width: int = 8, *, seed: int = 0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.linalg.qr(normal(width, width, seed=seed))[0])

    def forward(self, z_BN: Tensor, x_BN: Tensor, rate_B1: Tensor) -> Tensor:
        return rate_B1 * torch.tanh(z_BN @ self.weight.mT) + x_BN

    @staticmethod
    def batch(*rates: float, width: int = 8, seed: int = 3) -> tuple[Tensor, Tensor]:
        """x and the rates for one sample each."""
        rate_B1 = torch.tensor(rates, dtype=torch.float64).unsqueeze(1)
        return 0.3 * normal(len(rates), width, seed=seed), rate_B1


def solve_tightly(cell: Any, adjoint: AbstractAdjoint | None = None, **settings: Any) -> DEQ:
    """A DEQ whose forward solve ends at rounding, so that what is left is the gradient rule's own error."""
    settings = {"tol": TIGHT, "max_steps": 400, **settings}
    return DEQ(cell, adjoint=EXACT if adjoint is None else adjoint, **settings)


def loss_of(z: Tensor) -> Tensor:
    """Not linear in z, so that dl/dz depends on z too; the weights break all symmetry between entries."""
    weights = torch.linspace(0.5, 1.5, z.numel(), dtype=z.dtype).view_as(z)
    return (weights * z.sin()).sum() + (weights * z).square().sum()


def gradients(run: Callable[[], Tensor], inputs: Sequence[Tensor], *, create_graph: bool = False) -> tuple[Tensor, ...]:
    return torch.autograd.grad(loss_of(run()), inputs, create_graph=create_graph)


def relative_error(actual: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest ||a - e|| / ||e|| over the pairs."""
    with torch.no_grad():
        return max(float((a - e).norm() / e.norm()) for a, e in zip(actual, expected, strict=True))


class Budget(torch.autograd.Function):
    """The identity, whose backward may run `left[0]` times: a runaway backward pass fails instead of hanging."""

    @staticmethod
    def forward(ctx: Any, tensor: Tensor, left: list[int]) -> Tensor:
        ctx.left = left
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.left[0] -= 1
        if ctx.left[0] < 0:
            raise TimeoutError("the backward pass does not come to an end")
        return grads[0], None
