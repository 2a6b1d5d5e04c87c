"""A chain of solvers for cells that no single one solves every time."""

from __future__ import annotations

import dataclasses

from deqkit.solve._solver import AbstractSolver, check_count


@dataclasses.dataclass(frozen=True, slots=True, init=False, repr=False)
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
        if any(solver.group != "sample" for solver in solvers):
            raise ValueError(
                'Fallback needs solvers with group="sample": it hands over whole samples, which would let a later '
                "position decide how an earlier one is solved"
            )
        check_count("patience", patience, minimum=2)
        object.__setattr__(self, "solvers", solvers)
        object.__setattr__(self, "patience", patience)

    @property
    def group(self) -> str:
        return "sample"

    def __repr__(self) -> str:
        return f"Fallback({', '.join(map(repr, self.solvers))}, patience={self.patience})"
