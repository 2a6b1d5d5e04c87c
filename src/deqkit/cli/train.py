"""`deqkit train` and `deqkit recipes`."""

from __future__ import annotations

import json
import shlex
import sys
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, ClassVar

import torch
import tyro
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from deqkit._plain import unknown
from deqkit.analysis.training_memory import training_memory
from deqkit.cli._command import Command
from deqkit.cli._terminal import STYLE, TABLE_WIDTH
from deqkit.data import PrepareConfig, open_corpus, prepare
from deqkit.model import SequenceModel, num_parameters
from deqkit.train.config import DeviceConfig, TrainConfig
from deqkit.train.loop import train, try_step
from deqkit.train.recipes import RECIPES, demo
from deqkit.train.run_folder import RunFolder
from deqkit.train.tasks import BUILT_IN, resolve


@dataclass(frozen=True, kw_only=True)
class Train(Command):
    """Train a recipe, or continue a run. Every field of the recipe is an option."""

    subject: ClassVar[str] = "RECIPE"

    config: Annotated[TrainConfig, tyro.conf.arg(name="")]
    """The recipe."""
    out: Path | None = None
    """The run's folder; runs/RECIPE if left out."""
    resume: Path | None = None
    """A run to continue, with its own configuration; --data.source tells where its data was moved."""
    dry_run: bool = False
    """Build everything, do one step, and tell what it needs; nothing is kept."""
    json: bool = False
    """Print the result to stdout as JSON."""

    @classmethod
    def default(cls, words: list[str]) -> tuple[Command | None, list[str]]:
        """The recipe that the first word names gives the options their defaults."""
        if words and not words[0].startswith("-"):
            if "--resume" in words:
                raise ValueError(f"a run goes on as the recipe it began with: leave out {words[0]!r} beside --resume")
            return cls(config=find_recipe(words[0])), words[1:]
        if "--resume" in words or "-h" in words or "--help" in words:
            return cls(config=demo()), words
        raise ValueError(f"train needs a recipe, one of {', '.join(RECIPES)}, or --resume RUN")

    def remark(self) -> str:
        return f"; defaults below are of the recipe {self.config.recipe}, `deqkit recipes` lists all"

    def run(self) -> int:
        if self.resume is not None:
            source = self.config.data.source
            usual = replace(demo(), data=replace(demo().data, source=source))
            if self != Train(config=usual, resume=self.resume, json=self.json, debug=self.debug):
                raise ValueError(
                    "a run goes on with its own configuration: leave out all options beside --resume (but "
                    "--data.source, for data that was moved); to change anything else, begin a new run"
                )
            folder = RunFolder(self.resume)
            config = folder.config()
            if source != demo().data.source:
                config = replace(config, data=replace(config.data, source=str(Path(source).resolve())))
            return self._train(config, folder, resume=True)
        if self.dry_run:
            with tempfile.TemporaryDirectory() as scratch:
                return _dry_run(resolve(self._with_text(Path(scratch) / "data")), as_json=self.json)
        folder = RunFolder(self.out or Path("runs") / self.config.recipe)
        folder.require_free()  # before its text is prepared: a run that is there needs the text it had
        config = resolve(self._with_text(folder.path.with_name(f"{folder.path.name}-data")))
        return self._train(config, folder, resume=False)

    def _with_text(self, out: Path) -> TrainConfig:
        """A text file is prepared first, in this folder, unless it was before."""
        if self.config.data.source in ("", *BUILT_IN):
            return self.config
        source = Path(self.config.data.source)
        if not source.is_file():
            # The run may be used from elsewhere.
            where = str(source.resolve()) if source.is_dir() else self.config.data.source
            return replace(self.config, data=replace(self.config.data, source=where))
        if not (out.exists() and open_corpus(out).is_made_from(source)):
            print(f"deqkit: preparing {source} in {out}", file=sys.stderr)
            prepare(PrepareConfig(dataset="text", out=out, source=source, overwrite=True))
        return replace(self.config, data=replace(self.config.data, source=str(out.resolve()), fit_vocabulary=True))

    def _train(self, config: TrainConfig, folder: RunFolder, *, resume: bool) -> int:
        with _Live(config) as live:
            result = train(config, folder, resume=resume, on_record=live.show)
        if torch.distributed.is_initialized() and torch.distributed.get_rank():
            return 0
        if self.json:
            print(json.dumps({"run": str(folder.path), **result}))
        else:
            print(_ending(folder, config, result, was_done=not live.num_records))
        return 0 if result["signal"] is None else 128 + result["signal"]  # as shells have it


@dataclass(frozen=True, kw_only=True)
class Recipes(Command):
    """List the recipes."""

    json: bool = False
    """Print them to stdout as JSON."""

    def run(self) -> int:
        rows = [_describe(name) for name in RECIPES]
        if self.json:
            print(json.dumps(rows, indent=1))
            return 0
        table = Table(**STYLE)
        for column in ("recipe", "parameters", "outside embedding", "data", "steps", "expected time"):
            table.add_column(
                column, justify="right" if column in ("parameters", "outside embedding", "steps") else "left"
            )
        for row in rows:
            counts = (f"{row['parameters']:,}", f"{row['outside_embedding']:,}")
            table.add_row(row["recipe"], *counts, row["data"], f"{row['steps']:,}", row["expected_time"])
        console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH + 20)
        console.print(table)
        console.print("deqkit train RECIPE --dry-run tells what one needs; --help lists every option.", highlight=False)
        return 0


