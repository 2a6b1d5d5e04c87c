"""Appendix E, further: shallow stacks that plateau, the gradient through subsequences, auxiliary losses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from deqkit.adjoint import Implicit
from deqkit.analysis.training_memory import training_memory
from deqkit.model import SequenceModel
from deqkit.paper.behaviour import MUCH
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.equalities import relative_difference
from deqkit.paper.precision import EXACT, EXACT_STEPS, gradient, in_float64
from deqkit.paper.solves import Equation, curve, equation_of, figure, sample_text
from deqkit.paper.stability import LENGTH
from deqkit.paper.subjects import Scale, at_both_scales, describe
from deqkit.paper.workshop import Workshop
from deqkit.solve import AbstractSolver, Anderson, Broyden, FixedPointIteration, fixed_point
from deqkit.train.config import DeviceConfig, TrainConfig
from deqkit.train.load import LoadedRun
from deqkit.train.recipes import layers

# B samples, T positions, D width

SHALLOW = (2, 1)
"""Layers of the shallow stacks: the paper's example, and a single one."""
PIECES = (1, 2, 4)
SAME = 1e-8
"""Relative difference at which two float64 gradients count as equal: solves to 1e-12 amplified by (I - J)^-1."""
NO_MORE = 1.05
"""Up to this factor two amounts of memory are equivalent."""
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


def shallow(config: TrainConfig, depth: int) -> TrainConfig:
    """The recipe as a stack of few tied layers: there is no shallower one to begin with."""
    return replace(layers(config, depth, tied=True), devices=DeviceConfig())


def shallow_plateau(workshop: Workshop, *, scale: Scale) -> Outcome:
    config = scale.transformer(workshop)
    deep = scale.transformer_layers(workshop)
    configs = {
        "DEQ": config,
        _layers(deep.model.depth): deep,
        **{_layers(n): shallow(config, n) for n in SHALLOW},
    }
    runs = {name: workshop.trained(one) for name, one in configs.items()}
    found = {name: _quality(workshop, run, scale) for name, run in runs.items()}
    names = list(found)
    worst = max(found[name]["perplexity"] for name in names[:2])
    ratios = {name: found[name]["perplexity"] / worst for name in names[2:]}
    return Outcome(
        measured="test perplexity: "
        + ", ".join(f"{name} {one['perplexity']:.1f}" for name, one in found.items())
        + "; "
        + ", ".join(f"{name} {ratio:.3f}" for name, ratio in ratios.items())
        + " of the worse of the first two; in the last third of training "
        + ", ".join(f"{name} {one['last third']:.1%}" for name, one in found.items() if one["last third"] is not None)
        + " down in validation",
        scale=describe(*runs.values()),
        holds=all(ratio >= MUCH for ratio in ratios.values()),
        numbers={
            **found,
            "ratios": ratios,
            "bar": MUCH,
            "figure": figure(
                x="training step",
                y="validation perplexity",
                series=[curve(name, one["validation"], one["step"]) for name, one in found.items()],
                log_y=True,
            ),
        },
        remark="Tied layers of the same cell, as many steps on the same data."
        f"{_told_start(config)} Holds if each shallow stack ends at {MUCH:g} times the worse of the two other "
        "perplexities or more. One seed; nothing else was tried.",
    )


def auxiliary_effect(workshop: Workshop) -> Outcome:
    return Outcome(
        measured="not measured",
        scale="-",
        holds=None,
        remark="The paper compares the two in a sentence, and trains no stack to show it. deqkit has no auxiliary "
        "losses, so that it cannot either: what a loss of a shallower stack does to the gradient is in "
        "`auxiliary-losses`.",
    )


def _told_start(config: TrainConfig) -> str:
    devices = config.devices
    if not devices.warmup_steps:
        return ""
    return (
        f" The first {devices.warmup_steps:,} steps of the first two are those of a stack of {devices.warmup_depth} "
        "layers: they differ in the rest alone."
    )


def _layers(count: Any) -> str:
    return f"{count} layer{'s' if count > 1 else ''}"


def _quality(workshop: Workshop, run: LoadedRun, scale: Scale) -> dict[str, Any]:
    records = workshop.metrics(run, "valid")
    steps, perplexities = ([record[name] for record in records] for name in ("step", "perplexity"))
    before = [p for step, p in zip(steps, perplexities, strict=True) if step <= 2 / 3 * run.config.steps]
    return {
        "step": steps,
        "validation": perplexities,
        "last third": 1 - perplexities[-1] / before[-1] if before else None,
        "perplexity": workshop.tested(run, max_batches=scale.max_batches)["perplexity"],
    }


