"""Section 3: the backward pass needs products with the Jacobian alone, and f must be constrained to be solved."""

from __future__ import annotations

import itertools
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from deqkit.analysis import peak_memory
from deqkit.model import SequenceModel
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.solves import Equation, account, curve, equation_of, figure, finite, operator_norm, sample_text
from deqkit.paper.stability import LENGTH, MAX_STEPS, SOLVED, with_scheme
from deqkit.paper.subjects import Scale, at_both_scales, describe
from deqkit.paper.workshop import Workshop
from deqkit.solve import Broyden, fixed_point
from deqkit.solve._packing import Packing
from deqkit.train.config import TrainConfig
from deqkit.train.load import LoadedRun
from deqkit.train.tasks import make_task, resolve

# B samples, T positions

MIB = 2**20
SMALL_SHARE = 0.1
"""Of the Jacobian's bytes, up to which a backward pass counts as one that never has it."""
GAINS = (1, 2, 8)
"""Factors on the weights that act on the state."""
BOUNDED, LARGE = 1.01, 100.0
"""Root mean squares of an output: up to the first it is constrained (layer normalisation makes it 1, gates less), from
the second on it has grown without bounds."""
CONSTRAINTS: Mapping[str, tuple[str, Callable[..., Any]]] = {
    "transformer": ("layer normalisation", F.layer_norm),
    "trellis": ("the tanh of its gates", torch.tanh),
}


def vector_products(workshop: Workshop, *, scale: Scale) -> Outcome:
    run = workshop.trained(scale.transformer(workshop))
    points = []
    for length in scale.lengths[:3]:  # the longest takes a while to count
        workshop.tell(f"backward pass: {length} positions")
        points.append(backward_pass(run, sample_text(run.task(), length=length + 1, count=1)))
    never = all(p["bytes"] <= SMALL_SHARE * p["Jacobian"] and p["products"] < p["state"] for p in points)
    lengths = [p["length"] for p in points]
    series = {"backward pass": [p["bytes"] / MIB for p in points], "Jacobian": [p["Jacobian"] / MIB for p in points]}
    return Outcome(
        measured="; ".join(
            f"{p['length']} positions: {p['products']:.0f} products and {p['bytes'] / MIB:,.0f} MiB (a Jacobian: "
            f"{p['state']:,} products, {p['Jacobian'] / MIB:,.0f} MiB)"
            for p in points
        ),
        scale=f"a test sequence of each length, float32; {describe(run)}",
        holds=never,
        numbers={
            "points": points,
            "bar": SMALL_SHARE,
            "figure": figure(
                x="positions",
                y="MiB",
                series=[curve(name, values, lengths) for name, values in series.items()],
                log_x=True,
                log_y=True,
            ),
        },
        remark="Counted storage by storage: what the forward pass left for the backward pass, and what that held at "
        f"its peak, embedding, softmax and all gradients included. Holds if it is at most {SMALL_SHARE:.0%} of the "
        "(T d) x (T d) matrix, and if there are fewer products than that has rows.",
    )


def backward_pass(run: LoadedRun, tokens_BT: Tensor) -> dict[str, Any]:
    """Products and memory of a backward pass at the tolerances of training, beside the Jacobian of one sample."""
    config, model = run.config.model, run.model
    settings: dict[str, Any] = {"tol": config.tol, "max_steps": config.max_steps}
    forward = peak_memory(lambda: model(tokens_BT[:, :-1], tokens_BT[:, 1:], **settings))
    output = forward.result
    assert output.loss is not None
    backward = peak_memory(output.loss.backward)
    model.zero_grad(set_to_none=True)
    size = Packing.of(output.z, causal=False).pack(output.z)[0].numel()
    return {
        "length": tokens_BT.shape[1] - 1,
        "products": max(float(s.backward.num_evals.max()) for s in output.solutions if s.backward is not None),
        "bytes": forward.held_bytes + backward.peak_bytes,
        "state": size,
        "Jacobian": jacobian_bytes(size),
    }


def jacobian_bytes(size: int) -> int:
    """Of the square matrix for a state of so many numbers, in float32."""
    return torch.float32.itemsize * size**2


