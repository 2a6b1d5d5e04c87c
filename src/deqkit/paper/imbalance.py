"""Appendix E: samples of a batch that wait for others, and what it saves to let them go."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from deqkit.analysis.timing import compare_steps
from deqkit.model import SequenceModel
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.devices import PIECES_TOL
from deqkit.paper.solves import sample_text
from deqkit.paper.subjects import Scale, at_both_scales, changed, describe
from deqkit.paper.workshop import Workshop
from deqkit.solve import Solution
from deqkit.train.load import LoadedRun

# B samples, T positions

SMALL_IMBALANCE = 1.5
"""The slowest sample of a batch over the mean, up to which imbalance counts as "relatively small"."""


def imbalance(workshop: Workshop, *, scale: Scale) -> Outcome:
    """Evaluations of the samples of a batch, and what it saves to let go of those that are done."""
    run = workshop.trained(scale.transformer(workshop))
    natural = sample_text(run.task(), length=run.config.data.eval_length, count=16)
    # A repeated word is about as easy as text can be, so half the batch is done long before the other.
    easy = natural[:8, :1].expand(-1, natural.shape[1])
    batches = {
        "one sequence 16 times": natural[:1].expand(16, -1),
        "16 test sequences": natural,
        "8 of them, 8 of one repeated word": torch.cat([easy, natural[8:]]),
    }
    numbers: dict[str, Any] = {}
    for name, tokens in batches.items():
        workshop.tell(f"imbalance: {name}")
        numbers[name] = _compaction(run, tokens, scale.rounds)
    one = numbers["16 test sequences"]["evaluations"]
    ratio = one["max"] / one["mean"]
    return Outcome(
        measured="; ".join(
            f"{name}: {n['evaluations']['mean']:.1f} evaluations ({n['evaluations']['min']} to "
            f"{n['evaluations']['max']}), with compaction {n['time']['ratio']:.2f} of the time ({n['time']['low']:.2f} "
            f"to {n['time']['high']:.2f})"
            for name, n in numbers.items()
        ),
        scale=f"means of 16 samples, residual {PIECES_TOL.rtol:g}; {scale.rounds} interleaved rounds, "
        f"processor time; {describe(run)}",
        holds=ratio <= SMALL_IMBALANCE,
        numbers={**numbers, "slowest over mean": ratio, "bar": SMALL_IMBALANCE},
        remark="The claim is about imbalance in natural batches; what compaction saves beyond it is ours.",
    )


@torch.no_grad()
def _compaction(run: LoadedRun, tokens: Tensor, rounds: int) -> dict[str, Any]:
    models = {"compact": changed(run), "whole batch": changed(run)}
    models["whole batch"].core.compact = False

    def solve(model: SequenceModel) -> Solution:
        (solution,) = model(tokens, tol=PIECES_TOL, max_steps=200).solutions
        return solution

    compared = compare_steps({name: lambda m=model: solve(m) for name, model in models.items()}, rounds=rounds)
    evals = solve(models["compact"]).num_evals
    return {
        "evaluations": {"min": int(evals.min()), "mean": float(evals.double().mean()), "max": int(evals.max())},
        "seconds": compared["seconds"],
        "time": compared["ratios"]["whole batch"],
    }


CLAIMS: tuple[Claim, ...] = (
    at_both_scales(
        imbalance,
        row="imbalance",
        where="appendix E",
        claim="samples of a batch differ little in how many steps they need",
        paper="relatively small",
    ),
)
