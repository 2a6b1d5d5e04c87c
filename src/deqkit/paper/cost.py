"""What trainings cost beside each other: steps of each, timed in turn in one run, times how many of them it took."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch

from deqkit.model import ModelConfig, SequenceModel
from deqkit.paper.measure import Contender, shallow_model
from deqkit.paper.runtime import compare_models, phases
from deqkit.paper.workshop import Workshop
from deqkit.solve import Tolerance
from deqkit.train.config import DeviceConfig, TrainConfig
from deqkit.train.tasks import make_task, resolve

ROUNDS = 7


def training_costs(
    workshop: Workshop, contenders: Sequence[Contender], found: Sequence[dict[str, Any]]
) -> dict[str, float]:
    """Processor seconds of each contender's training, by its label.

    Minutes that trainings took are of different days, machines and company. The time of a step does not depend on the
    weights if its solves take as many evaluations and products as training did, so untrained models will do. One
    thread: a second one that waits for the first costs processor time too, and an LSTM makes it wait most.
    """
    stages: dict[str, tuple[str, int]] = {}
    models: dict[str, tuple[TrainConfig, SequenceModel]] = {}
    for contender, one in zip(contenders, found, strict=True):
        config = resolve(contender.config(workshop))
        for name, num_steps, stage in _stages(config, one["runs"][0]):
            key = f"{one['label']}, {name}"
            stages[key] = (one["label"], num_steps)
            with torch.random.fork_rng():
                torch.manual_seed(config.seed)
                models[key] = (stage, SequenceModel(stage.model))
    first = next(iter(models.values()))[0]
    batches = phases(first, make_task(first), ROUNDS)["training"]
    workshop.tell(f"time of a step: {'; '.join(models)}")
    with _one_thread():
        compared = compare_models(models, batches, training=True, rounds=ROUNDS)
    costs = dict.fromkeys((label for label, _ in stages.values()), 0.0)
    for key, (label, num_steps) in stages.items():
        data = models[key][0].data
        costs[label] += num_steps * data.batch * data.length * compared["seconds"][key]["median"]
    return costs


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _stages(config: TrainConfig, run: dict[str, Any]) -> Iterator[tuple[str, int, TrainConfig]]:
    """The parts of a training in which a step does the same: what it is, how many steps, and how each is taken.

    The last part comes first: `compare_models` takes turns as long as its penalty asks.
    """
    shallow, model = config.devices.warmup_steps, config.model
    if run["evaluations"] is not None:
        model = _with_counts(model, evaluations=round(run["evaluations"]), products=round(run["products"]))
    yield "then" if shallow else "all along", config.steps - shallow, replace(config, model=model)
    if shallow:
        without = replace(config.regulariser, jacobian=0.0, spectral=0.0)
        layers = replace(config, model=shallow_model(config), regulariser=without, devices=DeviceConfig())
        yield f"{config.devices.warmup_depth} layers", shallow, layers


def _with_counts(model: ModelConfig, *, evaluations: int, products: int) -> ModelConfig:
    """Solves that take exactly so many."""
    endless = Tolerance(rtol=0.0)
    adjoint: Any = model.adjoint
    return replace(model, tol=endless, max_steps=evaluations, adjoint=replace(adjoint, tol=endless, max_steps=products))
