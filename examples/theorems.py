"""The paper's three theorems as equalities: each prints what stands on the left and what stands on the right."""

import torch
from torch import Tensor, nn

from deqkit import DEQ, Tolerance
from deqkit.adjoint import Implicit
from deqkit.layers import stack, tie


class Cell(nn.Module):
    """f(z, x) = tanh(W z + x)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        weight = torch.randn(width, width, dtype=torch.float64)
        self.weight = nn.Parameter(0.8 * weight / torch.linalg.matrix_norm(weight, 2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.weight.T + x)


def show(theorem: str, left: Tensor, right: Tensor) -> None:
    print(theorem)
    print("  left ", "  ".join(f"{value:+.12f}" for value in left.flatten()[:4].tolist()))
    print("  right", "  ".join(f"{value:+.12f}" for value in right.flatten()[:4].tolist()))
    difference = (left - right).abs().max().item()
    print(f"  largest difference {difference:.1e}\n")
    assert difference < 1e-10


torch.manual_seed(0)
width = 8
x = torch.randn(1, width, dtype=torch.float64)
solve = {"tol": Tolerance(rtol=1e-13), "max_steps": 200}
solve |= {"adjoint": Implicit(tol=Tolerance(rtol=1e-13), max_steps=200)}

# Theorem 1. Left: the gradient that the library gives. Right: -dl/dz* J_g^-1 df/dW, J_g as a matrix.
cell = Cell(width)
z = DEQ(cell, **solve)(x)
(left,) = torch.autograd.grad(z.square().sum(), cell.weight)
z = z.detach()
jacobian = torch.autograd.functional.jacobian(lambda at: cell(at, x), z)
assert isinstance(jacobian, Tensor)
J_g = jacobian.reshape(width, width) - torch.eye(width, dtype=torch.float64)
(right,) = torch.autograd.grad(cell(z, x), cell.weight, -(2 * z) @ torch.linalg.inv(J_g))
show("Theorem 1: the gradient of an equilibrium needs the equilibrium alone", left, right)

# Theorem 2. Left: an equilibrium that is the input of another. Right: one equilibrium of one cell.
first, second = Cell(width), Cell(width)
left = DEQ(second, **solve)(DEQ(first, **solve)(x))
right = DEQ(stack(first, second), **solve)(x)[1]
show("Theorem 2: two equilibria are one", left, right)

# Theorem 3. Left: three different layers. Right: one layer, applied three times.
layers = [nn.Sequential(nn.Linear(a, b), nn.Tanh()).double() for a, b in ((8, 5), (5, 7), (7, 4))]
left = x
for layer in layers:
    left = layer(left)
tied = tie(layers)
state = tied.initial_state(x)
for _ in layers:
    state = tied(state, x)
show("Theorem 3: a network is a tied network of the same depth", left, state[-1])