def subsequence_gradient(workshop: Workshop, *, scale: Scale) -> Outcome:
    runs = {
        "transformer": workshop.trained(scale.transformer(workshop)),
        "trellis": workshop.trained(scale.trellis(workshop)),
    }
    numbers: dict[str, Any] = {}
    for kind, run in runs.items():
        tokens = sample_text(run.task(), length=LENGTH + 1, count=min(2, scale.num_samples))
        found = {}
        for count in PIECES:
            workshop.tell(f"gradient in pieces: {kind}, {count}")
            found[count] = gradient(in_float64(run, subsequences=count, subsequence_length=None), tokens)
        numbers[kind] = {
            "difference": {str(n): relative_difference(found[n].parts, found[1].parts) for n in PIECES[1:]},
            "evaluations": {str(n): found[n].forward["evaluations"]["mean"] for n in PIECES},
            "bytes": {str(n): _memory(run, subsequences=n) for n in PIECES},
            "bytes of one layer": _memory(run, depth=1),
            "bytes without context": {str(n): _memory(run, subsequences=n, mem_len=1) for n in PIECES},
        }
    exact = all(d <= SAME for one in numbers.values() for d in one["difference"].values())
    ratios = {kind: max(one["bytes"].values()) / one["bytes"]["1"] for kind, one in numbers.items()}
    return Outcome(
        measured="; ".join(
            f"{kind}: gradients in {', '.join(one['difference'])} pieces differ from those of the whole by "
            f"{', '.join(f'{d:.0e}' for d in one['difference'].values())}; peak of a training step "
            f"{_mib(one['bytes'])} MiB in {', '.join(one['bytes'])} pieces, "
            f"{one['bytes of one layer'] / 2**20:.1f} with f applied once"
            for kind, one in numbers.items()
        ),
        scale=f"float64, no dropout, test sequences of {LENGTH}; memory of the body for a training batch, solves to "
        f"their limits; {describe(*runs.values())}",
        holds=exact and all(ratio <= NO_MORE for ratio in ratios.values()),
        numbers={**numbers, "exact": exact, "memory ratios": ratios, "bars": {"same": SAME, "memory": NO_MORE}},
        remark=f"Holds if the gradients are equal (to {SAME:g}) and no number of pieces takes more than {NO_MORE:g} of "
        "the memory of the whole. Beyond one application of f a solve holds its pairs and temporaries. "
        + _without_context(numbers["transformer"]["bytes without context"]),
    )


def _without_context(num_bytes: Mapping[str, int]) -> str:
    return (
        "Every piece of a transformer has keys and values of all positions before it, also of those before the "
        f"sequence. Tried: a context of a single position there, with {_mib(num_bytes)} MiB in "
        f"{', '.join(num_bytes)} pieces."
    )


def _mib(num_bytes: Mapping[str, int]) -> str:
    return ", ".join(f"{b / 2**20:.1f}" for b in num_bytes.values())


def _memory(run: LoadedRun, **settings: Any) -> int:
    """Bytes at the peak of a training step of the body, on the recipe's batches."""
    model = replace(run.config.model, subsequence_length=None, start="zeros", **settings)
    data = run.config.data
    with torch.random.fork_rng():
        return training_memory(model, batch=data.batch, length=data.length, body_only=True, abstract=False).peak


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
        "model, and layers on top of an equilibrium add nothing to its loss. Solvers are compared that converge here; "
        "plain iteration circles around the equilibrium. deqkit has no auxiliary losses, and a "
        "model's output no intermediate states. What can be had: `model(tokens, targets, depth=2).loss` is the loss of "
        "a shallow stack of the same weights, to be added at the price of a pass of its own (whether that helps was "
        "not tried); penalties on the equilibrium itself (`--regulariser.activation`, `.temporal`, `.jacobian`, "
        "`.spectral`) apply as they are.",
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


CLAIMS: tuple[Claim, ...] = (
    at_both_scales(
        shallow_plateau,
        row="shallow-plateau",
        where="appendix E",
        claim="a shallow tied stack ends at a much lower quality than an equilibrium or a deeper tied stack",
        paper="in general",
        full_time="minutes, and up to an hour for each model that is not trained yet",
    ),
    at_both_scales(
        subsequence_gradient,
        row="subsequence-gradient",
        where="appendix E",
        claim="the gradient through a sequence that is solved in pieces is exact, in the memory of f applied once",
        paper="terms A, B and C of its equation",
    ),
    at_both_scales(
        auxiliary_losses,
        row="auxiliary-losses",
        where="appendix E",
        claim="an auxiliary loss has nothing to be applied to, as an equilibrium has no layers",
        paper="it is not clear how",
    ),
    Claim(
        row="auxiliary-losses-effect",
        where="appendix D",
        claim="auxiliary losses have an effect like that of solving for the equilibrium: the layers of a stack are "
        "close to the target and to each other",
        paper="in a certain sense; not measured",
        quick=auxiliary_effect,
        source="trainings of deep stacks with auxiliary losses, as in the publications that the paper cites",
    ),
)
