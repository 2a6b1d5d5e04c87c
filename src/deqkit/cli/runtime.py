"""`deqkit bench runtime`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
import tyro
from rich.console import Console
from rich.table import Table

from deqkit._plain import unknown
from deqkit.analysis.results import results_header, write_results
from deqkit.analysis.runtime import STAGES
from deqkit.cli._command import Command
from deqkit.cli._terminal import STYLE, TABLE_WIDTH, OnProgress, with_progress
from deqkit.model import SequenceModel
from deqkit.paper.runtime import breakdowns, compare_models, phases, stacked
from deqkit.train.config import TrainConfig
from deqkit.train.load import load_run
from deqkit.train.recipes import RECIPES
from deqkit.train.tasks import AbstractTask, make_task, resolve


@dataclass(frozen=True, kw_only=True)
class BenchRuntime(Command):
    """Where the time of a DEQ's steps goes, and how it compares with stacks of its cell."""

    name: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="RECIPE|RUN")]
    """A recipe, whose model is then untrained, or the folder of a run."""
    data: str | None = None
    """Data of the same vocabulary; the recipe's or the run's own if left out."""
    layers: int = 18
    """Depth of the stacks, tied and untied."""
    rounds: int = 9
    """How often every step is timed."""
    steps: int = 6
    """Steps that are broken down."""
    threads: int = 1
    """Threads torch may use."""
    compile: bool = False
    """Time the DEQ with its cell compiled as well."""
    bf16: bool = False
    """Time the DEQ's training in bfloat16 as well; all else is then in float32, whatever the run was trained in."""
    clock: Literal["cpu", "wall"] = "cpu"
    """For the comparison: processor time, which a busy machine disturbs least, or wall time."""
    out: Path = Path("results/bench_runtime.json")
    """Where the results are written."""
    json: bool = False
    """Print the results to stdout as JSON instead of tables."""

    def run(self) -> int:
        for option in ("layers", "rounds", "steps", "threads"):
            if getattr(self, option) < 1:
                raise ValueError(f"{option} must be at least 1, got {getattr(self, option)}")
        before = torch.get_num_threads()
        torch.set_num_threads(self.threads)
        try:
            config, model, task, step = find_equilibrium(self.name, self.data)
            results = with_progress(lambda show: self._measure(config, model, task, step, show))
        finally:
            torch.set_num_threads(before)
        path = write_results(self.out, results)
        if self.json:
            print(json.dumps(results, indent=1))
            return 0
        console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
        console.print(_breakdown_table(results))
        console.print(_comparison_table(results))
        if step is None:
            console.print("The model is untrained: the solves of a trained one take other numbers of evaluations.")
        console.print(f"Results written to {path}", soft_wrap=True, highlight=False)
        return 0

    def _measure(
        self, config: TrainConfig, model: SequenceModel, task: AbstractTask, step: int | None, show: OnProgress
    ) -> dict[str, Any]:
        if self.bf16:
            config = replace(config, precision="float32")
        show("breakdown", 0, 3)
        parts = breakdowns(config, model, task, self.steps)
        models = {"DEQ": (config, model)}
        for tied in (True, False):
            name = f"{self.layers} {'tied' if tied else 'untied'} layers"
            models[name] = stacked(config, model, self.layers, tied=tied)
        if self.compile:
            models["DEQ, compiled"] = compiled_copy(config, model)
        if self.bf16:
            models["DEQ, bf16"] = replace(config, precision="bf16"), model
        compared = {}
        for number, (phase, batches) in enumerate(phases(config, task, self.rounds + 1).items(), 1):
            if phase == "inference":  # which is in float32 for every model
                models.pop("DEQ, bf16", None)

            def on_round(done: int, total: int, *, phase: str = phase, number: int = number) -> None:
                show(f"{phase}, round {done + 1} of {total}", number, 3)

            settings: dict[str, Any] = {"rounds": self.rounds, "clock": self.clock, "on_round": on_round}
            compared[phase] = compare_models(models, batches, training=phase == "training", **settings)
        options = {"subject": config.recipe, "step": step, "layers": self.layers, "rounds": self.rounds}
        options |= {"steps": self.steps, "threads": self.threads, "clock": self.clock, "compile": self.compile}
        options |= {"bf16": self.bf16, "precision": config.precision}
        return {
            **results_header(benchmark="bench runtime", seed=config.seed, config=options),
            "breakdown": parts,
            "comparison": compared,
            "evaluations_per_token": {phase: _per_token(config, parts[phase], phase) for phase in parts},
        }


