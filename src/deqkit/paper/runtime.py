"""Table 4: how long a step of a trained DEQ takes beside a step of its cell stacked."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from deqkit.analysis import jacobian_penalty, spectral_penalty
from deqkit.analysis.runtime import Penalty, Stepper, breakdown, compare_steps, take
from deqkit.analysis.timing import ClockName
from deqkit.data import Batch
from deqkit.model import ModelOutput, SequenceModel
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.subjects import HOURS, Scale, at_both_scales, describe
from deqkit.paper.workshop import Workshop
from deqkit.solve import Tolerance
from deqkit.train.config import RegulariserConfig, TrainConfig
from deqkit.train.load import LoadedRun
from deqkit.train.optimiser import make_optimiser, set_lr
from deqkit.train.recipes import layers
from deqkit.train.tasks import AbstractTask

BAR = 1.0
"""Times as long as the stack at most, in training and in inference."""
EQUAL = 1.02
"""Up to this factor on the perplexity a DEQ counts as no worse than the trained stack."""
LOOSER = (0.2, 0.1, 7e-2, 5e-2, 4e-2, 3e-2, 2e-2)
"""Tolerances of evaluation at which a DEQ may be as good as the stack already, loosest first."""
DEQ = "DEQ"


def penalty_of(config: RegulariserConfig) -> Penalty | None:
    """The penalties on the Jacobian as training adds them; the others take no time."""
    weighted = [(w, p) for w, p in ((config.jacobian, jacobian_penalty), (config.spectral, spectral_penalty)) if w]
    if not weighted:
        return None

    def penalty(output: ModelOutput, number: int) -> torch.Tensor | None:
        if number % config.every:
            return None
        terms = []
        for equation in output.equations:
            f, args = equation.bind()
            terms += [weight * term(f, equation.z, args) for weight, term in weighted]
        return torch.stack(terms).sum() / len(output.equations)

    return penalty


def training_options(config: TrainConfig, model: SequenceModel) -> dict[str, Any]:
    """What a training step of this configuration does beside the model: `Stepper`'s options.

    The learning rate is zero, so that a measurement leaves the weights as they are.
    """
    optimiser = make_optimiser(config.optimiser, model.parameters())
    set_lr(optimiser, 0.0)
    penalty = penalty_of(config.regulariser) if config.model.depth == "equilibrium" else None
    bf16 = config.precision == "bf16"
    return {"optimiser": optimiser, "clip": config.optimiser.clip, "penalty": penalty, "bf16": bf16}


def stacked(config: TrainConfig, model: SequenceModel, depth: int, *, tied: bool) -> tuple[TrainConfig, SequenceModel]:
    """The counterpart in layers; tied ones have the model's weights, which no time depends on."""
    config = layers(config, depth, tied=tied)
    if tied:
        return config, model.with_config(config.model)
    with torch.random.fork_rng():
        return config, SequenceModel(config.model)


def compare_models(
    models: dict[str, tuple[TrainConfig, SequenceModel]],
    batches: list[Batch],
    *,
    training: bool,
    rounds: int,
    clock: ClockName = "cpu",
    on_round: Callable[[int, int], None] = lambda done, total: None,
) -> dict[str, Any]:
    """Steps of several models on the same batches, interleaved; seconds are per token, ratios are of the first.

    Every turn takes as many steps as there are from one penalty of the first model to the next.
    """
    config = next(iter(models.values()))[0]
    num_steps = config.regulariser.every if training and penalty_of(config.regulariser) else 1
    calls = {}
    for name, (config, model) in models.items():
        options = training_options(config, model) if training else {}
        calls[name] = partial(_repeat, Stepper(model, training=training, **options).over(batches), num_steps)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        compared = compare_steps(calls, rounds=rounds, clock=clock, on_round=on_round)
    num_tokens = num_steps * batches[0].tokens_BT.numel()
    for figures in compared["seconds"].values():
        figures["median"] /= num_tokens
        figures["spread"] = [value / num_tokens for value in figures["spread"]]
    return {**compared, "steps a round": num_steps}


def _repeat(step: Callable[[], Any], count: int) -> None:
    for _ in range(count):
        step()


def phases(config: TrainConfig, task: AbstractTask, count: int) -> dict[str, list[Batch]]:
    """Batches of equal size for training and for inference."""
    found = {}
    for name, source in (("training", task.training(rank=0, world_size=1)), ("inference", task.evaluation("test"))):
        batches = take(source, count)
        found[name] = [b for b in batches if b.tokens_BT.shape == batches[0].tokens_BT.shape]
    return found


def breakdowns(config: TrainConfig, model: SequenceModel, task: AbstractTask, num_steps: int) -> dict[str, Any]:
    """Where the time of a training step and of an inference step goes."""
    sources = {"training": task.training(rank=0, world_size=1), "inference": task.evaluation("test")}
    found = {}
    with torch.random.fork_rng():
        torch.manual_seed(0)
        for name, source in sources.items():
            options = training_options(config, model) if name == "training" else {}
            found[name] = breakdown(model, source, num_steps=num_steps, training=name == "training", **options)
    model.eval()
    return found


