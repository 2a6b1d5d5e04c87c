"""What a run folder tells of its training, read once and checked."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from deqkit.report.chart import Phase
from deqkit.train.checkpoint import list_checkpoints
from deqkit.train.config import TrainConfig
from deqkit.train.run_folder import RunError, RunFolder, read_metrics
from deqkit.train.tasks import CopyTask, TextTask

Record = dict[str, Any]
FIELDS = {"kind", "step", "loss", "seconds"}
TRAIN_FIELDS = {"lr", "grad_norm", "shallow", "tokens_per_second", "memory_mib"}


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """What `deqkit eval` found on a split."""

    split: str
    figures: Record
    leak: float | None
    sweep: Sequence[Record]
    settings: Record
    """Settings of the solve that are not the run's own."""

    @property
    def is_complete(self) -> bool:
        return bool(self.figures.get("complete", True))


@dataclass(frozen=True, kw_only=True)
class History:
    """A run: what it was told to do, and every step of it."""

    folder: RunFolder
    header: Record
    """`config.json`: versions, commit, hash of the data."""
    config: TrainConfig
    steps: Sequence[Record]
    """Training steps; none for a model that was imported."""
    validations: Sequence[Record]
    evaluations: Sequence[Evaluation]

    @property
    def is_equilibrium(self) -> bool:
        return self.config.model.depth == "equilibrium"

    @property
    def num_steps(self) -> int:
        return self.steps[-1]["step"] if self.steps else 0

    @property
    def is_finished(self) -> bool:
        return self.num_steps >= self.config.steps

    @property
    def seconds(self) -> float:
        """Time spent in steps and in evaluations."""
        return sum(record["seconds"] for record in (*self.steps, *self.validations))

    @property
    def headline(self) -> str:
        """The figure by which runs are compared."""
        return CopyTask.headline if self.config.data.source == "copy-memory" else TextTask.headline

    @property
    def best(self) -> Record | None:
        """The best validation of the network that was asked for; of the shallow one if there is no other."""
        candidates = [record for record in self.validations if not self.is_shallow(record["step"])]
        return min(candidates or self.validations, key=lambda record: record["loss"], default=None)

    @property
    def best_is_shallow(self) -> bool:
        """Whether that is of a few layers, which says little about the equilibrium."""
        return self.best is not None and self.is_shallow(self.best["step"])

    def evaluation(self, split: str) -> Evaluation | None:
        return next((found for found in self.evaluations if found.split == split), None)

    def is_shallow(self, step: int) -> bool:
        """Whether the network had only a few layers at that step."""
        return 0 < step <= self.config.devices.warmup_steps

    def series(self, name: str) -> tuple[list[int], list[float]]:
        """Steps and values of a quantity, where it was measured."""
        found = [record for record in self.steps if record.get(name) is not None]
        return [record["step"] for record in found], [float(record[name]) for record in found]

    @property
    def deep_steps(self) -> Sequence[Record]:
        """Steps after the shallow phase; all if there was no other."""
        return [record for record in self.steps if not record["shallow"]] or self.steps

    @cached_property
    def depths(self) -> tuple[list[int], list[float]]:
        """Steps, and how often the cell was applied in the forward pass: layers, or evaluations of a solve."""
        shallow, layers = self.config.devices.warmup_depth, self.config.model.depth
        found: list[tuple[int, float]] = []
        for record in self.steps:
            depth = shallow if record["shallow"] else record.get("evals") if self.is_equilibrium else layers
            if depth is not None:
                found.append((record["step"], float(depth)))
        return [step for step, _ in found], [depth for _, depth in found]

    @cached_property
    def phases(self) -> Sequence[Phase]:
        """Parts of training that were different."""
        devices = self.config.devices
        bounds = [(0, devices.warmup_steps, f"shallow phase: {devices.warmup_depth} layers")]
        if devices.early_adjoint is not None:
            name = type(devices.early_adjoint).__name__
            bounds.append((devices.warmup_steps, devices.early_adjoint_steps, f"gradients by {name}"))
        if devices.early_rtol is not None:
            bounds.append((devices.warmup_steps, devices.early_rtol_steps, f"tolerance {devices.early_rtol:g}"))
        reached = [(start, min(start + steps, self.num_steps), text) for start, steps, text in bounds]
        return [Phase(start=start, end=end, text=text) for start, end, text in reached if end > start]


def read_history(path: Path) -> History:
    """Read a run.

    Raises:
        RunError: there is no run, it is damaged, or there is neither a step nor a checkpoint.
    """
    folder = RunFolder(path)
    config = folder.config()
    records = _read_records(folder.metrics)
    steps = [record for record in records if record["kind"] == "train"]
    if not steps and not list_checkpoints(folder.checkpoints):
        raise RunError(f"{path} has nothing to report yet: no training step and no checkpoint")
    return History(
        folder=folder,
        header=folder.read(),
        config=config,
        steps=steps,
        validations=[record for record in records if record["kind"] == "valid"],
        evaluations=[_read_evaluation(file) for file in sorted(path.glob("evaluation*.json"))],
    )


def _read_records(path: Path) -> list[Record]:
    try:
        records = list(read_metrics(path))
    except ValueError as error:  # JSON or UTF-8
        raise RunError(f"{path} is damaged: {error}") from error
    for record in records:
        _require(isinstance(record, dict) and FIELDS <= record.keys(), path)
        _require(record["kind"] != "train" or TRAIN_FIELDS <= record.keys(), path)
    return records


def _read_evaluation(path: Path) -> Evaluation:
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise RunError(f"{path} is damaged ({error}): evaluate again, or remove it") from error
    _require(isinstance(record, dict) and isinstance(record.get("figures"), dict) and "split" in record, path)
    figures, sweep = record["figures"], record.get("sweep") or []
    _require("loss" in figures and all(isinstance(point, dict) for point in sweep), path)
    settings = record.get("settings") or {}
    _require(isinstance(settings, dict), path)
    split, leak = str(record["split"]), record.get("leak")
    return Evaluation(split=split, figures=figures, leak=leak, sweep=sweep, settings=settings)


def _require(right: bool, path: Path) -> None:
    if not right:
        raise RunError(f"{path} does not hold what deqkit writes there; was it edited?")
