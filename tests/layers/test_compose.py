"""Theorem 2 (one equilibrium holds two) and Theorem 3 (tied weights are no restriction) as equalities."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from deqkit import DEQ, Status, Tolerance
from deqkit.adjoint import Implicit
from deqkit.layers import TransformerCell, TransformerConfig, TrellisCell, TrellisConfig, stack, tie
from deqkit.solve import GMRES, FixedPointIteration, fixed_point
from layers.naive import fill, normal

# B samples, N numbers in a state

TIGHT = Tolerance(rtol=1e-13, patience=200)


class Cell(nn.Module):
    """f(z, x) = tanh(A z + B x + b) with ||A|| = 0.6."""

    def __init__(self, width: int, num_inputs: int, *, seed: int) -> None:
        super().__init__()
        state = normal(width, width, seed=seed)
        self.state = nn.Parameter(0.6 * state / torch.linalg.matrix_norm(state, 2))
        self.input = nn.Parameter(normal(width, num_inputs, seed=seed + 1))
        self.bias = nn.Parameter(normal(width, seed=seed + 2))

    def initial_state(self, x_BN: Tensor) -> Tensor:
        return x_BN.new_zeros(x_BN.shape[0], self.bias.numel())

    def forward(self, z_BN: Tensor, x_BN: Tensor) -> Tensor:
        return torch.tanh(z_BN @ self.state.mT + x_BN @ self.input.mT + self.bias)


class Affine(Cell):
    """The same without tanh, so that equilibria have a closed form."""

    def forward(self, z_BN: Tensor, x_BN: Tensor) -> Tensor:
        return z_BN @ self.state.mT + x_BN @ self.input.mT + self.bias

    def equilibrium(self, x_BN: Tensor) -> Tensor:
        identity = torch.eye(self.bias.numel(), dtype=torch.float64)
        return torch.linalg.solve(identity - self.state, (x_BN @ self.input.mT + self.bias).mT).mT


def solve(cell: Any, **settings: Any) -> DEQ:
    backward = Implicit(solver=GMRES(), tol=TIGHT, max_steps=200)
    return DEQ(cell, **{"tol": TIGHT, "max_steps": 400, "adjoint": backward, **settings})


def grads(value: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad((value * normal(*value.shape, seed=50)).sum(), inputs)


# --- Theorem 2 -------------------------------------------------------------------------------------------------------


def test_stacked_affine_cells_have_the_closed_form():
    first, second = Affine(4, 3, seed=0), Affine(5, 4, seed=10)
    x = normal(6, 3, seed=20).requires_grad_()
    z1, z2 = solve(stack(first, second))(x)
    expected_1 = first.equilibrium(x)
    expected_2 = second.equilibrium(expected_1)
    torch.testing.assert_close((z1, z2), (expected_1, expected_2), rtol=1e-9, atol=1e-9)
    inputs = [x, *first.parameters(), *second.parameters()]
    torch.testing.assert_close(grads(z2, inputs), grads(expected_2, inputs), rtol=1e-8, atol=1e-8)


def test_stacked_cells_are_two_equilibria_in_a_row():
    first, second = Cell(4, 3, seed=0), Cell(5, 4, seed=10)
    x = normal(6, 3, seed=20).requires_grad_()
    cell = stack(first, second)
    z1, z2 = solve(cell)(x)
    one = solve(first)(x)
    two = solve(second)(one)
    torch.testing.assert_close((z1, z2), (one, two), rtol=1e-9, atol=1e-9)
    inputs = [x, *first.parameters(), *second.parameters()]
    torch.testing.assert_close(grads(z2, inputs), grads(two, inputs), rtol=1e-8, atol=1e-8)
    assert len(list(cell.parameters())) == 6


def test_three_cells_by_stacking_a_stack():
    """The stack's state is a tuple, so the third cell picks what it wants to see."""

    class OfSecond(Cell):
        def initial_state(self, pair: tuple[Tensor, Tensor]) -> Tensor:  # pyright: ignore
            return super().initial_state(pair[1])

        def forward(self, z_BN: Tensor, pair: tuple[Tensor, Tensor]) -> Tensor:  # pyright: ignore
            return super().forward(z_BN, pair[1])

    first, second, third = Cell(4, 3, seed=0), Cell(5, 4, seed=10), OfSecond(2, 5, seed=20)
    x = normal(6, 3, seed=30)
    (_, z2), z3 = solve(stack(stack(first, second), third))(x)
    one = solve(first)(x)
    two = solve(second)(one)
    torch.testing.assert_close((z2, z3), (two, solve(third)((one, two))), rtol=1e-9, atol=1e-9)


