"""Causal acceleration: with group="prefix" no later token changes an earlier position, whatever the solve is doing."""

import dataclasses
import functools
from typing import Any

import pytest
import torch

from deqkit.solve import Anderson, Broyden, FixedPointIteration, Status, Tolerance, fixed_point
from problems import causal_attention, causal_mixing, normal

# B samples, T positions, D width

CAUSAL = {
    "plain": FixedPointIteration(group="prefix"),
    "anderson": Anderson(group="prefix"),
    "anderson-mixing": Anderson(group="prefix", memory=3, mixing=0.5),
    "broyden": Broyden(group="prefix"),
    "broyden-damped": Broyden(group="prefix", memory=3, damping=0.7),
}
CUT = 5  # tokens from here on are changed


@functools.cache
def problem_and_changed_tokens(gain=2.5, length=9):
    """A causal attention map, stiff enough to take some 30 steps, and inputs that differ from position CUT on."""
    problem = causal_attention(torch.float64, batch=2, length=length, gain=1.0)
    x_BTD = gain * problem.args[0]
    changed_BTD = x_BTD.clone()
    changed_BTD[:, CUT:] = 5 * normal(70, 2, length - CUT, 4)
    return problem.f, problem.z0, x_BTD, changed_BTD


def leak(solver, *, max_steps, tol, compact=False, check_every=1):
    """Largest change at positions before CUT."""
    f, z0_BTD, x_BTD, changed_BTD = problem_and_changed_tokens()
    options: dict[str, Any] = dict(
        solver=solver, tol=tol, max_steps=max_steps, throw=False, compact=compact, check_every=check_every
    )
    before = fixed_point(f, z0_BTD, (x_BTD,), **options).z[:, :CUT]
    after = fixed_point(f, z0_BTD, (changed_BTD,), **options).z[:, :CUT]
    return (before - after).abs().max().item()


@pytest.mark.parametrize("rtol", [1e-1, 1e-3, 1e-12])
@pytest.mark.parametrize("name", CAUSAL)
def test_later_tokens_leave_every_bit_of_earlier_positions_alone(name, rtol):
    for max_steps in range(1, 26):
        assert leak(CAUSAL[name], max_steps=max_steps, tol=Tolerance(rtol=rtol)) == 0, max_steps


@pytest.mark.parametrize("tol", [Tolerance(rtol=0.0, atol=1e-4, per_token=True), Tolerance(rtol=1e-14, patience=3)])
@pytest.mark.parametrize("name", CAUSAL)
def test_stopping_and_stalling_do_not_leak_either(name, tol):
    for max_steps, check_every in ((12, 1), (60, 1), (60, 7), (200, 1)):
        assert leak(CAUSAL[name], max_steps=max_steps, tol=tol, check_every=check_every) == 0


@pytest.mark.parametrize("name", CAUSAL)
def test_with_compaction_to_rounding(name):
    for max_steps in (3, 10, 60):
        assert leak(CAUSAL[name], max_steps=max_steps, tol=Tolerance(rtol=1e-3), compact=True) < 1e-12


@pytest.mark.parametrize("solver", [Anderson(), Broyden()], ids=["anderson", "broyden"])
def test_grouping_by_sample_leaks(solver):
    """The control: without it, the tests above could not fail."""
    assert max(leak(solver, max_steps=steps, tol=Tolerance(rtol=1e-3)) for steps in range(1, 26)) > 1e-3


def test_stopping_by_the_sample_leaks():
    """Even plain iteration is not causal if the whole sample decides when to stop."""
    assert max(leak(FixedPointIteration(), max_steps=60, tol=Tolerance(rtol=10.0**-k)) for k in range(1, 5)) > 1e-4


@pytest.mark.parametrize("name", CAUSAL)
def test_nan_at_a_later_position_leaves_the_earlier_ones_alone(name):
    f, z0_BTD, x_BTD, _ = problem_and_changed_tokens()

    def poisoned(z_BTD, x_BTD):
        fz_BTD = f(z_BTD.nan_to_num(), x_BTD)
        fz_BTD[0, CUT:] = float("nan")
        return fz_BTD

    options: dict[str, Any] = dict(
        solver=CAUSAL[name], tol=Tolerance(rtol=1e-8), max_steps=100, throw=False, compact=False
    )
    clean, solution = fixed_point(f, z0_BTD, (x_BTD,), **options), fixed_point(poisoned, z0_BTD, (x_BTD,), **options)
    assert torch.equal(solution.z[0, :CUT], clean.z[0, :CUT])
    assert torch.equal(solution.z[1], clean.z[1])
    assert solution.sample_status == (Status.NONFINITE, Status.CONVERGED)


