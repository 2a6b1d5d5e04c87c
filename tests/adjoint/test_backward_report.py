"""What a backward solve tells about itself, what it refuses, and what compaction saves it."""

import warnings

import pytest
import torch

from adjoint.cells import (
    EXACT,
    TIGHT,
    RatedCell,
    TanhCell,
    gradients,
    loss_of,
    normal,
    relative_error,
    solve_tightly,
)
from deqkit import DEQ, NonFiniteError, Status, Tolerance
from deqkit.adjoint import Implicit, OneStep, ReuseForward
from deqkit.solve import Anderson, Broyden, FixedPointIteration, NumericalWarning

# B samples, N numbers in a state

EASY_AND_HARD = (0.0, 0.1, 0.1, 0.0, 0.1, 0.05, 0.1, 0.95)


def test_the_report_is_there_after_the_backward_pass_and_not_before():
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    z, solution = DEQ(cell)(x, return_solution=True)
    assert (solution.backward, solution.grad_error) == (None, None)
    loss_of(z).backward()
    assert solution.backward.status is Status.CONVERGED
    for per_sample in (solution.backward.residual, solution.backward.num_steps, solution.backward.num_evals):
        assert per_sample.shape == (3,)
    assert 0 < solution.grad_error < 1


@pytest.mark.parametrize("grad_rtol", [None, 1e-3])
@pytest.mark.parametrize("scale", [1e-30, 1e-24, 1e20, 1e30])
def test_the_estimate_does_not_depend_on_the_scale_of_the_loss(scale, grad_rtol):
    """Squares of such float32 numbers are 0 or inf."""
    torch.manual_seed(0)
    cell, x = torch.nn.Linear(8, 8), normal(4, 8, seed=5).float()
    deq = DEQ(lambda z, x: torch.tanh(0.9 * cell(z) + x), adjoint=Implicit(grad_rtol=grad_rtol))
    errors = []
    for factor in (1.0, scale):
        z, solution = deq(x, return_solution=True)
        (factor * z).sum().backward()
        errors.append(solution.grad_error)
    assert errors[1] == pytest.approx(errors[0], rel=0.5) and errors[0] > 0


def test_the_residual_it_reports_is_the_true_one():
    """||J'y + v - y|| / ||J'y + v|| with a dense J, sample by sample."""
    cell, x = TanhCell(), normal(3, 4, seed=5)
    z, solution = solve_tightly(cell, Implicit(tol=Tolerance(rtol=1e-2)))(x, return_solution=True)
    v = normal(3, 4, seed=6)
    z.backward(v)
    y = solution.backward.z
    for i in range(3):
        jacobian = torch.autograd.functional.jacobian(lambda s, i=i: cell(s, x[i]), z[i].detach())
        right = y[i] @ jacobian + v[i]
        torch.testing.assert_close(
            solution.backward.residual[i], (right - y[i]).norm() / right.norm(), rtol=1e-8, atol=0
        )


@pytest.mark.parametrize("backward", [None, 4], ids=["forward", "backward"])
def test_the_estimated_error_of_the_gradient_is_within_a_factor_of_three(backward):
    """One of the two solves is stopped early, the other runs to rounding."""
    cell, x = TanhCell(16, norm=0.9, seed=3), normal(8, 16, seed=5).requires_grad_()
    exact = gradients(lambda: solve_tightly(cell)(x), [cell.weight])
    plain = FixedPointIteration()
    loose, tight = Tolerance(rtol=1e-3), TIGHT
    adjoint = Implicit(solver=plain, tol=loose if backward else tight, max_steps=400)
    deq = DEQ(cell, solver=plain, tol=tight if backward else loose, max_steps=400, adjoint=adjoint)
    z, solution = deq(x, return_solution=True)
    true_error = relative_error(torch.autograd.grad(loss_of(z), [cell.weight]), exact)
    assert true_error / 3 <= solution.grad_error <= 3 * true_error


class KinkedCell(torch.nn.Module):
    """f(z, x) = A relu(B z + x), with many hidden units: their switching makes J jump."""

    def __init__(self, *, seed: int) -> None:
        super().__init__()
        self.inner = torch.nn.Parameter(normal(4096, 64, seed=seed) / 8)
        self.outer = torch.nn.Parameter(normal(64, 4096, seed=seed + 100) / 64)

    def initial_state(self, x):
        return torch.zeros(x.shape[0], 64, dtype=x.dtype)

    def forward(self, z, x):
        return torch.relu(z @ self.inner.mT + x) @ self.outer.mT