def find_equilibrium(name: str, data: str | None) -> tuple[TrainConfig, SequenceModel, AbstractTask, int | None]:
    """Configuration, model and data of a run or recipe, and the step of a run (None for a recipe).

    Raises:
        ValueError: it is neither, or a stack of layers.
    """
    if (Path(name) / "config.json").exists():
        run = load_run(name)
        found = run.config, run.model, run.task(data), run.step
    elif name in RECIPES:
        config = RECIPES[name]()
        if data is not None:
            config = replace(config, data=replace(config.data, source=data))
        config = resolve(config)
        task = make_task(config)
        with torch.random.fork_rng():
            torch.manual_seed(config.seed)
            found = config, SequenceModel(config.model), task, None
    else:
        raise ValueError(f"{unknown('recipe', name, tuple(RECIPES))}; nor is it the folder of a run")
    if found[0].model.depth != "equilibrium":
        raise ValueError(f"{name} is a stack of layers: give the equilibrium model it belongs to")
    return found


def compiled_copy(config: TrainConfig, model: SequenceModel) -> tuple[TrainConfig, SequenceModel]:
    """The same weights, with the cell compiled."""
    config = replace(config, model=replace(config.model, compile=True))
    return config, model.with_config(config.model)


def _per_token(config: TrainConfig, part: dict[str, Any], phase: str) -> float:
    """The paper's measure: evaluations of a solve over the length of its sequence."""
    length = config.data.length if phase == "training" else config.data.eval_length
    if config.data.source == "copy-memory":
        length = config.data.copy_T + 20
    return part["evaluations"] * config.model.num_pieces(length) / length


def _breakdown_table(results: dict[str, Any]) -> Table:
    subject = results["config"]["subject"]
    table = Table(title=f"{subject}: microseconds a token, wall time, and shares", **STYLE)
    table.add_column("stage")
    for phase in results["breakdown"]:
        table.add_column(phase, justify="right")
        table.add_column("", justify="right")
    for stage in STAGES:
        cells = []
        for part in results["breakdown"].values():
            seconds = part["seconds"][stage]
            cells += [f"{1e6 * seconds / part['tokens']:.1f}", f"{seconds / part['total']:.0%}"]
        table.add_row(stage, *cells)
    table.add_section()
    totals = [(f"{1e6 * part['total'] / part['tokens']:.1f}", "") for part in results["breakdown"].values()]
    table.add_row("total", *(cell for pair in totals for cell in pair), style="bold")
    for name in ("evaluations", "products"):
        counts = [part[name] for part in results["breakdown"].values()]
        cells = [("-" if count is None else f"{count:.1f}", "") for count in counts]
        table.add_row(f"{name} a solve", *(cell for pair in cells for cell in pair))
    per_token = [(f"{value:.3f}", "") for value in results["evaluations_per_token"].values()]
    table.add_row("evaluations a token", *(cell for pair in per_token for cell in pair))
    return table


def _comparison_table(results: dict[str, Any]) -> Table:
    clock = {"cpu": "processor", "wall": "wall"}[results["config"]["clock"]]
    table = Table(title=f"a step of each, interleaved: {clock} time, median and quartiles", **STYLE)
    for column in ("model", "step", "us a token", "DEQ / model", "range"):
        table.add_column(column, justify="left" if column in ("model", "step") else "right")
    for phase, compared in results["comparison"].items():
        for name, figures in compared["seconds"].items():
            low, high = (1e6 * value for value in figures["spread"])
            ratio = compared["ratios"].get(name)
            own = ("-", "-") if ratio is None else (f"{ratio['ratio']:.2f}x", f"{ratio['low']:.2f}-{ratio['high']:.2f}")
            table.add_row(name, phase, f"{1e6 * figures['median']:.1f} ({low:.1f}-{high:.1f})", *own)
    return table
