"""The training loop.

for every step: the batch -> the objective, part by part -> gradients -> clip -> update -> metrics
                now and then an evaluation on the validation split, and a checkpoint
"""

from __future__ import annotations

import logging
import math
import random
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.state import AcceleratorState
from accelerate.tracking import get_available_trackers
from accelerate.utils import ProjectConfiguration
from torch import Tensor

from deqkit.data import Batch
from deqkit.model import ModelOutput
from deqkit.solve import NonFiniteError, Status
from deqkit.train.checkpoint import find_checkpoint, list_checkpoints, prune
from deqkit.train.config import TrainConfig
from deqkit.train.evaluate import evaluate, peak_memory_mib
from deqkit.train.optimiser import set_lr
from deqkit.train.run_folder import MetricsFile, RunError, RunFolder, read_metrics
from deqkit.train.state import TrainingState
from deqkit.train.tasks import TextTask, make_task

logger = logging.getLogger(__name__)

Record = dict[str, Any]


class TrainingError(ValueError):
    """Training cannot go on; the message says what to try. Everything up to the last checkpoint is safe."""


def train(
    config: TrainConfig,
    folder: RunFolder,
    *,
    resume: bool = False,
    max_steps: int | None = None,
    on_record: Callable[[Record], None] = lambda record: None,
) -> Record:
    """Run or continue a training.

    Args:
        folder: where it is kept; new, or with `resume` an existing run.
        max_steps: stop after so many steps of this call, with a checkpoint, as an interruption would.
        on_record: called with every record that goes to the metrics file.

    Returns:
        The last evaluation's record, with `finished` telling whether all steps were done, and `signal` the number of
        the signal that stopped it, if one did.
    """
    _check_trackers(config)
    if not resume and config.model.depth == "equilibrium" and 0 < config.steps <= config.devices.warmup_steps:
        logger.warning(
            "all %d steps are of the shallow start (devices.warmup_steps is %d): the equilibrium is never trained. "
            "Pass --devices.warmup-steps %d, or more --steps",
            config.steps,
            config.devices.warmup_steps,
            config.steps // 2,
        )
    task = make_task(config)
    project = ProjectConfiguration(project_dir=str(folder.path), logging_dir=str(folder.path))
    accelerator = _make_accelerator(config, log_with=list(config.trackers) or None, project_config=project)
    state = TrainingState(config, task, accelerator)
    if resume:
        _require_same_data(state, folder)
    elif accelerator.is_main_process:
        folder.create(config, data_hash=task.data_hash)
    if accelerator.is_main_process and isinstance(task, TextTask) and not folder.vocabulary.exists():
        task.corpus.save_vocabulary(folder.vocabulary)
    accelerator.wait_for_everyone()
    with _Log(state, folder, on_record) as log, _catching_signals() as signals:
        log.begin(size=_go_back(state, folder) if resume else 0)
        last = log.last_evaluation
        begun = state.step
        while state.step < config.steps:
            record = _train_step(state)
            log.write(record)
            stopping = _any_process(accelerator, bool(signals)) or state.step - begun == max_steps
            if state.step % config.eval_every == 0 or state.step == config.steps:
                last = _evaluate(state)
                log.write(last)
            due = state.step % config.checkpoint_every == 0 or state.step == config.steps
            if due or stopping or state.best_step == state.step:
                state.save(folder, metrics_size=log.synced_size())
            if stopping:
                break
    finished = state.step >= config.steps
    signal_number = signals[0] if signals and not finished else None
    return {**last, "step": state.step, "finished": finished, "signal": signal_number}


def try_step(config: TrainConfig) -> Record:
    """One step of a run, of which nothing is kept: whether it works, and what it costs."""
    return _train_step(TrainingState(config, make_task(config), _make_accelerator(config)))


def _check_trackers(config: TrainConfig) -> None:
    """accelerate leaves out trackers that are not installed, without a word."""
    available = [str(tracker) for tracker in get_available_trackers()]
    for name in config.trackers:
        if name not in available:
            raise ValueError(f"tracker {name!r} is not installed; trackers here: {', '.join(available) or 'none'}")


def _make_accelerator(config: TrainConfig, **options: Any) -> Accelerator:
    AcceleratorState._reset_state()  # a run before this one, in the same process, may have had another precision
    return Accelerator(
        cpu=not torch.accelerator.is_available(),  # else accelerate leaves processes without GPUs on their own
        mixed_precision="bf16" if config.precision == "bf16" else "no",
        step_scheduler_with_optimizer=False,
        **options,
    )


def _require_same_data(state: TrainingState, folder: RunFolder) -> None:
    if folder.read().get("data_sha256", state.task.data_hash) != state.task.data_hash:
        raise RunError(
            f"{folder.path} was trained on other data than {state.config.data.source} has now: bring that back, or "
            "begin a new run"
        )


