"""Derivatives of derivatives: the backward pass is itself an equilibrium."""

import gc

import pytest
import torch
from torch import Tensor

from adjoint.cells import (
    BACKWARD_SOLVERS,
    EXACT,
    TIGHT,
    Budget,
    RatedCell,
    TanhCell,
    loss_of,
    matrix,
    normal,
    relative_error,
    solve_tightly,
)
from deqkit import DEQ, Status
from deqkit.adjoint import Implicit, OneStep, Phantom, ReuseForward, Unrolled
from deqkit.analysis.memory import MemoryMeter
from deqkit.solve import Broyden

# B samples, N numbers in a state

solvers = pytest.mark.parametrize("solver", BACKWARD_SOLVERS.values(), ids=BACKWARD_SOLVERS.keys())


def hessian_vector_product(run, inputs, *, create_graph=False):
    """(d2 loss / d inputs2) v for a fixed v, by two backward passes."""
    grads = torch.autograd.grad(loss_of(run()), inputs, create_graph=True)
    inner = torch.stack([(g * normal(*g.shape, seed=11 + i)).sum() for i, g in enumerate(grads)]).sum()
    return torch.autograd.grad(inner, inputs, create_graph=create_graph)


@solvers
def test_gradgradcheck(solver):
    adjoint = Implicit(solver=solver, tol=TIGHT, max_steps=200)

    def solve(weight_NN, x_BN):
        return solve_tightly(lambda z, x: torch.tanh(z @ weight_NN.mT + x), adjoint)(x_BN)

    inputs = [matrix(2, norm=0.6, seed=0), normal(2, 2, seed=2)]
    assert torch.autograd.gradgradcheck(solve, [t.requires_grad_() for t in inputs])


@solvers
def test_hessian_vector_product_equals_that_of_an_unrolled_network(solver):
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    inputs = [x, *cell.parameters()]
    adjoint = Implicit(solver=solver, tol=TIGHT, max_steps=200)
    actual = hessian_vector_product(lambda: solve_tightly(cell, adjoint)(x), inputs)
    expected = hessian_vector_product(lambda: solve_tightly(cell, Unrolled(steps=300))(x), inputs)
    assert relative_error(actual, expected) < 1e-9


def test_reuse_forward_has_the_same_second_derivative():
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    inputs = [x, *cell.parameters()]
    deq = solve_tightly(cell, ReuseForward(refine=200, tol=TIGHT), solver=Broyden())
    expected = hessian_vector_product(lambda: solve_tightly(cell, Unrolled(steps=300))(x), inputs)
    assert relative_error(hessian_vector_product(lambda: deq(x), inputs), expected) < 1e-9


@pytest.mark.parametrize("adjoint", [OneStep(), Phantom(steps=3)], ids=["one-step", "phantom"])
def test_approximate_rules_are_differentiable_again(adjoint):
    """Their second derivative is that of the steps they take, z* held fixed."""
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    star = solve_tightly(cell)(x).detach()

    def by_hand():
        z = star
        for _ in range(getattr(adjoint, "steps", 1)):
            z = cell(z, x)
        return z

    actual = hessian_vector_product(lambda: solve_tightly(cell, adjoint)(x), [x])
    assert relative_error(actual, hessian_vector_product(by_hand, [x])) < 1e-9


@pytest.mark.parametrize("create_graph", [False, True])
def test_asking_for_a_graph_of_the_second_derivative_does_not_change_it(create_graph):
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    inputs = [x, *cell.parameters()]
    actual = hessian_vector_product(lambda: solve_tightly(cell)(x), inputs, create_graph=create_graph)
    expected = hessian_vector_product(lambda: solve_tightly(cell, Unrolled(steps=300))(x), inputs)
    assert relative_error(actual, expected) < 1e-9


@pytest.mark.parametrize("place", ["argument", "closure"])
def test_derivatives_up_to_the_fourth(place):
    x = normal(3, 2, seed=5)

    def derivatives(adjoint):
        s = torch.tensor(0.3, dtype=torch.float64, requires_grad=True)
        if place == "closure":
            z = solve_tightly(lambda z, x: torch.tanh(s * z.square() + x), adjoint)(x)
        else:
            z = solve_tightly(lambda z, x: torch.tanh(0.3 * z.square() + x), adjoint)(s * x)
        found = [z.pow(3).sum()]
        for _ in range(4):
            found += torch.autograd.grad(found[-1], s, create_graph=True)
        return [t.detach() for t in found]

    assert relative_error(derivatives(EXACT), derivatives(Unrolled(steps=120))) < 1e-8


