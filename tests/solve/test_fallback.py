"""Fallback: samples that one solver cannot solve go on with the next from the best point."""

from typing import Any

import pytest
import torch

from deqkit.solve import (
    GMRES,
    Anderson,
    Broyden,
    Fallback,
    FixedPointIteration,
    NewtonKrylov,
    Status,
    Tolerance,
    fixed_point,
)
from problems import affine_map, expansive, relative_residual

# B samples, N numbers in a state

STALLS = FixedPointIteration()


def quarter_turn(z_BN):
    """Plain iteration goes round in circles; the fixed point is (0, 1)."""
    return torch.stack((-z_BN[:, 1], z_BN[:, 0]), dim=1) + 1


@pytest.mark.parametrize("following", [Anderson(), Broyden(), NewtonKrylov(), GMRES()], ids=lambda s: type(s).__name__)
def test_goes_on_after_a_stall(following):
    z0_BN = torch.full((2, 2), 0.3).double()
    options: dict[str, Any] = dict(tol=Tolerance(rtol=1e-9, patience=10), max_steps=60, throw=False, trace=True)
    alone = fixed_point(quarter_turn, z0_BN, solver=STALLS, **options)
    assert alone.status is Status.STALLED
    chain = fixed_point(quarter_turn, z0_BN, solver=Fallback(STALLS, following), **options)
    assert chain.status is Status.CONVERGED
    torch.testing.assert_close(chain.z, torch.tensor([[0.0, 1.0]] * 2).double(), rtol=1e-8, atol=1e-8)
    assert chain.trace is not None and alone.trace is not None
    assert torch.equal(chain.trace[0][: len(alone.trace[0])], alone.trace[0])
    assert [len(trace) for trace in chain.trace] == chain.num_evals.tolist()
    assert (chain.num_steps < chain.num_evals).all()


def test_goes_on_after_nan_from_the_best_finite_point():
    """f is nan beyond |z| = 50; plain iteration with eigenvalue -3 gets there, Newton does not."""
    problem = expansive(torch.float64)

    def f(z_BN, *args):
        fz_BN = affine_map(z_BN, *args)
        return torch.where(z_BN.abs().amax(1, keepdim=True) > 50, float("nan"), fz_BN)

    options: dict[str, Any] = dict(tol=Tolerance(rtol=1e-9), max_steps=100, throw=False)
    alone = fixed_point(f, problem.z0, problem.args, solver=STALLS, **options)
    assert alone.status is Status.NONFINITE
    chain = fixed_point(f, problem.z0, problem.args, solver=Fallback(STALLS, NewtonKrylov()), **options)
    assert chain.status is Status.CONVERGED
    torch.testing.assert_close(chain.z, problem.z_star, rtol=1e-8, atol=1e-8)


def test_third_solver_is_reached_and_solved_samples_stay():
    def f(z_BN, turns_B1):
        return torch.where(turns_B1, quarter_turn(z_BN), 0.5 * z_BN + 1)

    turns_B1 = torch.tensor([[True], [False]])
    z0_BN = torch.full((2, 2), 0.3).double()
    solver = Fallback(STALLS, FixedPointIteration(damping=1.0), Broyden())
    solution = fixed_point(f, z0_BN, (turns_B1,), solver=solver, tol=Tolerance(rtol=1e-9, patience=5), max_steps=80)
    first = fixed_point(f, z0_BN[1:], (turns_B1[1:],), solver=STALLS, tol=Tolerance(rtol=1e-9), max_steps=80)
    assert torch.equal(solution.z[1:], first.z)


def test_not_used_while_the_first_one_succeeds():
    class Forbidden(FixedPointIteration):
        def init(self, z_BPN, tol):
            raise AssertionError("not needed")

    solution = fixed_point(lambda z: 0.5 * z + 1, torch.zeros(2, 2), solver=Fallback(Anderson(), Forbidden()))
    assert solution.status is Status.CONVERGED


@pytest.mark.parametrize("max_steps", [1, 9, 11, 12, 13, 14, 20, 30])
def test_all_solvers_share_one_budget(max_steps):
    calls = 0

    def f(z_BN):
        nonlocal calls
        calls += 1
        return quarter_turn(z_BN)

    solver = Fallback(STALLS, FixedPointIteration(damping=0.001))
    solution = fixed_point(f, torch.zeros(1, 2).double(), solver=solver, max_steps=max_steps, throw=False)
    assert calls == solution.num_evals.item() <= max_steps
    torch.testing.assert_close(solution.residual, relative_residual(quarter_turn, solution.z), equal_nan=True)


def test_the_verdict_is_about_the_point_returned():
    """The second solver converges at a large point whose absolute residual exceeds that of the small stalled point."""

    def f(z_BN):
        # Below 10: a rotation by a quarter turn, residual below 1. At 1e4 and above: a contraction to 2e4.
        turned_BN = 0.5 * torch.stack((-z_BN[:, 1], z_BN[:, 0]), dim=1) / z_BN.norm(dim=1, keepdim=True)
        return torch.where(z_BN.norm(dim=1, keepdim=True) < 10, turned_BN, 0.5 * z_BN + 1e4)

    class Jump(FixedPointIteration):
        """Plain iteration that first moves far away, as a Newton step may."""

        def step(self, at, state):
            return (torch.where(at.z_BPN.norm() < 10, torch.full_like(at.z_BPN, 1e4), at.fz_BPN)), state

    z0_BN = torch.tensor([[0.5, 0.0]]).double()
    solution = fixed_point(f, z0_BN, solver=Fallback(STALLS, Jump()), tol=Tolerance(rtol=1e-3), max_steps=60)
    assert solution.status is Status.CONVERGED
    assert solution.residual.item() <= 1e-3
    torch.testing.assert_close(solution.z, torch.full((1, 2), 2e4).double(), rtol=1e-2, atol=0)


def test_wrong_members_are_rejected():
    with pytest.raises(ValueError, match="at least two"):
        Fallback(Anderson())
    with pytest.raises(ValueError, match="takes solvers, got 'anderson'"):
        Fallback(Anderson(), "anderson")  # pyright: ignore[reportArgumentType]
    with pytest.raises(ValueError, match="patience must be .*at least 2, got 1"):
        Fallback(Anderson(), Broyden(), patience=1)
    with pytest.raises(ValueError, match='group="sample"'):
        Fallback(Anderson(group="prefix"), Anderson(group="prefix"))
    with pytest.raises(ValueError, match="takes solvers"):
        Fallback(Anderson(), Fallback(Anderson(), Broyden()))  # pyright: ignore[reportArgumentType]
