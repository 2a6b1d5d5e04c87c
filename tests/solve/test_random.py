"""Random contractions: every solver, any size, any batch, any norm up to 0.95."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from deqkit.solve import Status, Tolerance, fixed_point
from problems import SOLVERS, contraction, relative_residual

SAMPLE_SOLVERS = [name for name, solver in SOLVERS.items() if solver.group == "sample"]
CONTRACTIONS = st.builds(
    contraction,
    norm=st.floats(0.1, 0.95),
    batch=st.integers(1, 4),
    size=st.integers(1, 6),
    seed=st.integers(0, 10_000),
)


@pytest.mark.parametrize("name", SAMPLE_SOLVERS)
@settings(max_examples=12, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(problem=CONTRACTIONS, compact=st.booleans())
def test_random_contractions(name, problem, compact):
    solution = fixed_point(
        problem.f,
        problem.z0,
        problem.args,
        solver=SOLVERS[name],
        tol=Tolerance(rtol=1e-10),
        max_steps=1500,
        compact=compact,
    )
    assert solution.status is Status.CONVERGED
    torch.testing.assert_close(
        solution.residual, relative_residual(problem.f, solution.z, problem.args), rtol=1e-6, atol=1e-15
    )
    # ||z - z*|| <= ||f(z) - z|| / (1 - norm), and f is linear: no other fixed point.
    error_B = (solution.z - problem.z_star).norm(dim=1)
    assert (error_B <= solution.residual_norm / (1 - 0.951) + 1e-13 * problem.z_star.norm(dim=1)).all()
