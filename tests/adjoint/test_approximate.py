"""OneStep, Phantom and ReuseForward against their formulas, and their distance from the exact gradient."""

from dataclasses import replace

import pytest
import torch

from adjoint.cells import (
    EXACT,
    AffineCell,
    RatedCell,
    TanhCell,
    gradients,
    matrix,
    normal,
    relative_error,
    solve_tightly,
)
from deqkit import DEQ, Status, Tolerance
from deqkit.adjoint import OneStep, Phantom, ReuseForward
from deqkit.solve import Anderson, Broyden, Fallback, NewtonKrylov
from deqkit.train.recipes import RECIPES

# B samples, N numbers in a state


def reusing(cell, *, refine, rtol=1e-12, memory=8, **settings):
    adjoint = ReuseForward(refine=refine, tol=Tolerance(rtol=rtol))
    return solve_tightly(cell, adjoint, solver=Broyden(memory=memory), **settings)


def test_one_step_is_the_gradient_of_f_with_its_argument_held_fixed():
    """For z = A z + x: dl/dx = v and dl/dA = v z'."""
    cell, x = AffineCell(), normal(3, 5, seed=1).requires_grad_()
    z = solve_tightly(cell, OneStep())(x)
    v = normal(3, 5, seed=2)
    by_x, by_weight = torch.autograd.grad(z, [x, cell.weight], v)
    torch.testing.assert_close(by_x, v, rtol=0, atol=0)
    torch.testing.assert_close(by_weight, v.mT @ z.detach(), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("damping", [1.0, 0.5])
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_phantom_is_autograd_through_the_damped_steps_after_the_equilibrium(steps, damping):
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    inputs = [x, *cell.parameters()]

    def by_hand():
        z = solve_tightly(cell)(x).detach()
        for _ in range(steps):
            z = (1 - damping) * z + damping * cell(z, x)
        return z

    actual = gradients(lambda: solve_tightly(cell, Phantom(steps=steps, damping=damping))(x), inputs)
    assert relative_error(actual, gradients(by_hand, inputs)) < 1e-11  # both start where the residual is 1e-12


def test_phantom_is_the_truncated_neumann_series():
    cell, x = AffineCell(), normal(3, 5, seed=1).requires_grad_()
    v = normal(3, 5, seed=2)
    weight = cell.weight.detach()
    expected = v + v @ weight + v @ weight @ weight
    assert relative_error(torch.autograd.grad(solve_tightly(cell, Phantom(steps=3))(x), x, v), [expected]) < 1e-12


def test_phantom_approaches_the_exact_gradient_at_the_rate_of_the_map():
    cell, x = AffineCell(norm=0.7), normal(3, 5, seed=1).requires_grad_()
    v = normal(3, 5, seed=2)
    expected = [v @ cell.inverse()]
    errors = [
        relative_error(torch.autograd.grad(solve_tightly(cell, Phantom(steps=k))(x), x, v), expected)
        for k in (1, 5, 20, 80)
    ]
    assert errors[0] > 0.1  # one step is a different gradient: the test would not see a rule that ignores `steps`
    assert all(b < 0.5 * a for a, b in zip(errors, errors[1:], strict=False))
    assert errors[-1] < 1e-10


@pytest.mark.parametrize("adjoint", [OneStep(), Phantom(steps=5, damping=0.3)], ids=["one-step", "phantom"])
def test_the_value_is_the_equilibrium_itself(adjoint):
    cell, x = TanhCell(), normal(3, 4, seed=5)
    deq = DEQ(cell, adjoint=adjoint, tol=Tolerance(rtol=1e-2))
    with torch.no_grad():
        expected = deq(x)
    assert torch.equal(deq(x), expected)


def test_reuse_forward_reaches_the_exact_gradient():
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    inputs = [x, *cell.parameters()]
    exact = gradients(lambda: solve_tightly(cell, EXACT)(x), inputs)
    assert relative_error(gradients(lambda: reusing(cell, refine=100)(x), inputs), exact) < 1e-10


def test_reuse_forward_gradcheck():
    def solve(weight_NN, x_BN):
        return reusing(lambda z, x: torch.tanh(z @ weight_NN.mT + x), refine=100)(x_BN)

    inputs = [matrix(3, norm=0.6, seed=0), normal(2, 3, seed=2)]
    assert torch.autograd.gradcheck(solve, [t.requires_grad_() for t in inputs])


def test_the_error_of_reuse_forward_falls_as_it_is_refined():
    cell = RatedCell()
    x, rate = RatedCell.batch(0.9, 0.8, 0.9)
    exact = gradients(lambda: solve_tightly(cell, EXACT)(x, rate), [cell.weight])
    errors = []
    for refine in (1, 2, 4, 8, 40):
        actual = gradients(lambda k=refine: reusing(cell, refine=k)(x, rate), [cell.weight])
        errors.append(relative_error(actual, exact))
    assert all(b < 0.5 * a for a, b in zip(errors, errors[1:], strict=False))
    assert errors[-1] < 1e-10


def test_the_forward_inverse_is_a_better_start_than_none():
    """SHINE: with refine=1 nothing is corrected, and the gradient still beats the one-step gradient."""
    cell, x = AffineCell(norm=0.9), normal(3, 5, seed=1).requires_grad_()
    v = normal(3, 5, seed=2)
    expected = [v @ cell.inverse()]
    reused = relative_error(torch.autograd.grad(reusing(cell, refine=1)(x), x, v), expected)
    one_step = relative_error(torch.autograd.grad(solve_tightly(cell, OneStep())(x), x, v), expected)
    assert reused < 0.7 * one_step


def test_refinement_stops_at_its_tolerance():
    cell, x = TanhCell(), normal(3, 4, seed=5)
    z, solution = reusing(cell, refine=100, rtol=1e-3)(x, return_solution=True)
    z.sum().backward()
    assert solution.backward.status is Status.CONVERGED
    assert float(solution.backward.residual.max()) <= 1e-3
    assert int(solution.backward.num_evals.max()) < 20


@pytest.mark.parametrize("compact", [True, False])
def test_reuse_forward_treats_a_sample_as_if_it_were_alone(compact):
    """Samples end their forward solves at different times; none may cost another its memory."""
    cell = RatedCell()
    x, rate = RatedCell.batch(0.0, 0.6, 0.9)
    deq = reusing(cell, refine=1, compact=compact)

    def residuals(x, rate):
        z, solution = deq(x, rate, return_solution=True)
        z.sum().backward()
        return solution.backward.residual

    alone = torch.cat([residuals(x[i : i + 1], rate[i : i + 1]) for i in range(3)])
    torch.testing.assert_close(residuals(x, rate), alone, rtol=1e-6, atol=0)


def test_reuse_forward_with_a_memory_that_grows_while_samples_leave():
    cell = RatedCell()
    x, rate = RatedCell.batch(0.0, 0.1, 0.95)
    exact = gradients(lambda: solve_tightly(cell, EXACT)(x, rate), [cell.weight])
    actual = gradients(lambda: reusing(cell, refine=100, memory=30)(x, rate), [cell.weight])
    assert relative_error(actual, exact) < 1e-9


@pytest.mark.parametrize("solver", [Anderson(), Broyden(group="prefix"), Fallback(Broyden(), NewtonKrylov())], ids=repr)
def test_reuse_forward_asks_for_a_broyden_whose_inverse_has_a_transpose(solver):
    """A Fallback would do on most batches, and fail on the first one with a sample that stalls."""
    with pytest.raises(ValueError, match="ReuseForward needs"):
        DEQ(TanhCell(), solver=solver, adjoint=ReuseForward())
    with pytest.raises(ValueError, match="ReuseForward needs"):
        replace(RECIPES["demo"]().model, solver=solver, adjoint=ReuseForward())
    deq, x = DEQ(TanhCell(), adjoint=ReuseForward()), normal(2, 3, 4, seed=5)
    with pytest.raises(ValueError, match="ReuseForward needs"):
        deq(x, solver=solver)
    with torch.no_grad():
        deq(x, solver=solver)  # nothing to reuse, nothing to ask for


@pytest.mark.parametrize(
    ("rule", "settings"),
    [(Phantom, {"steps": 0}), (Phantom, {"damping": 0.0}), (Phantom, {"damping": 1.5}), (ReuseForward, {"refine": 0})],
)
def test_impossible_settings_are_refused(rule, settings):
    with pytest.raises(ValueError, match="must be"):
        rule(**settings)
