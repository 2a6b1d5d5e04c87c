"""What the precision of solves is worth: to the gradient, and in training."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from deqkit.adjoint import Implicit
from deqkit.model import SequenceModel
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.devices import LOOSER, SLIGHT, work
from deqkit.paper.equalities import relative_difference
from deqkit.paper.solves import account, curve, figure, sample_text
from deqkit.paper.stability import ALWAYS, PAPER_FORWARD, paper_backward
from deqkit.paper.subjects import Scale, at_both_scales, changed, describe
from deqkit.paper.workshop import Workshop
from deqkit.solve import GMRES, AbstractSolver, Anderson, Broyden, Solution, Tolerance
from deqkit.train.config import TrainConfig
from deqkit.train.load import LoadedRun

# B samples, T positions

EXACT = Tolerance(rtol=1e-12, patience=300)
EXACT_STEPS = 600
BACKWARD_SOLVER = Anderson(memory=10)
TOLERANCES = (0.3, 0.1, 0.01, 1e-3, 1e-4, 1e-6)
ACCURATE = 1e-3
"""Relative error up to which a gradient counts as accurate."""
TIGHT = 1e-3
"""Tolerance, both ways, of the most precise training: a twentieth of our recipes' or less."""
TIGHT_STEPS = 60
FEW_EVALS, FEW_PRODUCTS = 4, 3
"""The lower limits on steps."""
A_LITTLE = 2.0
"""Factor on both tolerances, beside `LOOSER`."""
EQUALLY = (0.1, 0.01, 1e-3, 1e-4, 1e-6)
"""Tolerances at which forward and backward solves are compared."""
PAPERS = "the paper's tolerances"
MUCH_FEWER = 2 / 3
"""At most this share of the evaluations is "much fewer" products."""
SLOW = f"A tight one, to {TIGHT:g}, is trained at full length. "


@dataclass(frozen=True, slots=True)
class Gradient:
    """Of the loss by all parameters that it depends on, and how it was solved for."""

    parts: list[Tensor]
    loss: float
    forward: dict[str, Any]
    backward: dict[str, Any]


def in_float64(run: LoadedRun, **settings: Any) -> SequenceModel:
    """The trained model without dropout, so that solves can be as tight as one likes."""
    return changed(run, **settings).double()


def gradient(
    model: SequenceModel,
    tokens_BT: Tensor,
    *,
    forward: Tolerance = EXACT,
    backward: Tolerance = EXACT,
    backward_solver: AbstractSolver = BACKWARD_SOLVER,
) -> Gradient:
    """The parameters' gradient of the loss of a sequence, whose last token is only a target."""
    settings: dict[str, Any] = {"tol": forward, "max_steps": EXACT_STEPS, "solver": Broyden(memory=20, group="prefix")}
    adjoint = Implicit(solver=backward_solver, tol=backward, max_steps=EXACT_STEPS)
    output = model(tokens_BT[:, :-1], tokens_BT[:, 1:], adjoint=adjoint, **settings)
    assert output.loss is not None
    grads = torch.autograd.grad(output.loss, list(model.parameters()), allow_unused=True)
    return Gradient(
        [grad for grad in grads if grad is not None],
        float(output.loss.detach()),
        account(output.solutions),
        account(_backward(output.solutions)),
    )


def _backward(solutions: Sequence[Solution]) -> list[Solution]:
    return [solution.backward for solution in solutions if solution.backward is not None]


