"""What every solver owes every problem it can solve. A new solver joins by a line in `problems.SOLVERS`."""

import dataclasses

import pytest
import torch

from deqkit.solve import Fallback, Status, Tolerance, fixed_point
from deqkit.solve._batch import Batch, Residuals
from deqkit.solve._solver import Evaluation
from problems import (
    PROBLEMS,
    SOLVERS,
    Problem,
    causal_mixing,
    contraction,
    expansive,
    flat,
    leaves,
    relative_residual,
)

TIGHT = Tolerance(rtol=1e-11)


def pairs(dtype):
    """Every solver with every problem it can solve."""
    problems = [make(dtype) for make in PROBLEMS]
    return [
        pytest.param(name, problem, id=f"{name}-{problem.name}".replace(" ", "-"))
        for problem in problems
        for name in SOLVERS
        if problem.solved_by(name)
    ]


def some_problem(name: str, dtype=torch.float64) -> Problem:
    """A problem that this solver can solve: affine for GMRES, causal for prefix grouping."""
    if SOLVERS[name].group == "prefix":
        return causal_mixing(dtype)
    return contraction(norm=0.8, batch=4, size=6, seed=20, dtype=dtype)


def solve(name: str, problem: Problem, tol=TIGHT, max_steps=400, **options):
    return fixed_point(
        problem.f, problem.z0, problem.args, solver=SOLVERS[name], tol=tol, max_steps=max_steps, **options
    )


def assert_near(z, z_star, rtol):
    """Per sample in the norm, as tolerances are meant."""
    error_B = (flat(z) - flat(z_star)).double().norm(dim=1) / flat(z_star).double().norm(dim=1)
    assert error_B.max() <= rtol, error_B


@pytest.mark.parametrize(("name", "problem"), pairs(torch.float64))
def test_reaches_the_known_fixed_point(name, problem):
    solution = solve(name, problem)
    assert solution.status is Status.CONVERGED
    assert (solution.residual <= 1e-11).all()
    assert_near(solution.z, problem.z_star, 2e-9)  # the non-normal map amplifies residuals up to 200 times


@pytest.mark.parametrize(("name", "problem"), pairs(torch.float32))
def test_float32(name, problem):
    solution = solve(name, problem, tol=Tolerance(rtol=3e-6))
    assert all(t.dtype == torch.float32 for t in leaves(solution.z))
    assert_near(
        solution.z, problem.z_star, 1e-3 if problem.name == "non-normal" else 1e-4
    )  # residuals grow up to 250 times there


@pytest.mark.parametrize("name", SOLVERS)
def test_bf16_states_are_solved_to_the_precision_of_bf16(name):
    problem = some_problem(name, torch.bfloat16)
    solution = solve(name, problem, tol=Tolerance(rtol=1e-2), throw=False)
    assert solution.z.dtype == torch.bfloat16 and solution.residual.dtype == torch.float32
    if name == "newton-krylov":  # differences of bf16 values are noise: it may fail, but not with nan
        assert solution.status is not Status.NONFINITE
    else:
        assert solution.status is Status.CONVERGED
    fz, z = problem.f(solution.z, *problem.args).float(), solution.z.float()
    residual_B = (fz - z).flatten(1).norm(dim=1) / fz.flatten(1).norm(dim=1)
    torch.testing.assert_close(solution.residual, residual_B)
    if solution.status is Status.CONVERGED:
        assert_near(solution.z, problem.z_star, 5e-2)  # rtol 1e-2 times ||(I - A)^-1|| <= 5


@pytest.mark.parametrize(("name", "problem"), pairs(torch.float64))
def test_residual_reported_is_that_of_the_point_returned(name, problem):
    for max_steps in (1, 2, 3, 7, 60):
        solution = solve(name, problem, tol=Tolerance(rtol=1e-6), max_steps=max_steps, throw=False)
        residual_B = relative_residual(problem.f, solution.z, problem.args)
        torch.testing.assert_close(solution.residual, residual_B, rtol=1e-6, atol=1e-15)
        norm_B = (flat(problem.f(solution.z, *problem.args)) - flat(solution.z)).norm(dim=1)
        torch.testing.assert_close(solution.residual_norm, norm_B, rtol=1e-6, atol=1e-15)
        converged_B = torch.tensor([status is Status.CONVERGED for status in solution.sample_status])
        assert torch.equal(converged_B, solution.residual <= 1e-6)


