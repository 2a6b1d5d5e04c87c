"""The theorems' rows hold, and stop to hold when one side of their equality is broken."""

import re
import runpy
from pathlib import Path

import pytest
import torch

from deqkit.adjoint import OneStep
from deqkit.deq import DEQ
from deqkit.paper import equalities, theorems
from deqkit.paper.equalities import TanhCell, block_matrices, dense_gradients, relative_difference, side_by_side
from deqkit.paper.workshop import Workshop
from deqkit.solve import FixedPointIteration, Tolerance
from paper.tiny_scale import check_outcome

EXAMPLE = Path(__file__).parents[2] / "examples" / "theorems.py"


@pytest.fixture
def workshop(tmp_path):
    return Workshop(runs=tmp_path)


@pytest.mark.parametrize("claim", theorems.CLAIMS, ids=lambda claim: claim.row)
def test_holds(claim, workshop):
    outcome = claim.quick(workshop)
    check_outcome(outcome)
    assert outcome.holds is True


def test_sides_are_compared_where_the_first_is_largest():
    ours, theirs = torch.tensor([[0.0, -3.0], [2.0, 0.5]]), torch.tensor([[9.0, 1.0], [-2.0, 0.0]])
    assert side_by_side([ours], [theirs], count=2) == ["-3.00000000, +2.00000000", "+1.00000000, -2.00000000"]


@pytest.mark.parametrize("claim", theorems.CLAIMS[:3], ids=lambda claim: claim.row)
def test_both_sides_are_told(claim, workshop):
    """The same digits on the left and on the right, in the line and in the table, and a zero that is one."""
    outcome = claim.quick(workshop)
    digits = re.findall(r"[+-]\d\.\d{8}", outcome.measured)
    each = 1 if claim.row == "theorem-1" else 3  # the largest entry, or three of them
    sides = [digits[i : i + each] for i in range(0, len(digits), each)]
    assert len(sides) >= 2 and all(side == sides[0] for side in sides)
    assert "0e+00" not in outcome.measured and "examples/theorems.py" in outcome.remark
    table = outcome.numbers["table"]
    assert all(len(row) == len(table["columns"]) for row in table["rows"])


def test_theorem_1_sees_a_wrong_gradient(workshop, monkeypatch):
    def one_step(cell, x):
        x = x.detach().requires_grad_()
        z = DEQ(cell, tol=equalities.TIGHT, max_steps=600, adjoint=OneStep())(x)
        grads = torch.autograd.grad(z, [x, *equalities.touched(cell, z)], equalities.direction(z))
        return z.detach(), list(grads)

    monkeypatch.setattr(theorems, "implicit_gradients", one_step)
    outcome = theorems.theorem_1(workshop)
    assert outcome.holds is False and outcome.numbers["largest"]["dense"] > 1e-2
    assert outcome.numbers["table"]["rows"][0][1] != outcome.numbers["table"]["rows"][0][2]


def test_theorem_1_sees_too_few_layers(workshop, monkeypatch):
    monkeypatch.setattr(equalities, "NUM_LAYERS", 5)
    assert theorems.theorem_1(workshop).holds is False


def test_theorem_2_sees_cells_in_the_wrong_order(workshop, monkeypatch):
    class Apart(torch.nn.Module):
        """The second cell reads a z1 that is not the first one's equilibrium."""

        def __init__(self, first, second):
            super().__init__()
            self.first, self.second = first, second

        def initial_state(self, x):
            z1 = self.first.initial_state(x)
            return z1, self.second.initial_state(z1)

        def forward(self, state, x):
            return self.first(state[0], x), self.second(state[1], 0.9 * state[0])

    monkeypatch.setattr(theorems, "stack", Apart)
    assert theorems.theorem_2(workshop).holds is False


def test_theorem_3_sees_a_weight_in_the_wrong_place(workshop, monkeypatch):
    def shifted(layers):
        w_z, w_x, bias = block_matrices(layers)
        return w_z.roll(1, 0), w_x, bias

    monkeypatch.setattr(theorems, "block_matrices", shifted)
    assert theorems.theorem_3(workshop).holds is False


def test_any_solver_sees_a_loose_one(workshop, monkeypatch):
    loose = Tolerance(rtol=1e-4)
    monkeypatch.setattr(theorems, "TIGHT", loose)
    monkeypatch.setattr(equalities, "TIGHT", loose)
    assert theorems.any_solver(workshop).holds is False


def test_figure_1a_sees_a_method_that_only_iterates(workshop, monkeypatch):
    monkeypatch.setitem(theorems.SOLVERS, "Broyden", FixedPointIteration())
    assert theorems.figure_1a(workshop).holds is False


def test_the_dense_gradient_of_a_linear_cell_has_a_closed_form():
    class Linear(TanhCell):
        def forward(self, z, x):
            return z @ self.state.mT + x @ self.input.mT + self.bias

    cell, x = Linear(4, 3).double(), torch.randn(2, 3, dtype=torch.float64)
    inverse = torch.linalg.inv(torch.eye(4, dtype=torch.float64) - cell.state.detach())
    z = (x @ cell.input.mT + cell.bias).detach() @ inverse.mT
    v = equalities.direction(z)
    grads = dense_gradients(cell, x, z)
    torch.testing.assert_close(grads[0], v @ inverse @ cell.input)
    torch.testing.assert_close(grads[-1], (v @ inverse).sum(0))  # of the bias


def test_relative_difference():
    assert relative_difference([torch.tensor([3.0, 0.0])], [torch.tensor([3.0, 4.0])]) == pytest.approx(0.8)


def test_the_example_prints_both_sides(capsys):
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    lines = capsys.readouterr().out.splitlines()
    assert [line[:10] for line in lines if line.startswith("Theorem")] == ["Theorem 1:", "Theorem 2:", "Theorem 3:"]
    left = [line.split()[1:] for line in lines if line.startswith("  left")]
    right = [line.split()[1:] for line in lines if line.startswith("  right")]
    assert len(left) == 3 and left == right