def _table_4(
    workshop: Workshop,
    *,
    scale: Scale,
    equilibrium: LoadedRun,
    stack: LoadedRun,
    depth: int,
    paper: tuple[float, float],
) -> Outcome:
    name, trained = f"{depth} layers", f"{stack.config.model.depth} layers, trained"
    tol, validation = _equal_tolerance(workshop, equilibrium, stack, scale.max_batches)
    equilibrium = replace(
        equilibrium, model=equilibrium.model.with_config(replace(equilibrium.config.model, eval_tol=tol)).eval()
    )
    models = {
        DEQ: (equilibrium.config, equilibrium.model),
        name: stacked(equilibrium.config, equilibrium.model, depth, tied=True),
    }
    numbers: dict[str, Any] = {}
    task = equilibrium.task()
    for phase, batches in phases(equilibrium.config, task, scale.rounds + 1).items():
        workshop.tell(f"table 4: {phase}, DEQ beside {name}")
        numbers[phase] = compare_models(models, batches, training=phase == "training", rounds=scale.rounds)
    numbers["breakdown"] = breakdowns(equilibrium.config, equilibrium.model, task, 3)
    quality = {
        label: workshop.tested(run, max_batches=scale.max_batches)["perplexity"]
        for label, run in ((DEQ, equilibrium), (trained, stack))
    }
    own, theirs = quality.values()
    ratios = {phase: numbers[phase]["ratios"][name] for phase in ("training", "inference")}
    solves = numbers["breakdown"]["training"]
    slower = [phase for phase, ratio in ratios.items() if ratio["ratio"] > 1]
    return Outcome(
        measured=", ".join(f"{phase} {_times(ratios[phase])}" for phase in ratios)
        + f" the time of {name}; test perplexity {own:.2f}, of {stack.config.model.depth} trained layers {theirs:.2f}; "
        f"{solves['evaluations']:.1f} evaluations and {solves['products']:.1f} products a step, "
        f"{numbers['breakdown']['inference']['evaluations']:.1f} evaluations in inference, solved to {tol.rtol:g}",
        scale=f"{scale.rounds} interleaved rounds, processor time, {torch.get_num_threads()} threads; "
        f"{describe(equilibrium, stack)}",
        holds=all(ratio["ratio"] <= BAR for ratio in ratios.values()) and own <= EQUAL * theirs,
        numbers={
            **numbers,
            "perplexity": quality,
            "validation": validation,
            "paper": {"training": paper[0], "inference": paper[1]},
            "bar": BAR,
        },
        remark=f"Holds if both ratios are at most {BAR:g} and the DEQ's perplexity is at most 2 % above that of the "
        f"stack that was trained, of {stack.config.model.depth} layers. Inference is solved to the loosest tolerance "
        "at which the DEQ is no worse than that stack on validation text (if there is none, to the recipe's, "
        f"{equilibrium.config.model.eval_tol.rtol:g}). The time of a stack does not depend on its weights: the {name} "
        "that were timed have the DEQ's. Training steps include what the recipe adds to the loss. The paper's remark, "
        f"that DEQs are typically slower, {_of_phases(slower)} here.",
    )


def _of_phases(slower: list[str]) -> str:
    return f"holds for {' and '.join(slower)}" if slower else "does not hold"


def _equal_tolerance(
    workshop: Workshop, equilibrium: LoadedRun, stack: LoadedRun, max_batches: int | None
) -> tuple[Tolerance, dict[str, float]]:
    """The loosest tolerance of evaluation at which the DEQ is as good as the stack on validation text, the recipe's if
    there is none; and the validation perplexities that decided."""

    def validated(run: LoadedRun, **settings: Any) -> float:
        return workshop.tested(run, "valid", max_batches=max_batches, **settings)["perplexity"]

    recipe = equilibrium.config.model.eval_tol
    found = {f"{stack.config.model.depth} layers": (goal := validated(stack))}
    for rtol in (rtol for rtol in LOOSER if rtol > recipe.rtol):
        tol = replace(recipe, rtol=rtol)
        found[f"{DEQ} at {rtol:g}"] = perplexity = validated(equilibrium, tol=tol)
        if perplexity <= goal:
            return tol, found
    return recipe, found


def _times(ratio: dict[str, float]) -> str:
    return f"{ratio['ratio']:.2f}x ({ratio['low']:.2f} to {ratio['high']:.2f})"


def transformer(workshop: Workshop, *, scale: Scale) -> Outcome:
    equilibrium = workshop.trained(scale.transformer(workshop))
    stack = workshop.trained(scale.transformer_layers(workshop))
    return _table_4(workshop, scale=scale, equilibrium=equilibrium, stack=stack, depth=18, paper=(2.82, 1.76))


def trellisnet(workshop: Workshop, *, scale: Scale) -> Outcome:
    equilibrium, stack = workshop.trained(scale.trellis(workshop)), workshop.trained(scale.trellis_layers(workshop))
    scale = replace(scale, rounds=max(3, scale.rounds // 2))  # 70 layers take long
    return _table_4(workshop, scale=scale, equilibrium=equilibrium, stack=stack, depth=70, paper=(2.40, 1.64))


CLAIMS: tuple[Claim, ...] = (
    at_both_scales(
        transformer,
        row="table-4-transformer",
        where="table 4, left; abstract, computational requirements",
        claim="our own bar: with a perplexity at most 2 % above that of trained layers, a DEQ-Transformer takes no "
        "longer than 18 layers (the paper's does)",
        paper="2.82x in training, 1.76x in inference: DEQs are typically slower",
        full_time=HOURS,
    ),
    at_both_scales(
        trellisnet,
        row="table-4-trellisnet",
        where="table 4, right; abstract, computational requirements",
        claim="our own bar: with a perplexity at most 2 % above that of trained layers, a DEQ-TrellisNet takes no "
        "longer than 70 layers (the paper's does)",
        paper="2.40x in training, 1.64x in inference: DEQs are typically slower",
        full_time=HOURS,
    ),
)
