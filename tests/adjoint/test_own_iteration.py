"""Unrolled and Reversible differentiate the very steps they take, converged or not."""

import warnings

import pytest
import torch

from adjoint.cells import (
    FULL_BUDGET,
    RatedCell,
    TanhCell,
    gradients,
    loss_of,
    matrix,
    normal,
    relative_error,
    solve_tightly,
)
from deqkit import DEQ, NumericalWarning, Status, Tolerance
from deqkit.adjoint import Reversible, Unrolled
from deqkit.solve import Anderson

# B samples, N numbers in a state

UNROLLED = [Unrolled(steps=6), Unrolled(steps=6, checkpoint=True)]


def reversible_by_hand(cell, z0, args, *, damping, num_steps):
    """Plain autograd through y' = (1-b) y + b f(z), z' = (1-b) z + b f(y'), each sample for its own number of steps."""
    y = z = z0
    for step in range(max(num_steps)):
        active = (torch.tensor(num_steps) > step).unsqueeze(1)
        new_y = (1 - damping) * y + damping * cell(z, *args)
        new_z = (1 - damping) * z + damping * cell(new_y, *args)
        y, z = torch.where(active, new_y, y), torch.where(active, new_z, z)
    return z


@pytest.mark.parametrize("adjoint", UNROLLED, ids=["stored", "checkpointed"])
def test_unrolled_is_autograd_through_its_steps(adjoint):
    cell, x, z0 = TanhCell(), normal(3, 4, seed=5).requires_grad_(), normal(3, 4, seed=6).requires_grad_()
    inputs = [x, z0, *cell.parameters()]

    def by_hand():
        z = z0
        for _ in range(6):
            z = cell(z, x)
        return z

    deq = DEQ(cell, adjoint=adjoint)
    assert torch.equal(deq(x, z0=z0), by_hand())
    expected = gradients(by_hand, inputs)
    for actual, wanted in zip(gradients(lambda: deq(x, z0=z0), inputs), expected, strict=True):
        assert torch.equal(actual, wanted)  # the same operations in the same order


@pytest.mark.parametrize("adjoint", UNROLLED, ids=["stored", "checkpointed"])
def test_unrolled_gradcheck_and_gradgradcheck(adjoint):
    def solve(weight_NN, z0_BN, x_BN):
        return DEQ(lambda z, x: torch.tanh(z @ weight_NN.mT + x), adjoint=adjoint)(x_BN, z0=z0_BN)

    inputs = [matrix(2, norm=0.6, seed=0), normal(2, 2, seed=1), normal(2, 2, seed=2)]
    inputs = [t.requires_grad_() for t in inputs]
    assert torch.autograd.gradcheck(solve, inputs)
    assert torch.autograd.gradgradcheck(solve, inputs)


def test_unrolled_reports_the_residual_of_the_state_it_returns():
    cell, x = TanhCell(), normal(3, 4, seed=5)
    z, solution = DEQ(cell, adjoint=Unrolled(steps=4))(x, return_solution=True)
    expected = (cell(z, x) - z).norm(dim=1) / cell(z, x).norm(dim=1)
    torch.testing.assert_close(solution.residual, expected.detach(), rtol=1e-9, atol=0)
    assert solution.num_steps.tolist() == [4, 4, 4]
    assert solution.num_evals.tolist() == [5, 5, 5]  # one more, without gradient, to measure


def test_unrolled_refuses_an_f_that_changes_the_shape_of_the_state():
    deq = DEQ(lambda z, x: torch.tanh(z + x), adjoint=Unrolled(steps=3))
    with pytest.raises(ValueError, match="shape"):
        deq(normal(3, 4, seed=5), z0=torch.zeros(3, 1, dtype=torch.float64))