@pytest.mark.parametrize("seed", range(3))
def test_the_estimate_is_within_a_factor_of_three_on_cells_with_kinks(seed):
    """Without a look at how J jumps between z and z*, which `compact=False` does not allow, it is lower."""
    cell, x = KinkedCell(seed=seed), normal(8, 4096, seed=5)
    parameters = [cell.inner, cell.outer]
    exact = gradients(lambda: solve_tightly(cell)(x), parameters)

    def estimate_over_truth(*, compact: bool) -> float:
        z, solution = DEQ(cell, tol=Tolerance(rtol=1e-2), compact=compact)(x, return_solution=True)
        error = relative_error(torch.autograd.grad(loss_of(z), parameters), exact)
        return solution.grad_error / error

    assert 1 / 3 <= estimate_over_truth(compact=True) <= 3
    assert estimate_over_truth(compact=False) < 1 / 2


@pytest.mark.parametrize("grad_rtol", [1e-2, 1e-5, 1e-8])
def test_grad_rtol_tightens_both_solves_until_the_gradient_is_that_good(grad_rtol):
    cell, x = TanhCell(16, norm=0.9, seed=3), normal(8, 16, seed=5).requires_grad_()
    exact = gradients(lambda: solve_tightly(cell)(x), [x, cell.weight])
    deq = DEQ(cell, tol=Tolerance(rtol=1e-1), max_steps=300, adjoint=Implicit(grad_rtol=grad_rtol, max_steps=300))
    assert relative_error(gradients(lambda: deq(x), [x, cell.weight]), exact) <= grad_rtol


def test_a_gradient_that_stays_worse_than_asked_is_told():
    cell, x = TanhCell(16, norm=0.9, seed=3), normal(8, 16, seed=5).requires_grad_()
    deq = DEQ(cell, max_steps=4, adjoint=Implicit(grad_rtol=1e-3))
    with pytest.warns(NumericalWarning, match=r"above grad_rtol=0.001: raise max_steps.*8 MAX_STEPS"):
        deq(x).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        DEQ(cell, max_steps=100, adjoint=Implicit(grad_rtol=1e-3, max_steps=100))(x).sum().backward()


def test_grad_rtol_where_relative_residuals_say_nothing():
    deq = DEQ(TanhCell(4), adjoint=Implicit(grad_rtol=1e-2))
    assert deq(torch.zeros(3, 0, 4, dtype=torch.float64)).shape == (3, 0, 4)
    zero = DEQ(lambda z, x: torch.relu(0.3 * z - x), tol=Tolerance(rtol=0, atol=1e-3), adjoint=deq.adjoint)
    assert not zero(torch.ones(2, 4, requires_grad=True)).any()


def test_grad_rtol_keeps_what_else_the_tolerance_says():
    """A sample whose equilibrium is zero has a relative residual of about 1: it is solved when it is small enough."""
    x = torch.tensor([[1.0, 1.0], [0.0, 0.0]]).requires_grad_()
    deq = DEQ(lambda z, x: 0.5 * torch.tanh(z) + x, tol=Tolerance(rtol=1e-3, atol=1e-4), max_steps=60)
    z, solution = deq(x, z0=torch.ones(2, 2), adjoint=Implicit(grad_rtol=1e-1), return_solution=True)
    assert solution.status is Status.CONVERGED and solution.num_evals.max() < 40


def test_verdicts_of_both_passes_are_counted_per_sample_and_over_calls():
    deq = DEQ(TanhCell(norm=0.9), tol=Tolerance(rtol=1e-6), adjoint=Implicit(tol=TIGHT, max_steps=2))
    for _ in range(2):
        deq(normal(3, 4, seed=5), max_steps=60).sum().backward()
    deq(normal(2, 4, seed=5), max_steps=2)
    assert deq.verdicts == {Status.CONVERGED: 6, Status.MAX_STEPS: 2}
    assert deq.backward_verdicts == {Status.MAX_STEPS: 6}