@pytest.mark.parametrize("name", CAUSAL)
def test_first_positions_do_not_know_how_long_the_sequence_is(name):
    """A solve of the prefix alone gives the prefix of the solve: what cached decoding relies on."""
    problem = causal_mixing(torch.float64, length=8)
    options: dict[str, Any] = dict(solver=CAUSAL[name], tol=Tolerance(rtol=1e-6), throw=False, compact=False)
    for max_steps in (2, 6, 100):
        whole = fixed_point(problem.f, problem.z0, problem.args, max_steps=max_steps, **options)
        part = fixed_point(problem.f, problem.z0[:, :3], (problem.args[0][:, :3],), max_steps=max_steps, **options)
        assert torch.equal(whole.z[:, :3], part.z)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=["float64", "float32"])
@pytest.mark.parametrize("name", CAUSAL)
def test_converges_to_the_floor_of_the_dtype(name, dtype):
    """A prototype stalled at 1e-3 once the first positions had converged."""
    problem = causal_attention(dtype, length=12, gain=1.1)
    rtol = 8 * torch.finfo(dtype).eps
    solution = fixed_point(
        problem.f, problem.z0, problem.args, solver=CAUSAL[name], tol=Tolerance(rtol=rtol), max_steps=600
    )
    error_BT = (solution.z - problem.z_star).norm(dim=2) / problem.z_star.norm(dim=2)
    assert error_BT.max() < 100 * rtol


def test_every_position_is_converged_on_its_own():
    """Early positions are judged by themselves, so a large late position cannot hide their residual."""
    problem = causal_mixing(torch.float64, length=6)
    x_BTD = problem.args[0].clone()
    x_BTD[:, 4:] *= 100
    solution = fixed_point(
        problem.f, problem.z0, (x_BTD,), solver=CAUSAL["anderson"], tol=Tolerance(rtol=1e-4), max_steps=100
    )
    fz_BTD = problem.f(solution.z, x_BTD)
    norm_BT = (fz_BTD - solution.z).norm(dim=2).square().cumsum(1).sqrt()
    scale_BT = fz_BTD.norm(dim=2).square().cumsum(1).sqrt()
    assert (norm_BT <= 1e-4 * scale_BT * (1 + 1e-9)).all()


@pytest.mark.parametrize("name", ["anderson", "broyden"])
def test_no_more_evaluations_than_grouping_by_sample(name):
    problem = causal_attention(torch.float64, batch=4, length=16, gain=1.2)
    by_prefix = CAUSAL[name]
    by_sample = dataclasses.replace(by_prefix, group="sample")
    prefix, sample = (
        fixed_point(problem.f, problem.z0, problem.args, solver=solver, tol=Tolerance(rtol=1e-6), max_steps=200)
        for solver in (by_prefix, by_sample)
    )
    assert prefix.num_evals.sum() <= 1.1 * sample.num_evals.sum() + 4


@pytest.mark.parametrize("max_steps", [1, 2, 3, 6])
def test_the_whole_budget_is_spent_on_steps(max_steps):
    """On a contraction every evaluation is the best so far, at every position: nothing is left to measure."""
    x_BTD = normal(3, 2, 5, 4)
    options: dict[str, Any] = {"max_steps": max_steps, "tol": Tolerance(rtol=1e-12), "throw": False}
    solution = fixed_point(
        lambda z, x: 0.5 * z + x, x_BTD, (x_BTD,), solver=FixedPointIteration(group="prefix"), **options
    )
    assert solution.num_evals.tolist() == [max_steps] * 2
    assert torch.allclose(solution.z, (2 - 0.5 ** (max_steps - 1)) * x_BTD)


def test_what_is_measured_in_the_end_is_not_the_neighbours_affair():
    f, z0_BTD, x_BTD, _ = problem_and_changed_tokens()
    x_BTD = torch.stack([x_BTD[0], 0.1 * x_BTD[1]])  # the second is easy
    counts = set()
    for max_steps in range(2, 20):
        options: dict[str, Any] = {
            "solver": Broyden(group="prefix"), "max_steps": max_steps, "tol": Tolerance(rtol=1e-12), "throw": False,
        }  # fmt: skip
        together = fixed_point(f, z0_BTD, (x_BTD,), **options).num_evals.tolist()
        alone = [int(fixed_point(f, z0_BTD[i : i + 1], (x_BTD[i : i + 1],), **options).num_evals) for i in range(2)]
        assert together == alone
        counts |= {count - max_steps for count in together}
    assert {0, 1} <= counts  # else nothing was seen
