"""Appendix E, further: shallow stacks that plateau, the gradient through subsequences."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch

from deqkit.analysis.training_memory import training_memory
from deqkit.paper.behaviour import MUCH
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.equalities import relative_difference
from deqkit.paper.precision import gradient, in_float64
from deqkit.paper.solves import curve, figure, sample_text
from deqkit.paper.stability import LENGTH
from deqkit.paper.subjects import Scale, at_both_scales, describe
from deqkit.paper.workshop import Workshop
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
    most = {kind: max(one["bytes"][str(n)] for n in PIECES[1:]) for kind, one in numbers.items()}
    ratios = {kind: most[kind] / one["bytes of one layer"] for kind, one in numbers.items()}
    of_whole = {kind: most[kind] / one["bytes"]["1"] for kind, one in numbers.items()}
    told, of_layer = (", ".join(f"{ratio:.2f} ({kind})" for kind, ratio in of.items()) for of in (of_whole, ratios))
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
        holds=exact and all(ratio <= NO_MORE for ratio in of_whole.values()),
        numbers={
            **numbers,
            "exact": exact,
            "memory, of f applied once": ratios,
            "memory, of the whole": of_whole,
            "bars": {"same": SAME, "memory": NO_MORE},
        },
        remark=f"Holds if the gradients are equal (to {SAME:g}) and no number of pieces takes more than {NO_MORE:g} "
        f"times the memory of the whole. At most they take {told}; of f applied once to the whole, without the pairs "
        f"and temporaries that any solve holds, {of_layer}. "
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
        claim="the gradient through a sequence that is solved in pieces is exact, and takes no more memory than the "
        "whole at once",
        paper="terms A, B and C of its equation; the memory of f applied once",
    ),
)
