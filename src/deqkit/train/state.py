"""Everything about a run that a checkpoint must hold for it to continue to the same bits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import Tensor
from torch.optim.swa_utils import AveragedModel

from deqkit.data import DataError
from deqkit.layers.memory import check_memory
from deqkit.model import SequenceModel
from deqkit.model.weights import WeightsError, load_weights, weights_of
from deqkit.train.checkpoint import (
    CheckpointError,
    CheckpointWriter,
    flatten,
    prune,
    read_checkpoint_tensors,
    read_json,
    read_state,
    unflatten,
)
from deqkit.train.config import TrainConfig, to_plain
from deqkit.train.objective import Objective
from deqkit.train.optimiser import make_optimiser
from deqkit.train.run_folder import RunFolder
from deqkit.train.schedule import Schedule
from deqkit.train.tasks import AbstractTask


class TrainingState:
    """Model, optimiser, schedule, place in the data, memory of earlier segments and random numbers."""

    def __init__(self, config: TrainConfig, task: AbstractTask, accelerator: Accelerator) -> None:
        self.config, self.task, self.accelerator = config, task, accelerator
        rank, world_size = accelerator.process_index, accelerator.num_processes
        _check_shares(config, world_size)
        torch.manual_seed(config.seed)
        self.model = SequenceModel(config.model)
        torch.manual_seed(config.seed + 1_000_003 * (rank + 1))  # dropout: each process has its own
        objective = Objective(self.model, config.regulariser)
        optimiser = make_optimiser(config.optimiser, objective.parameters())
        self.objective, self.optimiser = accelerator.prepare(objective, optimiser)
        self.schedule = Schedule(config.optimiser, config.steps)
        self.batches = task.training(rank=rank, world_size=world_size)
        self.memory: list[Any] = [None] * config.optimiser.accumulate
        self.averaged: AveragedModel | None = None
        self.step = 0
        self.best_step: int | None = None

    @property
    def evaluated_model(self) -> SequenceModel:
        """The model whose quality is reported: with averaging the mean of the weights, once there is one."""
        return self.model if self.averaged is None else self.averaged.module  # pyright: ignore[reportReturnType]

    def update_average(self) -> None:
        start = self.config.optimiser.average_after
        if start is None or self.step <= start:
            return
        if self.averaged is None:
            self.averaged = AveragedModel(self.model)
        self.averaged.update_parameters(self.model)

    def save(self, folder: RunFolder, *, metrics_size: int) -> None:
        """Write a checkpoint. All processes call it; it exists complete or not at all."""
        accelerator = self.accelerator
        writer = CheckpointWriter(folder.checkpoints, self.step)
        if accelerator.is_main_process:
            writer.begin()
        accelerator.wait_for_everyone()
        try:
            tensors, rest = flatten({"memory": plain_memory(self.memory), "random": _random_state()}, "rank")
            writer.add_tensors(f"rank-{accelerator.process_index}.safetensors", tensors)
            writer.add_json(f"rank-{accelerator.process_index}.json", rest)
            if accelerator.is_main_process:
                self._save_shared(writer, metrics_size)
            accelerator.wait_for_everyone()
            if accelerator.is_main_process:
                writer.commit()
                prune(folder.checkpoints, keep=self.config.keep, best_step=self.best_step)
        except BaseException:
            writer.abandon()
            raise
        accelerator.wait_for_everyone()

    def _save_shared(self, writer: CheckpointWriter, metrics_size: int) -> None:
        writer.add_tensors("model.safetensors", weights_of(self.model))
        tensors, rest = flatten(self.optimiser.state_dict(), "optimiser")
        writer.add_tensors("optimiser.safetensors", tensors)
        if self.averaged is not None:
            writer.add_tensors("averaged.safetensors", weights_of(self.averaged.module))
        state = {
            "step": self.step,
            "best_step": self.best_step,
            "num_processes": self.accelerator.num_processes,
            "num_averaged": None if self.averaged is None else int(self.averaged.n_averaged),
            "optimiser": rest,
            "schedule": self.schedule.state_dict(),
            "data": self.batches.state_dict(),
            "metrics_size": metrics_size,
            "vocabulary": self.task.fingerprint,
            "model": to_plain(self.config.model),
        }
        writer.add_json("state.json", state)

    def load(self, checkpoint: Path) -> int:
        """Continue from a checkpoint; returns the size of the metrics file at that moment.

        Raises:
            CheckpointError: it is damaged, or of another run.
        """
        state = read_state(checkpoint)
        try:
            self._check(state, checkpoint)
            self._load_shared(state, checkpoint)
            self._load_rank(checkpoint)
            return state["metrics_size"]
        except CheckpointError:
            raise
        except DataError as error:
            raise CheckpointError(f"{checkpoint} was made with other data or another batch: {error}") from error
        except (LookupError, TypeError, ValueError, RuntimeError) as error:
            raise CheckpointError(f"{checkpoint} is damaged ({error!r}); remove it to use the one before") from error

    def _load_shared(self, state: dict[str, Any], checkpoint: Path) -> None:
        _load(self.model, checkpoint, "model.safetensors")
        tensors = read_checkpoint_tensors(checkpoint, "optimiser.safetensors")
        optimiser = _with_integer_keys(unflatten(tensors, state["optimiser"]))
        self._check_optimiser(optimiser, checkpoint)
        self.optimiser.load_state_dict(optimiser)
        if state["num_averaged"] is not None:
            self.averaged = AveragedModel(self.model)
            _load(self.averaged.module, checkpoint, "averaged.safetensors")
            self.averaged.n_averaged.fill_(state["num_averaged"])
        self.schedule.load_state_dict(state["schedule"])
        self.batches.load_state_dict(state["data"])
        self.step, self.best_step = state["step"], state["best_step"]

    def _check_optimiser(self, state: dict[str, Any], checkpoint: Path) -> None:
        """An optimiser loads any settings and moments of any shape, and fails at its next step only."""
        if state["param_groups"][0].keys() != self.optimiser.param_groups[0].keys():
            name = self.config.optimiser.name
            raise CheckpointError(f"{checkpoint} was made with another optimiser than {name}; resume with that one")
        parameters = list(self.model.parameters())
        for index, moments in state["state"].items():
            for name, moment in moments.items():
                if isinstance(moment, Tensor) and moment.ndim and moment.shape != parameters[index].shape:
                    raise ValueError(f"{name} of parameter {index} of the optimiser has shape {tuple(moment.shape)}")

    def _load_rank(self, checkpoint: Path) -> None:
        name = f"rank-{self.accelerator.process_index}"
        tensors = read_checkpoint_tensors(checkpoint, f"{name}.safetensors")
        own = unflatten(tensors, read_json(checkpoint, f"{name}.json"))
        rows = len(self.batches.rows) // self.config.optimiser.accumulate
        self.memory = [memory_of(self.model, part, rows, self.accelerator.device) for part in own["memory"]]
        _set_random_state(own["random"])

    def _check(self, state: dict[str, Any], checkpoint: Path) -> None:
        if state["optimiser"] is None:
            raise CheckpointError(f"{checkpoint} is an imported model without an optimiser: there is nothing to resume")
        if state["vocabulary"] != self.task.fingerprint:
            raise CheckpointError(
                f"{checkpoint} was made with another vocabulary than that of {self.config.data.source}; resume with "
                "the data that the run began with"
            )
        if state["num_processes"] != self.accelerator.num_processes:
            raise CheckpointError(
                f"{checkpoint} was made by {state['num_processes']} processes; resume with as many, "
                f"not {self.accelerator.num_processes}: each has its own memory and random numbers"
            )


def _check_shares(config: TrainConfig, world_size: int) -> None:
    """Every process gets equally many rows of a batch, and cuts them into equal parts."""
    batch, accumulate = config.data.batch, config.optimiser.accumulate
    if batch % (world_size * accumulate):
        raise ValueError(
            f"data.batch {batch} does not divide into {world_size} processes with optimiser.accumulate {accumulate} "
            f"equal parts each: it must be a multiple of {world_size * accumulate}"
        )
    if config.data.eval_batch % world_size:
        raise ValueError(
            f"data.eval_batch {config.data.eval_batch} does not divide into {world_size} processes: it must be a "
            f"multiple of {world_size}"
        )


def _load(model: Any, checkpoint: Path, name: str) -> None:
    try:
        load_weights(model, read_checkpoint_tensors(checkpoint, name), source=str(checkpoint / name))
    except WeightsError as error:
        raise CheckpointError(f"{error}; remove {checkpoint} to use the one before") from error


def _with_integer_keys(state: dict[str, Any]) -> dict[str, Any]:
    """Optimisers number their parameters; JSON has string keys only."""
    return {**state, "state": {int(key): value for key, value in state["state"].items()}}


def plain_memory(memory: list[Any]) -> list[Any]:
    """Memories of earlier segments as lists of tensors, for a file."""
    return [None if part is None else [list(entry) for entry in part] for part in memory]


def memory_of(model: SequenceModel, part: Any, rows: int, device: torch.device) -> Any:
    """One of them again, checked against the model."""
    if part is None:
        return None
    x_B1D = torch.zeros(rows, 1, model.embedding.width, device=device)
    empty = tuple(cell.empty_memory(x_B1D) for cell in model.cells)
    memory = tuple(type(e)(*(t.to(device) for t in entry)) for e, entry in zip(empty, part, strict=True))
    check_memory(memory, empty)
    return memory


def _random_state() -> dict[str, Tensor]:
    state = {"cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        state["cuda"] = torch.cuda.get_rng_state()
    return state


def _set_random_state(state: dict[str, Tensor]) -> None:
    torch.set_rng_state(state["cpu"])
    if "cuda" in state and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