@pytest.mark.parametrize(("name", "problem"), pairs(torch.float64))
def test_evaluations_are_counted(name, problem):
    calls = 0

    def counting(z, *args):
        nonlocal calls
        calls += 1
        return problem.f(z, *args)

    counted = dataclasses.replace(problem, f=counting)
    for max_steps in (1, 5, 400):
        calls = 0
        options = {"tol": Tolerance(rtol=1e-8), "max_steps": max_steps, "compact": False, "throw": False, "trace": True}
        solution = solve(name, counted, **options, check_samples=False)
        causal = SOLVERS[name].group == "prefix"  # it may measure once more what it puts together
        assert calls == solution.num_evals.max() <= max_steps + causal
        assert solution.trace is not None
        assert [len(trace) for trace in solution.trace] == solution.num_evals.tolist()
        assert (solution.num_steps < solution.num_evals).all()
        assert (solution.num_steps > 0).any() or max_steps == 1
        for residual, trace in zip(solution.residual, solution.trace, strict=True):
            assert residual == trace.min() or causal
        spent, calls = calls, 0
        again = solve(name, counted, **options)  # and one look on top, at samples that were not seen side by side
        assert spent <= calls <= spent + 1 and torch.equal(again.codes, solution.codes)


@pytest.mark.parametrize("name", SOLVERS)
def test_one_sample_already_solved(name):
    problem = some_problem(name)
    z0 = problem.z0.clone()
    z0[1] = problem.z_star[1]
    start = z0.clone()
    solution = fixed_point(problem.f, z0, problem.args, solver=SOLVERS[name], tol=Tolerance(rtol=1e-9), max_steps=200)
    assert solution.num_evals[1] == 1 and solution.num_steps[1] == 0
    assert torch.equal(solution.z[1], problem.z_star[1])
    assert_near(solution.z, problem.z_star, 1e-8)
    assert torch.equal(z0, start), "the caller's z0 was written to"


@pytest.mark.parametrize("name", SOLVERS)
def test_batch_of_one(name):
    problem = some_problem(name)
    args = tuple(t[:1] for t in problem.args)
    solution = fixed_point(problem.f, problem.z0[:1], args, solver=SOLVERS[name], tol=TIGHT, max_steps=400)
    assert solution.residual.shape == solution.num_evals.shape == (1,)
    assert_near(solution.z, problem.z_star[:1], 1e-9)


@pytest.mark.parametrize("name", SOLVERS)
def test_empty_batch(name):
    problem = some_problem(name)
    args = tuple(t[:0] for t in problem.args)
    solution = fixed_point(problem.f, problem.z0[:0], args, solver=SOLVERS[name], trace=True)
    assert solution.z.shape == problem.z0[:0].shape
    assert solution.status is Status.CONVERGED and solution.sample_status == () and solution.trace == ()
    assert solution.describe() == "empty batch"


@pytest.mark.parametrize("solver", [SOLVERS["anderson"], SOLVERS["anderson-prefix"]], ids=["sample", "prefix"])
def test_no_positions(solver):
    solution = fixed_point(lambda z: z, torch.zeros(2, 0, 3), solver=solver)
    assert solution.z.shape == (2, 0, 3) and solution.status is Status.CONVERGED


@pytest.mark.parametrize("name", SOLVERS)
def test_a_budget_of_one_evaluation_returns_the_start(name):
    problem = some_problem(name)
    solution = solve(name, problem, max_steps=1, throw=False)
    assert torch.equal(solution.z, problem.z0)
    assert set(solution.sample_status) == {Status.MAX_STEPS}
    assert solution.num_evals.tolist() == [1] * len(problem.z0) and solution.num_steps.eq(0).all()


