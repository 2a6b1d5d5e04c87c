"""`deqkit eval`."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import tyro
from rich.console import Console
from rich.table import Table

from deqkit.analysis.results import results_header, write_results
from deqkit.cli._command import Command
from deqkit.cli._terminal import STYLE, TABLE_WIDTH, with_progress
from deqkit.solve import AbstractSolver, NonFiniteError, Tolerance
from deqkit.train.evaluate import evaluate, measure_leak, peak_memory_mib, sweep
from deqkit.train.load import LoadedRun, load_run
from deqkit.train.progress import Progress
from deqkit.train.tasks import AbstractTask

TOLERANCES = (0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
STEP_LIMITS = (2, 3, 4, 6, 8, 12, 16, 24)


@dataclass(frozen=True, kw_only=True)
class Eval(Command):
    """The quality of a run's model on a split, with the context carried from segment to segment.

    A pass that is interrupted goes on where it was when the same command is given again.
    """

    run_folder: Annotated[Path, tyro.conf.Positional, tyro.conf.arg(metavar="RUN")]
    """The run."""
    split: str = "valid"
    """"train", "valid" or "test"."""
    checkpoint: str = "best"
    """"best", "latest" or a step."""
    data: str | None = None
    """Other data with the same vocabulary."""
    tol: float | None = None
    """Relative tolerance of the solve; the run's own if left out."""
    max_steps: int | None = None
    """Step limit of the solve; the run's own if left out."""
    solver: AbstractSolver | None = None
    """Solver; the run's own if left out, which does not let later tokens change earlier results."""
    max_batches: int | None = None
    """Look at a part only."""
    sweep: bool = False
    """Also measure against the tolerance and against the step limit."""
    out: Path | None = None
    """Where the figures are written; in the run's folder if left out."""
    json: bool = False
    """Print the figures to stdout as JSON."""

    def __post_init__(self) -> None:
        if self.max_batches is not None and self.max_batches < 1:
            raise ValueError(f"max_batches must be at least 1, got {self.max_batches}")

    def run(self) -> int:
        which = int(self.checkpoint) if self.checkpoint.isdigit() else self.checkpoint
        loaded = load_run(self.run_folder, which)
        if loaded.config.model.depth == "equilibrium" and loaded.step <= loaded.config.devices.warmup_steps:
            shallow = f"step {loaded.step} is of the shallow start ({loaded.config.devices.warmup_depth} layers)"
            told = f"deqkit: {shallow}: its equilibrium, which is evaluated here, was never trained"
            print(told, file=sys.stderr)
        task = loaded.task(self.data)
        is_equilibrium = loaded.config.model.depth == "equilibrium"
        if self.sweep and not is_equilibrium:
            raise ValueError(f"nothing of {self.run_folder} is solved: there is no tolerance or step limit to sweep")
        settings = self._settings()
        progress = self._progress(loaded, task, settings)
        figures = with_progress(lambda show: self._evaluate(loaded, task, settings, progress, show))
        result = {
            **results_header(
                benchmark="eval",
                seed=loaded.config.seed,
                config={"run": loaded.config.recipe},
            ),
            "step": loaded.step,
            "split": self.split,
            "data": self.data or loaded.config.data.source,
            "data_sha256": task.data_hash,
            "settings": {name: repr(value) for name, value in settings.items() if value is not None},
            "figures": figures,
            "seconds": progress.seconds,
            "interruptions": progress.interruptions,
            "leak": measure_leak(loaded.model, task, self.split, **settings),
            "sweep": with_progress(lambda show: self._sweep(loaded, task, show)) if self.sweep else [],
            "memory_mib": peak_memory_mib(),
        }
        path = write_results(self.out or self.run_folder / f"{self._name()}.json", result)
        if self.json:
            print(json.dumps(result))
        else:
            _print(result, task, path)
        return 0

    def _name(self) -> str:
        """Figures on other data, of a part, of another checkpoint or with another solve have a file of their own, or
        they would pass for the run's, and take the place of those."""
        name = f"evaluation-{self.split}" if self.data is None else f"other-data-{Path(self.data).name}-{self.split}"
        options = {"checkpoint": self.checkpoint, "tol": self.tol, "max-steps": self.max_steps}
        options |= {"solver": self.solver and type(self.solver).__name__, "max-batches": self.max_batches}
        usual = {"checkpoint": "best"}
        others = [f"{key}-{value}" for key, value in options.items() if value != usual.get(key)]
        return "-".join(["other", name, *others]) if others else name

    def _settings(self) -> dict[str, Any]:
        tol = None if self.tol is None else Tolerance(rtol=self.tol)
        return {"tol": tol, "max_steps": self.max_steps, "solver": self.solver}

    def _progress(self, loaded: LoadedRun, task: AbstractTask, settings: dict[str, Any]) -> Progress:
        key = {
            "step": loaded.step,
            "data": task.data_hash,
            "split": self.split,
            "max_batches": self.max_batches,
            "batch": [loaded.config.data.eval_batch, loaded.config.data.eval_length],
            "settings": {name: repr(value) for name, value in settings.items()},
        }
        return Progress(self.run_folder / f".{self._name()}.progress", key)

    def _evaluate(
        self, loaded: LoadedRun, task: AbstractTask, settings: dict[str, Any], progress: Progress, show: Any
    ) -> dict[str, Any]:
        batches = task.evaluation(self.split)
        total = len(batches) if hasattr(batches, "__len__") else 0  # pyright: ignore[reportArgumentType]

        def on_batch(number: int) -> None:
            show(f"evaluating {self.split}", number + 1, total)

        try:
            return evaluate(
                loaded.model,
                task,
                self.split,
                max_batches=self.max_batches,
                on_batch=on_batch,
                progress=progress,
                **settings,
            )
        except NonFiniteError as error:
            raise ValueError(f"{self.run_folder}, step {loaded.step}: try another --checkpoint ({error})") from error

    def _sweep(self, loaded: LoadedRun, task: AbstractTask, show: Any) -> list[dict[str, Any]]:
        return sweep(
            loaded.model,
            task,
            self.split,
            tolerances=TOLERANCES,
            step_limits=STEP_LIMITS,
            max_batches=self.max_batches,
            on_point=show,
        )