def test_states_without_an_initial_state_start_like_their_input():
    weight = nn.Linear(3, 3).double()
    fill(weight, seed=0, scale=0.2)

    class Plain(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return torch.tanh(weight(z) + x)

    z1, z2 = stack(Plain(), Plain()).initial_state(normal(2, 3, seed=1))
    assert z1.shape == z2.shape == (2, 3) and not z1.any() and not z2.any()
    with pytest.raises(ValueError, match="initial_state"):
        stack(Plain(), Plain()).initial_state({"x": normal(2, 3, seed=1)})


@pytest.mark.parametrize("kind", ["transformer", "trellis"])
def test_our_own_cells_can_be_stacked_with_dropout_and_weight_norm(kind):
    """`bind` draws masks and normalises weights once per solve; a stack must pass it on to its first cell."""
    torch.manual_seed(0)
    if kind == "transformer":
        options: dict[str, Any] = {"normalise": "weight", "dropout": 0.3, "init_std": None}
        first: Any = TransformerCell(TransformerConfig(width=6, num_heads=2, hidden_width=8, **options)).double()
        second = Cell(5, 6, seed=0)
    else:
        options = {"normalise": "weight", "hidden_dropout": 0.3, "init_std": None}
        first = TrellisCell(TrellisConfig(input_width=6, hidden_width=2, output_width=3, **options)).double()

        class OfH(Cell):
            def initial_state(self, state: tuple[Tensor, Tensor]) -> Tensor:  # pyright: ignore
                return super().initial_state(state[0])

            def forward(self, z_BN: Tensor, state: tuple[Tensor, Tensor]) -> Tensor:  # pyright: ignore
                return super().forward(z_BN, state[0])

        second = OfH(5, 5, seed=0)
    second.initial_state = lambda seen: torch.zeros(2, 4, 5, dtype=torch.float64)  # pyright: ignore
    u = first.inject(normal(2, 4, 6, seed=1)).detach()
    torch.manual_seed(1)
    z1, z2 = solve(stack(first, second))(u)
    torch.manual_seed(1)
    one = solve(first)(u)
    two = solve(second)(one)
    torch.testing.assert_close((z1, z2), (one, two), rtol=1e-9, atol=1e-9)


# --- Theorem 3 -------------------------------------------------------------------------------------------------------

WIDTHS = (3, 5, 4, 6, 2)


def layers() -> list[nn.Sequential]:
    made = [nn.Sequential(nn.Linear(a, b), nn.Sigmoid()) for a, b in zip(WIDTHS, WIDTHS[1:], strict=False)]
    module = nn.ModuleList(made).double()
    fill(module, seed=0, scale=1.0)
    return made


def test_tied_network_computes_what_the_layers_compute():
    made = layers()
    x = normal(6, 3, seed=20).requires_grad_()
    expected, y = [], x
    for layer in made:
        y = layer(y)
        expected.append(y)
    z = solve(tie(made))(x)
    torch.testing.assert_close(z, tuple(expected), rtol=1e-9, atol=1e-9)
    inputs = [x, *(p for layer in made for p in layer.parameters())]
    torch.testing.assert_close(grads(z[-1], inputs), grads(y, inputs), rtol=1e-8, atol=1e-8)


def test_tied_network_is_the_papers_block_matrices():
    """Appendix C: z <- sigma(W_z z + W_x x + b), W_z with the weights on the lower block diagonal."""
    made = layers()
    cell, x = tie(made), normal(6, 3, seed=20)
    linears: list[Any] = [layer[0] for layer in made]
    total = sum(WIDTHS[1:])
    w_z, w_x = torch.zeros(total, total).double(), torch.zeros(total, WIDTHS[0]).double()
    ends = torch.tensor(WIDTHS[1:]).cumsum(0).tolist()
    w_x[: ends[0]] = linears[0].weight.detach()
    for i in range(1, len(linears)):
        column = ends[i - 2] if i > 1 else 0
        w_z[ends[i - 1] : ends[i], column : ends[i - 1]] = linears[i].weight.detach()
    b = torch.cat([linear.bias.detach() for linear in linears])
    state = tuple(normal(6, width, seed=30 + width) for width in WIDTHS[1:])
    for _ in range(6):
        expected = torch.sigmoid(torch.cat(state, 1) @ w_z.mT + x @ w_x.mT + b)
        state = cell(state, x)
        torch.testing.assert_close(torch.cat(state, 1), expected, rtol=1e-12, atol=1e-12)


def test_fixed_point_is_reached_after_as_many_steps_as_layers():
    """From any start, and not sooner: W_z is nilpotent of that order."""
    made = layers()
    cell, x = tie(made), normal(6, 3, seed=20)
    start = tuple(normal(6, width, seed=30 + width) for width in WIDTHS[1:])
    with torch.no_grad():
        output = nn.Sequential(*made)(x)
        state = start
        for step in range(1, len(made) + 1):
            state = cell(state, x)
            assert torch.equal(state[-1], output) == (step == len(made))
        assert all(torch.equal(a, b) for a, b in zip(cell(state, x), state, strict=True))
    exact = Tolerance(rtol=1e-15)
    solution = fixed_point(cell, start, (x,), solver=FixedPointIteration(), tol=exact, max_steps=20)
    assert solution.status is Status.CONVERGED
    assert solution.num_steps.tolist() == [len(made)] * 6 and solution.num_evals.tolist() == [len(made) + 1] * 6


def test_one_layer_is_its_own_equilibrium():
    layer = nn.Linear(3, 2).double()
    x = normal(4, 3, seed=1)
    (z,) = solve(tie([layer]))(x)
    torch.testing.assert_close(z, layer(x), rtol=1e-12, atol=1e-12)


def test_no_layers_are_refused():
    with pytest.raises(ValueError, match="at least one layer"):
        tie([])


def test_a_tied_network_starts_at_zeros_of_its_layers_shapes():
    state = tie(layers()).initial_state(normal(6, 3, seed=1))
    assert [tuple(z.shape) for z in state] == [(6, width) for width in WIDTHS[1:]]
    assert not any(z.any() or z.requires_grad for z in state)
