"""`deqkit bench length`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from deqkit.analysis.length_bench import LengthBenchConfig, run_length_bench
from deqkit.analysis.results import write_results
from deqkit.cli._command import Command
from deqkit.cli._terminal import STYLE, TABLE_WIDTH, with_progress
from deqkit.cli.runtime import find_equilibrium
from deqkit.train.tasks import AbstractTask, TextTask


@dataclass(frozen=True, kw_only=True)
class BenchLength(Command):
    """How time and memory of a DEQ grow with the length of its sequences."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE|RUN")]
    """A recipe, whose model is then untrained, or the folder of a run."""
    data: str | None = None
    """Data of the same vocabulary; the recipe's or the run's own if left out."""
    config: Annotated[LengthBenchConfig, tyro.conf.arg(name="")] = field(default_factory=LengthBenchConfig)
    """What to measure."""
    out: Path = Path("results/bench_length.json")
    """Where the results are written."""
    json: bool = False
    """Print the results to stdout as JSON instead of a table."""

    def run(self) -> int:
        config, model, task, step = find_equilibrium(self.name, self.data)
        text = _text(task, self.config.num_tokens)
        results = with_progress(lambda show: run_length_bench(self.config, model, text=text, on_progress=show))
        results["run"] = {"recipe": config.recipe, "step": step}
        path = write_results(self.out, results)
        if self.json:
            print(json.dumps(results, indent=1))
            return 0
        console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
        console.print(_table(results))
        for row in results["summary"]:
            word = "flat" if row["holds"] else "grows"
            console.print(f"{row['name']}: {row['value']:.2f}x ({word}: at most {row['bar']:.1f}x is)")
        console.print(f"Results written to {path}", soft_wrap=True, highlight=False)
        return 0


def _text(task: AbstractTask, count: int) -> torch.Tensor | None:
    """Tokens of the data itself, if it is a text that is long enough."""
    if not isinstance(task, TextTask):
        return None
    for split in ("test", "train"):
        ids = task.corpus.split(split)
        if len(ids) >= count:
            return torch.tensor(ids[:count].astype("int64"))
    return None


def _table(results: dict[str, Any]) -> Table:
    clock = {"cpu": "processor", "wall": "wall"}[results["config"]["clock"]]
    table = Table(title=f"{results['run']['recipe']}: a token at several lengths, {clock} time", **STYLE)
    columns = ("length", "training us", "inference us", "evaluations", "products", "MiB a step")
    for column in columns:
        table.add_column(column, justify="right")
    for row in results["rows"]:
        training, inference = row["training"], row["inference"]
        table.add_row(
            str(row["length"]),
            f"{1e6 * training['seconds_per_token']:.1f}",
            f"{1e6 * inference['seconds_per_token']:.1f}",
            f"{training['evaluations']:.1f}",
            f"{training['products']:.1f}" if "products" in training else "-",
            f"{row['peak_bytes'] / 2**20:.1f}",
        )
    return table
