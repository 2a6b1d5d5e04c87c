"""How solves of trained models behave: figures 2 and 3, appendix D, and what the paper says about convergence."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from deqkit.paper import stability, stacking
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.solves import curve, figure
from deqkit.paper.subjects import GROWN, LABELS, Scale, at_both_scales, at_limit, describe, is_transformer, told_plain
from deqkit.paper.workshop import Workshop
from deqkit.train.evaluate import sweep
from deqkit.train.load import LoadedRun

TOLERANCES = (0.9, 0.5, 0.3, 0.1, 0.03, 0.01, 0.003, 0.001)
STEP_LIMITS = (1, 2, 3, 4, 6, 8, 12, 16, 24, 30)
SLIGHT, MUCH = 1.01, 1.05
"""Factors on the perplexity: up to the first it is "a small degradation", from the second on "it hurts"."""
FEW = 0.5
"""A limit counts as low up to this share of the highest one."""
NUM_BINS = 12
_BACKWARD = "backward_evals"


def through_training(records: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Mean evaluations and products in equal parts of a training, shallow steps left out; the first and the last
    quarter tell whether they grow."""
    solved = [r for r in records if r.get("evals") is not None and r.get("backward_evals") is not None]
    if len(solved) < 8:
        raise ValueError(f"{len(solved)} steps at the equilibrium are too few to see anything grow")
    size = max(1, -(-len(solved) // NUM_BINS))
    bins = [solved[i : i + size] for i in range(0, len(solved), size)]
    quarter = len(solved) // 4

    def mean(part: Sequence[dict[str, Any]], name: str) -> float:
        return statistics.fmean(r[name] for r in part)

    return {
        "step": [part[-1]["step"] for part in bins],
        "forward": [mean(part, "evals") for part in bins],
        "backward": [mean(part, "backward_evals") for part in bins],
        "first quarter": {"forward": mean(solved[:quarter], "evals"), "backward": mean(solved[:quarter], _BACKWARD)},
        "last quarter": {"forward": mean(solved[-quarter:], "evals"), "backward": mean(solved[-quarter:], _BACKWARD)},
        "unconverged, last quarter": mean(solved[-quarter:], "unconverged"),
    }


def figure_2_left(workshop: Workshop, *, scale: Scale) -> Outcome:
    runs = {
        "penalised": workshop.trained(scale.penalised(workshop)),
        "plain": workshop.trained(scale.plain(workshop)),
    }
    numbers: dict[str, Any] = {name: through_training(workshop.metrics(run)) for name, run in runs.items()}
    series = [
        {**curve(f"{direction}, {LABELS[name]}", numbers[name][direction], numbers[name]["step"]), **look}
        for colour, name in enumerate(runs)
        for direction, look in (
            ("forward", {"colour": colour, "style": 0}),
            ("backward", {"colour": colour, "style": 1}),
        )
    ]
    series.append(at_limit(runs["plain"].config, numbers["plain"]["step"]))
    first, last = numbers["plain"]["first quarter"], numbers["plain"]["last quarter"]
    kept = numbers["penalised"]
    grows = all(last[direction] >= GROWN * first[direction] for direction in ("forward", "backward"))
    return Outcome(
        measured=f"plain training, first to last quarter: forward {first['forward']:.1f} to "
        f"{last['forward']:.1f} evaluations, backward {first['backward']:.1f} to {last['backward']:.1f} products; with "
        f"our penalty on Jacobian modes above 1: {kept['first quarter']['forward']:.1f} to "
        f"{kept['last quarter']['forward']:.1f} and {kept['first quarter']['backward']:.1f} to "
        f"{kept['last quarter']['backward']:.1f}",
        scale=describe(*runs.values()),
        holds=grows,
        numbers={
            **numbers,
            "grows": grows,
            "figure": figure(x="training step", y="evaluations or products a solve", series=series),
            "caption": "Evaluations of f (forward) and products with its Jacobian (backward) a solve, in two "
            "trainings that differ by the penalty alone.",
        },
        remark=f"Holds if both counts of the plain training are higher by {GROWN - 1:.0%} or more in the last quarter "
        f"than in the first. {told_plain(runs['plain'].config)} Growth is cut off at those limits. The two tolerances "
        "differ; `backward-fewer` compares at equal ones. Of the last quarter's forward solves "
        + " and ".join(f"{n['unconverged, last quarter']:.0%} {LABELS[name]}" for name, n in numbers.items())
        + " did not converge within the limit.",
    )


def figure_3_tolerance(workshop: Workshop, *, scale: Scale) -> Outcome:
    run = workshop.trained(scale.transformer(workshop))
    points = _sweep(workshop, run, scale, tolerances=TOLERANCES, step_limits=())
    best = points[-1]["perplexity"]
    cheap = max(points[:-1], key=lambda p: (p["perplexity"] <= SLIGHT * best, p["tolerance"]))
    size = _state_norm(run)
    absolute = f" (in the paper's absolute norm: {cheap['tolerance'] * size:.1g})" if size else ""
    return Outcome(
        measured=f"perplexity {best:.2f} at {points[-1]['tolerance']:g} with {points[-1]['evals']:.1f} evaluations; "
        f"{cheap['perplexity']:.2f} at {cheap['tolerance']:g}{absolute} with {cheap['evals']:.1f}; "
        f"{points[0]['perplexity']:.2f} at {points[0]['tolerance']:g} with {points[0]['evals']:.1f}",
        scale=_test_scale(run, points),
        holds=cheap["perplexity"] <= SLIGHT * best
        and cheap["evals"] < points[-1]["evals"]
        and points[0]["perplexity"] >= MUCH * best,
        numbers={"points": points, "figure": _quality_figure(points, "tolerance", "relative tolerance")},
        remark="Evaluation only: the model is the same at every tolerance. Ours are relative to the size of f(z), and "
        f"the recipe evaluates at {run.config.model.eval_tol.rtol:g}.{_told_norm(run, size)}",
    )


def figure_3_steps(workshop: Workshop, *, scale: Scale) -> Outcome:
    run = workshop.trained(scale.transformer(workshop))
    points = _sweep(workshop, run, scale, tolerances=(), step_limits=STEP_LIMITS)
    best = points[-1]["perplexity"]
    enough = next(p for p in points if p["perplexity"] <= SLIGHT * best)
    return Outcome(
        measured=f"perplexity {points[0]['perplexity']:.2f} at a limit of {points[0]['max_steps']}, "
        f"{enough['perplexity']:.2f} at {enough['max_steps']} (the first within 1 %), {best:.2f} at "
        f"{points[-1]['max_steps']}",
        scale=_test_scale(run, points),
        holds=enough["max_steps"] <= FEW * points[-1]["max_steps"] and points[0]["perplexity"] >= MUCH * best,
        numbers={"points": points, "figure": _quality_figure(points, "max_steps", "limit on evaluations")},
        remark="Evaluation only: the model is the same at every limit, and has the tolerance 0, so that every solve "
        f"takes as many evaluations as it may. Holds if a limit of at most {FEW:.0%} of the highest gives a perplexity "
        f"within 1 % of that one's, and a limit of 1 a perplexity that is {MUCH - 1:.0%} above it or more.",
    )


def _sweep(workshop: Workshop, run: LoadedRun, scale: Scale, **what: Any) -> list[dict[str, Any]]:
    def on_point(name: str, *_: int) -> None:
        workshop.tell(f"{run.folder.path.name}: {name}")

    return sweep(run.model, run.task(), "test", max_batches=scale.max_batches, on_point=on_point, **what)


def _test_scale(run: LoadedRun, points: Sequence[dict[str, Any]]) -> str:
    return f"{points[-1]['num_tokens']:,} test tokens; {describe(run)}"


def _told_norm(run: LoadedRun, size: float | None) -> str:
    """Why an absolute tolerance says little without the size of what it is a tolerance of."""
    if size is None:
        return ""
    return (
        f" The {run.config.data.eval_length} positions of a segment have states of width {run.model.embedding.width} "
        f"that end in LN, so that ||f(z)|| is about sqrt(T d) = {size:.0f} and the paper's absolute 0.1 would be "
        f"{0.1 / size:.1g} relative, far tighter than this model needs."
    )


def _state_norm(run: LoadedRun) -> float | None:
    """||z|| of a segment, which layer normalisation fixes."""
    config = run.config
    if not is_transformer(config) or getattr(config.model.cell, "pre_norm", True):
        return None
    return (config.data.eval_length * run.model.embedding.width) ** 0.5


def _quality_figure(points: Sequence[dict[str, Any]], name: str, label: str) -> dict[str, Any]:
    xs = [p[name] for p in points]
    return figure(
        x=label,
        y="perplexity",
        log_x=True,
        log_y=True,
        series=[curve("perplexity", [p["perplexity"] for p in points], xs)],
    )


CLAIMS: tuple[Claim, ...] = (
    at_both_scales(
        figure_2_left,
        row="figure-2-left",
        where="figure 2, left",
        claim="solves take more and more steps as training goes on, forward and backward",
        paper="a plot",
    ),
    *stacking.CLAIMS,
    at_both_scales(
        figure_3_tolerance,
        row="figure-3-tolerance",
        where="figure 3, left",
        claim="a looser tolerance saves steps at a small loss of quality; a very loose one hurts",
        paper="an absolute tolerance below 0.1 suffices",
    ),
    at_both_scales(
        figure_3_steps,
        row="figure-3-steps",
        where="figure 3, right",
        claim="a low limit on steps saves evaluations at a small loss of quality; a very low one hurts",
        paper="30 steps suffice (length 75)",
    ),
    *stability.CLAIMS,
)
