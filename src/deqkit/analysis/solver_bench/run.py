"""Running the benchmark: all rows interleaved, round after round, and their medians."""

from __future__ import annotations

import gc
import logging
import math
import statistics
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._pytree import tree_leaves

from deqkit.analysis.memory import peak_memory
from deqkit.analysis.results import results_header
from deqkit.analysis.solver_bench.cells import CELLS, CellSize, load_cell
from deqkit.analysis.solver_bench.measure import CLOCKS, MeasuredCell, State, Tally, initial_state
from deqkit.analysis.solver_bench.methods import Equilibrium, Method, Settings, Solve, all_methods, torchdeq_installed
from deqkit.analysis.solver_bench.reference import (
    Reference,
    joined_gradient,
    reference_gradient,
    relative_residual,
)
from deqkit.analysis.solver_bench.summary import summarise

logger = logging.getLogger(__name__)

Progress = Callable[[str, int, int], None]
"""Told what is done next, how many steps are done, and of how many."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SolverBenchConfig:
    """What `deqkit bench solvers` measures."""

    cells: tuple[Literal["transformer", "trellis", "mixed"], ...] = ("transformer", "trellis", "mixed")
    """Which of the built-in cells."""
    cell: str | None = None
    """A cell of your own instead, as file.py:make, where make() returns (cell, x)."""
    tols: tuple[float, ...] = (1e-3, 1e-4)
    """Relative tolerances, each for the forward and the backward solve."""
    max_steps: int = 100
    """Limit of every solve."""
    rounds: int = 5
    """How often every row runs; medians are reported."""
    only: tuple[str, ...] = ()
    """Keep only rows whose library/name contains one of these."""
    threads: int = 1
    """Threads torch may use."""
    clock: Literal["cpu", "wall"] = "cpu"
    """Processor time of the process, which a busy machine disturbs least, or wall time."""
    seed: int = 24
    """Seed of weights and inputs. Untrained cells differ much: torchdeq's plain iteration takes 42 to over 100
    evaluations at 1e-3, and 63 with this seed."""
    size: CellSize = field(default_factory=CellSize)
    """Size of the built-in cells."""

    def __post_init__(self) -> None:
        for name in ("max_steps", "rounds", "threads"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if not self.tols or not all(0 < tol < 1 for tol in self.tols):
            raise ValueError(f"tols must be one or more numbers between 0 and 1, got {self.tols}")
        if self.cell is None and not self.cells:
            raise ValueError("no cell to measure: name some with cells, or your own with cell")


def run_solver_bench(config: SolverBenchConfig, *, on_progress: Progress = lambda *_: None) -> dict[str, Any]:
    """Measure every row on every cell.

    Args:
        config: What to measure.
        on_progress: Called before each measured call.

    Returns:
        The content of the results file: where it comes from, all rows, and the bars of the summary.
    """
    methods = [
        method for method in all_methods() if not config.only or any(part in method.label for part in config.only)
    ]
    if not methods:
        raise ValueError(f"only={config.only} matches no row; rows: {', '.join(m.label for m in all_methods())}")
    if not torchdeq_installed():
        logger.warning("the torchdeq rows are missing: torchdeq is not installed (pip install 'deqkit[bench]')")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        header = results_header(benchmark="bench solvers", seed=config.seed, config=config)
        cells = []
        for name in config.cells if config.cell is None else (config.cell,):
            cells.append(_CellBench(name, config, methods, on_progress).run())
    finally:
        torch.set_num_threads(threads_before)
    return {**header, "torchdeq": torchdeq_installed(), "summary": summarise(cells), "cells": cells}


@dataclass(kw_only=True, slots=True)
class _Row:
    """One method at one tolerance, and what its rounds measured."""

    method: Method
    settings: Settings
    solve: Solve
    tallies: list[Tally] = field(default_factory=list)
    overheads: list[float] = field(default_factory=list)
    numbers: dict[str, Any] = field(default_factory=dict)
    failure: str | None = None


class _CellBench:
    """All rows on one cell."""

    def __init__(self, name: str, config: SolverBenchConfig, methods: list[Method], on_progress: Progress) -> None:
        self.name, self.config, self.on_progress = name, config, on_progress
        generator = torch.Generator().manual_seed(config.seed)
        cell, self.x = CELLS[name](config.size, generator) if name in CELLS else load_cell(name)
        self.cell = MeasuredCell(cell, clock=CLOCKS[config.clock])
        self.start = initial_state(cell, self.x)
        self.weights = [torch.randn(leaf.shape, generator=generator) for leaf in tree_leaves(self.start)]
        self.unit_seconds: list[float] = []
        settings = [Settings(tol=tol, max_steps=config.max_steps) for tol in config.tols]
        self.rows = [
            _Row(method=method, settings=one, solve=method.build(self.cell, one))
            for one in settings
            for method in methods
            if not method.causal or all(leaf.ndim > 2 for leaf in tree_leaves(self.start))
        ]
        if not self.rows:
            raise ValueError(f"the state of {name} has no positions: leave out only={config.only}, causal solvers")

    def run(self) -> dict[str, Any]:
        num_done, num_steps = 0, len(self.rows) * (self.config.rounds + 1) + 1
        self.on_progress(f"{self.name}: float64 reference", num_done, num_steps)
        reference = reference_gradient(self.cell.cell, self.x, self.loss)
        if reference is None:
            logger.warning(
                "%s: plain iteration does not settle in float64; gradient errors are not measured", self.name
            )
        for row in self.rows:  # the first, untimed call: memory, accuracy, and a warm start for the caches
            num_done += 1
            self.on_progress(f"{self.name}: memory, {row.method.label} {row.settings.tol:g}", num_done, num_steps)
            self._guard(row, lambda row=row: self._examine(row, reference))
        for round_index in range(self.config.rounds):
            gc.collect()
            turn = round_index % len(self.rows)
            for row in self.rows[turn:] + self.rows[:turn]:
                num_done += 1
                self.on_progress(f"{self.name}: {row.method.label} {row.settings.tol:g}", num_done, num_steps)
                if row.failure is None:
                    self._guard(row, lambda row=row: self._time(row))
        return {
            "cell": self.name,
            "num_parameters": sum(p.numel() for p in self.cell.parameters()),
            "state_bytes": sum(leaf.nbytes for leaf in tree_leaves(self.start)),
            "f_seconds": statistics.median(self.unit_seconds) if self.unit_seconds else None,
            "reference": None if reference is None else _without_gradient(reference),
            "rows": [self._report(row) for row in self.rows],
        }

    def loss(self, z: State) -> Tensor:
        """A fixed random linear functional: unlike the mean, it is not constant on layer-normalised states."""
        leaves = tree_leaves(z)
        terms = [(leaf * weight.to(leaf)).mean() for leaf, weight in zip(leaves, self.weights, strict=True)]
        return torch.stack(terms).sum()

    def _examine(self, row: _Row, reference: Reference | None) -> None:
        self.cell.zero_grad(set_to_none=True)

        def call() -> Equilibrium:
            equilibrium = row.solve(self.x)
            self.loss(equilibrium.z).backward()
            return equilibrium

        memory = peak_memory(call)
        equilibrium = memory.result
        with torch.no_grad():
            residual = relative_residual(self.cell.cell(equilibrium.z, self.x), equilibrium.z)
        if not math.isfinite(residual):
            raise ArithmeticError("the returned state is not finite")
        error = None
        if reference is not None:
            gradient = joined_gradient(self.cell)
            error = ((gradient - reference.gradient).norm() / reference.gradient.norm()).item()
        row.numbers = {
            "status": equilibrium.status,
            "residual": residual,
            "grad_error": _finite(error),
            "grad_error_estimate": _finite(equilibrium.grad_error()),
            "peak_mib": memory.peak_bytes / 2**20,
        }

    def _time(self, row: _Row) -> None:
        self.cell.zero_grad(set_to_none=True)
        self._time_f()
        equilibrium, tally = self.cell.measure(lambda: row.solve(self.x), lambda found: self.loss(found.z))
        row.tallies.append(tally)
        if equilibrium.solver_overhead is not None:
            row.overheads.append(equilibrium.solver_overhead)

    def _time_f(self, repeats: int = 3) -> None:
        """Time evaluations of the whole batch: the unit of cost, measured beside what it is the unit of."""
        clock = CLOCKS[self.config.clock]
        with torch.no_grad():
            for _ in range(repeats):
                start = clock()
                self.cell.cell(self.start, self.x)
                self.unit_seconds.append(clock() - start)

    def _guard(self, row: _Row, step: Callable[[], None]) -> None:
        try:
            step()
        except (ArithmeticError, LookupError, RuntimeError, TypeError, ValueError) as error:  # a result, not the end
            row.failure = f"{type(error).__name__}: {error}"
            logger.warning("%s: %s failed: %s", self.name, row.method.label, row.failure)

    def _report(self, row: _Row) -> dict[str, Any]:
        report = {"library": row.method.library, "method": row.method.name, "tol": row.settings.tol}
        report |= {"failure": row.failure, **row.numbers}
        if row.failure is not None:
            return report
        ordered = sorted(row.tallies, key=lambda tally: tally.total_seconds)
        typical = ordered[(len(ordered) - 1) // 2]  # one run, so that its parts add up to its total
        counts = {name: value for name, value in asdict(typical).items() if isinstance(value, int)}
        unit = statistics.median(self.unit_seconds)
        costs = [t.total_seconds / unit for t in row.tallies]
        return report | {
            **counts,
            "seconds": {"total": typical.total_seconds, **typical.seconds, "outside": typical.outside_seconds},
            "cost": statistics.median(costs),
            "cost_range": [min(costs), max(costs)],
            "outside_share": statistics.median([t.outside_seconds / t.total_seconds for t in row.tallies]),
            "solver_overhead": statistics.median(row.overheads) if row.overheads else None,
            "total_seconds": [t.total_seconds for t in row.tallies],
        }


def _finite(value: float | None) -> float | None:
    """JSON has no NaN; a measurement that gave none is missing."""
    return value if value is not None and math.isfinite(value) else None


def _without_gradient(reference: Reference) -> dict[str, Any]:
    return {key: value for key, value in asdict(reference).items() if key != "gradient"}
