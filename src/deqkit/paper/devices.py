"""Appendix E: weight norm, dropout, shallow warm-up, cheap early steps, subsequences."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from deqkit.adjoint import OneStep
from deqkit.analysis.training_memory import training_memory
from deqkit.paper.behaviour import through_training
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.measure import shallow_model
from deqkit.paper.solves import account, curve, figure, sample_text
from deqkit.paper.stacking import QUICKER
from deqkit.paper.subjects import Scale, at_both_scales, at_limit, changed, describe, is_transformer, untrained
from deqkit.paper.workshop import Workshop
from deqkit.solve import Solution, Tolerance
from deqkit.train.config import DeviceConfig, TrainConfig
from deqkit.train.load import LoadedRun

# B samples, T positions

SLIGHT = 1.01
"""Up to this factor two perplexities are as good as each other."""
LOOSER = 4.0
"""By what the tolerance of early steps is multiplied."""
MOSTLY = 0.95
"""The share of solves that must converge for their evaluations to be compared: others end at the limit."""
MORE_STEPS = 1.5
"""What a warm-up saves may be spent: times the steps of the training from scratch."""
NUM_DRAWS = 8
"""Of dropout masks for the same text."""
MOST_PIECES = 4
"""Into how many a long sequence is cut at most."""
PIECES_TOL = Tolerance(rtol=1e-3, patience=200)
SHORT_TRAININGS = "ten minutes of a core for each training, two of them"


def _trained(workshop: Workshop, config: TrainConfig, scale: Scale) -> tuple[LoadedRun, dict[str, Any]]:
    """A training with its solver steps, seconds and quality."""
    run = workshop.trained(config)
    records = workshop.metrics(run)
    tested = workshop.tested(run, max_batches=scale.max_batches)
    return run, {
        **through_training(records),
        "seconds": sum(r["processor_seconds"] for r in records),
        "work": work(records, config.devices.warmup_depth),
        "perplexity": tested["perplexity"],
        "test evaluations": tested["evals"],
    }


def work(records: Sequence[dict[str, Any]], warmup_depth: int) -> float:
    """Evaluations and products of a training's steps: what its time depends on, and no other process does.

    A solve ends with one evaluation that has a graph, and with the product with the parameters, which is all there is
    of a one-step gradient.
    """
    return sum(2 * warmup_depth if r["shallow"] else r["evals"] + 1 + r.get("backward_evals", 0) + 1 for r in records)


def _pair(
    workshop: Workshop, scale: Scale, name: str, change: TrainConfig
) -> tuple[tuple[LoadedRun, LoadedRun], dict[str, Any], dict[str, Any]]:
    """The plain training and the same with one thing changed."""
    plain_run, plain = _trained(workshop, scale.plain(workshop), scale)
    other_run, other = _trained(workshop, replace(change, recipe=f"{change.recipe}-{name}"), scale)
    return (plain_run, other_run), plain, other


def _told(name: str, one: dict[str, Any]) -> str:
    return (
        f"{name}: {one['first quarter']['forward']:.1f} to {one['last quarter']['forward']:.1f} evaluations, "
        f"{one['first quarter']['backward']:.1f} to {one['last quarter']['backward']:.1f} products"
        f"{_told_limit(one)}, {one['seconds']:.0f} s of a processor, test perplexity {one['perplexity']:.1f}"
    )


def _told_limit(one: dict[str, Any]) -> str:
    share = one["unconverged, last quarter"]
    return f" ({share:.0%} of the last quarter's solves at their limit)" if share >= 1 - MOSTLY else ""


def _curves(config: TrainConfig, parts: dict[str, dict[str, Any]]) -> dict[str, Any]:
    series = [
        {**curve(f"{direction}, {name}", one[direction], one["step"]), "colour": colour, "style": style}
        for colour, (name, one) in enumerate(parts.items())
        for style, direction in enumerate(("forward", "backward"))
    ]
    series.append(at_limit(config, next(iter(parts.values()))["step"]))
    return figure(x="training step", y="evaluations or products a solve", series=series)


def _growth(one: dict[str, Any], direction: str) -> float:
    return one["last quarter"][direction] - one["first quarter"][direction]


def weight_norm(workshop: Workshop, *, scale: Scale) -> Outcome:
    config = scale.plain(workshop)
    cell: Any = replace(config.model.cell, normalise="weight")
    change = replace(config, model=replace(config.model, cell=cell))
    runs, plain, normed = _pair(workshop, scale, "weight-norm", change)
    slower = {
        direction: _growth(normed, direction) < _growth(plain, direction) for direction in ("forward", "backward")
    }
    return Outcome(
        measured=f"{_told('without', plain)}; {_told('with weight norm', normed)}",
        scale=describe(*runs),
        holds=all(slower.values()),
        numbers={
            "without": plain,
            "with": normed,
            "slows growth": slower,
            "figure": _curves(config, {"without weight norm": plain, "with it": normed}),
        },
        remark="One seed each. Growth is the difference between the first and the last quarter of a training, cut off "
        f"at its limit of {config.model.max_steps} evaluations (and one more, of which the graph is kept): where "
        "solves end at the limit, the growth is larger than what is seen.",
    )


def dropout(workshop: Workshop, *, scale: Scale) -> Outcome:
    config = scale.plain(workshop)
    cell: Any = config.model.cell
    rates = {"hidden_dropout": 0.0, **({"dropout": 0.0} if is_transformer(config) else {})}
    model = replace(config.model, cell=replace(cell, **rates), input_dropout=0.0, output_dropout=0.0)
    runs, plain, without = _pair(workshop, scale, "no-dropout", replace(config, model=model))
    solved = workshop.trained(scale.transformer(workshop))
    masked = _with_and_without_masks(solved, scale)
    more, error = masked["difference"], masked["standard error"]
    counts = min(masked["with"]["converged"], masked["without"]["converged"]) >= MOSTLY and abs(more) > 2 * error
    return Outcome(
        measured="one trained model on the same test segments: "
        f"{masked['with']['evaluations']['mean']:.2f} evaluations with masks, "
        f"{masked['without']['evaluations']['mean']:.2f} without, a difference of {more:.2f} +- {error:.2f}; "
        f"{_told('trained with', plain)}; {_told('without', without)}",
        scale=f"{masked['with']['solves']:,} solves with masks; {describe(solved, *runs)}",
        holds=more > 0 if counts else None,
        numbers={
            "solved": masked,
            "trained with": plain,
            "trained without": without,
            "figure": _curves(config, {"with dropout": plain, "without": without}),
            "caption": "Two trainings, with dropout and without it, which become different functions: they do not "
            "decide.",
        },
        remark=f"The comparison on one model, {solved.config.recipe}, decides, if nearly all solves reach a residual "
        f"of {PIECES_TOL.rtol:g} and the difference is more than twice its standard error (+-); its dropout is "
        f"{cell.hidden_dropout:g}. A model that was trained without dropout becomes another function, whose solves may "
        "take longer for that.",
    )


def _with_and_without_masks(run: LoadedRun, scale: Scale) -> dict[str, Any]:
    """Solves of the same segments with masks, drawn several times, and without."""
    tokens = sample_text(run.task(), length=run.config.data.eval_length, count=8 * scale.num_samples)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(0)
        run.model.train()
        masked = [run.model(tokens, tol=PIECES_TOL, max_steps=200).solutions for _ in range(NUM_DRAWS)]
        run.model.eval()
        clean = run.model(tokens, tol=PIECES_TOL, max_steps=200).solutions
    # One difference a segment: its draws have the text in common.
    mean_B = torch.stack([_evals(solutions) for solutions in masked]).mean(dim=0)
    difference_B = mean_B - _evals(clean)
    return {
        "with": account([solution for solutions in masked for solution in solutions]),
        "without": account(clean),
        "difference": float(difference_B.mean()),
        "standard error": float(difference_B.std() / len(difference_B) ** 0.5),
    }


def _evals(solutions: Sequence[Solution]) -> Tensor:
    """Evaluations of every segment, over its pieces."""
    return torch.stack([solution.num_evals.double() for solution in solutions]).mean(dim=0)


def warm_up(workshop: Workshop, *, scale: Scale) -> Outcome:
    config = scale.plain(workshop)
    change = replace(config, devices=DeviceConfig(warmup_steps=config.steps // 2))
    runs, scratch, warm = _pair(workshop, scale, "warm-up", change)
    steps = round(MORE_STEPS * config.steps)
    more = replace(change, recipe=f"{config.recipe}-warm-up-longer", steps=steps, eval_every=steps)
    longer_run, longer = _trained(workshop, replace(more, devices=DeviceConfig(warmup_steps=steps // 2)), scale)
    peaks = {
        name: training_memory(model, batch=config.data.batch, length=config.data.length).peak
        for name, model in (("shallow", shallow_model(change)), ("equilibrium", config.model))
    }
    peak = {name: f"{size / 2**20:.0f} MiB" for name, size in peaks.items()}
    pays = {
        name: one["work"] < scratch["work"] and one["perplexity"] <= SLIGHT * scratch["perplexity"]
        for name, one in (("as many steps", warm), ("more steps", longer))
    }
    return Outcome(
        measured=f"{scratch['work']:,.0f} evaluations and products from scratch, {warm['work']:,.0f} with 2 layers in "
        f"the first half, {longer['work']:,.0f} with {MORE_STEPS:g} times as many steps; "
        f"{_told('from scratch', scratch)}; {_told('with 2 layers first', warm)}; "
        f"{_told(f'and {MORE_STEPS:g} times the steps', longer)}",
        scale=describe(*runs, longer_run),
        holds=any(pays.values()),
        numbers={"scratch": scratch, "warm-up": warm, "warm-up, more steps": longer, "pays": pays, "peaks": peaks},
        remark="One learning-rate schedule, over the steps of each; holds if a warm-up saves evaluations and products "
        "and its perplexity is at most 1 % worse. The longer one sees as much more text, in less time; what from "
        "scratch takes long are solves that end at their limit, which weight normalisation prevents as well "
        f"(`weight-norm`). One seed. With as many steps it {'is' if pays['as many steps'] else 'is not'} "
        f"so, with {MORE_STEPS:g} times as many it {'is' if pays['more steps'] else 'is not'}. A training step with 2 "
        f"layers needs {peak['shallow']}, one of the equilibrium {peak['equilibrium']} (counted).",
    )


def early_precision(workshop: Workshop, *, scale: Scale) -> Outcome:
    config = scale.plain(workshop)
    half = config.steps // 2
    early: dict[str, dict[str, Any]] = {
        "one-step": {"early_adjoint": OneStep(), "early_adjoint_steps": half},
        "loose": {"early_rtol": LOOSER * config.model.tol.rtol, "early_rtol_steps": half},
    }
    early["one-step-loose"] = {**early["one-step"], **early["loose"]}
    runs: list[LoadedRun] = []
    found: dict[str, dict[str, Any]] = {}
    for name, devices in early.items():
        change = replace(config, devices=replace(config.devices, **devices))
        (exact_run, run), found["exact"], found[name] = _pair(workshop, scale, f"early-{name}", change)
        runs = [exact_run, *runs[1:], run]
    exact = found.pop("exact")
    pays = {
        name: one["work"] < exact["work"] and one["perplexity"] <= SLIGHT * exact["perplexity"]
        for name, one in found.items()
    }
    labels = {
        "one-step": "one-step gradients",
        "loose": f"{LOOSER:g} times the tolerance",
        "one-step-loose": "both",
    }
    return Outcome(
        measured=f"exact from the first step: {exact['work']:,.0f} evaluations and products, test perplexity "
        f"{exact['perplexity']:.1f}; in the first half "
        + "; ".join(f"{labels[n]}: {one['work']:,.0f}, {one['perplexity']:.1f}" for n, one in found.items()),
        scale=describe(*runs),
        holds=any(pays.values()),
        numbers={"exact": exact, **found, "pays": pays},
        remark="Holds if one of them saves evaluations and products and its perplexity is at most 1 % worse. One seed. "
        "Steps with a one-step gradient have no backward solve, and are left out of the evaluations by quarter.",
    )


def subsequences(workshop: Workshop, *, scale: Scale) -> Outcome:
    config = scale.plain(workshop)
    change = replace(config, model=replace(config.model, subsequences=2))
    runs, whole, halves = _pair(workshop, scale, "2-subsequences", change)
    solved = workshop.trained(scale.transformer(workshop))
    pieces = {count: _in_pieces(solved, count, scale) for count in _powers_of_two(MOST_PIECES)}
    before = replace(solved, model=untrained(solved))
    at_first = {count: _in_pieces(before, count, scale) for count in (1, MOST_PIECES)}
    shares = {
        "trained": _share_in_pieces(pieces),
        "before training": _share_in_pieces(at_first),
    }
    counts = min(found["converged"] for of in (pieces, at_first) for found in of.values()) >= MOSTLY
    same = abs(pieces[MOST_PIECES]["loss"] - pieces[1]["loss"]) < 0.01
    return Outcome(
        measured=f"one trained model on sequences of {scale.long_length}: "
        + ", ".join(
            f"{count} piece{'s' if count > 1 else ''} {found['evaluations']['mean']:.1f} evaluations (at most "
            f"{found['evaluations']['max']}), loss {found['loss']:.3f}"
            for count, found in pieces.items()
        )
        + "; before training "
        + ", ".join(f"{found['evaluations']['mean']:.1f} in {count}" for count, found in at_first.items())
        + f"; {_told('trained whole', whole)}; {_told('in halves', halves)}",
        scale=f"{scale.num_samples} test sequences of {scale.long_length} to a residual of {PIECES_TOL.rtol:g}; "
        f"{describe(solved, *runs)}",
        holds=_easier(list(shares.values())) if counts and same else None,
        numbers={
            "pieces": {str(count): found for count, found in pieces.items()},
            "pieces before training": {str(count): found for count, found in at_first.items()},
            "trained whole": whole,
            "trained in halves": halves,
            "evaluations in pieces, of those in one": shares,
            "same loss": same,
        },
        remark=f"Pieces are of {solved.config.recipe}. {MOST_PIECES} of them take {shares['trained']:.0%} of the "
        f"evaluations of one when trained, {shares['before training']:.0%} before. Holds if both are at most "
        f"{QUICKER:.0%}, does not if one is as much above 1; open between, and if solves do not converge to the same "
        "loss. An evaluation of a "
        "piece costs a share of one of the whole. The paper speaks of lengths above 1000 and of the beginning of "
        f"training; models were trained on {config.data.length} positions and as many of memory.",
    )


def _share_in_pieces(found: Mapping[int, Mapping[str, Any]]) -> float:
    """Evaluations of the most pieces, as a share of those of one."""
    return found[MOST_PIECES]["evaluations"]["mean"] / found[1]["evaluations"]["mean"]


def _easier(shares: Sequence[float]) -> bool | None:
    """None if some are about 1."""
    if any(share >= 1 / QUICKER for share in shares):
        return False
    return True if all(share <= QUICKER for share in shares) else None


def _powers_of_two(largest: int) -> Iterator[int]:
    count = 1
    while count <= largest:
        yield count
        count *= 2


@torch.no_grad()
def _in_pieces(run: LoadedRun, count: int, scale: Scale) -> dict[str, Any]:
    tokens = sample_text(run.task(), length=scale.long_length + 1, count=scale.num_samples)
    output = changed(run, subsequences=count)(tokens[:, :-1], tokens[:, 1:], tol=PIECES_TOL, max_steps=200)
    assert output.loss is not None
    return {**account(output.solutions), "loss": float(output.loss)}


CLAIMS: tuple[Claim, ...] = (
    at_both_scales(
        weight_norm,
        row="weight-norm",
        where="appendix E",
        claim="weight normalisation slows the growth of solver steps, forward and backward",
        paper="typically",
        full_time=SHORT_TRAININGS,
    ),
    at_both_scales(
        dropout,
        row="dropout",
        where="appendix E",
        claim="dropout makes solves take longer",
        paper="observed",
        full_time=SHORT_TRAININGS,
    ),
    at_both_scales(
        warm_up,
        row="warm-up",
        where="appendix E",
        claim="beginning with a shallow stack of the same cell makes training faster",
        paper="observed",
        full_time=SHORT_TRAININGS,
    ),
    at_both_scales(
        early_precision,
        row="early-precision",
        where="appendix E, further",
        claim="solves and gradients may be rough in early training",
        paper="- (a shallow start is the paper's way of it)",
        full_time="ten minutes of a core for each training, four of them",
    ),
    at_both_scales(
        subsequences,
        row="subsequences",
        where="appendix E",
        claim="the pieces of a long sequence are easier to solve than the whole",
        paper="likely easier",
        full_time=SHORT_TRAININGS,
    ),
)