def find_recipe(name: str) -> TrainConfig:
    if name not in RECIPES:
        raise ValueError(unknown("recipe", name, RECIPES))
    return RECIPES[name]()


def _describe(name: str) -> dict[str, Any]:
    config = RECIPES[name]()
    with torch.device("meta"):
        count = num_parameters(SequenceModel(config.model))
    prepared = {"ptb": "ptb", "wikitext-2": "wikitext-2", "wt103": "wikitext-103", "text": "your text"}
    data = config.data.source or next(kind for prefix, kind in prepared.items() if name.startswith(prefix))
    return {
        "recipe": name,
        "parameters": count.total,
        "outside_embedding": count.rest,
        "data": data,
        "steps": config.steps,
        "expected_time": config.expected_time,
    }


def _dry_run(config: TrainConfig, *, as_json: bool) -> int:
    """One step at the equilibrium, which is the dearest."""
    memory = training_memory(config.model, batch=config.data.batch, length=config.data.length)
    with torch.device("meta"):
        count = num_parameters(SequenceModel(config.model))
    record = try_step(replace(config, devices=DeviceConfig()))
    figures = {
        "parameters": count.total,
        "outside_embedding": count.rest,
        "tensor_memory_mib": memory.peak / 2**20,
        "seconds_per_step": record["seconds"],
        "loss": record["loss"],
        "evals": record.get("evals"),
        "backward_evals": record.get("backward_evals"),
    }
    if as_json:
        print(json.dumps(figures))
        return 0
    print(f"{config.recipe}: {count.total:,} parameters, {count.rest:,} outside embedding and softmax")
    print(f"one step: {record['seconds']:.2f} s, loss {record['loss']:.3f}, {_solves(record)}")
    print(f"tensors at the peak, without the optimiser's: {memory.peak / 2**20:,.0f} MiB")
    print("nothing was kept")
    return 0


def _solves(record: dict[str, Any]) -> str:
    if "evals" not in record:
        return "layer by layer"
    backward = f", {record['backward_evals']:.1f} products backward" if "backward_evals" in record else ""
    return f"{record['evals']:.1f} evaluations forward{backward}"


def _ending(folder: RunFolder, config: TrainConfig, result: dict[str, Any], *, was_done: bool) -> str:
    path = shlex.quote(str(folder.path))
    if not result["finished"]:
        return f"Stopped after step {result['step']} of {config.steps}. Go on with: deqkit train --resume {path}"
    figures = ", ".join(f"{k} {result[k]:.4g}" for k in ("loss", "perplexity", "bits_per_byte") if k in result)
    layers = f", of {result['shallow']} layers: its equilibrium was never trained" if "shallow" in result else ""
    ending = f"The run is in {path}. Next: deqkit eval {path} --split test; deqkit report {path}"
    before = f"All {config.steps} steps had been done before. " if was_done else ""
    return f"{before}Validation {figures}{layers}.\n{ending}"


class _Live:
    """One line that moves on a terminal, or a line every ten seconds in a log; evaluations always."""

    def __init__(self, config: TrainConfig) -> None:
        self._console = Console(stderr=True)
        self._steps = config.steps
        self._last = -1e9
        self.num_records = 0
        columns = (TextColumn("step"), MofNCompleteColumn(), BarColumn(bar_width=20), TextColumn("{task.description}"))
        self._progress = Progress(*columns, TimeRemainingColumn(), console=self._console, transient=True)
        self._task: Any = None

    def __enter__(self) -> _Live:
        if self._console.is_terminal:
            self._progress.start()
            self._task = self._progress.add_task("", total=self._steps)
        return self

    def __exit__(self, *error: Any) -> None:
        if self._task is not None:
            self._progress.stop()

    def show(self, record: dict[str, Any]) -> None:
        self.num_records += 1
        if record["kind"] == "valid":
            self._console.print(_line(record), highlight=False, soft_wrap=True)
        elif self._task is not None:
            self._progress.update(self._task, completed=record["step"], description=_line(record))
        elif time.monotonic() - self._last > 10:
            self._last = time.monotonic()
            self._console.print(_line(record), highlight=False, soft_wrap=True)


def _line(record: dict[str, Any]) -> str:
    figures = ", ".join(f"{k} {record[k]:.4g}" for k in ("loss", "perplexity") if k in record)
    if record["kind"] == "valid":
        solves = f", {record['evals']:.1f} evaluations a solve" if "evals" in record else ""
        solves += f", of {record['shallow']} layers" if "shallow" in record else ""
        return f"step {record['step']}: validation {figures}{solves}"
    solver = ""
    if "evals" in record:
        solver = f" · f {record['evals']:.1f} vjp {record.get('backward_evals', 0):.1f}"
        solver += f" · {record['unconverged']:.0%} open" if record["unconverged"] else ""
    return (
        f"step {record['step']}: {figures} · lr {record['lr']:.2g}{solver} · {record['tokens_per_second']:,.0f} tok/s"
    )
