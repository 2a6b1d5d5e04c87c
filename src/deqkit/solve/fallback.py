"""A chain of solvers for cells that no single one solves every time."""

from __future__ import annotations

import dataclasses

from deqkit.solve._solver import AbstractSolver


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Fallback:
    """`Fallback(a, b, ...)`: samples that stall or diverge under one solver go on with the next.

    Each starts from the best point found so far, and all share one `max_steps`. Samples that are solved stay as they
    are. A sample counts as stalled after `Tolerance.patience` evaluations without a new best residual.
    """

    solvers: tuple[AbstractSolver, ...]

    def __init__(self, *solvers: AbstractSolver) -> None:
        if len(solvers) < 2:
            raise ValueError("Fallback needs at least two solvers, for example Fallback(Anderson(), NewtonKrylov())")
        for solver in solvers:
            if not isinstance(solver, AbstractSolver):
                raise ValueError(f"Fallback takes solvers, got {solver!r}")
        if len({solver.group for solver in solvers}) > 1:
            raise ValueError("all solvers of a Fallback need the same group: a non-causal one would undo a causal one")
        object.__setattr__(self, "solvers", solvers)

    @property
    def group(self) -> str:
        return self.solvers[0].group
