"""The models that checks look at, at two scales: quick ones on what deqkit carries, and those of the mini recipes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from deqkit.adjoint import Implicit
from deqkit.analysis.results import told_commit
from deqkit.layers import TransformerConfig, TrellisConfig
from deqkit.model import SequenceModel, num_parameters
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.workshop import Workshop
from deqkit.solve import Anderson, Broyden, Tolerance
from deqkit.train.config import DeviceConfig, RegulariserConfig, TrainConfig
from deqkit.train.load import LoadedRun
from deqkit.train.recipes import KEEP_SOLVES_SHORT, layers

LENGTHS = (100, 200, 400, 800)
"""Of the sequences in appendix D."""
GROWN = 1.1
"""From this factor on something grows."""
PLAIN_LIMIT = 30
"""Evaluations, and products, of a solve in plain trainings."""
NUM_CHECKPOINTS = 8
"""That plain trainings keep, for what is seen to change in them."""
HOURS = "minutes, and an hour for each model that is not trained yet"


@dataclass(frozen=True, kw_only=True)
class Scale:
    """How large the models of a check are, and how long it looks at them."""

    transformer: Callable[[Workshop], TrainConfig]
    """A DEQ-Transformer."""
    transformer_layers: Callable[[Workshop], TrainConfig]
    """The same cell trained as a stack of tied layers."""
    trellis: Callable[[Workshop], TrainConfig]
    """A DEQ-TrellisNet."""
    trellis_layers: Callable[[Workshop], TrainConfig]
    """The same cell trained as a stack of tied layers."""
    plain: Callable[[Workshop], TrainConfig]
    """A short training of the transformer at its equilibrium from the first step on, without a penalty on the
    Jacobian and with solves that begin at zero, as in the paper: what a training device is compared with."""
    penalised: Callable[[Workshop], TrainConfig]
    """The same training with our penalty on the Jacobian."""
    max_batches: int | None
    """Batches of the test split that are looked at; None for all."""
    num_samples: int
    """Sequences whose solves are followed step by step."""
    depth: int
    """Evaluations for which they are followed."""
    rounds: int
    """How often a timing is repeated."""
    lengths: tuple[int, ...] = LENGTHS
    """Sequence lengths of appendix D."""
    long_length: int = 1024
    """Positions of a sequence that is cut in pieces; the paper speaks of more than 1000."""


class ScaledCheck(Protocol):
    def __call__(self, workshop: Workshop, *, scale: Scale) -> Outcome: ...


def at_both_scales(
    check: ScaledCheck, *, row: str, where: str, claim: str, paper: str, full_time: str = HOURS
) -> Claim:
    """A claim with the quick and the full version of one check."""
    quick, full = partial(check, scale=QUICK), partial(check, scale=FULL)
    return Claim(row=row, where=where, claim=claim, paper=paper, quick=quick, full=full, full_time=full_time)


def on_ptb(recipe: str) -> Callable[[Workshop], TrainConfig]:
    """A recipe for Penn Treebank, with the corpus that the workshop has."""
    return lambda workshop: workshop.recipe(recipe, corpus="ptb")


def trellis_demo(workshop: Workshop) -> TrainConfig:
    """The demo with a small TrellisNet."""
    config = workshop.recipe("demo")
    width = 64
    cell = TrellisConfig(
        input_width=width,
        hidden_width=width,
        output_width=width,
        hidden_dropout=0.1,
        normalise="weight",
        init_std=None,
        input_scale=8.0,
    )
    model = replace(
        config.model,
        vocabulary=replace(config.model.vocabulary, embedding_width=width),
        cell=cell,
        mem_len=1,
        subsequence_length=8,
        start="zeros",
        solver=Broyden(memory=2, group="prefix"),
        max_steps=30,
        adjoint=Implicit(solver=Anderson(memory=2), tol=Tolerance(rtol=5e-2), max_steps=20),
    )
    return replace(
        config,
        recipe="demo-trellisnet",
        model=model,
        optimiser=replace(config.optimiser, lr=4e-2, weight_decay=0.0),
        devices=DeviceConfig(warmup_depth=10, warmup_steps=140),
        regulariser=RegulariserConfig(),
        steps=200,
        eval_every=200,
        checkpoint_every=200,
    )


def plain(config: TrainConfig, *, steps: int, batch: int) -> TrainConfig:
    """A short training at the equilibrium alone, with the limits on solves that the authors' code has."""
    adjoint: Any = config.model.adjoint
    model = replace(config.model, start="zeros", max_steps=PLAIN_LIMIT, adjoint=replace(adjoint, max_steps=PLAIN_LIMIT))
    return replace(
        config,
        recipe=f"{config.recipe}-plain",
        model=model,
        data=replace(config.data, batch=batch),
        devices=DeviceConfig(),
        regulariser=RegulariserConfig(),
        steps=steps,
        eval_every=steps,
        checkpoint_every=max(1, steps // NUM_CHECKPOINTS),
        keep=NUM_CHECKPOINTS,
    )


def told_plain(config: TrainConfig) -> str:
    """How such a training solves, for a remark."""
    model, adjoint = config.model, config.model.adjoint
    assert isinstance(adjoint, Implicit)
    return (
        "The plain training has no shallow start, no learned start of its solves and no penalty, as the paper's; its "
        f"solves are ours: {type(model.solver).__name__} to {model.tol.rtol:g} of ||f(z)|| within {model.max_steps} "
        f"evaluations, {type(adjoint.solver).__name__} to {adjoint.tol.rtol:g} within {adjoint.max_steps} products."
    )


def at_limit(config: TrainConfig, steps: Sequence[int]) -> dict[str, Any]:
    """A line in figures of such trainings: solves that end here did not converge."""
    return {"label": "limit", "x": [steps[0], steps[-1]], "y": 2 * [config.model.max_steps], "colour": 5, "style": 2}


def penalised(config: TrainConfig, regulariser: RegulariserConfig) -> TrainConfig:
    """The same training with a penalty."""
    return replace(config, recipe=f"{config.recipe}-penalised", regulariser=regulariser)


QUICK = Scale(
    transformer=lambda workshop: workshop.recipe("demo"),
    transformer_layers=lambda workshop: workshop.recipe("demo-tied-12"),
    trellis=trellis_demo,
    trellis_layers=lambda workshop: layers(trellis_demo(workshop), 20, tied=True),
    plain=lambda workshop: plain(workshop.recipe("demo"), steps=120, batch=8),
    penalised=lambda workshop: penalised(QUICK.plain(workshop), workshop.recipe("demo").regulariser),
    max_batches=4,
    num_samples=4,
    depth=60,
    rounds=5,
)
FULL = Scale(
    transformer=on_ptb("ptb-mini"),
    transformer_layers=on_ptb("ptb-mini-tied-16"),
    trellis=on_ptb("ptb-deq-trellisnet-mini"),
    trellis_layers=on_ptb("ptb-deq-trellisnet-mini-tied-60"),
    plain=lambda workshop: plain(on_ptb("ptb-mini")(workshop), steps=400, batch=16),
    penalised=lambda workshop: penalised(FULL.plain(workshop), KEEP_SOLVES_SHORT),
    max_batches=None,
    num_samples=16,
    depth=200,
    rounds=15,
)


def describe(*runs: LoadedRun) -> str:
    """Models, data and length, for the scale of an outcome."""
    return "; ".join(
        f"{run.config.recipe} ({num_parameters(run.model).total / 1e6:.2g} million parameters, step {run.step} of "
        f"{run.config.steps}, {Path(run.config.data.source).name} corpus, seed {run.config.seed}"
        f", trained at {told_commit(run.folder.read().get('commit'))})"
        for run in runs
    )


LABELS = {"penalised": "with our penalty", "plain": "plain"}
"""How figures call the trainings of `Scale.penalised` and `Scale.plain`."""


def untrained(run: LoadedRun) -> SequenceModel:
    """The model with the weights that its training began with."""
    with torch.random.fork_rng():
        torch.manual_seed(run.config.seed)
        return SequenceModel(run.config.model).eval()


def changed(run: LoadedRun, **settings: Any) -> SequenceModel:
    """The trained model with other settings of its configuration, none of which has weights."""
    return run.model.with_config(replace(run.config.model, **settings)).eval()


def is_transformer(config: TrainConfig) -> bool:
    return isinstance(config.model.cell, TransformerConfig)
