"""Whether the models that are compared have learning rates that suit them: each is tried with lower and higher ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.measure import Contender
from deqkit.paper.subjects import on_ptb
from deqkit.paper.workshop import Workshop
from deqkit.train.config import TrainConfig

FACTORS = (0.5, 1.0, 2.0)
"""Rates that are tried, as multiples of the recipe's."""
STEPS = 400
"""Of each training. Its rate falls to the end: after as many steps of a long schedule low rates look too good."""
TUNED = 1.02
"""A rate whose validation perplexity is at most this much above the lowest is as good: of short trainings seeds differ
by more than of long ones."""


def short(config: TrainConfig, factor: float, *, steps: int) -> TrainConfig:
    """The same training in few steps with another rate; as large a share of it is shallow."""
    shallow = round(config.devices.warmup_steps * steps / config.steps)
    return replace(
        config,
        optimiser=replace(config.optimiser, lr=config.optimiser.lr * factor),
        devices=replace(config.devices, warmup_steps=shallow),
        steps=steps,
        eval_every=steps,
        checkpoint_every=steps,
    )


def learning_rates(
    workshop: Workshop, *, contenders: Sequence[Contender], text: str, steps: int = STEPS, tuned: float = TUNED
) -> Outcome:
    found = {one.label: _search(workshop, one.config(workshop), steps) for one in contenders}
    above = {label: of[FACTORS.index(1.0)]["perplexity"] / _best(of)["perplexity"] for label, of in found.items()}
    return Outcome(
        measured="validation perplexity: "
        + "; ".join(
            f"{label} " + ", ".join(f"{one['perplexity']:.1f} with {one['lr']:g}" for one in of)
            for label, of in found.items()
        ),
        scale=f"{text}, {steps:,} steps of each, one seed",
        holds=all(ratio <= tuned for ratio in above.values()),
        numbers={
            "rates": found,
            "above the lowest": above,
            "bar": tuned,
            "figure": {
                "x": "multiple of the recipe's learning rate",
                "y": "validation perplexity",
                "log_x": True,
                "log_y": False,
                "series": [
                    {"label": label, "x": list(FACTORS), "y": [one["perplexity"] for one in of]}
                    for label, of in found.items()
                ],
            },
        },
        remark=f"The middle one of each is its recipe's. Holds if none of these is more than {tuned - 1:.0%} above the "
        "lowest of its model; they are "
        + ", ".join(f"{label} {ratio - 1:.1%}" for label, ratio in above.items())
        + ". Short trainings, whose rates fall to their floor by their end, favour higher rates than long ones do.",
    )


def _search(workshop: Workshop, config: TrainConfig, steps: int) -> list[dict[str, Any]]:
    trials = []
    for factor in FACTORS:
        trial = short(config, factor, steps=steps)
        lr = trial.optimiser.lr
        run = workshop.trained(trial, f"{config.recipe}-{steps}-steps-lr-{lr:g}-seed-{config.seed}")
        trials.append({"factor": factor, "lr": lr, "perplexity": workshop.metrics(run, "valid")[-1]["perplexity"]})
    return trials


def _best(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return min(trials, key=lambda one: one["perplexity"])


MODELS = tuple(
    Contender(label=label, config=on_ptb(recipe))
    for label, recipe in (
        ("DEQ-Transformer", "ptb-mini"),
        ("tied stack of 16", "ptb-mini-tied-16"),
        ("untied stack of 4", "ptb-mini-untied-4"),
        ("LSTM", "ptb-mini-lstm"),
    )
)

CLAIMS: tuple[Claim, ...] = (
    Claim(
        row="learning-rates",
        where="tables 2 and 3, at our scale",
        claim="each of the models that are compared on Penn Treebank is trained with a learning rate that suits it",
        paper="-",
        full=partial(learning_rates, contenders=MODELS, text="Penn Treebank"),
        full_time="an hour of one core",
    ),
)