def test_a_nan_from_the_loss_is_not_blamed_on_the_solve():
    z, solution = DEQ(TanhCell())(normal(3, 4, seed=5), return_solution=True)
    weights = torch.ones(3, 4, dtype=torch.float64)
    weights[1, 2] = float("nan")
    with pytest.raises(NonFiniteError, match="after the DEQ") as raised:
        z.backward(weights)
    assert [s is Status.NONFINITE for s in raised.value.solution.sample_status] == [False, True, False]
    assert solution.backward is None


class BadBackward(torch.autograd.Function):
    """The identity, whose derivative is nan for the second sample."""

    @staticmethod
    def forward(ctx, z):
        return z.view_as(z)

    @staticmethod
    def backward(ctx, *grad_outputs):
        (grad,) = grad_outputs
        return torch.where(torch.arange(grad.shape[0]).unsqueeze(1) == 1, float("nan"), grad)


@pytest.mark.parametrize(
    "settings", [{"adjoint": Implicit()}, {"adjoint": ReuseForward(), "solver": Broyden()}], ids=["implicit", "reuse"]
)
def test_a_nan_from_the_jacobian_of_f_names_the_backward_solve_and_the_sample(settings):
    deq = DEQ(lambda z, x: torch.tanh(0.5 * BadBackward.apply(z) + x), **settings)
    z = deq(normal(3, 4, seed=5).requires_grad_())
    with pytest.raises(NonFiniteError, match=r"backward solve.*sample 1 "):
        z.sum().backward()


@pytest.mark.parametrize("rates", [EASY_AND_HARD, EASY_AND_HARD[::-1], (0.95, 0.1, 0.9, 0.0)], ids=str)
def test_compaction_leaves_the_gradient_as_it_is(rates):
    cell = RatedCell()
    x, rate = RatedCell.batch(*rates)
    x.requires_grad_()
    grads = [
        gradients(
            lambda c=c: solve_tightly(cell, Implicit(tol=TIGHT, max_steps=400, compact=c))(x, rate), [x, cell.weight]
        )
        for c in (True, False)
    ]
    assert relative_error(grads[0], grads[1]) < 1e-11


