"""A small transformer cell, hard enough to tell solvers apart: torchdeq's limited-memory Broyden is nan on it."""

import pytest
import torch

from deqkit.solve import Anderson, Broyden, FixedPointIteration, Status, Tolerance, fixed_point
from problems import transformer_cell


@pytest.mark.parametrize("rtol", [1e-3, 1e-5])
@pytest.mark.parametrize(
    "solver",
    [
        FixedPointIteration(),
        FixedPointIteration(group="prefix"),
        Anderson(),
        Anderson(memory=3),
        Broyden(),
        Broyden(group="prefix"),
    ],
    ids=repr,
)
def test_every_solver_does_what_plain_iteration_can(solver, rtol):
    """With the default patience: Anderson passes a plateau of 30 evaluations here, no reason to give up."""
    cell, x_BTD = transformer_cell()
    solution = fixed_point(
        cell, torch.zeros_like(x_BTD), (x_BTD,), solver=solver, tol=Tolerance(rtol=rtol), max_steps=300, throw=False
    )
    assert solution.status is Status.CONVERGED, solution.describe()


@pytest.mark.xfail(strict=False, reason="an early position stagnates at a kink (hangs on rounding): a record")
@pytest.mark.parametrize("rtol", [1e-3, 1e-5])
def test_anderson_prefix_does_what_plain_iteration_can(rtol):
    cell, x_BTD = transformer_cell()
    fixed_point(
        cell,
        torch.zeros_like(x_BTD),
        (x_BTD,),
        solver=Anderson(group="prefix"),
        tol=Tolerance(rtol=rtol),
        max_steps=300,
    )


@pytest.mark.parametrize("group", ["sample", "prefix"])
@pytest.mark.parametrize("memory", [3, 10])
def test_limited_memory_is_stable_on_a_transformer_cell(memory, group):
    """torchdeq's Broyden with 3 or 10 vectors is nan on this cell (PEERS.md 1.5, 2)."""
    cell, x_BTD = transformer_cell()
    solution = fixed_point(
        cell,
        torch.zeros_like(x_BTD),
        (x_BTD,),
        solver=Broyden(memory=memory, group=group),
        tol=Tolerance(rtol=1e-5),
        max_steps=300,
        trace=True,
    )
    assert solution.status is Status.CONVERGED
    assert solution.trace is not None
    assert all(trace.isfinite().all() and trace.max() < 1e3 for trace in solution.trace)


def test_the_transformer_cell_is_hard_enough_for_that():
    torchdeq = pytest.importorskip("torchdeq.solver", reason="needs the bench extra")
    cell, x_BTD = transformer_cell()
    for memory in (3, 10):
        z_BTD, _, _ = torchdeq.broyden_solver(
            lambda z: cell(z, x_BTD),
            torch.zeros_like(x_BTD),
            max_iter=80,
            tol=1e-5,
            stop_mode="rel",
            LBFGS_thres=memory,
        )
        assert z_BTD.isnan().any()
