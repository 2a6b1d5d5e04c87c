"""How solves fail: per sample, with a verdict, the best finite point and an error that says what to do."""

import pickle
from typing import Any

import pytest
import torch

from deqkit.solve import (
    Anderson,
    FixedPointIteration,
    NonFiniteError,
    NotConvergedError,
    Status,
    Tolerance,
    fixed_point,
)
from problems import (
    SOLVERS,
    causal_mixing,
    contraction,
    nan_in_marked_samples,
    relative_residual,
    without_fixed_point,
)

# B samples, T positions, D width


def some_problem(name):
    if SOLVERS[name].group == "prefix":
        return causal_mixing(torch.float64, batch=4)
    return contraction(norm=0.9, batch=4, size=12, seed=40)


@pytest.mark.parametrize("evaluation", [1, 2, 3])
@pytest.mark.parametrize("name", SOLVERS)
def test_nan_in_one_sample(name, evaluation):
    """The sample gets NONFINITE and its best finite point; the others' results do not change by a bit."""
    problem, bad = some_problem(name), 2
    marked_B = torch.arange(4) == bad
    options: dict[str, Any] = dict(
        solver=SOLVERS[name], tol=Tolerance(rtol=1e-9), max_steps=200, throw=False, trace=True
    )
    clean = fixed_point(problem.f, problem.z0, problem.args, compact=False, **options)
    for compact in (False, True):
        f = nan_in_marked_samples(problem.f, evaluation=evaluation)
        solution = fixed_point(f, problem.z0, (*problem.args, marked_B), compact=compact, **options)
        assert solution.sample_status[bad] is Status.NONFINITE and solution.status is Status.NONFINITE
        assert solution.z.isfinite().all()
        others = [0, 1, 3]
        if compact:
            torch.testing.assert_close(solution.z[others], clean.z[others], rtol=1e-9, atol=1e-9)
        else:
            assert torch.equal(solution.z[others], clean.z[others])
            assert torch.equal(solution.residual[others], clean.residual[others])
        assert [solution.sample_status[i] for i in others] == [Status.CONVERGED] * 3
        if isinstance(SOLVERS[name], Anderson | FixedPointIteration):
            check_best_finite_point(problem, solution, bad, evaluation)


def check_best_finite_point(problem, solution, bad, evaluation):
    """With f finite at the first points, what is returned is the best of those, with its true residual."""
    if evaluation == 1:
        assert torch.equal(solution.z[bad], problem.z0[bad]) and solution.residual[bad].isnan()
        return
    assert solution.trace[bad][evaluation - 1].isnan()
    residual_B = relative_residual(problem.f, solution.z, problem.args)
    assert residual_B[bad] <= solution.trace[bad][: evaluation - 1].min() * (1 + 1e-9)
    # With prefix grouping the point is put together from the best positions: only f itself, nan by now, could tell.
    if not problem.causal:
        torch.testing.assert_close(solution.residual[bad], residual_B[bad])


@pytest.mark.parametrize("tol", [Tolerance(rtol=0.0, atol=1e-3), Tolerance(rtol=1e-3)], ids=["atol", "rtol"])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_map_without_fixed_point_never_converges(name, tol):
    """z -> z + 1. A solver that runs off to 1e8 makes the residual small only in comparison."""
    z0_BTD = torch.zeros(2, 3, 2).double()
    solution = fixed_point(without_fixed_point, z0_BTD, solver=SOLVERS[name], tol=tol, max_steps=80, throw=False)
    assert set(solution.sample_status) <= {Status.MAX_STEPS, Status.STALLED}
    assert solution.z.isfinite().all()
    torch.testing.assert_close(solution.residual_norm, torch.full((2,), 6.0).double().sqrt())


@pytest.mark.parametrize("small", [1e-6, 1e-9])
def test_a_start_near_an_unstable_point_is_not_a_runaway(small):
    """z = tanh(2 z) + small from 0: the residual starts at `small`, grows as z leaves 0, and then falls."""
    z, num_evals = torch.zeros(1, 4), 1
    while (fz := torch.tanh(2 * z) + small).sub(z).norm() > 1e-3 * fz.norm():
        z, num_evals = fz, num_evals + 1
    solution = fixed_point(
        lambda z: torch.tanh(2 * z) + small, torch.zeros(1, 4), solver=FixedPointIteration(), max_steps=100
    )
    assert solution.num_evals.item() == num_evals
    torch.testing.assert_close(solution.z, z)


def test_a_start_just_above_the_tolerance_converges_as_soon_as_it_is_below():
    """A warm start: residuals fall by 5 percent a step and the tolerance asks for 3 percent less than the start has."""
    z0 = torch.full((1, 1), 1.99, dtype=torch.float64)
    slow = lambda z: 0.95 * z + 0.1  # noqa: E731
    start = fixed_point(slow, z0, solver=FixedPointIteration(), max_steps=1, throw=False).residual.item()
    tol = Tolerance(rtol=0.97 * start)
    solution = fixed_point(slow, z0, solver=FixedPointIteration(), tol=tol)
    assert solution.num_evals.item() == 2