def test_compaction_spends_fewer_products_per_sample():
    sizes = []

    class Logged(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.view_as(z)

        @staticmethod
        def backward(ctx, *grad_outputs):
            sizes.append(grad_outputs[0].shape[0])
            return grad_outputs

    cell = RatedCell()
    x, rate = RatedCell.batch(*EASY_AND_HARD)
    spent = {}
    for compact in (True, False):
        adjoint = Implicit(solver=Anderson(), tol=Tolerance(rtol=1e-8), max_steps=400, compact=compact)
        z = solve_tightly(lambda z, x, r: cell(Logged.apply(z), x, r), adjoint)(x, rate)
        sizes.clear()
        z.sum().backward()
        spent[compact] = sum(sizes)
        assert set(sizes) != {8} if compact else set(sizes) == {8}
    assert spent[True] < 0.5 * spent[False]


def test_no_compaction_where_f_closes_over_its_batch():
    cell = RatedCell()
    x, rate = RatedCell.batch(*EASY_AND_HARD)
    closed = solve_tightly(lambda z: cell(z, x, rate))
    actual = gradients(lambda: closed(z0=torch.zeros_like(x)), [cell.weight])
    assert relative_error(actual, gradients(lambda: solve_tightly(cell)(x, rate), [cell.weight])) < 1e-10


def test_no_compaction_where_the_arguments_hold_no_tensor():
    """A number in args says nothing about which tensors belong to a sample."""
    cell = RatedCell()
    x, rate = RatedCell.batch(*EASY_AND_HARD)
    deq = solve_tightly(lambda z, scale: scale * cell(z, x, rate))
    actual = gradients(lambda: deq(1.0, z0=torch.zeros_like(x)), [cell.weight])
    assert relative_error(actual, gradients(lambda: solve_tightly(cell)(x, rate), [cell.weight])) < 1e-10


def test_weights_that_changed_before_the_backward_pass_are_reported_when_f_is_evaluated_again():
    cell = RatedCell()
    z = solve_tightly(cell, Implicit(tol=TIGHT, max_steps=400))(*RatedCell.batch(*EASY_AND_HARD))
    cell.weight.data.mul_(0.5)  # .data: autograd does not notice
    with pytest.raises(RuntimeError, match="changed between the forward and the backward pass"):
        z.sum().backward()


def test_weights_that_an_optimiser_changed_are_reported_by_autograd():
    cell, x = TanhCell(), normal(3, 4, seed=5)
    z = solve_tightly(cell)(x)
    loss_of(z).backward(retain_graph=True)
    torch.optim.SGD(cell.parameters(), lr=0.1).step()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss_of(z).backward()


def test_weights_that_changed_are_reported_by_a_differentiable_backward_pass():
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    z = solve_tightly(cell)(x)
    cell.weight.data.mul_(0.5)
    with pytest.raises(RuntimeError, match="changed between the forward and the backward pass"):
        torch.autograd.grad(loss_of(z), x, create_graph=True)


def test_a_sample_without_a_gradient_costs_no_products():
    z, solution = solve_tightly(TanhCell(), EXACT)(normal(3, 4, seed=5), return_solution=True)
    z[1].sum().backward()
    assert solution.backward.num_evals.tolist()[::2] == [1, 1]
    assert solution.backward.num_evals[1] > 1


def test_rules_without_a_backward_solve_report_none():
    z, solution = DEQ(TanhCell(), adjoint=OneStep())(normal(3, 4, seed=5), return_solution=True)
    z.sum().backward()
    assert solution.backward is None


CONNECTED = torch.softmax(normal(6, 6, seed=8), dim=1)
TOGETHER = {
    "a graph": lambda z, x: torch.tanh(0.5 * CONNECTED @ z + x),
    "a closure over the batch": lambda z, x: torch.tanh(0.5 * z + x) * torch.linspace(0.5, 1, 6).double().unsqueeze(1),
}


@pytest.mark.parametrize("f", TOGETHER.values(), ids=TOGETHER.keys())
def test_no_sample_is_evaluated_alone_for_the_estimate_unless_it_was_before(f):
    """With a fixed number of steps none leaves the batch, and such an f is nobody's business."""
    steps = {"tol": Tolerance(rtol=0.0), "max_steps": 6}
    x = normal(6, 4, seed=5).requires_grad_()
    deq = DEQ(f, solver=FixedPointIteration(), adjoint=Implicit(solver=FixedPointIteration(), **steps), **steps)
    z, solution = deq(x, return_solution=True)
    z.sum().backward()
    assert solution.grad_error > 0 and not solution.independent


def test_reuse_forward_of_samples_that_were_solved_twice():
    x = normal(12, 4, seed=5) * torch.logspace(-2, 1, 12).double().unsqueeze(1)
    deq = DEQ(lambda z, x: torch.tanh(0.4 * z.mean(0) + x), solver=Broyden(), compact=False, adjoint=ReuseForward())
    z, solution = deq(x.requires_grad_(), return_solution=True)
    samples = torch.cat([samples for samples, _ in solution.solver_state])
    assert samples.sort().values.tolist() == list(range(12))
    z.sum().backward()


def test_an_equilibrium_at_zero_is_not_taken_for_another_function():
    """Squares of its numbers are zero in float32, and its residual is not."""
    deq = DEQ(lambda z, x: torch.tanh(0.5 * z + x))
    z, solution = deq(torch.zeros(2, 3, requires_grad=True), z0=torch.ones(2, 3), return_solution=True)
    assert z.abs().max() < 1e-20
    assert solution.status is Status.MAX_STEPS


def test_the_estimate_is_no_lower_than_what_the_stretched_gradient_tells():
    """(I - J)^-T makes y of v. Where it stretches v more than the last steps show, residuals count for more too."""
    inner, outer, x, v = (
        normal(*shape, seed=163 + i) for i, shape in enumerate([(16, 16), (16, 16), (6, 16), (6, 16)])
    )
    # Without compaction, so that no curvature is added.
    deq = DEQ(lambda z, x: torch.tanh(0.5 * z @ inner.T + 0.25 * x @ outer.T), max_steps=300, compact=False)
    z, solution = deq(x.requires_grad_(), return_solution=True)
    (v * z).sum().backward()
    y, backward = solution.backward.z, solution.backward
    stretch = y.norm(dim=1) / v.norm(dim=1)
    assert (stretch > 1.3 * torch.fmax(solution.amplification, backward.amplification)).any()
    squared = stretch.square() * (solution.residual.square() + backward.residual.square())
    assert solution.grad_error >= float((squared * y.square().sum(1)).sum() / y.square().sum()) ** 0.5
