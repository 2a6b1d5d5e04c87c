"""The solve of a single position, against closed forms."""

import pytest
import torch

from deqkit import NonFiniteError, Tolerance
from deqkit.model.decode_solve import QUICK_STEPS, SolveSettings, solve_position, solve_positions
from deqkit.solve import Broyden, FixedPointIteration

# B samples, N numbers

TIGHT = Tolerance(rtol=1e-12)


def settings(tol: Tolerance = TIGHT, max_steps: int = 200) -> SolveSettings:
    return SolveSettings(tol=tol, max_steps=max_steps, solver=Broyden(group="prefix"))


def linear(size: int, *, norm: float, seed: int = 0):
    """z = z A + b for three samples, with the answer."""
    generator = torch.Generator().manual_seed(seed)
    a = torch.randn(size, size, generator=generator, dtype=torch.float64)
    a *= norm / torch.linalg.matrix_norm(a, 2)
    b_B1N = torch.randn(3, 1, size, generator=generator, dtype=torch.float64)
    answer_BN = torch.linalg.solve(torch.eye(size, dtype=torch.float64) - a, b_B1N.squeeze(1), left=False)
    return (lambda z: z @ a + b_B1N), answer_BN.unsqueeze(1)


def recorded(f, evaluated: list):
    """f, noting where it was evaluated."""
    return lambda z: evaluated.append(z.clone()) or f(z)


def test_tight_solves_are_finished_by_the_loop():
    f, answer = linear(6, norm=0.9)
    solved = solve_position(f, torch.zeros(3, 1, 6, dtype=torch.float64), settings())
    torch.testing.assert_close(solved.z, answer, rtol=1e-10, atol=1e-10)
    assert bool((solved.evals_B > QUICK_STEPS).all()) and not bool(solved.failed_B.any())


def test_steep_slopes_are_no_trouble():
    """z = -3 z + 4 (fixed point 1) drives plain iteration away; a secant solves it in three evaluations."""
    solved = solve_position(lambda z: 4 - 3 * z, torch.zeros(2, 1, 1, dtype=torch.float64), settings())
    torch.testing.assert_close(solved.z, torch.ones(2, 1, 1, dtype=torch.float64))
    assert solved.evals_B.tolist() == [3, 3]


def test_samples_stop_one_by_one_and_stay():
    f, answer = linear(6, norm=0.5)
    z0 = answer.clone()
    z0[1] = 0
    evaluated = []
    tol = Tolerance(rtol=1e-2)
    solved = solve_position(recorded(f, evaluated), z0, settings(tol))
    assert solved.evals_B[0] == solved.evals_B[2] == 1 < solved.evals_B[1] == len(evaluated)
    assert torch.equal(solved.z[0], answer[0])
    assert torch.equal(evaluated[-1], solved.z)  # a cache holds the keys of what was evaluated last
    residual = (f(solved.z) - solved.z).norm(dim=2) / f(solved.z).norm(dim=2)
    assert float(residual.max()) <= 1e-2


@pytest.mark.parametrize("max_steps", [1, 2, 5, QUICK_STEPS, QUICK_STEPS + 3])
def test_the_step_limit_is_kept_and_failure_told(max_steps):
    f, _ = linear(30, norm=0.99)
    evaluated = []
    z0 = torch.zeros(3, 1, 30, dtype=torch.float64)
    solved = solve_position(recorded(f, evaluated), z0, settings(max_steps=max_steps))
    assert bool(solved.failed_B.all())
    assert torch.equal(evaluated[-1], solved.z)
    assert int(solved.evals_B.max()) <= max_steps + 1  # the loop measures what it returns


def test_the_last_evaluation_is_at_the_state_returned_though_that_is_an_earlier_one():
    """Plain iteration on z = 3 - 2 z runs away, so the best point is the start."""
    evaluated = []
    plain = SolveSettings(tol=TIGHT, max_steps=4, solver=FixedPointIteration())
    solved = solve_positions(recorded(lambda z: 3 - 2 * z, evaluated), torch.zeros(2, 3, 1).double(), plain)
    assert torch.equal(solved.z, torch.zeros(2, 3, 1).double()) and bool(solved.failed_B.all())
    assert float(evaluated[-2].abs().max()) > 0 and torch.equal(evaluated[-1], solved.z)


def test_a_pair_of_states():
    f, answer = linear(6, norm=0.3)
    pair = solve_position(
        lambda state: tuple(f(torch.cat(state, 2)).split((2, 4), 2)),
        (torch.zeros(3, 1, 2).double(), torch.zeros(3, 1, 4).double()),
        settings(),
    )
    torch.testing.assert_close(torch.cat(pair.z, 2), answer, rtol=1e-10, atol=1e-10)


def test_steps_that_run_into_nan_start_again():
    """df is zero at the second evaluation, so the secant divides zero by zero."""
    state = {"count": 0}

    def f(z):
        state["count"] += 1
        return torch.ones_like(z) if state["count"] > 2 else z + 1

    solved = solve_position(f, torch.zeros(1, 1, 1, dtype=torch.float64), settings())
    assert solved.z.item() == 1 and not bool(solved.failed_B.any())


def test_nan_is_an_error():
    with pytest.raises(NonFiniteError):
        solve_position(lambda z: z * torch.nan, torch.ones(1, 1, 2), settings())