def test_the_hessian_by_torch_is_symmetric_and_right():
    cell, x = TanhCell(2), normal(1, 2, seed=5)
    found, expected = (
        torch.autograd.functional.hessian(lambda x, a=a: loss_of(solve_tightly(cell, a)(x)), x)
        for a in (EXACT, Unrolled(steps=300))
    )
    assert isinstance(found, Tensor)
    torch.testing.assert_close(found.view(2, 2), found.view(2, 2).mT, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("tied", [False, True])
def test_a_gradient_penalty_trains_what_made_the_input(tied):
    """First derivative, its penalty and one plain backward pass: how second derivatives are used."""
    cell, u = TanhCell(), normal(3, 4, seed=5)
    encoder = cell.weight if tied else matrix(4, norm=1.0, seed=8).requires_grad_()
    inputs = [encoder, *cell.parameters()]

    def penalty(adjoint):
        x = torch.tanh(u @ encoder)
        loss = loss_of(solve_tightly(cell, adjoint)(x))
        (by_x,) = torch.autograd.grad(loss, x, create_graph=True)
        return torch.autograd.grad(loss + by_x.square().sum(), inputs)

    assert relative_error(penalty(EXACT), penalty(Unrolled(steps=300))) < 1e-9


def test_second_derivatives_of_a_batch_whose_samples_end_at_different_times():
    cell = RatedCell()
    x, rate = RatedCell.batch(0.0, 0.1, 0.1, 0.9)
    x.requires_grad_()
    inputs = [x, cell.weight]
    actual = hessian_vector_product(lambda: solve_tightly(cell)(x, rate), inputs)
    expected = hessian_vector_product(lambda: solve_tightly(cell, Unrolled(steps=400))(x, rate), inputs)
    assert relative_error(actual, expected) < 1e-8


@pytest.mark.parametrize("inner_input", ["argument", "closure"])
def test_second_derivatives_of_an_equilibrium_inside_another(inner_input):
    weight, x = matrix(2, norm=0.5, seed=0).requires_grad_(), normal(2, 2, seed=5).requires_grad_()
    left = [100_000]

    def inner_cell(h, z):
        return torch.tanh(Budget.apply(h, left) @ weight.mT + z)

    def run(adjoint):
        def outer(z, x):
            if inner_input == "argument":
                inner = solve_tightly(inner_cell, adjoint)(z)
            else:
                inner = solve_tightly(lambda h: inner_cell(h, z), adjoint)(z0=torch.zeros_like(z))
            return torch.tanh(0.5 * inner + x)

        return solve_tightly(outer, adjoint)(x)

    expected = hessian_vector_product(lambda: run(Unrolled(steps=40)), [weight, x])
    left[0] = 3000
    if inner_input == "closure":
        with pytest.raises(RuntimeError, match="pass that state to the inner DEQ as an argument"):
            hessian_vector_product(lambda: run(EXACT), [weight, x])
        return
    actual = hessian_vector_product(lambda: run(EXACT), [weight, x])
    assert relative_error(actual, expected) < 1e-7  # 40 steps of a map that halves leave 1e-12, squared by nesting


def test_repeated_second_derivatives_leave_no_garbage_behind():
    """Reference cycles would keep every graph until the collector happens to run, on a GPU with all its memory."""
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    meter = MemoryMeter()
    gc.collect()
    gc.disable()
    try:
        with meter:
            held = []
            for _ in range(3):
                hessian_vector_product(lambda: solve_tightly(cell)(x), [x, cell.weight])
                held.append(meter.current_bytes)
    finally:
        gc.enable()
    assert held[1] == held[0] and held[2] == held[0]


def test_the_solves_of_a_second_derivative_are_counted():
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    deq = DEQ(cell, adjoint=EXACT, tol=TIGHT, max_steps=200)
    (grad,) = torch.autograd.grad(loss_of(deq(x)), x, create_graph=True)
    assert deq.backward_verdicts == {Status.CONVERGED: 3}
    grad.sum().backward()
    assert deq.backward_verdicts[Status.CONVERGED] >= 9  # y for dl/dz*, the transposed solve for y, and z* again
