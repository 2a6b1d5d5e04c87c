"""A chain of solvers for cells that no single one solves every time."""

from __future__ import annotations

import dataclasses

from deqkit.solve._solver import AbstractSolver


@dataclasses.dataclass(frozen=True, slots=True, init=False)
class Fallback:
    """`Fallback(a, b, ...)`: samples that stall or diverge under one solver go on with the next.

    Each starts from the best point found so far, and all share one `max_steps`. Samples that are solved stay as they
    are.
    """

    solvers: tuple[AbstractSolver, ...]
    patience: int
    """Evaluations without a new best residual before a sample is handed on (`Tolerance.patience` for the last)."""

    def __init__(self, *solvers: AbstractSolver, patience: int = 10) -> None:
        if len(solvers) < 2:
            raise ValueError("Fallback needs at least two solvers, for example Fallback(Anderson(), NewtonKrylov())")
        for solver in solvers:
            if not isinstance(solver, AbstractSolver):
                raise ValueError(f"Fallback takes solvers, got {solver!r}")
        if len({solver.group for solver in solvers}) > 1:
            raise ValueError("all solvers of a Fallback need the same group: a non-causal one would undo a causal one")
        if patience < 2:
            raise ValueError(f"patience must be at least 2, got {patience}")
        object.__setattr__(self, "solvers", solvers)
        object.__setattr__(self, "patience", patience)

    @property
    def group(self) -> str:
        return self.solvers[0].group
