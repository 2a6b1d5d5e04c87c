"""The row about low-rank updates, and what decides it."""

import pytest
import torch

from deqkit.analysis.timing import Timing
from deqkit.paper import inverse
from deqkit.paper.workshop import Workshop
from paper.tiny_scale import check_outcome


@pytest.fixture
def workshop(tmp_path):
    return Workshop(runs=tmp_path)


def test_both_methods_end_where_plain_iteration_does():
    x = torch.randn(1, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    z = torch.zeros_like(x)
    for _ in range(400):
        z = inverse.cell(z, x)
    (exact, steps), (found, _) = inverse.newton(x), inverse.broyden(x)
    torch.testing.assert_close(exact, z, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(found, z, rtol=1e-9, atol=1e-9)
    assert steps <= 8  # with a wrong Jacobian Newton's method needs many more


def test_the_row(workshop):
    numbers = check_outcome(inverse.low_rank(workshop, sizes=(8, 16)))
    assert numbers["same point"] is True and numbers["growth"]["newton"] > 0


@pytest.mark.parametrize(
    ("newton", "broyden", "holds"), [(8.0, 1.5, True), (2.0, 1.5, False), (8.0, 8.0, False)]
)  # cubic and flat; no matrix worth naming; both cubic
def test_growth_decides(newton, broyden, holds, workshop, monkeypatch):
    rounds = iter([1.0, 1.0, newton, broyden])

    def timed(calls, *, rounds_=rounds, **_):
        return {name: Timing((next(rounds_),)) for name in calls}

    monkeypatch.setattr(inverse, "interleaved", timed)
    assert inverse.low_rank(workshop, sizes=(8, 16)).holds is holds
