"""Optimality on affine problems, where Anderson's method and GMRES have theory, and freedom from units."""

import math
from typing import Any

import numpy as np
import pytest
import scipy.sparse.linalg
import torch

from deqkit.solve import GMRES, Anderson, Broyden, NewtonKrylov, Status, Tolerance, fixed_point
from problems import affine_map, contraction, evaluation, expansive, non_normal, normal

# B samples, N numbers in a state

AFFINE = {
    "contraction": contraction(norm=0.95, batch=3, size=10, seed=60),
    "expansive": expansive(torch.float64),
    "non-normal": non_normal(torch.float64),
}


@pytest.mark.parametrize("problem", AFFINE.values(), ids=AFFINE)
def test_anderson_with_full_memory_ends_after_as_many_steps_as_unknowns(problem):
    size = problem.z0.shape[1]
    solver = Anderson(memory=size, ridge=0.0)
    solution = fixed_point(
        problem.f, problem.z0, problem.args, solver=solver, tol=Tolerance(rtol=1e-8), max_steps=size + 2
    )
    assert (solution.num_evals <= size + 2).all()


@pytest.mark.parametrize("problem", AFFINE.values(), ids=AFFINE)
def test_gmres_ends_after_as_many_steps_as_unknowns(problem):
    size = problem.z0.shape[1]
    solution = fixed_point(
        problem.f, problem.z0, problem.args, solver=GMRES(), tol=Tolerance(rtol=1e-10), max_steps=size + 2
    )
    assert solution.status is Status.CONVERGED


def reference_residuals(a_NN, b_N, z0_N):
    """Norms of scipy's GMRES on (I - A) z = b after each product."""
    norms = []
    scipy.sparse.linalg.gmres(
        np.eye(len(b_N)) - a_NN.numpy(),
        b_N.numpy(),
        x0=z0_N.numpy(),
        rtol=1e-12,
        restart=len(b_N),
        maxiter=1,
        callback=norms.append,
        callback_type="pr_norm",
    )
    return np.array(norms) * float(b_N.norm())  # scipy reports them relative to b


@pytest.mark.parametrize("start", [0.0, 100.0])
def test_gmres_needs_no_more_products_than_scipy_s(start):
    """From far away too, where the size of the solution, and with it the tolerance, is not that of the start."""
    problem = contraction(norm=0.95, batch=3, size=20, seed=61)
    a_BNN, b_BN = problem.args
    z0_BN = start * normal(66, 3, 20)
    for rtol in (1e-2, 1e-4, 1e-8):
        solution = fixed_point(problem.f, z0_BN, problem.args, solver=GMRES(), tol=Tolerance(rtol=rtol))
        for sample in range(3):
            bound = 0.95 * rtol * float(problem.f(solution.z, *problem.args)[sample].norm())
            products = 1 + int(np.argmax(reference_residuals(a_BNN[sample], b_BN[sample], z0_BN[sample]) <= bound))
            # One evaluation for f(z0), one for each product, one to measure the result; the size of f(z) is a guess.
            assert solution.num_evals[sample] - (products + 2) in (-1, 0, 1)


def test_anderson_is_gmres_in_disguise():
    """Walker and Ni 2011: with full memory and mixing 1, z_{k+1} = f(z_k of GMRES) while GMRES makes progress."""
    problem = contraction(norm=0.95, batch=1, size=12, seed=62)
    a_NN, b_N = problem.args[0][0], problem.args[1][0]
    solver = Anderson(memory=20, ridge=0.0)
    z_BPN = problem.z0.view(1, 1, -1)
    state = solver.init(z_BPN, Tolerance())
    krylov = [b_N]
    for step in range(8):
        fz_BPN = affine_map(z_BPN[:, 0], *problem.args).unsqueeze(1)
        z_BPN, state = solver.step(evaluation(z_BPN, fz_BPN), state)
        if step > 0:
            # The point of smallest residual in span(r, ..., (I-A)^(k-1) r), densely, then one plain step.
            basis_NM = torch.stack(krylov, dim=1)
            product_NM = basis_NM - a_NN @ basis_NM
            best_N = basis_NM @ torch.linalg.lstsq(product_NM, b_N, driver="gelsd").solution
            torch.testing.assert_close(z_BPN.flatten(), a_NN @ best_N + b_N, rtol=1e-6, atol=1e-6)
            krylov.append(product_NM[:, -1] / product_NM[:, -1].norm())