def gradient_precision(workshop: Workshop, *, scale: Scale) -> Outcome:
    run = workshop.trained(scale.transformer(workshop))
    model, own = in_float64(run), run.config.model
    length = run.config.data.eval_length
    tokens = sample_text(run.task(), length=length + 1, count=scale.num_samples)
    exact = gradient(model, tokens)

    def point(name: str, forward: Tolerance = EXACT, backward: Tolerance = EXACT) -> dict[str, Any]:
        workshop.tell(f"gradient: {name}")
        found = gradient(model, tokens, forward=forward, backward=backward)
        return {
            "error": relative_difference(found.parts, exact.parts),
            "evaluations": found.forward["evaluations"]["mean"],
            "products": found.backward["evaluations"]["mean"],
        }

    loose = {rtol: Tolerance(rtol=rtol, patience=300) for rtol in TOLERANCES}
    forward = {rtol: point(f"forward {rtol:g}", forward=tol) for rtol, tol in loose.items()}
    backward = {rtol: point(f"backward {rtol:g}", backward=tol) for rtol, tol in loose.items()}
    adjoint_tol = getattr(own.adjoint, "tol", EXACT)
    recipe = point("the recipe's", forward=own.tol, backward=adjoint_tol)
    paper = point("the paper's", forward=PAPER_FORWARD, backward=paper_backward(length))
    falls = {"forward": _falls(forward), "backward": _falls(backward)}
    return Outcome(
        measured=f"relative error of the gradient: {_ends('forward', forward)}; {_ends('backward', backward)}; "
        f"{paper['error']:.0e} with the paper's tolerances ({paper['evaluations']:.0f} evaluations, "
        f"{paper['products']:.0f} products), {recipe['error']:.0e} with those that our recipe trains with "
        f"({recipe['evaluations']:.1f} and {recipe['products']:.1f})",
        scale=f"float64, no dropout, {scale.num_samples} test sequences of {length}; {describe(run)}",
        holds=all(falls.values()) and paper["error"] <= ACCURATE,
        numbers={
            "forward": {f"{rtol:g}": one for rtol, one in forward.items()},
            "backward": {f"{rtol:g}": one for rtol, one in backward.items()},
            "the paper's": paper,
            "the recipe's": recipe,
            "falls": falls,
            "bar": ACCURATE,
            "reference": {"loss": exact.loss, "forward": exact.forward, "backward": exact.backward},
            "figure": figure(
                x="relative tolerance",
                y="relative error of the gradient",
                series=[
                    curve("of the forward solve", [one["error"] for one in forward.values()], list(forward)),
                    curve("of the backward solve", [one["error"] for one in backward.values()], list(backward)),
                ],
                log_x=True,
                log_y=True,
            ),
        },
        remark=f"While one solve's tolerance varies the other's is {EXACT.rtol:g}; so are both in the reference. Holds "
        "if the error falls wherever a tolerance does, in both, and if the paper's tolerances leave at most "
        f"{ACCURATE:g}. Our recipe's are {own.tol.rtol:g} forward and {adjoint_tol.rtol:g} backward, the paper's "
        "sqrt(T) 1e-5 and sqrt(T) 1e-8.",
    )


def backward_fewer(workshop: Workshop, *, scale: Scale) -> Outcome:
    run = workshop.trained(scale.transformer(workshop))
    model, length = in_float64(run, start="zeros"), run.config.data.eval_length
    tokens = sample_text(run.task(), length=length + 1, count=scale.num_samples)
    pairs = {f"{rtol:g}": 2 * (Tolerance(rtol=rtol, patience=300),) for rtol in EQUALLY}
    found = {}
    for name, (forward, backward) in {**pairs, PAPERS: (PAPER_FORWARD, paper_backward(length))}.items():
        workshop.tell(f"backward and forward solve: {name}")
        solved = gradient(model, tokens, forward=forward, backward=backward)
        by_gmres = gradient(model, tokens, forward=forward, backward=backward, backward_solver=GMRES())
        found[name] = {
            "evaluations": solved.forward["evaluations"]["median"],
            "products": solved.backward["evaluations"]["median"],
            "products of GMRES": by_gmres.backward["evaluations"]["median"],
            "converged": min(solved.forward["converged"], solved.backward["converged"]),
        }
    counts = all(one["converged"] >= ALWAYS for one in found.values())
    tried = ", ".join(f"{one['products of GMRES']:.0f}" for one in found.values())
    shares = {name: one["products"] / one["evaluations"] for name, one in found.items()}
    return Outcome(
        measured="evaluations forward and products backward: "
        + ", ".join(f"{one['evaluations']:.0f} and {one['products']:.0f} to {name}" for name, one in found.items()),
        scale=f"float64, no dropout, {scale.num_samples} test sequences of {length}; {describe(run)}",
        holds=all(share <= MUCH_FEWER for share in shares.values()) if counts else None,
        numbers={"found": found, "products, of the evaluations": shares, "bar": MUCH_FEWER},
        remark="Medians over the sequences, with the same relative tolerance for both, and with the paper's pair, "
        "sqrt(T) 1e-5 and sqrt(T) 1e-8. Broyden's method with 20 pairs forward, Anderson's with 10 backward, the "
        f"forward one from zeros. Holds if products are at most {MUCH_FEWER:.0%} of the evaluations each time; open if "
        f"fewer than {ALWAYS:.0%} of the solves converge. Tried: GMRES, which has the smallest residual that as many "
        f"products allow, with {tried} products. "
        "The backward system is linear, but it has the eigenvalues of the same J, on which either solve's length "
        "depends near the equilibrium. Where trainings take fewer products (`figure-2-left`), they ask less of the "
        "backward solve.",
    )


def _falls(points: Mapping[float, Mapping[str, float]]) -> bool:
    """No tighter tolerance has a larger error, and the tightest a much smaller one than the loosest."""
    errors = [one["error"] for one in points.values()]
    return all(b <= a for a, b in itertools.pairwise(errors)) and errors[-1] < ACCURATE * errors[0]


def _ends(name: str, points: Mapping[float, Mapping[str, float]]) -> str:
    told = [(rtol, points[rtol]["error"]) for rtol in (TOLERANCES[0], 0.01, 1e-4, TOLERANCES[-1])]
    return f"{name} " + ", ".join(f"{error:.0e} at {rtol:g}" for rtol, error in told)


