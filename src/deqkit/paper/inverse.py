"""Section 3.1.3: what low-rank updates save against an exact inverse Jacobian."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from deqkit.analysis.timing import interleaved
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.equalities import relative_difference
from deqkit.paper.solves import curve, figure
from deqkit.paper.workshop import Workshop
from deqkit.solve import Broyden, Tolerance, fixed_point

SIZES = (128, 256, 512, 1024)
"""Numbers in a state."""
TOL = Tolerance(rtol=1e-10, patience=100)
SAME = 1e-8
"""Relative difference up to which two solves end at the same point."""
LARGE_SIZES = (2**18, 2**19)
"""States of which no Jacobian fits in memory: Broyden's time is its calls' overhead until they are long."""
MORE_THAN_SQUARE, LESS_THAN_SQUARE = 5.0, 3.0
"""A time that a doubled state multiplies by at least the first grows faster than a square, which would be 4 (a cube
would be 8, which small matrices do not reach); by at most the second, slower than one."""
ROUNDS = 5
BEFORE, AFTER = 0.6, -0.3
"""What the numbers before and after one have to do with it."""


def cell(z: Tensor, x: Tensor) -> Tensor:
    """Each number depends on two others, so that f itself costs as much as the state is long."""
    return torch.tanh(BEFORE * z.roll(1, -1) + AFTER * z.roll(-2, -1) + x)


def newton(x: Tensor) -> tuple[Tensor, int]:
    """Newton's method with the inverse of the exact Jacobian of g(z) = f(z) - z, and its number of steps."""
    z, eye = torch.zeros_like(x), torch.eye(x.shape[-1], dtype=x.dtype)
    mixes = BEFORE * eye.roll(1, 0) + AFTER * eye.roll(-2, 0)
    for step in range(50):
        value = cell(z, x)
        residual = value - z
        if float(residual.norm()) <= TOL.rtol * float(value.norm()):
            return z, step
        jacobian = (1 - value.square()).mT * mixes - eye
        z = z - residual @ torch.linalg.inv(jacobian).mT
    raise AssertionError("Newton's method did not converge on a contraction")


def broyden(x: Tensor) -> tuple[Tensor, int]:
    """Broyden's method, and its number of evaluations."""
    solution = fixed_point(cell, torch.zeros_like(x), args=(x,), solver=Broyden(memory=30), tol=TOL, max_steps=100)
    return solution.z, int(solution.num_evals.max())


def _input(size: int) -> Tensor:
    return torch.randn(1, size, dtype=torch.float64, generator=torch.Generator().manual_seed(size))


def low_rank(
    workshop: Workshop, *, sizes: tuple[int, ...] = SIZES, large_sizes: tuple[int, int] = LARGE_SIZES
) -> Outcome:
    points: list[dict[str, Any]] = []
    for size in sizes:
        workshop.tell(f"inverse Jacobian: {size} numbers")
        x = _input(size)
        (exact, steps), (found, evals) = newton(x), broyden(x)
        seconds = interleaved({"newton": partial(newton, x), "broyden": partial(broyden, x)}, rounds=ROUNDS)
        points.append(
            {
                "size": size,
                "difference": relative_difference([found], [exact]),
                "newton": {"steps": steps, "seconds": seconds["newton"].median},
                "broyden": {"steps": evals, "seconds": seconds["broyden"].median},
            }
        )
    workshop.tell("inverse Jacobian: large states")
    timed = interleaved({f"{size}": partial(broyden, _input(size)) for size in large_sizes}, rounds=ROUNDS)
    large = {int(size): timing.median for size, timing in timed.items()}
    growth = {
        "newton": points[-1]["newton"]["seconds"] / points[-2]["newton"]["seconds"],
        "broyden": large[large_sizes[1]] / large[large_sizes[0]],
    }
    same = all(point["difference"] <= SAME for point in points)
    series = [
        curve("Newton, exact inverse", [1000 * point["newton"]["seconds"] for point in points], list(sizes)),
        curve(
            "Broyden",
            [1000 * seconds for seconds in (*(point["broyden"]["seconds"] for point in points), *large.values())],
            [*sizes, *large],
        ),
    ]
    return Outcome(
        measured="; ".join(
            f"{p['size']:,} numbers: Newton {p['newton']['steps']} steps, {1000 * p['newton']['seconds']:.1f} ms, "
            f"Broyden {p['broyden']['steps']} evaluations, {1000 * p['broyden']['seconds']:.1f} ms"
            for p in points
        )
        + f"; the last doubling multiplies Newton's time by {growth['newton']:.1f}; {large_sizes[1]:,} numbers: "
        f"Broyden {1000 * large[large_sizes[1]]:.0f} ms, {growth['broyden']:.1f} times that of {large_sizes[0]:,}",
        scale=f"float64, f(z) = tanh(a mix of two neighbours + x) at a residual of {TOL.rtol:g}, median of {ROUNDS} "
        f"interleaved rounds, processor time, {torch.get_num_threads()} threads",
        holds=same and growth["newton"] >= MORE_THAN_SQUARE and growth["broyden"] <= LESS_THAN_SQUARE,
        numbers={
            "points": points,
            "large": {str(size): seconds for size, seconds in large.items()},
            "growth": growth,
            "same point": same,
            "bars": {"newton": MORE_THAN_SQUARE, "broyden": LESS_THAN_SQUARE, "same": SAME},
            "figure": figure(x="numbers in the state", y="milliseconds", series=series, log_x=True, log_y=True),
        },
        remark="Newton's method takes the exact Jacobian, which is known here in closed form, and its dense inverse. "
        "Broyden's time is that of its calls until states are long, so its growth is taken where no Jacobian would fit "
        f"in memory. Holds if both end at the same point, Newton's last doubling takes at least {MORE_THAN_SQUARE:g} "
        f"times as long, and Broyden's at most {LESS_THAN_SQUARE:g} times.",
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        row="low-rank-updates",
        where="section 3.1.3",
        claim="Broyden's low-rank updates avoid the cubic cost of the exact inverse of the Jacobian",
        paper="cubic cost avoided",
        quick=low_rank,
    ),
)
