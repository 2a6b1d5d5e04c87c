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
    numbers = check_outcome(inverse.low_rank(workshop, sizes=(8, 16), large_sizes=(32, 64)))
    assert numbers["same point"] is True and set(numbers["large"]) == {"32", "64"}


@pytest.mark.parametrize(
    ("newton", "broyden", "holds"), [(8.0, 1.5, True), (4.0, 1.5, False), (8.0, 8.0, False)]
)  # cubic and flat; an exact square; both cubic
def test_growth_decides(newton, broyden, holds, workshop, monkeypatch):
    seconds = {8: {"newton": 1.0}, 16: {"newton": newton}, 32: {"32": 1.0, "64": broyden}}

    def timed(calls, *, rounds):
        times = seconds[next(iter(calls.values())).args[0].shape[-1]]
        return {name: Timing((times.get(name, 1.0),)) for name in calls}

    monkeypatch.setattr(inverse, "interleaved", timed)
    assert inverse.low_rank(workshop, sizes=(8, 16), large_sizes=(32, 64)).holds is holds