@pytest.mark.filterwarnings("ignore:.*samples took no step")  # a first step that makes matters worse is not taken
@pytest.mark.parametrize("damping", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("num_steps", [1, 3, 12])
def test_reversible_is_autograd_through_its_recurrence(num_steps, damping):
    cell, x, z0 = TanhCell(), normal(3, 4, seed=5).requires_grad_(), normal(3, 4, seed=6).requires_grad_()
    inputs = [x, z0, *cell.parameters()]
    # n steps cost 2 n evaluations, and two more to judge the last one.
    deq = DEQ(cell, adjoint=Reversible(damping=damping), tol=FULL_BUDGET, max_steps=2 * num_steps + 2)
    z, solution = deq(x, z0=z0, return_solution=True)
    taken = solution.num_steps.tolist()
    assert max(taken) == num_steps  # a sample whose first step made matters worse keeps its start
    expected = reversible_by_hand(cell, z0, (x,), damping=damping, num_steps=taken)
    assert relative_error([z], [expected]) < 1e-14
    actual = gradients(lambda: deq(x, z0=z0), inputs)
    by_hand = lambda: reversible_by_hand(cell, z0, (x,), damping=damping, num_steps=taken)  # noqa: E731
    # Rounding grows by 1 / (1 - b) a step when the states are recomputed: at most 5^12 * 1e-16 here.
    assert relative_error(actual, gradients(by_hand, inputs)) < 1e-12 / (1 - damping) ** num_steps


def test_reversible_with_samples_that_take_different_numbers_of_steps():
    cell = RatedCell()
    x, rate = RatedCell.batch(0.0, 0.5, 0.8)
    x.requires_grad_()
    inputs = [x, cell.weight]
    deq = DEQ(cell, adjoint=Reversible(), tol=Tolerance(rtol=1e-2), max_steps=40)
    z, solution = deq(x, rate, return_solution=True)
    taken = solution.num_steps.tolist()
    assert len(set(taken)) == 3 and max(taken) < 20
    by_hand = lambda: reversible_by_hand(cell, torch.zeros_like(x), (x, rate), damping=0.5, num_steps=taken)  # noqa: E731
    assert relative_error([z], [by_hand()]) < 1e-13
    assert relative_error(gradients(lambda: deq(x, rate), inputs), gradients(by_hand, inputs)) < 1e-7  # 2^20 eps


def test_reversible_gradcheck():
    def solve(weight_NN, z0_BN, x_BN):
        deq = DEQ(lambda z, x: torch.tanh(z @ weight_NN.mT + x), adjoint=Reversible(), tol=FULL_BUDGET, max_steps=12)
        return deq(x_BN, z0=z0_BN)

    inputs = [matrix(3, norm=0.6, seed=0), normal(2, 3, seed=1), normal(2, 3, seed=2)]
    assert torch.autograd.gradcheck(solve, [t.requires_grad_() for t in inputs])


def test_reversible_reaches_the_gradient_of_the_equilibrium():
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    inputs = [x, *cell.parameters()]
    deq = DEQ(cell, adjoint=Reversible(), tol=Tolerance(rtol=1e-7), max_steps=60)
    actual = gradients(lambda: deq(x), inputs)
    assert relative_error(actual, gradients(lambda: solve_tightly(cell)(x), inputs)) < 1e-4  # 30 steps of 0.7


def test_reversible_in_float32_keeps_its_accuracy():
    cell, x = TanhCell(dtype=torch.float32), normal(3, 4, seed=5, dtype=torch.float32).requires_grad_()
    deq = DEQ(cell, adjoint=Reversible(), tol=FULL_BUDGET, max_steps=62)
    z, solution = deq(x, return_solution=True)
    by_hand = lambda: reversible_by_hand(  # noqa: E731
        cell, torch.zeros_like(x), (x,), damping=0.5, num_steps=solution.num_steps.tolist()
    )
    assert z.dtype == torch.float32
    assert relative_error(gradients(lambda: deq(x), [x]), gradients(by_hand, [x])) < 1e-4


@pytest.mark.parametrize("max_steps", [60, 80, 200])
def test_reversible_never_returns_a_gradient_ruined_by_rounding_without_a_word(max_steps):
    """Recomputing n steps multiplies rounding by 2^n; the pair it ends with, (z0, z0), shows how far it got."""
    cell = RatedCell()
    x, rate = RatedCell.batch(0.97, 0.97)  # slow: the first steps still matter
    deq = DEQ(cell, adjoint=Reversible(), tol=FULL_BUDGET, max_steps=max_steps)
    z, solution = deq(x, rate, return_solution=True)
    start = torch.zeros_like(x)
    expected = reversible_by_hand(cell, start, (x, rate), damping=0.5, num_steps=solution.num_steps.tolist())
    assert relative_error([z], [expected]) < 1e-12
    wanted = torch.autograd.grad(loss_of(expected), [cell.weight])
    with warnings.catch_warnings():
        warnings.simplefilter("error", NumericalWarning)
        try:
            actual = torch.autograd.grad(loss_of(z), [cell.weight])
        except (NumericalWarning, RuntimeError):
            return  # it was said
    assert relative_error(actual, wanted) < 1e-3


@pytest.mark.parametrize("loss", [torch.sum, loss_of], ids=["linear", "curved"])
def test_reversible_has_no_second_derivative_and_says_so(loss):
    """A penalty on the gradient must not be dropped from the loss in silence."""
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    first = loss(DEQ(cell, adjoint=Reversible())(x))
    with pytest.raises(RuntimeError, match="(?i)once_differentiable|second derivative|twice"):
        (grad,) = torch.autograd.grad(first, x, create_graph=True)
        (first + grad.square().sum()).backward()


@pytest.mark.parametrize("adjoint", [Unrolled(steps=3), Reversible()], ids=["unrolled", "reversible"])
def test_no_solver_can_be_chosen_with_a_rule_that_iterates_by_itself(adjoint):
    with pytest.raises(ValueError, match="leave out solver"):
        DEQ(TanhCell(), solver=Anderson(), adjoint=adjoint)
    with pytest.raises(ValueError, match="leave out solver"):
        DEQ(TanhCell(), adjoint=adjoint)(normal(3, 4, seed=5), solver=Anderson())


def test_reversible_cannot_be_attached_to_a_foreign_solution():
    with pytest.raises(TypeError, match="cannot be attached"):
        Reversible().attach(TanhCell(), normal(3, 4, seed=0), (normal(3, 4, seed=5),))


@pytest.mark.parametrize(
    ("rule", "settings"), [(Unrolled, {"steps": 0}), (Reversible, {"damping": 1.0}), (Reversible, {"damping": 0.0})]
)
def test_impossible_settings_are_refused(rule, settings):
    with pytest.raises(ValueError, match="must be"):
        rule(**settings)


def test_reversible_warns_where_it_takes_no_step():
    """Its gradient is that of the steps taken; from a solution there are none."""
    deq, x = DEQ(TanhCell(), adjoint=Reversible()), normal(3, 4, seed=5)
    z = deq(x).detach()
    with pytest.warns(NumericalWarning, match="3 of 3 samples took no step"):
        deq(x, z0=z)
    with torch.no_grad(), warnings.catch_warnings():
        warnings.simplefilter("error")
        deq(x, z0=z)


@pytest.mark.parametrize("damping", [0.3, 0.5, 0.8])
@pytest.mark.parametrize("rtol", [1e-3, 1e-6, 1e-9])
def test_reversible_goes_on_until_the_state_it_returns_meets_the_tolerance(rtol, damping):
    """It steps on pairs, whose second half may be farther from the solution than both together."""
    for seed in range(4):
        cell, x = TanhCell(16, norm=0.9, seed=seed), normal(32, 16, seed=seed).requires_grad_()
        deq = DEQ(cell, adjoint=Reversible(damping=damping), tol=Tolerance(rtol=rtol), max_steps=600)
        z, solution = deq(x, return_solution=True)
        assert solution.status is Status.CONVERGED and int(solution.num_evals.max()) < 500
        taken = solution.num_steps.tolist()
        expected = reversible_by_hand(cell, torch.zeros_like(x), (x,), damping=damping, num_steps=taken)
        assert relative_error([z], [expected]) < 1e-12


def test_reversible_in_float32_rounds_as_f_does():
    """Its pairs are float64, but kernels for batches of other sizes differ by the rounding of f."""
    for seed in range(3):
        cell = TanhCell(128, norm=0.8, seed=seed, dtype=torch.float32)
        x = normal(16, 128, seed=seed, dtype=torch.float32) * torch.logspace(-2, 1, 16).unsqueeze(1)
        deq = DEQ(cell, adjoint=Reversible(), max_steps=200)
        z, solution = deq(x, return_solution=True)
        assert solution.num_evals.unique().numel() > 1, "samples should leave at different times"
        z.sum().backward()
