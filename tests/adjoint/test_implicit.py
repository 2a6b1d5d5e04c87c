"""The implicit gradient three ways: finite differences, an unrolled network, the closed form."""

import pytest
import torch

from adjoint.cells import (
    BACKWARD_SOLVERS,
    TIGHT,
    AffineCell,
    TanhCell,
    gradients,
    loss_of,
    matrix,
    normal,
    relative_error,
    solve_tightly,
)
from deqkit import Status, Tolerance
from deqkit.adjoint import Implicit, Unrolled
from deqkit.solve import Anderson, Fallback, NewtonKrylov

# B samples, N numbers in a state

solvers = pytest.mark.parametrize("solver", BACKWARD_SOLVERS.values(), ids=BACKWARD_SOLVERS.keys())


def implicit(solver, **settings):
    return Implicit(solver=solver, tol=TIGHT, max_steps=400, **settings)


@solvers
def test_gradcheck(solver):
    def solve(weight_NN, bias_N, x_BN):
        return solve_tightly(lambda z, x: torch.tanh(z @ weight_NN.mT + x + bias_N), implicit(solver))(x_BN)

    inputs = [matrix(3, norm=0.6, seed=0), normal(3, seed=1), normal(2, 3, seed=2)]
    assert torch.autograd.gradcheck(solve, [t.requires_grad_() for t in inputs])


@solvers
def test_equals_a_network_unrolled_until_it_no_longer_changes(solver):
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    inputs = [x, *cell.parameters()]
    unrolled = gradients(lambda: solve_tightly(cell, Unrolled(steps=300))(x), inputs)
    assert relative_error(gradients(lambda: solve_tightly(cell, implicit(solver))(x), inputs), unrolled) < 1e-10


@solvers
def test_equals_the_closed_form_of_a_linear_map(solver):
    """z = A z + x: with y = (I - A)^-T dl/dz, dl/dx = y and dl/dA = y z'."""
    cell, x = AffineCell(), normal(3, 5, seed=5).requires_grad_()
    actual = gradients(lambda: solve_tightly(cell, implicit(solver))(x), [x, cell.weight])
    z = (x.detach() @ cell.inverse().mT).requires_grad_()
    (v,) = torch.autograd.grad(loss_of(z), z)
    y = v @ cell.inverse()
    assert relative_error(actual, [y, y.mT @ z]) < 1e-10


@pytest.mark.parametrize("norm", [0.1, 0.9, 0.99])
def test_equals_the_closed_form_however_stiff_the_map_is(norm):
    cell, x = AffineCell(norm=norm), normal(2, 5, seed=1).requires_grad_()
    # Errors are residuals times ||(I - A)^-1||, up to 100 here.
    v = normal(2, 5, seed=2)
    z = solve_tightly(cell, max_steps=2000)(x)
    assert relative_error(torch.autograd.grad(z, x, v), [v @ cell.inverse()]) < 1e-9


def test_a_repelling_equilibrium_has_its_gradient_too():
    """Plain iteration runs away from it, so only the implicit rule can differentiate it."""
    cell, x = AffineCell(norm=3.0, seed=4), normal(2, 5, seed=1).requires_grad_()
    radius = torch.linalg.eigvals(cell.weight.detach()).abs().max()
    assert radius > 1.1
    solver = NewtonKrylov()
    z = solve_tightly(cell, implicit(solver), solver=solver)(x)
    v = normal(2, 5, seed=2)
    assert relative_error([z], [x @ cell.inverse().mT]) < 1e-9
    assert relative_error(torch.autograd.grad(z, x, v), [v @ cell.inverse()]) < 1e-9


@solvers
def test_the_error_falls_with_the_backward_tolerance(solver):
    cell, x = AffineCell(norm=0.9), normal(3, 5, seed=1).requires_grad_()
    v = normal(3, 5, seed=2)
    expected = v @ cell.inverse()
    errors = []
    for rtol in (1e-1, 1e-3, 1e-5, 1e-7, 1e-9):
        deq = solve_tightly(cell, Implicit(solver=solver, tol=Tolerance(rtol=rtol), max_steps=400))
        z, solution = deq(x, return_solution=True)
        errors.append(relative_error(torch.autograd.grad(z, x, v), [expected]))
        assert solution.backward.status is Status.CONVERGED
        # ||error|| <= ||(I - A)^-1|| ||residual|| <= 10 rtol ||y||, with some room as rtol refers to J'y + v.
        assert errors[-1] <= 11 * rtol
    # Some solvers overshoot at once; over the whole range each must follow the tolerance.
    assert all(b <= a for a, b in zip(errors, errors[1:], strict=False))
    assert errors[-1] < 1e-5 * max(errors[0], 1e-3)


def test_a_budget_of_one_product_gives_the_one_step_gradient():
    """Starting at y = v, one product only measures v, and the gradient is (df/dtheta)'v."""
    cell, x = AffineCell(), normal(3, 5, seed=1).requires_grad_()
    z, solution = solve_tightly(cell, Implicit(max_steps=1))(x, return_solution=True)
    v = normal(3, 5, seed=2)
    torch.testing.assert_close(torch.autograd.grad(z, x, v)[0], v)
    assert solution.backward.status is Status.MAX_STEPS


def test_a_chain_of_backward_solvers_gives_the_exact_gradient():
    cell, x = AffineCell(norm=0.9), normal(3, 5, seed=1).requires_grad_()
    adjoint = implicit(Fallback(Anderson(memory=1), NewtonKrylov()))
    v = normal(3, 5, seed=2)
    assert relative_error(torch.autograd.grad(solve_tightly(cell, adjoint)(x), x, v), [v @ cell.inverse()]) < 1e-9


def test_state_of_several_tensors_and_a_loss_on_one_of_them():
    weight = matrix(6, norm=0.7, seed=0)

    def cell(z, x):
        both = torch.cat((z["a"], z["b"]), 1) @ weight.mT
        return {"a": torch.tanh(both[:, :2] + x), "b": torch.tanh(both[:, 2:])}

    def solve(x, adjoint):
        z0 = {"a": torch.zeros(3, 2, dtype=torch.float64), "b": torch.zeros(3, 4, dtype=torch.float64)}
        return solve_tightly(cell, adjoint)(x, z0=z0)["b"]

    x = normal(3, 2, seed=1).requires_grad_()
    exact = gradients(lambda: solve(x, implicit(Anderson())), [x])
    assert relative_error(exact, gradients(lambda: solve(x, Unrolled(steps=300)), [x])) < 1e-10


@pytest.mark.parametrize("scale", [2.0**-60, 2.0**60])
def test_the_gradient_scales_with_the_loss_to_the_last_bit(scale):
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    deq = solve_tightly(cell, Implicit())
    (plain,) = torch.autograd.grad(deq(x).sum(), x)
    (scaled,) = torch.autograd.grad(scale * deq(x).sum(), x)
    assert torch.equal(scaled, scale * plain)


@pytest.mark.parametrize("grad_rtol", [0.0, 1.0, -1e-3])
def test_a_grad_rtol_outside_zero_to_one_is_refused(grad_rtol):
    with pytest.raises(ValueError, match="grad_rtol"):
        Implicit(grad_rtol=grad_rtol)


def test_a_causal_backward_solver_is_refused():
    with pytest.raises(ValueError, match="group"):
        Implicit(solver=Anderson(group="prefix"))
