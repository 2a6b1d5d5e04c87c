"""What a report measures by itself: parameters, the memory of a step, and how the trained model behaves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import torch

from deqkit.analysis.training_memory import TrainingMemory, training_memory
from deqkit.model import ModelConfig, ParameterCount, SequenceModel, num_parameters
from deqkit.report.chart import typical
from deqkit.report.convergence import Convergence, injects, measure_convergence
from deqkit.report.history import History
from deqkit.report.samples import CopySample, TextSamples, take_samples
from deqkit.report.trained import Trained, load_trained
from deqkit.solve import NotConvergedError
from deqkit.train.config import DataConfig, TrainConfig
from deqkit.train.tasks import AbstractTask, make_task

T = TypeVar("T")
S = TypeVar("S")
OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Missing:
    """What could not be measured, and why, in a sentence for the page."""

    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMemory:
    """What a training step of the run holds, and what one of its counterpart would."""

    own: TrainingMemory
    batch: int
    length: int
    depth: int | None
    """Layers of the counterpart of an equilibrium: as many as a solve takes evaluations. A tied stack has its
    equilibrium for a counterpart, and then this is None."""
    counterpart: TrainingMemory | None
    """None if there is none: layers that are not tied have no equilibrium, nor has a network to compare with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """Every measurement, or the reason why it is missing."""

    history: History
    parameters: ParameterCount
    memory: StepMemory | Missing
    trained: Trained | Missing
    convergence: Convergence | Missing
    samples: TextSamples | CopySample | Missing


def measure(histories: Sequence[History], on_progress: OnProgress) -> list[Measured]:
    """Measure every run. Runs on the same data read it once."""
    tasks: dict[tuple[DataConfig, int], AbstractTask | Missing] = {}
    found = []
    for number, history in enumerate(histories):
        config = history.config

        def show(what: str, part: int, *, name: str = config.recipe, number: int = number) -> None:
            on_progress(f"{name}: {what}", 4 * number + part, 4 * len(histories))

        show("memory of a step", 0)
        memory = attempt(step_memory, history)
        show("data and checkpoint", 1)
        key = (config.data, config.seed)
        if key not in tasks:
            tasks[key] = attempt(make_task, config)
        trained = then(tasks[key], lambda task, history=history: load_trained(history, task))
        show("convergence", 2)
        convergence = then(trained, measure_convergence)
        show("samples", 3)
        samples = then(trained, take_samples)
        found.append(
            Measured(
                history=history,
                parameters=_count_parameters(config.model),
                memory=memory,
                trained=trained,
                convergence=convergence,
                samples=samples,
            )
        )
    return found


def attempt(work: Callable[[S], T], subject: S) -> T | Missing:
    """The result, or why there is none: a user's mistake, a file that is gone, a solve that gave nan."""
    try:
        return work(subject)
    except (ValueError, OSError, NotConvergedError) as error:
        return Missing(" ".join(str(error).split()))


def then(subject: S | Missing, work: Callable[[S], T]) -> T | Missing:
    return subject if isinstance(subject, Missing) else attempt(work, subject)


def step_memory(history: History) -> StepMemory:
    """The peak of a training step, counted without numbers: it needs no memory and little time."""
    config = history.config
    batch, length = step_shape(config)
    own = training_memory(config.model, batch=batch, length=length)
    depth = _typical_evals(history) if history.is_equilibrium else None
    other = None
    if depth is not None:
        other = replace(config.model, depth=depth, subsequences=1, subsequence_length=None, start="zeros")
    elif config.model.tied and not history.is_equilibrium and injects(config.model) and not config.model.is_baseline:
        other = replace(config.model, depth="equilibrium", checkpoint=False)
    counterpart = None if other is None else training_memory(other, batch=batch, length=length)
    return StepMemory(own=own, batch=batch, length=length, depth=depth, counterpart=counterpart)


def step_shape(config: TrainConfig) -> tuple[int, int]:
    """Samples and positions that go through the model at once."""
    data = config.data
    length = data.copy_T + 20 if data.source == "copy-memory" else data.length
    return data.batch // config.optimiser.accumulate, length


def _typical_evals(history: History) -> int | None:
    """Evaluations of a solve in training towards its end; None while the run has not solved."""
    _, evals = history.series("evals")
    return round(typical(evals)) if evals else None


def _count_parameters(config: ModelConfig) -> ParameterCount:
    with torch.device("meta"):
        return num_parameters(SequenceModel(config))