@pytest.mark.parametrize("memory", [1, 2, 4])
def test_anderson_step_minimises_over_its_memory(memory):
    """gamma is the least-squares solution over the last differences, the definition of the method."""
    problem = contraction(norm=0.9, batch=1, size=8, seed=63)
    solver = Anderson(memory=memory, mixing=0.7, ridge=0.0)
    z_BPN = problem.z0.view(1, 1, -1)
    state, z_N, r_N = solver.init(z_BPN, Tolerance()), [], []
    for _ in range(7):
        fz_BPN = affine_map(z_BPN[:, 0], *problem.args).unsqueeze(1)
        z_N.append(z_BPN.flatten())
        r_N.append((fz_BPN - z_BPN).flatten())
        z_BPN, state = solver.step(evaluation(z_BPN, fz_BPN), state)
        expected_N = z_N[-1] + 0.7 * r_N[-1]
        if len(z_N) > 1:
            dz_NM = torch.stack(z_N, dim=1).diff(dim=1)[:, -memory:]
            dr_NM = torch.stack(r_N, dim=1).diff(dim=1)[:, -memory:]
            gamma_M = torch.linalg.lstsq(dr_NM, r_N[-1]).solution
            expected_N = expected_N - (dz_NM + 0.7 * dr_NM) @ gamma_M
        torch.testing.assert_close(z_BPN.flatten(), expected_N, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("scale", [1e-8, 1e8])
@pytest.mark.parametrize(
    "solver", [Anderson(), Anderson(mixing=0.5, memory=3), Broyden(), GMRES(), GMRES(restart=4)], ids=repr
)
def test_units_do_not_matter_in_float32(solver, scale):
    """Backward systems have right-hand sides of any size; torchdeq's absolute ridge stalls at 1e-8."""
    problem = contraction(norm=0.95, batch=3, size=10, seed=64, dtype=torch.float32)
    a_BNN, b_BN = problem.args
    options: dict[str, Any] = dict(solver=solver, tol=Tolerance(rtol=1e-5), max_steps=120)
    plain = fixed_point(problem.f, problem.z0, (a_BNN, b_BN), **options)
    scaled = fixed_point(problem.f, problem.z0, (a_BNN, scale * b_BN), **options)
    assert plain.num_evals.tolist() == scaled.num_evals.tolist()
    torch.testing.assert_close(scaled.z / scale, plain.z, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("group", ["sample", "prefix"])
@pytest.mark.parametrize("make", [Anderson, Broyden], ids=lambda c: c.__name__)
def test_powers_of_two_scale_every_bit(make, group):
    problem = contraction(norm=0.95, batch=2, size=12, seed=65, dtype=torch.float32)
    triangular_BNN = problem.args[0].tril()
    options: dict[str, Any] = dict(solver=make(group=group), tol=Tolerance(rtol=1e-5), max_steps=120)
    z0_BN1 = problem.z0.unsqueeze(2)
    f = lambda z, a, b: a @ z + b  # noqa: E731
    b_BN1 = problem.args[1].unsqueeze(2)
    plain = fixed_point(f, z0_BN1, (triangular_BNN, b_BN1), **options)
    scaled = fixed_point(f, z0_BN1, (triangular_BNN, 2.0**-27 * b_BN1), **options)
    assert torch.equal(scaled.z, 2.0**-27 * plain.z)


@pytest.mark.parametrize("solver", [Anderson(), Broyden(), GMRES()], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("scale", [1e-20, 1e-25])
def test_tiny_numbers_do_not_pass_for_solved(solver, scale):
    problem = contraction(norm=0.95, batch=2, size=10, seed=67, dtype=torch.float32)
    a_BNN, b_BN = problem.args[0], scale * problem.args[1]
    solution = fixed_point(problem.f, problem.z0, (a_BNN, b_BN), solver=solver, tol=Tolerance(rtol=1e-5), throw=False)
    fz_BN = problem.f(solution.z, a_BNN, b_BN).double()
    true_B = (fz_BN - solution.z.double()).norm(dim=1) / fz_BN.norm(dim=1)
    assert solution.status is not Status.CONVERGED or (true_B < 2e-5).all()


def test_a_restart_survives_residuals_whose_squares_underflow():
    """Gradients of size 1e-20 in float32: the norm of what a restart begins with must not come out as zero."""
    problem = contraction(norm=0.9, batch=2, size=10, seed=68, dtype=torch.float32)
    a_BNN, b_BN = problem.args
    options: dict[str, Any] = dict(solver=GMRES(restart=4), tol=Tolerance(rtol=1e-4), max_steps=120)
    plain = fixed_point(problem.f, problem.z0, (a_BNN, b_BN), **options)
    tiny = fixed_point(problem.f, problem.z0, (a_BNN, 1e-20 * b_BN), **options)
    torch.testing.assert_close(1e20 * tiny.z, plain.z, rtol=1e-3, atol=1e-3)


def test_newton_krylov_halves_steps_that_go_too_far():
    """arctan, the textbook case: full Newton steps on atan(z) = 0 diverge from |z0| > 1.39."""
    solution = fixed_point(
        lambda z: z - torch.atan(z),
        torch.full((1, 1), 10.0).double(),
        solver=NewtonKrylov(),
        tol=Tolerance(rtol=0.0, atol=1e-10),
        max_steps=80,
    )
    assert solution.z.abs().max() < 1e-9


def test_newton_krylov_finds_an_equilibrium_that_repels():
    """z = cos(3 z) has slope -2.8 at its root in (0, 1), where cos(3 z) - z falls: bisection gives the answer."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if math.cos(3 * middle) > middle else (low, middle)
    solution = fixed_point(
        lambda z: torch.cos(3 * z),
        torch.tensor([[0.3], [0.5]]).double(),
        solver=NewtonKrylov(forcing=1e-3),
        tol=Tolerance(rtol=1e-13),
        max_steps=20,
    )
    torch.testing.assert_close(solution.z, torch.full((2, 1), low, dtype=torch.float64), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("near", [0.0, 0.9, 0.999])
def test_arnoldi_basis_is_orthonormal_and_projects_the_operator(near):
    """V'V = I and V'(I - J)V = H against dense products, where one pass of Gram-Schmidt would do and where not."""
    a_BNN = near * torch.eye(30).double() + (1 - near) * contraction(norm=0.9, batch=3, size=30, seed=70).args[0]
    # A neighbour for which one pass is enough must not spare the others the second.
    a_BNN[0] = normal(71, 30, 30)
    b_BN = normal(72, 3, 30)
    solver = GMRES(restart=12)
    z_BPN = torch.zeros(3, 1, 30, dtype=torch.float64)
    state = solver.init(z_BPN, Tolerance(rtol=0.0))
    for _ in range(12):
        fz_BPN = affine_map(z_BPN[:, 0], a_BNN, b_BN).unsqueeze(1)
        z_BPN, state = solver.step(evaluation(z_BPN, fz_BPN), state)
    basis_BMN = state[0].basis_BMN[:, :12]
    eye_MM = torch.eye(12).double().expand(3, 12, 12)
    torch.testing.assert_close(basis_BMN @ basis_BMN.mT, eye_MM, rtol=0, atol=2e-14)
    projected_BMM = basis_BMN @ (torch.eye(30).double() - a_BNN) @ basis_BMN.mT
    torch.testing.assert_close(projected_BMM[:, :, :11], state[0].hessenberg_BMM[:, :12, :11], rtol=0, atol=1e-12)


def test_newton_krylov_keeps_its_pace_where_j_is_close_to_the_identity():
    """Eigenvalues of I - J from 1 to 1e-4 in float32. Was a bug: 1 - v.Jv lost their digits, at 54 evaluations."""
    q_BNN, _ = torch.linalg.qr(normal(73, 48, 20, 20))
    a_BNN = torch.eye(20).double() - q_BNN @ (torch.logspace(0, -4, 20).double().unsqueeze(1) * q_BNN.mT)
    args = (a_BNN.float(), normal(74, 48, 20).float())
    options: dict[str, Any] = dict(solver=NewtonKrylov(), tol=Tolerance(rtol=1e-4), max_steps=150, throw=False)
    solution = fixed_point(affine_map, torch.zeros(48, 20), args, **options)
    assert solution.num_evals.double().mean() < 42
