"""Whether the models that are compared have learning rates that suit them: each is tried with lower and higher ones."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.language import (
    EMBEDDED,
    FULL_TRELLIS,
    LSTM_ON_PTB,
    LSTM_ON_WIKITEXT_2,
    ONE_EMBEDDED,
    QUICK_LSTM,
    QUICK_SMALL,
    QUICK_TRELLIS,
    SMALL_ON_PTB,
    SMALL_ON_WIKITEXT_2,
)
from deqkit.paper.measure import Contender, verdict_of
from deqkit.paper.workshop import Workshop
from deqkit.train.config import TrainConfig
from deqkit.train.load import LoadedRun

FACTORS = (0.5, 1.0, 2.0)
"""Rates that are tried, as multiples of the recipe's."""
STEPS = 400
"""Of each training. Its rate falls to the end: after as many steps of a long schedule low rates look too good."""
FAVOURS = " Short trainings, whose rates fall to their floor by their end, favour higher rates than long ones do."
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
    workshop: Workshop,
    *,
    contenders: Sequence[Contender],
    text: str,
    steps: int = STEPS,
    tuned: float = TUNED,
    compared: Sequence[Contender] = (),
) -> Outcome:
    """Short trainings decide, unless they prefer another rate than the recipe's: then both are trained to the end.

    `compared` are the models that the claim is about, if more than the contenders.
    """
    found = {one.label: _search(workshop, one.config(workshop), steps) for one in contenders}
    above = {label: _recipes(of)["perplexity"] / _best(of)["perplexity"] for label, of in found.items()}
    to_the_end = {
        one.label: _to_the_end(workshop, config, [_recipes(of), _best(of)])
        for one, of in zip(contenders, found.values(), strict=True)
        if above[one.label] > tuned and (config := one.config(workshop)).steps > steps
    }
    at_the_end = {label: _recipes(of)["perplexity"] / _best(of)["perplexity"] for label, of in to_the_end.items()}
    tuned_all = all(ratio <= tuned for ratio in (above | at_the_end).values())
    holds, missing = verdict_of(tuned_all, compared or contenders, [{"label": label} for label in found])
    are_short = any(one.config(workshop).steps > steps for one in contenders)
    return Outcome(
        measured="validation perplexity: "
        + "; ".join(f"{label} {_told(of)}" for label, of in found.items())
        + "".join(f"; {label} trained to the end {_told(of)}" for label, of in to_the_end.items()),
        scale=f"{text}, {steps:,} steps of each, one seed",
        holds=holds,
        numbers={
            "rates": found,
            "above the lowest": above,
            "to the end": to_the_end,
            "above the lowest at the end": at_the_end,
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
        f"lowest of its model ({_shares(above)}), or if one that is, is not when both are trained to the end"
        + (f" ({_shares(at_the_end)})" if at_the_end else "")
        + f".{missing}{FAVOURS if are_short else ''}",
    )


def _search(workshop: Workshop, config: TrainConfig, steps: int) -> list[dict[str, Any]]:
    trials = []
    for factor in FACTORS:
        trial = short(config, factor, steps=steps)
        lr = trial.optimiser.lr
        run = workshop.trained(trial, f"{config.recipe}-{steps}-steps-lr-{lr:g}-seed-{config.seed}")
        trials.append({"factor": factor, "lr": lr, "perplexity": _validation(workshop, run)})
    return trials


def _to_the_end(workshop: Workshop, config: TrainConfig, trials: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The recipe with the rates of these trials."""
    found = []
    for trial in trials:
        with_rate = replace(config, optimiser=replace(config.optimiser, lr=trial["lr"]))
        name = None if with_rate == config else f"{config.recipe}-lr-{trial['lr']:g}-seed-{config.seed}"
        if before := workshop.measured_before(with_rate):
            perplexity = before["valid"]["perplexity"]
        else:
            perplexity = _validation(workshop, workshop.trained(with_rate, name))
        found.append({**trial, "perplexity": perplexity})
    return found


def _validation(workshop: Workshop, run: LoadedRun) -> float:
    return min(record["perplexity"] for record in workshop.metrics(run, "valid"))


def _recipes(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    (own,) = [one for one in trials if one["factor"] == 1.0]
    return own


def _best(trials: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return min(trials, key=lambda one: one["perplexity"])


def _told(trials: Sequence[dict[str, Any]]) -> str:
    return ", ".join(f"{one['perplexity']:.1f} with {one['lr']:g}" for one in trials)


def _shares(above: Mapping[str, float]) -> str:
    return ", ".join(f"{label} {ratio - 1:.1%}" for label, ratio in above.items())


FEW_STEPS, FEWEST_STEPS = 200, 150
"""Of trainings whose steps take long, and longer."""
QUICK_COMPARED = (*QUICK_SMALL, QUICK_LSTM[1])
QUICK = (QUICK_SMALL[0], QUICK_LSTM[1])
"""Stacks take longest, and have the DEQ's rate."""
QUICK_STEPS, QUICK_TRELLIS_STEPS = 300, 200
"""All that these have."""

CLAIMS: tuple[Claim, ...] = (
    Claim(
        row="learning-rates",
        where="tables 2 and 3, at our scale",
        claim="each of the models that are compared on Penn Treebank after as many steps (`table-3-small`, `lstm`) is "
        "trained with a learning rate that suits it",
        paper="-",
        quick=partial(learning_rates, contenders=QUICK, compared=QUICK_COMPARED, text=EMBEDDED, steps=QUICK_STEPS),
        full=partial(learning_rates, contenders=(*SMALL_ON_PTB, LSTM_ON_PTB[1]), text="Penn Treebank"),
        full_time="an hour of one core",
    ),
    Claim(
        row="learning-rates-wikitext-2",
        where="table 3, at our scale",
        claim="each of the models that are compared on WikiText-2 after as many steps "
        "(`table-3-small-wikitext-2`, `lstm-wikitext-2`) is "
        "trained with a learning rate that suits it",
        paper="-",
        quick=partial(learning_rates, contenders=QUICK, compared=QUICK_COMPARED, text=ONE_EMBEDDED, steps=QUICK_STEPS),
        full=partial(
            learning_rates,
            contenders=(*SMALL_ON_WIKITEXT_2, LSTM_ON_WIKITEXT_2[1]),
            text="WikiText-2",
            steps=FEWEST_STEPS,
        ),
        full_time="half an hour of one core",
    ),
    Claim(
        row="learning-rates-trellisnet",
        where="table 2, at our scale",
        claim="both TrellisNets are trained with a learning rate that suits them",
        paper="-",
        quick=partial(
            learning_rates,
            contenders=QUICK_TRELLIS[:1],
            compared=QUICK_TRELLIS,
            text=EMBEDDED,
            steps=QUICK_TRELLIS_STEPS,
        ),
        full=partial(learning_rates, contenders=FULL_TRELLIS, text="Penn Treebank", steps=FEW_STEPS),
        full_time="three quarters of an hour of one core",
    ),
)
