"""Auxiliary losses: why an equilibrium has none (appendix E), and what they do to a stack (appendix D)."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deqkit.adjoint import Implicit
from deqkit.model import SequenceModel
from deqkit.paper.claim import Outcome
from deqkit.paper.equalities import relative_difference
from deqkit.paper.precision import EXACT, EXACT_STEPS, in_float64
from deqkit.paper.remarks import SAME
from deqkit.paper.solves import Equation, curve, equation_of, figure, sample_text, yes
from deqkit.paper.stability import LENGTH
from deqkit.paper.subjects import Scale, at_both_scales, describe
from deqkit.paper.workshop import Workshop
from deqkit.solve import AbstractSolver, Anderson, Broyden, FixedPointIteration, fixed_point
from deqkit.train.config import RegulariserConfig, TrainConfig
from deqkit.train.load import LoadedRun
from deqkit.train.recipes import layers

# B samples, T positions, D width

EARLY = 3
"""Evaluations after which solvers' iterates are compared."""
APART = 0.01
"""Relative difference from which iterates are different points."""
FURTHER, SHALLOWER = (1, 4), (1, 2, 4)
"""Layers on top of the equilibrium, and of stacks of the same cell, that an auxiliary loss might look at."""
SOLVERS: Mapping[str, AbstractSolver] = {
    "Broyden": Broyden(memory=20),
    "Anderson": Anderson(memory=10),
    "damped iteration": FixedPointIteration(damping=0.5),
}
WEIGHT = 1.0
"""Of the auxiliary losses' mean: as much as the loss itself, "strong" ones."""
NUM_LOSSES = 3
"""Layers on the way that have one."""
CLEARLY = 0.9
"""At most this share of a loss or a change is a lower one."""
UNTIED_RATE = 0.75
"""Learning rate of untied layers, as a multiple of that of tied ones."""


def auxiliary_losses(workshop: Workshop, *, scale: Scale) -> Outcome:
    run = workshop.trained(scale.transformer(workshop))
    model = in_float64(run, start="zeros")
    tokens = sample_text(run.task(), length=LENGTH + 1, count=scale.num_samples)
    equation = equation_of(model, tokens[:, :-1])
    workshop.tell("auxiliary losses: iterates")
    early, late = (_apart(equation, max_steps) for max_steps in (EARLY, EXACT_STEPS))
    workshop.tell("auxiliary losses: gradients")
    main, further = _on_top(model, tokens)
    stacks = {n: _of_stack(model, tokens, n) for n in SHALLOWER}
    again = max(relative_difference(grads, main) for grads in further.values())
    cosines = {n: _cosine(grads, main) for n, grads in stacks.items()}
    return Outcome(
        measured=f"after {EARLY} evaluations the iterates of {len(SOLVERS)} solvers differ by {early:.2f} of their "
        f"size, at the equilibrium by {late:.0e}; a loss on {' or '.join(map(str, FURTHER))} more layers on top of the "
        f"equilibrium has the gradient of the loss itself (difference {again:.0e}); that of a stack of "
        f"{', '.join(map(str, SHALLOWER))} layers has a cosine of {', '.join(f'{c:.2f}' for c in cosines.values())} "
        "with it",
        scale=f"float64, no dropout, {scale.num_samples} test sequences of {LENGTH}; {describe(run)}",
        holds=early >= APART and late <= SAME and again <= SAME,
        numbers={
            "iterates": early,
            "equilibria": late,
            "further layers": {str(n): relative_difference(grads, main) for n, grads in further.items()},
            "cosine with stacks": {str(n): cosine for n, cosine in cosines.items()},
            "bars": {"apart": APART, "same": SAME},
        },
        remark="Holds if nothing in a solve could stand for a layer: iterates belong to the solver and not to the "
        "model, and layers on top of an equilibrium add nothing to its loss. What can be had: "
        "`model(tokens, targets, depth=2).loss` is the loss of a shallow stack of the same weights, to be added at the "
        "price of a pass of its own (whether that helps was not tried); penalties on the equilibrium itself "
        "(`--regulariser.activation`, `.temporal`, `.jacobian`, `.spectral`) apply as they are. A stack can have "
        "auxiliary losses (`--regulariser.auxiliary`); what they do to it is in `auxiliary-losses-effect`.",
    )


@torch.no_grad()
def _apart(equation: Equation, max_steps: int) -> float:
    """The largest relative difference between what solvers have after so many evaluations, or when they are done."""
    settings: dict[str, Any] = {"tol": EXACT, "max_steps": max_steps, "throw": False}
    solve = partial(fixed_point, equation.f, equation.start, equation.args, **settings)
    first, *others = (solve(solver=solver).z for solver in SOLVERS.values())
    return max(relative_difference([other], [first]) for other in others)


def _on_top(model: SequenceModel, tokens_BT: Tensor) -> tuple[list[Tensor], dict[int, list[Tensor]]]:
    """Gradients of the loss at the equilibrium, and of the loss after f was applied to it some more times."""
    adjoint = Implicit(solver=Anderson(memory=10), tol=EXACT, max_steps=EXACT_STEPS)
    solver = Broyden(memory=20, group="prefix")
    output = model(tokens_BT[:, :-1], tol=EXACT, max_steps=EXACT_STEPS, solver=solver, adjoint=adjoint)
    (equation,) = output.equations
    f, args = equation.bind()
    z, grads = equation.z, {}
    for n in range(max(FURTHER) + 1):
        if n in (0, *FURTHER):
            loss = model.softmax.nll(model.cells[0].output(z), tokens_BT[:, 1:]).mean()
            grads[n] = _gradients(model, loss)
        z = f(z, *args)
    return grads.pop(0), grads