def _go_back(state: TrainingState, folder: RunFolder) -> int:
    """Load the latest checkpoint; returns the size of the metrics file at that moment.

    A run that was stopped before its first checkpoint begins again, at size 0.
    """
    steps = (record["step"] for record in read_metrics(folder.metrics))
    if not list_checkpoints(folder.checkpoints) and max(steps, default=0) <= state.config.checkpoint_every:
        return 0
    size = state.load(find_checkpoint(folder.checkpoints))
    if state.accelerator.is_main_process:  # what a kill left
        prune(folder.checkpoints, keep=state.config.keep, best_step=state.best_step)
    return size


def _train_step(state: TrainingState) -> Record:
    """One update of the weights, and the record of it.

    Raises:
        TrainingError: a loss, gradient or solve is not finite; the weights are then as they were.
    """
    with _explaining_nonfinite(f"the weights were left as they were: a solve of step {state.step + 1}"):
        return _update(state)


def _update(state: TrainingState) -> Record:
    started, processor_started = time.perf_counter(), time.process_time()
    config, accelerator, number = state.config, state.accelerator, state.step
    batch = next(state.batches)
    state.model.train()
    lr = state.schedule.lr(number)
    set_lr(state.optimiser, lr)
    settings = _settings(config, number)
    penalise = number % config.regulariser.every == 0 and "depth" not in settings
    parts = []
    for part, (tokens_BT, targets_BT) in enumerate(_parts(batch, config.optimiser.accumulate)):
        if batch.new_context:
            state.memory[part] = None
        last_part = part == config.optimiser.accumulate - 1
        with nullcontext() if last_part else accelerator.no_sync(state.objective):
            tokens_BT, targets_BT = tokens_BT.to(accelerator.device), targets_BT.to(accelerator.device)
            objective, added, output = state.objective(
                tokens_BT, targets_BT, state.memory[part], penalise=penalise, **settings
            )
            _require_finite(objective, f"the loss of step {number + 1}")
            accelerator.backward(objective / config.optimiser.accumulate)
        state.memory[part] = output.memory
        parts.append(_account(output, added))
    norm = _clip(state)
    state.optimiser.step()
    state.optimiser.zero_grad()
    state.step += 1
    state.update_average()
    account = _reduced(accelerator, parts)
    seconds = time.perf_counter() - started
    return {
        "kind": "train",
        "step": state.step,
        "epoch": state.batches.epoch,
        **{name: value if math.isfinite(value) else None for name, value in account.items()},
        "lr": lr,
        "grad_norm": float(norm),
        "shallow": "depth" in settings,
        "seconds": seconds,
        "processor_seconds": time.process_time() - processor_started,
        "tokens_per_second": batch.tokens_BT.numel() * accelerator.num_processes / seconds,
        "memory_mib": peak_memory_mib(),
    }


def _clip(state: TrainingState) -> Tensor:
    """Clip the gradients; returns the norm of those of the model.

    A learned start is clipped apart: how far off it is must not slow down the model.
    """
    start = [] if state.model.start is None else list(state.model.start.parameters())
    apart = {id(parameter) for parameter in start}
    model = [parameter for parameter in state.objective.parameters() if id(parameter) not in apart]
    norms = []
    for parameters in filter(None, (model, start)):
        norm: Any = state.accelerator.clip_grad_norm_(parameters, state.config.optimiser.clip or math.inf)
        _require_finite(norm, f"the gradient of step {state.step + 1}")
        norms.append(norm)
    return norms[0]


def _settings(config: TrainConfig, number: int) -> dict[str, Any]:
    """How the model is solved at this step: shallow at first, then with early settings, then as configured."""
    devices = config.devices
    if number < devices.warmup_steps:
        return {"depth": devices.warmup_depth}
    settings: dict[str, Any] = {}
    if number < devices.warmup_steps + devices.early_adjoint_steps:
        settings["adjoint"] = devices.early_adjoint
    if devices.early_rtol is not None and number < devices.warmup_steps + devices.early_rtol_steps:
        settings["tol"] = replace(config.model.tol, rtol=devices.early_rtol)
    if devices.random_steps:
        fewer = random.Random(f"{config.seed} {number}").randint(0, devices.random_steps)
        settings["max_steps"] = max(1, config.model.max_steps - fewer)
    return settings


