"""`deqkit bench memory` and `deqkit plan`."""

from __future__ import annotations

import dataclasses
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any

import torch
import tyro
from rich.console import Console
from rich.table import Table

from deqkit._plain import unknown
from deqkit.analysis.memory_bench import MemoryBenchConfig, run_memory_bench
from deqkit.analysis.results import write_results
from deqkit.analysis.training_memory import TrainingMemory, training_memory
from deqkit.cli._command import Command
from deqkit.cli._terminal import STYLE, TABLE_WIDTH, with_progress
from deqkit.model import ModelConfig, SequenceModel, num_parameters
from deqkit.model.paper import PAPER_MODELS
from deqkit.train.recipes import RECIPES

MIB, GIB = 2**20, 2**30


@dataclass(frozen=True, kw_only=True)
class BenchMemory(Command):
    """Peak training memory of the paper's models and their counterparts, counted storage by storage."""

    config: Annotated[MemoryBenchConfig, tyro.conf.arg(name="")] = field(default_factory=MemoryBenchConfig)
    """What to measure."""
    out: Path = Path("results/bench_memory.json")
    """Where the results are written."""
    json: bool = False
    """Print the results to stdout as JSON instead of tables."""

    def run(self) -> int:
        results = with_progress(lambda show: run_memory_bench(self.config, on_progress=show))
        path = write_results(self.out, results)
        if self.json:
            print(json.dumps(results, indent=1))
            return 0
        console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
        console.print(_models_table(results))
        console.print(_comparison_table(results))
        console.print(f"Results written to {path}", soft_wrap=True, highlight=False)
        return 0


@dataclass(frozen=True, kw_only=True)
class Plan(Command):
    """What a training step of a model will need, found out without its memory or its time."""

    name: Annotated[str, tyro.conf.Positional]
    """A recipe, or a model of the paper's tables."""
    batch: int = 15
    """Samples."""
    length: int = 150
    """Positions."""
    json: bool = False
    """Print the figures to stdout as JSON."""

    def run(self) -> int:
        if self.batch < 1 or self.length < 1:
            raise ValueError(f"batch and length must be at least 1, got {self.batch} and {self.length}")
        config = find_model(self.name)
        memory = training_memory(config, batch=self.batch, length=self.length)
        with torch.device("meta"):
            count = num_parameters(SequenceModel(config))
        optimiser = 2 * memory.parameters
        if self.json:
            figures = {**dataclasses.asdict(memory), "optimiser": optimiser, "total": memory.peak + optimiser}
            print(json.dumps({"model": self.name, "batch": self.batch, "length": self.length, "bytes": figures}))
            return 0
        print(f"{self.name}: {count.total:,} parameters, {count.rest:,} of them outside embedding and softmax")
        console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
        console.print(f"one training step in float32, batch {self.batch}, length {self.length}:", highlight=False)
        console.print(_plan_table(memory, optimiser))
        console.print("Tensors only: leave room for the CUDA context, workspaces and fragmentation.", highlight=False)
        return 0


def find_model(name: str) -> ModelConfig:
    """The model of a recipe, or one of the paper's tables."""
    if name in RECIPES:
        return RECIPES[name]().model
    if name in PAPER_MODELS:
        return PAPER_MODELS[name]()
    raise ValueError(unknown("recipe or model", name, (*RECIPES, *PAPER_MODELS)))


def _plan_table(memory: TrainingMemory, optimiser: int) -> Table:
    table = Table(**STYLE)
    table.add_column("held for")
    table.add_column("GiB", justify="right")
    for name in ("parameters", "gradients", "activations", "solver"):
        table.add_row(name, f"{getattr(memory, name) / GIB:.2f}")
    table.add_row("Adam's two averages", f"{optimiser / GIB:.2f}")
    table.add_section()
    table.add_row("at the peak", f"{(memory.peak + optimiser) / GIB:.2f}", style="bold")
    return table


def _models_table(results: dict[str, Any]) -> Table:
    config = results["config"]
    title = f"peak of one training step in MiB, batch {config['batch']}, length {config['length']}, embeddings excluded"
    table = Table(title=title, **STYLE)
    table.add_column("model", no_wrap=True)
    parts = ("parameters", "gradients", "activations", "solver", "peak")
    for part in parts:
        table.add_column(part, justify="right")
    for name, held in results["bytes"].items():
        table.add_row(name, *(f"{held[part] / MIB:,.0f}" for part in parts))
    return table


def _comparison_table(results: dict[str, Any]) -> Table:
    table = Table(title="ratios and bars", **STYLE)
    table.add_column("what", no_wrap=True)
    table.add_column("measured", justify="right")
    table.add_column("asked", justify="right")
    table.add_column("holds")
    for row in results["summary"]:
        table.add_row(row["name"], f"{row['value']:.3f}", f"<= {row['bar']:.3f}", "yes" if row["holds"] else "NO")
    return table