@pytest.mark.parametrize("group", ["sample", "prefix"])
@pytest.mark.parametrize("check_every", [1, 3])
def test_residual_of_a_stalled_sample_in_a_batch_that_goes_on(group, check_every):
    """Sample 0 turns in circles and is given up while sample 1 still converges; both residuals are of the result."""

    def f(z_BTD, gain_B):
        turned_BTD = torch.stack((-z_BTD[..., 1], z_BTD[..., 0]), dim=-1)
        gain_B11 = gain_B.view(-1, 1, 1)
        return torch.where(gain_B11 == 1, turned_BTD, gain_B11 * z_BTD) + 1

    gain_B = torch.tensor([1.0, 0.8]).double()
    z0_BTD = torch.full((2, 3, 2), 0.3).double()
    for compact in (False, True):
        solution = fixed_point(
            f,
            z0_BTD,
            (gain_B,),
            solver=FixedPointIteration(group=group),
            tol=Tolerance(rtol=1e-6, patience=6),
            max_steps=100,
            throw=False,
            compact=compact,
            check_every=check_every,
        )
        assert solution.sample_status == (Status.STALLED, Status.CONVERGED)
        torch.testing.assert_close(solution.residual, relative_residual(f, solution.z, (gain_B,)), rtol=1e-6, atol=0)


@pytest.mark.parametrize("position", [0, 2])
@pytest.mark.parametrize("check_every", [1, 4])
def test_residual_of_a_sample_that_was_nan_somewhere_on_the_way(position, check_every):
    """f is nan beyond 1.7 at one position of sample 0. The point returned is finite, and so must its residual be."""

    def f(z_BTD, x_B):
        fz_BTD = 0.5 * z_BTD + x_B.view(-1, 1, 1)
        fz_BTD[:, position] = torch.where(fz_BTD[:, position] > 1.7, float("nan"), fz_BTD[:, position])
        return fz_BTD

    x_B = torch.tensor([1.0, 0.1]).double()
    for compact in (False, True):
        solution = fixed_point(
            f,
            torch.zeros(2, 3, 2).double(),
            (x_B,),
            solver=FixedPointIteration(group="prefix"),
            tol=Tolerance(rtol=1e-9),
            max_steps=100,
            throw=False,
            compact=compact,
            check_every=check_every,
        )
        assert solution.sample_status == (Status.NONFINITE, Status.CONVERGED)
        torch.testing.assert_close(solution.z[0, :position], torch.full((position, 2), 2.0).double())
        torch.testing.assert_close(solution.residual, relative_residual(f, solution.z, (x_B,)), rtol=1e-6, atol=0)


def test_verdicts_are_ranked_and_the_worst_is_the_batch_s():
    solution = fixed_point(
        lambda z, kind: torch.where(kind == 0, 0.5 * z + 1, torch.where(kind == 1, -z, z * 1e200 + 1)),
        torch.ones(3, 1).double(),
        (torch.arange(3).unsqueeze(1),),
        solver=FixedPointIteration(),
        tol=Tolerance(patience=10),
        max_steps=60,
        throw=False,
    )
    assert solution.sample_status == (Status.CONVERGED, Status.STALLED, Status.NONFINITE)
    assert solution.status is Status.NONFINITE
    assert [status.severity for status in Status] == [0, 1, 2, 3]
    assert "1 CONVERGED, 1 STALLED, 1 NONFINITE" in solution.describe()


def test_failing_raises_with_the_solution_and_a_remedy():
    problem = contraction(norm=0.95, batch=3, size=12, seed=41)
    with pytest.raises(NotConvergedError, match="MAX_STEPS for sample 0, 1, 2 .*raise max_steps.*5-5 eval") as error:
        fixed_point(problem.f, problem.z0, problem.args, tol=Tolerance(rtol=1e-12), max_steps=5)
    assert not isinstance(error.value, NonFiniteError)
    solution = error.value.solution
    torch.testing.assert_close(solution.residual, relative_residual(problem.f, solution.z, problem.args))
    with pytest.raises(NotConvergedError, match="STALLED for sample 1 .*tolerance is below rounding"):
        fixed_point(
            lambda z, turn: torch.where(turn, -z, 0.5 * z + 1),
            torch.ones(2, 1),
            (torch.tensor([[False], [True]]),),
            solver=FixedPointIteration(),
            tol=Tolerance(patience=10),
        )


def test_nonfinite_raises_its_own_error():
    with pytest.raises(NonFiniteError, match="NONFINITE for sample 0 .*inf or nan") as error:
        fixed_point(lambda z: z * 1e200 + 1, torch.ones(1, 1).double(), solver=FixedPointIteration())
    assert issubclass(NonFiniteError, NotConvergedError) and issubclass(NotConvergedError, RuntimeError)
    assert error.value.solution.z.isfinite().all()


def test_errors_survive_pickling():
    """Data loaders and process groups send exceptions between processes."""
    with pytest.raises(NotConvergedError) as error:
        fixed_point(without_fixed_point, torch.zeros(1, 1), max_steps=3)
    copy = pickle.loads(pickle.dumps(error.value))
    assert type(copy) is NotConvergedError and str(copy) == str(error.value)
    assert torch.equal(copy.solution.z, error.value.solution.z)


def test_many_failing_samples_are_not_all_listed():
    with pytest.raises(NotConvergedError, match=r"sample 0, 1, 2, 3, 4, 5, 6, 7, \.\.\. "):
        fixed_point(without_fixed_point, torch.zeros(100, 1), max_steps=2)