class Without(TorchFunctionMode):
    """While it is entered, a function returns its first argument as it is."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return args[0] if func is self.function else func(*args, **(kwargs or {}))


def stable_cell(workshop: Workshop, *, scale: Scale) -> Outcome:
    numbers: dict[str, Any] = {}
    for kind, make in (("transformer", scale.transformer), ("trellis", scale.trellis)):
        config = resolve(make(workshop))
        tokens = sample_text(make_task(config), length=LENGTH, count=scale.num_samples)
        numbers[kind] = {"with": {}, "without": {}}
        for gain, constrained in itertools.product(GAINS, ("with", "without")):
            workshop.tell(f"stable cell: {kind}, weights times {gain}, {constrained} {CONSTRAINTS[kind][0]}")
            model = with_gain(config, gain)
            equation = equation_of(model, tokens)
            if constrained == "with":
                numbers[kind][constrained][str(gain)] = _behaviour(model, equation)
            else:
                with Without(CONSTRAINTS[kind][1]):
                    numbers[kind][constrained][str(gain)] = _behaviour(model, equation)
    verdicts = {kind: _verdicts(of["with"].values(), of["without"].values()) for kind, of in numbers.items()}
    return Outcome(
        measured=f"solved with {', '.join(map(str, GAINS))} times the weights, and the largest size: "
        + "; ".join(
            f"{kind} with {CONSTRAINTS[kind][0]} {_told(of['with'])}, without {_told(of['without'])}"
            for kind, of in numbers.items()
        ),
        scale=f"untrained cells of {scale.transformer(workshop).recipe} and {scale.trellis(workshop).recipe}, "
        f"{scale.num_samples} test sequences of {LENGTH}",
        holds=all(all(of.values()) for of in verdicts.values()),
        numbers={**numbers, "verdicts": verdicts, "table": _table(numbers)},
        remark=f"Size: root mean square of the output after {MAX_STEPS} layers. Solved: share of samples that Broyden "
        f"brings to {SOLVED.rtol:g} within {MAX_STEPS} evaluations. Holds if with the constraint outputs stay bounded "
        f"and without it they do not, and if without it fewer solves end in an equilibrium. The weights that act on "
        "the state are those of our initialisation, scaled (with others layer normalisation is not enough: "
        "`initialisation`), the injection is not. ||J||: the operator norm of the Jacobian where Broyden's method "
        "ended. The paper says that these functions help to make f contractive, which it is where ||J|| is below "
        "1.",
    )


def with_gain(config: TrainConfig, gain: float) -> SequenceModel:
    """The untrained model with larger weights on the state."""
    model = with_scheme(config, (None, None), 0)
    cell = model.core.cell
    with torch.no_grad():
        for name, module in cell.named_modules():
            if isinstance(module, nn.Linear) and name != "injection":
                module.weight.mul_(gain)
    return model


@torch.no_grad()
def _behaviour(model: SequenceModel, equation: Equation) -> dict[str, Any]:
    settings: dict[str, Any] = {"tol": SOLVED, "max_steps": MAX_STEPS, "throw": False}
    solution = fixed_point(equation.f, equation.start, equation.args, solver=Broyden(memory=10), **settings)
    z = equation.start
    for _ in range(MAX_STEPS):
        z = equation.f(z, *equation.args)
    (cell,) = model.cells
    size = float(cell.output(z).square().mean().sqrt())
    norm = float(operator_norm(equation, solution.z).mean())
    return {"size": finite(size), "solved": account([solution])["converged"], "norm": finite(norm)}


def _verdicts(constrained: Any, free: Any) -> dict[str, bool]:
    with_, without = list(constrained), list(free)
    return {
        "bounded with": all(one["size"] is not None and one["size"] <= BOUNDED for one in with_),
        "not without": any(one["size"] is None or one["size"] >= LARGE for one in without),
        "more are solved": statistics.fmean(one["solved"] for one in with_)
        > statistics.fmean(one["solved"] for one in without),
    }


def _told(of: Mapping[str, Mapping[str, Any]]) -> str:
    sizes = [one["size"] for one in of.values()]
    largest = None if None in sizes else max(sizes)
    solved = ", ".join(f"{one['solved']:.0%}" for one in of.values())
    return f"{solved} (size {_number(largest)})"


def _number(value: float | None) -> str:
    return "overflow" if value is None else f"{value:.2g}"


def _table(numbers: Mapping[str, Mapping[str, Mapping[str, Mapping[str, Any]]]]) -> dict[str, Any]:
    rows = [
        [
            kind,
            f"{constrained} {CONSTRAINTS[kind][0]}",
            gain,
            _number(one["size"]),
            _number(one["norm"]),
            f"{one['solved']:.0%}",
        ]
        for kind, of in numbers.items()
        for constrained, by_gain in of.items()
        for gain, one in by_gain.items()
    ]
    return {"columns": ["cell", "function", "weights times", "size", "||J||", "solved"], "rows": rows}


CLAIMS: tuple[Claim, ...] = (
    at_both_scales(
        vector_products,
        row="vector-products",
        where="sections 3.1.3 and 3.2, memory",
        claim="the backward pass takes products of vectors with the Jacobian, and never the matrix itself",
        paper="N x T d numbers instead of N x (T d)^2",
    ),
    at_both_scales(
        stable_cell,
        row="stable-cell",
        where="section 3.2, the choice of f; section 5, initialisation",
        claim="to be solved reliably f must be stable and constrained, as it is by layer normalisation and gates",
        paper="-",
        full_time="minutes",
    ),
)
