"""`convergence_trace`: what each evaluation measured, no more and no less."""

import torch

from deqkit.analysis import convergence_trace
from deqkit.solve import Anderson, Broyden, Fallback, FixedPointIteration, Tolerance, fixed_point
from problems import contraction, relative_residual


def test_values_are_the_residuals_of_plain_iteration():
    problem = contraction(norm=0.8, batch=3, size=5, seed=0)
    traces = convergence_trace(
        problem.f, problem.z0, problem.args, solvers={"plain": FixedPointIteration()}, max_steps=12
    )["plain"]
    z, expected = problem.z0, []
    for _ in range(12):
        expected.append(relative_residual(problem.f, z, problem.args))
        z = problem.f(z, *problem.args)
    for sample, trace in enumerate(traces):
        values = torch.stack(expected)[:, sample]
        solved = (values <= 1e-3).nonzero()
        length = int(solved[0]) + 1 if len(solved) else 12
        torch.testing.assert_close(trace, values[:length])


def test_lengths_are_the_evaluations_of_each_sample():
    problem = contraction(norm=0.9, batch=4, size=8, seed=1)
    solvers = {
        "plain": FixedPointIteration(),
        "anderson": Anderson(),
        "chain": Fallback(Broyden(memory=2), Anderson()),
        "short": FixedPointIteration(damping=0.1),
    }
    tol = Tolerance(rtol=1e-6)
    traces = convergence_trace(problem.f, problem.z0, problem.args, solvers=solvers, tol=tol, max_steps=60)
    assert list(traces) == list(solvers)
    for name, solver in solvers.items():
        solution = fixed_point(problem.f, problem.z0, problem.args, solver=solver, tol=tol, max_steps=60, throw=False)
        assert [len(trace) for trace in traces[name]] == solution.num_evals.tolist()
        for trace, residual in zip(traces[name], solution.residual, strict=True):
            assert trace.min() == residual and trace.isfinite().all()
            assert (trace[-1] <= 1e-6) == (len(trace) < 60 or trace[-1] <= 1e-6)
    assert {len(trace) for trace in traces["short"]} == {60}


def test_a_failing_solver_is_shown_as_far_as_it_went():
    traces = convergence_trace(
        lambda z: 1e120 * z + 1, torch.ones(1, 1).double(), solvers={"plain": FixedPointIteration()}
    )["plain"]
    assert len(traces[0]) < 40
    assert not traces[0][-1].isfinite() and traces[0][:-1].isfinite().all()
