"""`make demo`: two tasks, each learned by an equilibrium and by the same cell in layers, and a page that compares them.

The tasks are copy memory at a short length and next-token prediction on the documentation that every Python carries.
Counterparts have the same parameters and see the same data. Writes `demo/report.html`; nothing is downloaded.
"""

import shutil
import statistics
import time
from dataclasses import replace
from pathlib import Path

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from deqkit.analysis.training_memory import training_memory
from deqkit.report import write_report
from deqkit.train.config import DeviceConfig, TrainConfig
from deqkit.train.evaluate import evaluate, measure_leak
from deqkit.train.load import load_run
from deqkit.train.loop import train
from deqkit.train.recipes import RECIPES, layers
from deqkit.train.run_folder import RunFolder, read_metrics
from deqkit.train.tasks import resolve

OUT = Path("demo")
DEPTH = 12
console = Console()


def experiments() -> list[TrainConfig]:
    """Text and copy memory, at the equilibrium and in layers."""
    text = resolve(RECIPES["demo"]())
    copy = RECIPES["copy-memory-mini"]()
    copy = replace(
        copy,
        recipe="copy",
        data=replace(copy.data, copy_T=30, copy_train=2_000, copy_test=400),
        devices=DeviceConfig(warmup_steps=200),
        steps=500,
        eval_every=100,
    )
    runs = [text, layers(text, DEPTH, tied=True), copy, layers(copy, DEPTH, tied=True)]
    return [replace(run, trackers=()) for run in runs]


def run(config: TrainConfig) -> dict[str, str]:
    """Train and test one of them; a row of the table."""
    folder = RunFolder(OUT / config.recipe)
    if (folder.path / "config.json").exists():  # of an earlier demo
        shutil.rmtree(folder.path)
    started = time.monotonic()
    with console.status(f"{config.recipe}: starting") as status:
        train(config, folder, on_record=lambda r: status.update(f"{config.recipe}: step {r['step']}/{config.steps}"))
    seconds = time.monotonic() - started
    trained = load_run(folder.path)
    task = trained.task()
    figures = evaluate(trained.model, task, "test")
    records = [r for r in read_metrics(folder.metrics) if r["kind"] == "train" and not r["shallow"]]
    memory = training_memory(config.model, batch=config.data.batch, length=sequence_length(config), body_only=True)
    return {
        "model": config.recipe,
        "on test": f"{task.headline} {figures[task.headline]:.3g}",
        "memory": f"{memory.peak / 2**20:.1f} MiB",
        "ms/step": f"{1e3 * statistics.median(r['seconds'] for r in records):.0f}",
        "f/step": f"{records[-1]['evals']:.1f}" if "evals" in records[-1] else str(config.model.depth),
        "leak": f"{measure_leak(trained.model, task, 'test'):g}",
        "minutes": f"{seconds / 60:.1f}",
    }


def sequence_length(config: TrainConfig) -> int:
    return config.data.copy_T + 20 if config.data.source == "copy-memory" else config.data.length


def main() -> None:
    console.print("Four small models: text and copy memory, at the equilibrium and in layers.")
    rows = [run(config) for config in experiments()]
    table = Table(box=SIMPLE_HEAD)
    for column in rows[0]:
        table.add_column(column, justify="left" if column in ("model", "on test") else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row.values())
    console.print(table)
    console.print("memory: peak of the body in one training step, counted storage by storage")
    console.print("ms/step, f/step: time and evaluations of the cell, after the shallow start")
    console.print("leak: how much a token's loss changes when later tokens do")
    page = write_report([OUT / row["model"] for row in rows], OUT / "report.html")
    console.print(f"The page is {page}")


if __name__ == "__main__":
    main()
