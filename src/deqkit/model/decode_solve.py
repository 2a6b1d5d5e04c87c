"""The equilibrium of one new position, or of the positions of a prompt, with the past given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deqkit.solve import AbstractSolver, Fallback, Status, Tolerance, fixed_point
from deqkit.solve._packing import Packing
from deqkit.solve._solution import raise_if_failed

# B samples, N numbers in the state of a position

QUICK_STEPS = 12
"""Evaluations after which `fixed_point` takes over; trained cells need about 4."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolveSettings:
    """How the positions of a text are solved for."""

    tol: Tolerance
    max_steps: int
    solver: AbstractSolver | Fallback


class Solved(NamedTuple):
    """States, and for every sample the evaluations spent and whether it failed to converge."""

    z: Any
    evals_B: Tensor
    failed_B: Tensor


def solve_positions(f: Callable[[Any], Any], z0: Any, settings: SolveSettings) -> Solved:
    """By the library's loop. The last evaluation is at the state that is returned, so that a cache holds its keys.

    Raises:
        NonFiniteError: f gave inf or nan.
    """
    solution = fixed_point(
        f,
        z0,
        solver=settings.solver,
        tol=settings.tol,
        max_steps=settings.max_steps,
        throw=False,
        compact=False,
        check_samples=False,  # our cells keep them apart
        hoist=False,  # f is bound
    )
    raise_if_failed(solution, where="solve of a text's positions", above=Status.STALLED)
    f(solution.z)
    return Solved(solution.z, solution.num_evals, solution.codes != Status.CONVERGED.severity)


def solve_position(f: Callable[[Any], Any], z0: Any, settings: SolveSettings) -> Solved:
    """The state of a single position, from a start that is near.

    The loop's account of a solve (verdicts, patience, best points) costs several evaluations of f on a state as small
    as this. So a few steps are tried without it; what they leave unsolved goes to the loop, which judges it. A step is
    Anderson's with a memory of one, z' = f - gamma df with gamma = dr.r / dr.dr, by sample.
    """
    packing, tol = Packing.of(z0, causal=False), settings.tol
    z_BN, last = packing.pack(z0), None
    active_B = torch.ones(packing.batch_size, 1, dtype=torch.bool, device=packing.device)
    evals_B = torch.zeros_like(active_B, dtype=torch.int64)
    num_quick = min(QUICK_STEPS, settings.max_steps - 1)
    for _ in range(num_quick):
        fz_BN = packing.pack(f(packing.unpack(z_BN)))
        r_BN = fz_BN - z_BN
        evals_B += active_B
        norm_B, scale_B = (torch.linalg.vector_norm(part, dim=2) for part in (r_BN, fz_BN))
        active_B = active_B & ~(norm_B <= tol.bound(scale_B, 1))  # nan is not solved
        if not bool(active_B.any()):
            return Solved(packing.unpack(z_BN), evals_B[:, 0], active_B[:, 0])
        z_BN = torch.where(active_B.unsqueeze(2), _accelerated(fz_BN, r_BN, last), z_BN)
        last = (fz_BN, r_BN)
    sound_B = z_BN.isfinite().all(2, keepdim=True)
    z0 = packing.unpack(torch.where(sound_B, z_BN, packing.pack(z0)))
    left = SolveSettings(tol=tol, max_steps=settings.max_steps - num_quick, solver=settings.solver)
    rest = solve_positions(f, z0, left)
    return Solved(rest.z, torch.where(active_B[:, 0], evals_B[:, 0] + rest.evals_B, evals_B[:, 0]), rest.failed_B)


def _accelerated(fz_BN: Tensor, r_BN: Tensor, last: tuple[Tensor, Tensor] | None) -> Tensor:
    if last is None:
        return fz_BN
    dr_BN = r_BN - last[1]
    gamma_B1 = torch.linalg.vecdot(dr_BN, r_BN) / torch.linalg.vecdot(dr_BN, dr_BN)
    return torch.addcmul(fz_BN, gamma_B1.unsqueeze(2), fz_BN - last[0], value=-1)