def _parts(batch: Batch, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    return zip(batch.tokens_BT.chunk(count), batch.targets_BT.chunk(count), strict=True)


def _require_finite(value: Tensor, what: str) -> None:
    """Called before the update."""
    if not bool(torch.isfinite(value.detach())):
        raise _not_finite(f"the weights were left as they were: {what}")


def _not_finite(what: str) -> TrainingError:
    return TrainingError(
        f"{what} is not finite: begin a new run with a lower learning rate, a longer warm-up of it, a lower clip, or "
        "regulariser.spectral"
    )


@contextmanager
def _explaining_nonfinite(what: str) -> Iterator[None]:
    try:
        yield
    except NonFiniteError as error:
        raise _not_finite(what) from error


def _account(output: ModelOutput, added: dict[str, Tensor]) -> dict[str, float]:
    """What one part tells: its loss, and how its solves went."""
    assert output.loss is not None
    account = {"loss": float(output.loss.detach()), **{name: float(value.detach()) for name, value in added.items()}}
    for prefix, solutions in (
        ("", output.solutions),
        ("backward_", [s.backward for s in output.solutions if s.backward is not None]),
    ):
        if solutions:
            count = len(solutions)
            account[f"{prefix}evals"] = sum(float(s.num_evals.double().mean()) for s in solutions) / count
            account[f"{prefix}residual"] = max(float(s.residual.max()) for s in solutions)
            failed = sum(float((s.codes != Status.CONVERGED.severity).double().mean()) for s in solutions)
            account[f"{prefix}unconverged"] = failed / count
    errors = [s.grad_error for s in output.solutions if s.grad_error is not None]
    if errors:
        account["grad_error"] = max(errors)
    return account


def _reduced(accelerator: Accelerator, parts: list[dict[str, float]]) -> dict[str, float]:
    """The mean over the parts of a batch and over processes; of residuals and errors the largest."""
    names = sorted({name for part in parts for name in part})
    values = {name: [part[name] for part in parts if name in part] for name in names}
    largest = {name for name in names if "residual" in name or name == "grad_error"}
    mine = [max(values[name]) if name in largest else sum(values[name]) / len(values[name]) for name in names]
    if accelerator.num_processes == 1:
        return dict(zip(names, mine, strict=True))
    table: Any = accelerator.gather(torch.tensor([mine], dtype=torch.float64, device=accelerator.device))
    means, tops = table.mean(0).tolist(), table.amax(0).tolist()
    return {name: tops[i] if name in largest else means[i] for i, name in enumerate(names)}


def _evaluate(state: TrainingState) -> Record:
    started = time.perf_counter()
    depth = _settings(state.config, state.step - 1).get("depth")
    what = f"the validation loss after step {state.step}"
    with _explaining_nonfinite(what):
        figures = evaluate(state.evaluated_model, state.task, "valid", accelerator=state.accelerator, depth=depth)
    if not math.isfinite(figures["loss"]):
        raise _not_finite(what)
    if depth is None:  # what a shallow network reaches says nothing about its equilibrium, so it is never the best
        if figures["loss"] < state.schedule.best:
            state.best_step = state.step
        state.schedule.evaluated(figures["loss"])
    shallow = {} if depth is None else {"shallow": depth}  # of how many layers the figures are
    return {"kind": "valid", "step": state.step, **shallow, **figures, "seconds": time.perf_counter() - started}


def _any_process(accelerator: Accelerator, flag: bool) -> bool:
    if accelerator.num_processes == 1:
        return flag
    flags: Any = accelerator.gather(torch.tensor([float(flag)], device=accelerator.device))
    return bool(flags.max())


@contextmanager
def _catching_signals() -> Iterator[list[int]]:
    """Collects SIGINT and SIGTERM instead of dying of them; the loop looks after every step."""
    caught: list[int] = []
    numbers = (signal.SIGINT, signal.SIGTERM)
    try:
        before = [signal.signal(number, lambda got, _: caught.append(got)) for number in numbers]
    except ValueError:  # not in the main thread: somebody else has the signals
        yield caught
        return
    try:
        yield caught
    finally:
        for number, handler in zip(numbers, before, strict=True):
            signal.signal(number, handler)


class _Log:
    """The metrics file and the trackers; only the first process writes."""

    def __init__(self, state: TrainingState, folder: RunFolder, on_record: Callable[[Record], None]) -> None:
        self._state, self._folder, self._on_record = state, folder, on_record
        self._stack = ExitStack()
        self._file: MetricsFile | None = None

    @property
    def last_evaluation(self) -> Record:
        """The one before this run was resumed."""
        return next((r for r in reversed(list(read_metrics(self._folder.metrics))) if r["kind"] == "valid"), {})

    def __enter__(self) -> _Log:
        """From here on no other process trains in this folder, or removes what it takes for left over."""
        if self._state.accelerator.is_main_process:
            self._file = self._stack.enter_context(closing(MetricsFile(self._folder.metrics)))
        return self

    def begin(self, *, size: int) -> None:
        """Go on after so many bytes of metrics."""
        if self._file is not None:
            self._file.cut(size)
        if self._state.config.trackers:
            options = {"tensorboard": {"purge_step": self._state.step + 1}}
            self._state.accelerator.init_trackers("events", init_kwargs=options)
            self._stack.callback(self._finish_trackers)

    def _finish_trackers(self) -> None:
        """Not `end_training`, after which this process could not train again with the others."""
        for tracker in self._state.accelerator.trackers:
            tracker.finish()

    def __exit__(self, *error: Any) -> None:
        self._stack.close()

    def write(self, record: Record) -> None:
        if self._file is not None:
            self._file.write(record)
            self._on_record(record)
        if self._state.config.trackers:
            numbers = {f"{record['kind']}/{k}": v for k, v in record.items() if isinstance(v, float)}
            self._state.accelerator.log(numbers, step=record["step"])

    def synced_size(self) -> int:
        return 0 if self._file is None else self._file.synced_size()