def variants(config: TrainConfig, *, tight: bool) -> dict[str, TrainConfig]:
    """Trainings by how they are solved, the most precise first; `tight` is slow."""
    adjoint: Any = config.model.adjoint
    forward, backward = config.model.tol, adjoint.tol
    changes: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
        "tight": (
            {"tol": replace(forward, rtol=TIGHT), "max_steps": TIGHT_STEPS},
            {"tol": replace(backward, rtol=TIGHT), "max_steps": TIGHT_STEPS},
        ),
        "own": ({}, {}),
        **{
            name: (
                {"tol": replace(forward, rtol=factor * forward.rtol)},
                {"tol": replace(backward, rtol=factor * backward.rtol)},
            )
            for name, factor in (("a-little-loose", A_LITTLE), ("loose", LOOSER))
        },
        "few-steps": ({"max_steps": FEW_EVALS}, {"max_steps": FEW_PRODUCTS}),
    }
    return {
        name: replace(
            config,
            recipe=config.recipe if name == "own" else f"{config.recipe}-{name}",
            model=replace(config.model, adjoint=replace(adjoint, **of_backward), **of_forward),
        )
        for name, (of_forward, of_backward) in changes.items()
        if tight or name != "tight"
    }


def training_tolerance(workshop: Workshop, *, scale: Scale) -> Outcome:
    is_full = scale.max_batches is None
    configs = variants(scale.plain(workshop), tight=is_full)
    runs = {name: workshop.trained(config) for name, config in configs.items()}
    found = {name: _training(workshop, run, scale) for name, run in runs.items()}
    precise, *others = found
    best = found[precise]
    pays = {
        name: found[name]["work"] < best["work"] and found[name]["perplexity"] <= SLIGHT * best["perplexity"]
        for name in others
    }
    own: Any = configs["own"].model
    labels = {
        "tight": f"{TIGHT:g} both ways",
        "own": f"{own.tol.rtol:g} forward, {own.adjoint.tol.rtol:g} backward",
        "a-little-loose": f"{A_LITTLE:g} times as loose",
        "loose": f"{LOOSER:g} times as loose",
        "few-steps": f"at most {FEW_EVALS} evaluations and {FEW_PRODUCTS} products",
    }
    return Outcome(
        measured="evaluations and products of a training, test perplexity: "
        + "; ".join(f"{labels[name]}: {one['work']:,.0f}, {one['perplexity']:.1f}" for name, one in found.items()),
        scale=describe(*runs.values()),
        holds=any(pays[name] for name in others if name != "few-steps") and pays["few-steps"],
        numbers={**found, "compared with": precise, "pays": pays, "table": _table(found, labels)},
        remark="Holds if a looser tolerance and the lower limit each save evaluations and products, at a perplexity at "
        f"most 1 % worse than in the first training, the most precise. {'' if is_full else SLOW}One seed. The table "
        "has means over the steps; evaluation is the same for all.",
    )


def _table(found: Mapping[str, Mapping[str, float]], labels: Mapping[str, str]) -> dict[str, Any]:
    rows = [
        [labels[name], f"{one['evaluations']:.1f}", f"{one['products']:.1f}", f"{one['perplexity']:.1f}"]
        for name, one in found.items()
    ]
    return {"columns": ["solves in training", "evaluations", "products", "test perplexity"], "rows": rows}


def _training(workshop: Workshop, run: LoadedRun, scale: Scale) -> dict[str, Any]:
    records = workshop.metrics(run)
    return {
        "work": work(records, run.config.devices.warmup_depth),
        "evaluations": sum(r["evals"] for r in records) / len(records),
        "products": sum(r["backward_evals"] for r in records) / len(records),
        "unconverged": sum(r["unconverged"] for r in records) / len(records),
        "perplexity": workshop.tested(run, max_batches=scale.max_batches)["perplexity"],
    }


CLAIMS: tuple[Claim, ...] = (
    at_both_scales(
        gradient_precision,
        row="gradient-precision",
        where="sections 5 (setting) and 5.2 (runtime)",
        claim="the smaller the tolerances of the solves, forward and backward, the more accurate is the gradient",
        paper="as small as possible; sqrt(T) 1e-5 and sqrt(T) 1e-8 in training",
    ),
    at_both_scales(
        backward_fewer,
        row="backward-fewer",
        where="section 5.2, convergence",
        claim="the backward solve takes much fewer steps than the forward one",
        paper="much fewer (figure 2, left), as its system is linear",
    ),
    at_both_scales(
        training_tolerance,
        row="training-tolerance",
        where="section 5.2 (runtime), figure 3",
        claim="a looser tolerance or a lower limit on steps makes training cheaper too, at a small loss of quality",
        paper="much faster with a small degradation",
        full_time="ten minutes of a core for each training, five of them, more for the tight one",
    ),
)