@pytest.mark.parametrize("name", SOLVERS)
def test_without_tolerance_the_budget_buys_the_best_point(name):
    """`Tolerance(rtol=0, atol=0)` runs its full budget; it must not hand back the start."""
    problem = some_problem(name)
    solution = solve(name, problem, tol=Tolerance(rtol=0.0, atol=0.0), max_steps=60, throw=False)
    assert (solution.residual < 1e-4).all()
    assert_near(solution.z, problem.z_star, 1e-3)


def test_plain_iteration_fails_where_the_others_do_not():
    problem = expansive(torch.float64)
    solution = solve("plain", problem, throw=False)
    assert solution.status in (Status.STALLED, Status.NONFINITE)
    assert all(solve(name, problem).status is Status.CONVERGED for name in SOLVERS if problem.solved_by(name))


def test_every_kind_of_solver_is_on_the_list():
    import deqkit.solve

    kinds = {type(solver) for solver in SOLVERS.values()}
    public = {getattr(deqkit.solve, name) for name in deqkit.solve.__all__}
    solvers = {c for c in public if isinstance(c, type) and issubclass(c, deqkit.solve.AbstractSolver | Fallback)}
    assert solvers - {deqkit.solve.AbstractSolver} == kinds


@pytest.mark.parametrize("max_steps", [3, 60])
@pytest.mark.parametrize(("name", "problem"), pairs(torch.float32))
def test_the_usual_step_is_noted_as_any_other(name, problem, max_steps, monkeypatch):
    """Most steps end nothing, and take a shorter way: nothing that is reported may depend on it."""

    def solve():
        return fixed_point(
            problem.f,
            problem.z0,
            problem.args,
            solver=SOLVERS[name],
            tol=Tolerance(rtol=1e-5),
            max_steps=max_steps,
            throw=False,
            trace=True,
        )

    goes_on, taken = Batch.goes_on, []

    def counted(self, *args, **options):
        taken.append(goes_on(self, *args, **options))
        return taken[-1]

    monkeypatch.setattr(Batch, "goes_on", counted)
    short = solve()
    assert any(taken)
    monkeypatch.setattr(Batch, "goes_on", lambda *args, **options: False)
    long = solve()
    for ours, expected in zip(leaves(short.z), leaves(long.z), strict=True):
        assert torch.equal(ours, expected)
    for field in ("residual", "residual_norm", "codes", "num_steps", "num_evals", "amplification"):
        assert torch.equal(getattr(short, field).nan_to_num(-1), getattr(long, field).nan_to_num(-1)), field
    assert short.trace is not None and long.trace is not None
    assert all(torch.equal(a, b) for a, b in zip(short.trace, long.trace, strict=True))


def test_the_short_way_keeps_the_account_of_the_long_one():
    """Residuals of two samples, one of which comes to rest where the other does not fall: each way notes the same."""
    ways = [Batch.new(torch.zeros(2, 1, 1), max_steps=20) for _ in range(2)]
    alive_B = torch.ones(2, dtype=torch.bool)
    for number, norms in enumerate([(1.0, 1.0), (0.5, 2.0), (0.5, 0.9), (0.6, 0.95), (0.4, 3.0)]):
        norm_BP = torch.tensor(norms).double().unsqueeze(1)
        z_BPN = torch.full((2, 1, 1), float(number))
        at = Evaluation(z_BPN, z_BPN, norm_BP.unsqueeze(2), norm_BP, torch.ones_like(norm_BP))
        found = Residuals(at, torch.full_like(norm_BP, 0.1), 10 * norm_BP)
        short, long = ways
        assert short.goes_on(found, None, alive_B, patience=10, causal=False)
        taken_BP = long.judge(found, atol=0.0, patience=10, causal=False)
        long.best_z_BPN = torch.where(taken_BP.unsqueeze(2), z_BPN, long.best_z_BPN)
        long.record(found, alive_B, taken_BP[:, 0], causal=False)
        for name in ("best_z_BPN", "best_BP", "mark_BP", "waited_BP", "norm_B", "steps_B", "evals_B"):
            assert torch.equal(getattr(short, name), getattr(long, name)), (number, name)
