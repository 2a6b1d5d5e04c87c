"""How fast solvers converge on one problem, for plots and for choosing one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from deqkit.solve import AbstractSolver, Fallback, Tolerance, fixed_point


def convergence_trace(
    f: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...] = (),
    *,
    solvers: Mapping[str, AbstractSolver | Fallback],
    tol: Tolerance | None = None,
    max_steps: int = 40,
) -> dict[str, tuple[Tensor, ...]]:
    """The relative residual at every evaluation, per solver and sample, from one start.

    Returns:
        For every name in `solvers` one 1-D tensor a sample. It ends where the sample's solve ended, so lengths differ.
    """
    traces = {}
    for name, solver in solvers.items():
        solution = fixed_point(f, z0, args, solver=solver, tol=tol, max_steps=max_steps, throw=False, trace=True)
        assert solution.trace is not None
        traces[name] = solution.trace
    return traces
