"""`deqkit bench ...`: measurements, printed as tables and written under results/."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from deqkit.analysis.results import write_results
from deqkit.analysis.solver_bench import SolverBenchConfig, run_solver_bench
from deqkit.cli._command import Command
from deqkit.cli._terminal import STYLE, TABLE_WIDTH, with_progress


@dataclass(frozen=True, kw_only=True)
class BenchSolvers(Command):
    """Measure deqkit and torchdeq side by side."""

    config: Annotated[SolverBenchConfig, tyro.conf.arg(name="")] = field(default_factory=SolverBenchConfig)
    """What to measure."""
    out: Path = Path("results/bench_solvers.json")
    """Where the results are written."""
    json: bool = False
    """Print the results to stdout as JSON instead of tables."""

    def run(self) -> int:
        results = with_progress(lambda show: run_solver_bench(self.config, on_progress=show))
        path = write_results(self.out, results)
        if self.json:
            print(json.dumps(results, indent=1))
        else:
            console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH + 10)
            for cell in results["cells"]:
                console.print(_cell_table(cell))
            if self.config.cell is None:  # the bars are about the built-in cells
                console.print(_summary_table(results["summary"]), width=min(console.width, TABLE_WIDTH))
            console.print(f"Results written to {path}", soft_wrap=True, highlight=False)
        return 0


def _cell_table(cell: Mapping[str, Any]) -> Table:
    unit = "not measured" if cell["f_seconds"] is None else f"{1e3 * cell['f_seconds']:.2f} ms"
    table = Table(
        title=f"{cell['cell']}: one f of the whole batch {unit}, state {cell['state_bytes'] / 2**20:.2f} MiB",
        caption="f, vjp: calls (samples in them); *: tolerance not reached; cost: in units of f; "
        "outside: time not in f or vjp",
        **STYLE,
    )
    table.add_column("method", no_wrap=True)
    for name in ("f", "f bwd", "vjp", "residual", "grad err", "estimate", "cost", "outside", "MiB"):
        table.add_column(name, justify="right", no_wrap=True)
    last_tol = None
    for row in cell["rows"]:
        if row["tol"] != last_tol:
            table.add_section()
            table.add_row(f"relative tolerance {row['tol']:g}", style="bold")
        last_tol = row["tol"]
        table.add_row(*_columns_of(row))
    return table


def _columns_of(row: Mapping[str, Any]) -> list[str]:
    name = f"{row['library']} {row['method']}"
    if row["failure"] is not None:
        return [name, "failed", *["-"] * 8]
    low, high = row["cost_range"]
    return [
        name,
        f"{row['evals_forward']} ({row['sample_evals_forward']})",
        str(row["evals_backward"]),
        f"{row['vjps']} ({row['sample_vjps']})",
        _scientific(row["residual"]) + ("*" if row["residual"] > row["tol"] else ""),
        _scientific(row["grad_error"]),
        _scientific(row["grad_error_estimate"]),
        f"{row['cost']:.0f} ± {(high - low) / 2:.0f}",
        f"{row['outside_share']:.0%}",
        f"{row['peak_mib']:.1f}",
    ]


def _scientific(value: float | None) -> str:
    return "-" if value is None else f"{value:.1e}"


def _summary_table(summary: list[dict[str, Any]]) -> Table:
    table = Table(title="bars, at tolerance 1e-3, on the transformer cell unless another is named", **STYLE)
    table.add_column("bar", no_wrap=True)
    table.add_column("value", justify="right", no_wrap=True)
    table.add_column("asked", justify="right", no_wrap=True)
    table.add_column("holds", no_wrap=True)
    table.add_column("detail")
    for entry in summary:
        at_least = "speed-up" in entry["name"]
        value = "-" if entry["value"] is None else f"{entry['value']:.3g}{entry['unit']}"
        holds = {True: "yes", False: "NO", None: "not measured"}[entry["holds"]]
        asked = f"{'>=' if at_least else '<='} {entry['bar']:g}{entry['unit']}"
        table.add_row(entry["name"], value, asked, holds, entry["detail"])
    return table
