"""How the trained model's solve converges, against applying its cell again and again (the paper's figure 2, right)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deqkit.analysis import convergence_trace, spectral_radius
from deqkit.layers import TransformerConfig
from deqkit.model import ModelConfig, SequenceModel
from deqkit.report.trained import Trained
from deqkit.solve import Anderson, Broyden, FixedPointIteration, Status, Tolerance, fixed_point

# B samples, T positions, D width

MAX_SAMPLES = 4
NUM_EVALS = 60
STACKING = "plain iteration"
_NO_TOLERANCE = Tolerance(rtol=0.0, patience=10 * NUM_EVALS)  # every curve runs to its end


@dataclass(frozen=True, kw_only=True, slots=True)
class Trace:
    """The relative residual at every evaluation, the median over samples."""

    name: str
    residuals: Sequence[float]

    def evals_to(self, tolerance: float) -> int | None:
        """Evaluations until the residual is first within a tolerance; None if it never is."""
        return next((i for i, residual in enumerate(self.residuals, 1) if residual <= tolerance), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Convergence:
    """What happens to a validation batch in the trained model."""

    traces: Sequence[Trace]
    """One a solver, the run's own first; for a stack the change from layer to layer, first."""
    num_samples: int
    length: int
    tolerance: float | None
    """At which the run evaluates; None for a stack."""
    depth: int | None
    """Layers of a stack; None for an equilibrium."""
    radius: float | None
    """Largest |eigenvalue| of the Jacobian at the equilibrium over the samples; None where there is none."""


@torch.no_grad()
def measure_convergence(trained: Trained) -> Convergence:
    """Solve a validation batch in several ways, every one from the same start to the same number of evaluations.

    Raises:
        ValueError: the model is a network to compare with.
    """
    config = trained.model.config
    if config.is_baseline:
        raise ValueError("a network that is run once has nothing that could converge")
    x_BTD, memory = _validation_batch(trained)
    is_equilibrium = config.depth == "equilibrium"
    radius = None
    if config.tied:
        f, z0, args = _equation(trained.model, x_BTD, memory)
        traces = _solver_traces(_solvers(trained.model), f, z0, args)
        radius = _radius(f, z0, args) if is_equilibrium else None
    else:
        traces = [_layer_changes(trained.model, x_BTD, memory)]
    return Convergence(
        traces=traces,
        num_samples=x_BTD.shape[0],
        length=x_BTD.shape[1],
        tolerance=(config.eval_tol.rtol or None) if is_equilibrium else None,
        depth=None if is_equilibrium else int(config.depth),
        radius=radius,
    )


def _validation_batch(trained: Trained) -> tuple[Tensor, tuple[Any, ...]]:
    """A few sequences of the validation split, embedded: of the second segment if it continues the first, whose memory
    then comes with it."""
    model, batches = trained.model, iter(trained.task.evaluation("valid"))
    tokens_BT = next(batches).tokens_BT[:MAX_SAMPLES]
    second = next(batches, None)
    if second is None or second.new_context or second.tokens_BT.shape[1] != tokens_BT.shape[1]:
        x_BTD = model.embed(tokens_BT)
        return x_BTD, tuple(cell.empty_memory(x_BTD) for cell in model.cells)
    memory = model(tokens_BT, depth=trained.depth).memory
    return model.embed(second.tokens_BT[:MAX_SAMPLES]), memory


def _equation(model: SequenceModel, x_BTD: Tensor, memory: tuple[Any, ...]) -> tuple[Any, Any, tuple[Any, ...]]:
    """f, the start and the further arguments of f, of a model with one cell."""
    (cell,) = model.cells
    noise = cell.sample_noise(x_BTD)
    u = cell.inject(x_BTD, memory[0], noise)
    f, args = cell.bind(u, memory[0], noise)
    return f, cell.initial_state(u) if injects(model.config) else x_BTD, args


def injects(config: ModelConfig) -> bool:
    """Whether the input enters through the cell; if not, it is the first state."""
    return not isinstance(config.cell, TransformerConfig) or config.cell.inject


def _solvers(model: SequenceModel) -> dict[str, Any]:
    """What is compared: the run's own solver first."""
    causal, plain = Broyden(memory=5, group="prefix"), FixedPointIteration()
    if model.config.depth != "equilibrium":
        return {"layer after layer": plain, "Broyden, causal": causal}
    own = model.config.solver
    others = [solver for solver in (causal, Anderson(), plain) if type(solver) is not type(own)]
    return {_name(solver): solver for solver in (own, *others)}


def _name(solver: Any) -> str:
    if isinstance(solver, FixedPointIteration):
        return STACKING
    causal = ", causal" if getattr(solver, "group", None) == "prefix" else ""
    return f"{type(solver).__name__}{causal}"


def _solver_traces(solvers: dict[str, Any], f: Callable[..., Any], z0: Any, args: tuple[Any, ...]) -> list[Trace]:
    found = convergence_trace(f, z0, args, solvers=solvers, tol=_NO_TOLERANCE, max_steps=NUM_EVALS)
    return [Trace(name=name, residuals=_median([t.tolist() for t in traces])) for name, traces in found.items()]


def _median(traces: Sequence[Sequence[float]]) -> list[float]:
    """The median over samples; one that is done keeps its last residual. Ends where there is none to plot."""
    medians = []
    for i in range(max(map(len, traces))):
        median = statistics.median(trace[min(i, len(trace) - 1)] for trace in traces if trace)
        if not (0 < median < math.inf):
            break
        medians.append(median)
    return medians


def _layer_changes(model: SequenceModel, x_BTD: Tensor, memory: tuple[Any, ...]) -> Trace:
    """`||z' - z|| / ||z'||` from each layer of an untied stack to the next."""
    changes_LB = []
    z: Any = None
    for cell, kept in zip(model.cells, memory, strict=True):
        noise = cell.sample_noise(x_BTD)
        u = cell.inject(x_BTD, kept, noise)
        if z is None:
            z = cell.initial_state(u) if injects(model.config) else x_BTD
        f, args = cell.bind(u, kept, noise)
        before, z = z, f(z, *args)
        changes_LB.append(_relative_change(before, z))
    return Trace(name="layer after layer", residuals=_median(torch.stack(changes_LB).T.tolist()))


def _relative_change(before: Any, after: Any) -> Tensor:
    pairs = [(before, after)] if isinstance(after, Tensor) else list(zip(before, after, strict=True))
    moved = torch.stack([(new - old).flatten(1).square().sum(1) for old, new in pairs]).sum(0)
    return (moved / torch.stack([new.flatten(1).square().sum(1) for _, new in pairs]).sum(0)).sqrt()


def _radius(f: Callable[..., Any], z0: Any, args: tuple[Any, ...]) -> float | None:
    solver = Broyden(memory=5, group="prefix")
    tol = Tolerance(rtol=1e-3)
    solution = fixed_point(f, z0, args, solver=solver, tol=tol, max_steps=2 * NUM_EVALS, throw=False)
    if solution.status is not Status.CONVERGED:
        return None
    generator = torch.Generator().manual_seed(0)
    return float(spectral_radius(f, solution.z, args, steps=30, generator=generator).max())
