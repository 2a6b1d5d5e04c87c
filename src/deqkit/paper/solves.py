"""Looking at solves of a trained model: batches, the function that is solved, counts, traces and its Jacobian."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from deqkit.adjoint._graph import transposed_product, twice_differentiable
from deqkit.analysis import convergence_trace
from deqkit.model import SequenceModel
from deqkit.solve import AbstractSolver, Fallback, Solution, Status, Tolerance
from deqkit.solve._packing import Packing
from deqkit.train.load import LoadedRun
from deqkit.train.tasks import AbstractTask, TextTask

# B samples, T positions, P = 1, N numbers in a state

PLOTTED = 1e-7
"""Residuals below this are rounding in float32, and are drawn here."""
ROUNDING = 1e-5
"""Steps that are shorter than this share of the state have no direction in float32: each of its numbers is rounded to
some 1e-7 of its size, and so is everything that f computes from them."""


@dataclass(frozen=True, slots=True)
class Equation:
    """z = f(z, *args) of a batch, and where the solve starts."""

    f: Callable[..., Any]
    start: Any
    args: tuple[Any, ...]


@torch.no_grad()
def equation_of(model: SequenceModel, tokens_BT: Tensor, memory: tuple[Any, ...] | None = None) -> Equation:
    """What a tied model solves, or stacks, for these tokens."""
    (cell,) = model.cells
    x_BTD = model.embed(tokens_BT)
    kept = cell.empty_memory(x_BTD) if memory is None else memory[0]
    noise = cell.sample_noise(x_BTD)
    u = cell.inject(x_BTD, kept, noise)
    f, args = cell.bind(u, kept, noise)
    return Equation(f, cell.initial_state(u), args)


def sample_text(task: AbstractTask, *, length: int, count: int, seed: int = 0) -> Tensor:
    """Sequences at random places of the test split, (count, length)."""
    assert isinstance(task, TextTask), f"{type(task).__name__} has no text"
    ids = np.asarray(task.corpus.split("test"))
    if len(ids) <= length:
        raise ValueError(f"the test split has {len(ids)} tokens, too few for sequences of {length}")
    starts = np.random.default_rng(seed).integers(0, len(ids) - length, count)
    return torch.from_numpy(np.stack([ids[start : start + length] for start in starts]).astype(np.int64))


@torch.no_grad()
def solutions_on_test(
    run: LoadedRun, *, max_batches: int | None, model: SequenceModel | None = None, **settings: Any
) -> Iterator[Solution]:
    """Every solve of the test split, the context carried from segment to segment."""
    model = run.model if model is None else model
    memory = None
    for number, batch in enumerate(run.task().evaluation("test")):
        if number == max_batches:
            return
        output = model(batch.tokens_BT, memory=None if batch.new_context else memory, **settings)
        memory = output.memory
        yield from output.solutions


def account(solutions: Iterator[Solution] | Sequence[Solution]) -> dict[str, Any]:
    """Evaluations and verdicts of all samples."""
    found = list(solutions)
    evals = torch.cat([s.num_evals for s in found]).double()
    codes = torch.cat([s.codes for s in found])
    return {
        "solves": int(evals.numel()),
        "converged": float((codes == Status.CONVERGED.severity).double().mean()),
        "evaluations": {
            "mean": float(evals.mean()),
            "median": float(evals.median()),
            "99 %": float(evals.quantile(0.99)),
            "max": int(evals.max()),
        },
        "largest residual": finite(max(float(s.residual.max()) for s in found)),
    }


def median_traces(
    equation: Equation, solvers: Mapping[str, AbstractSolver | Fallback], *, depth: int
) -> dict[str, list[float]]:
    """The relative residual at every evaluation, the median over samples, to the end whatever the residual is."""
    tol = Tolerance(rtol=0.0, patience=10 * depth)
    found = convergence_trace(equation.f, equation.start, equation.args, solvers=solvers, tol=tol, max_steps=depth)
    return {name: _median([trace.tolist() for trace in traces]) for name, traces in found.items()}


def _median(traces: Sequence[Sequence[float]]) -> list[float]:
    """A sample that is done keeps its last residual; the median ends where it is not finite."""
    medians = []
    for i in range(max(map(len, traces))):
        value = statistics.median(trace[min(i, len(trace) - 1)] for trace in traces)
        if not math.isfinite(value):
            break
        medians.append(max(value, PLOTTED))
    return medians


def evals_to(trace: Sequence[float], residual: float) -> int | None:
    """Evaluations until a residual is reached; None if it is not."""
    return next((i for i, value in enumerate(trace, 1) if value <= residual), None)


@torch.no_grad()
def turns(equation: Equation, *, depth: int) -> list[float]:
    """The cosine between each step of plain iteration and the one before, the median over the samples that still move.

    +1: it goes on in one direction; -1: it goes back to where it came from, as an oscillation does. A sample is at rest
    from its first step on that is rounding; the list ends when most are.
    """
    packing = Packing.of(equation.start, causal=False)
    z, before, cosines = packing.pack(equation.start), None, []
    moves = torch.ones(z.shape[0], dtype=torch.bool, device=z.device)
    for _ in range(depth):
        after = packing.pack(equation.f(packing.unpack(z), *equation.args))
        step = (after - z).flatten(1)
        moves &= torch.linalg.vector_norm(step, dim=1) > ROUNDING * torch.linalg.vector_norm(after.flatten(1), dim=1)
        if 2 * int(moves.sum()) < len(moves):
            break
        if before is not None:
            cosines.append(float(torch.cosine_similarity(step, before, dim=1)[moves].median()))
        z, before = after, step
    return [cosine for cosine in cosines if math.isfinite(cosine)]


def operator_norm(equation: Equation, z: Any, *, steps: int = 20) -> Tensor:
    """The largest singular value of J = df/dz per sample, by power iteration with J'J.

    J v is the derivative by u of the linear function v'(J'u).
    """
    packing = Packing.of(z, causal=False)
    at = packing.pack(z).detach().clone().requires_grad_()
    with torch.enable_grad(), twice_differentiable():
        value = packing.pack(equation.f(packing.unpack(at), *equation.args))
        u = torch.zeros_like(value, requires_grad=True)
        pulled = transposed_product(value, at, u, create_graph=True)
    v = torch.randn(at.shape, dtype=at.dtype, generator=torch.Generator().manual_seed(0))
    norms = at.new_ones(at.shape[0])
    for _ in range(steps):
        v = v / torch.linalg.vector_norm(v, dim=(1, 2), keepdim=True)
        (pushed,) = torch.autograd.grad(pulled, u, v, retain_graph=True)
        norms = torch.linalg.vector_norm(pushed, dim=(1, 2))
        v = transposed_product(value, at, pushed, create_graph=False)
    return norms.detach()


def finite(value: float | None) -> float | None:
    """None for what is not a number: results have no NaN."""
    return value if value is not None and math.isfinite(value) else None


def figure(*, x: str, y: str, series: Sequence[Mapping[str, Any]], log_x: bool = False, log_y: bool = False) -> Any:
    """Curves for the document."""
    return {"x": x, "y": y, "log_x": log_x, "log_y": log_y, "series": [dict(one) for one in series]}


def curve(label: str, y: Sequence[float], x: Sequence[float] | None = None) -> dict[str, Any]:
    """One curve of a figure; counted from 1 unless it says where."""
    return {"label": label, "x": list(range(1, len(y) + 1)) if x is None else list(x), "y": list(y)}


def yes(holds: bool) -> str:
    """In words."""
    return "yes" if holds else "no"
