"""The causality constraint of section 2: what later text changes, and what a solver without causality would claim."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.solves import curve, figure
from deqkit.paper.subjects import describe, on_ptb
from deqkit.paper.workshop import Workshop
from deqkit.solve import Broyden, Tolerance
from deqkit.train.config import TrainConfig
from deqkit.train.evaluate import measure_leak

STEP_LIMITS = (2, 3, 4, 6, 8, 12)


def causal(workshop: Workshop, *, config: Callable[[Workshop], TrainConfig], max_batches: int | None) -> Outcome:
    """Perplexity and leak of one solver with inner products up to each position, and over the whole sequence."""
    run = workshop.trained(config(workshop))
    solvers = {"causal": Broyden(memory=5, group="prefix"), "not causal": Broyden(memory=5)}
    own = measure_leak(run.model, run.task(), "test")
    points: dict[str, list[dict[str, Any]]] = {name: [] for name in solvers}
    for name, solver in solvers.items():
        for limit in STEP_LIMITS:
            settings: dict[str, Any] = {"solver": solver, "max_steps": limit, "tol": Tolerance(rtol=0.0)}
            figures = workshop.tested(run, max_batches=max_batches, **settings)
            leak = measure_leak(run.model, run.task(), "test", **settings)
            points[name].append({"max_steps": limit, "leak": leak, **figures})
    worst = max(points["not causal"], key=lambda p: p["leak"])
    gains = [
        (fair["perplexity"] - claimed["perplexity"], claimed, fair)
        for claimed, fair in zip(points["not causal"], points["causal"], strict=True)
    ]
    most, claimed, fair = max(gains, key=lambda gain: gain[0])
    return Outcome(
        measured=f"leak {max(own, *(p['leak'] for p in points['causal'])):g} nats at every step limit; a solver with "
        f"inner products over the sequence, cut off after {worst['max_steps']} evaluations, lets the future change a "
        f"token's loss by up to {worst['leak']:.2g} nats"
        + (
            f"; where it gains most, cut off after {claimed['max_steps']}, it would have claimed a perplexity of "
            f"{claimed['perplexity']:.2f} for the causal {fair['perplexity']:.2f}"
            if most > 0
            else ", and gains nothing by it"
        ),
        scale=f"{describe(run)}, {worst['num_tokens']:,} test tokens",
        holds=(own == 0 and all(p["leak"] == 0 for p in points["causal"])) if worst["leak"] > 0 else None,
        numbers={"leak": own, "points": points, "figures": _panels(points, [-gain for gain, *_ in gains])},
        remark="Leak: the largest change of the loss at the first half of a segment when the second half is replaced. "
        "A measurement that does not see the other solver's would leave the claim open. "
        f"The solver without causality has the lower perplexity at {sum(gain > 0 for gain, *_ in gains)} of the "
        f"{len(gains)} limits and the higher one at {sum(gain < 0 for gain, *_ in gains)}. "
        "Both solvers are Broyden's method with five pairs and differ in their inner products alone. A leak changes "
        "losses of single tokens, in either direction, and their mean by little. Every perplexity in this document is "
        "of a causal solver.",
    )


def _panels(points: dict[str, list[dict[str, Any]]], differences: list[float]) -> list[Any]:
    limits = list(STEP_LIMITS)
    leaks = [curve(kind, [p["leak"] for p in of], limits) for kind, of in points.items()]
    claimed = [curve("not causal, less causal", differences, limits)]
    return [
        figure(x="limit on evaluations", y="leak in nats", series=leaks, log_x=True),
        figure(x="limit on evaluations", y="difference in perplexity", series=claimed, log_x=True),
    ]


CLAIMS: tuple[Claim, ...] = (
    Claim(
        row="causal-evaluation",
        where="section 2, the causality constraint",
        claim="the output at a position depends on earlier inputs alone, whether or not a solve has converged",
        paper="required of every sequence model; not measured",
        quick=partial(causal, config=lambda workshop: workshop.recipe("demo"), max_batches=8),
        full=partial(causal, config=on_ptb("ptb-mini"), max_batches=None),
        full_time="15 minutes, and an hour for the training",
    ),
)