def _print(result: dict[str, Any], task: AbstractTask, path: Path) -> None:
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)
    figures, part = result["figures"], "" if result["figures"]["complete"] else " (a part of it)"
    console.print(f"{result['split']}{part}, checkpoint of step {result['step']}:", highlight=False)
    table = Table(**STYLE)
    table.add_column("figure")
    table.add_column("value", justify="right")
    names = {"perplexity": "perplexity", "loss": "loss in nats per token", "bits_per_byte": "bits per byte"}
    names |= {"num_tokens": "tokens", "evals": "evaluations a solve", "unconverged": "share not converged"}
    for key, name in names.items():
        if key in figures:
            table.add_row(name, f"{figures[key]:,}" if key == "num_tokens" else f"{figures[key]:.5g}")
    table.add_row("causality leak in nats", f"{result['leak']:.3g}")
    table.add_row("tokens a second", f"{figures['num_tokens'] / result['seconds']:,.0f}")
    if result["interruptions"]:
        table.add_row("taken up again", f"{result['interruptions']} times")
    table.add_row("memory of the process in MiB", f"{result['memory_mib']:,.0f}")
    console.print(table)
    if result["sweep"]:
        console.print(_sweep_table(result["sweep"], task.headline))
    console.print(f"Written to {path}", highlight=False, soft_wrap=True)


def _sweep_table(points: list[dict[str, Any]], headline: str) -> Table:
    table = Table(**STYLE)
    for column in ("tolerance", "step limit", headline, "evaluations", "largest residual"):
        table.add_column(column, justify="right")
    for point in points:
        tolerance = f"{point['tolerance']:g}" if "tolerance" in point else "-"
        limit = f"{point['max_steps']}" if "max_steps" in point else "-"
        row = (f"{point[headline]:.5g}", f"{point['evals']:.1f}", f"{point['residual']:.1e}")
        table.add_row(tolerance, limit, *row)
    return table
