"""`causality_leak` on functions whose leak is known, and on solves of a causal cell."""

import pytest
import torch

from deqkit.analysis import causality_leak
from deqkit.solve import Anderson, Broyden, FixedPointIteration, Tolerance, fixed_point
from problems import causal_attention, normal

# B samples, T positions, D width


def test_exactly_zero_for_a_causal_function():
    x_BTD = normal(0, 2, 8, 3)
    for position in (None, 1, 7):
        leak_T = causality_leak(lambda x: x.cumsum(1).tanh(), x_BTD, position=position)
        assert leak_T.shape == (4 if position is None else position,)
        assert leak_T.eq(0).all()


def test_sees_one_leaking_position_and_its_size():
    """Position 2 reads position 6; nothing else looks ahead."""

    def model(x_BTD):
        y_BTD = x_BTD.clone()
        y_BTD[:, 2] += 0.1 * x_BTD[:, 6]
        return y_BTD

    x_BTD = normal(1, 3, 8, 2)
    leak_T = causality_leak(model, x_BTD, generator=torch.Generator().manual_seed(5))
    noise_BTD = torch.randn(3, 4, 2, generator=torch.Generator().manual_seed(5), dtype=torch.float64)
    assert leak_T[[0, 1, 3]].eq(0).all()
    torch.testing.assert_close(leak_T[2], 0.1 * noise_BTD[:, 2].abs().max())


def test_tokens_all_change_and_stay_in_the_vocabulary():
    seen = []

    def model(x_BT):
        seen.append(x_BT)
        return x_BT.float().flip(1)

    x_BT = torch.randint(0, 5, (4, 10), generator=torch.Generator().manual_seed(0))
    leak_T = causality_leak(model, x_BT, position=6)
    before, after = seen
    assert torch.equal(before, x_BT) and torch.equal(after[:, :6], x_BT[:, :6])
    assert (after[:, 6:] != x_BT[:, 6:]).all() and after.max() < 5 and after.min() >= 0
    assert leak_T.shape == (6,) and (leak_T > 0).tolist() == [True] * 4 + [False] * 2
    assert causality_leak(model, torch.zeros(1, 4, dtype=torch.int64)).max() > 0  # even one lone token changes


@pytest.mark.parametrize("position", [0, 8, -1, 9])
def test_wrong_position(position):
    with pytest.raises(ValueError, match=f"between 1 and 7, got {position}"):
        causality_leak(lambda x: x, torch.zeros(1, 8, 1), position=position)


def solve_with(solver, max_steps=8):
    problem = causal_attention(torch.float64, length=10)

    def model(x_BTD):
        return fixed_point(
            problem.f,
            torch.zeros_like(x_BTD),
            (x_BTD,),
            solver=solver,
            tol=Tolerance(rtol=1e-6),
            max_steps=max_steps,
            throw=False,
            compact=False,
        ).z

    return model, 2 * problem.args[0]


@pytest.mark.parametrize("make", [Anderson, Broyden], ids=lambda c: c.__name__)
def test_shows_that_grouping_by_sample_leaks_and_by_prefix_does_not(make):
    model, x_BTD = solve_with(make(group="sample"))
    leak_T = causality_leak(model, x_BTD)
    assert leak_T.max() > 1e-4 and (leak_T > 0).all()
    model, x_BTD = solve_with(make(group="prefix"))
    assert causality_leak(model, x_BTD).eq(0).all()


def test_a_converged_solve_leaks_no_more_than_its_tolerance():
    truncated = causality_leak(*solve_with(Anderson(), max_steps=8)).max()
    converged = causality_leak(*solve_with(Anderson(), max_steps=100)).max()
    assert converged < 1e-4 < truncated
    assert causality_leak(*solve_with(FixedPointIteration(group="prefix"))).eq(0).all()