def _of_stack(model: SequenceModel, tokens_BT: Tensor, depth: int) -> list[Tensor]:
    return _gradients(model, model(tokens_BT[:, :-1], tokens_BT[:, 1:], depth=depth).loss)


def _gradients(model: SequenceModel, loss: Any) -> list[Tensor]:
    """By all parameters; zeros where the loss does not depend on them."""
    parameters = list(model.parameters())
    grads = torch.autograd.grad(loss, parameters, retain_graph=True, allow_unused=True)
    return [torch.zeros_like(p) if grad is None else grad for p, grad in zip(parameters, grads, strict=True)]


def _cosine(ours: list[Tensor], theirs: list[Tensor]) -> float:
    flat = [torch.cat([part.flatten() for part in parts]) for parts in (ours, theirs)]
    return float(torch.cosine_similarity(*flat, dim=0))


def auxiliary_effect(workshop: Workshop, *, scale: Scale) -> Outcome:
    """Stacks with and without auxiliary losses: the loss after each layer, and the change from layer to layer."""
    plain = scale.plain(workshop)
    depth = int(scale.transformer_layers(workshop).model.depth)
    stacks = {kind: _stack(plain, depth, tied=kind == "tied") for kind in ("tied", "untied")}
    runs = {"DEQ": workshop.trained(plain)}
    for kind, config in stacks.items():
        runs[kind] = workshop.trained(config)
        runs[f"{kind}, auxiliary"] = workshop.trained(deeply_supervised(config))
    found = {name: _by_layer(run, depth, scale) for name, run in runs.items()}
    effect = {kind: _effect(found[kind], found[f"{kind}, auxiliary"]) for kind in stacks}
    return Outcome(
        measured="; ".join(
            f"{name}: loss {_mean(one['losses'][:-1]):.2f} after earlier layers, {one['losses'][-1]:.2f} after the "
            f"last, change from layer to layer {_mean(one['changes']):.2f}"
            for name, one in found.items()
        ),
        scale=f"{depth} layers ({NUM_LOSSES} auxiliary losses, weight {WEIGHT:g}), the DEQ's cell applied as often; "
        f"{scale.num_samples} test sequences of {plain.data.eval_length}; {describe(*runs.values())}",
        holds=all(all(one.values()) for one in effect.values()),
        numbers={
            "found": found,
            "effect": effect,
            "figures": [
                _panel("loss after each layer", found, "losses", first=1),
                _panel("relative change by each layer", found, "changes", first=2),
            ],
        },
        remark="Means over layers before the last, and over the changes from one layer's output to the next one's, "
        f"relative to its size. Holds if with auxiliary losses both are at most {CLEARLY:.0%} of what they are "
        "without, for tied layers and for untied ones: "
        + "; ".join(
            f"{kind} {yes(one['closer to the target'])} and {yes(one['closer to each other'])}"
            for kind, one in effect.items()
        )
        + ". To solve for an equilibrium, to which the paper likens this, does not decide; "
        f"its cell is followed layer by layer here as well. {plain.steps} steps each, dropout as in training's recipe, "
        "one seed; nothing else was tried.",
    )


def _stack(plain: TrainConfig, depth: int, *, tied: bool) -> TrainConfig:
    config = layers(plain, depth, tied=tied)
    rate = 1.0 if tied else UNTIED_RATE
    return replace(config, optimiser=replace(config.optimiser, lr=rate * config.optimiser.lr))


def deeply_supervised(config: TrainConfig) -> TrainConfig:
    """The same stack with auxiliary losses."""
    every = max(1, int(config.model.depth) // (NUM_LOSSES + 1))
    regulariser = RegulariserConfig(auxiliary=WEIGHT, auxiliary_every=every)
    return replace(config, recipe=f"{config.recipe}-auxiliary", regulariser=regulariser)


@torch.no_grad()
def _by_layer(run: LoadedRun, depth: int, scale: Scale) -> dict[str, list[float]]:
    """Test losses read out after each layer, and what each layer but the first changes."""
    tokens = sample_text(run.task(), length=run.config.data.eval_length + 1, count=scale.num_samples)
    output = run.model(tokens[:, :-1], tokens[:, 1:], depth=depth, layers_every=1)
    outputs = (*output.layers, output.hidden)
    changes = [relative_difference([after], [before]) for before, after in zip(outputs, outputs[1:], strict=False)]
    return {"losses": [float(loss) for loss in (*output.layer_losses, output.loss)], "changes": changes}


def _effect(without: Mapping[str, list[float]], supervised: Mapping[str, list[float]]) -> dict[str, bool]:
    return {
        "closer to the target": _mean(supervised["losses"][:-1]) <= CLEARLY * _mean(without["losses"][:-1]),
        "closer to each other": _mean(supervised["changes"]) <= CLEARLY * _mean(without["changes"]),
    }


def _panel(title: str, found: Mapping[str, Mapping[str, list[float]]], name: str, *, first: int) -> dict[str, Any]:
    series = [curve(label, one[name], range(first, first + len(one[name]))) for label, one in found.items()]
    return {"title": title, **figure(x="layer", y=title, series=series)}


def _mean(values: Sequence[float]) -> float:
    return statistics.fmean(values)


CLAIMS = (
    at_both_scales(
        auxiliary_losses,
        row="auxiliary-losses",
        where="appendix E",
        claim="an auxiliary loss has nothing to be applied to, as an equilibrium has no layers",
        paper="it is not clear how",
    ),
    at_both_scales(
        auxiliary_effect,
        row="auxiliary-losses-effect",
        where="appendix D",
        claim="auxiliary losses bring the layers of a stack closer to the target and to each other",
        paper="in a certain sense an effect similar to that of solving for the equilibrium; not measured",
        full_time="ten minutes of a core for each training, five of them",
    ),
)
