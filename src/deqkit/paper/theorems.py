"""The three theorems as equalities between two computations, and that the root-finder does not matter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from deqkit.adjoint import Implicit
from deqkit.analysis import spectral_radius
from deqkit.deq import DEQ
from deqkit.layers import stack, tie
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.equalities import (
    NUM_LAYERS,
    TIGHT,
    Spiral,
    TanhCell,
    block_matrices,
    dense_gradients,
    direction,
    implicit_gradients,
    problems,
    relative_difference,
    side_by_side,
    touched,
    unrolled_gradients,
)
from deqkit.paper.workshop import Workshop
from deqkit.solve import (
    GMRES,
    AbstractSolver,
    Anderson,
    Broyden,
    Fallback,
    FixedPointIteration,
    NewtonKrylov,
    Status,
    Tolerance,
    fixed_point,
)

# B samples, T positions, D width, N numbers in a state

SAME = 1e-8
"""Relative difference at which two float64 computations count as equal: a solve to 1e-12 amplified by (I - J)^-1."""
EXAMPLE = "`python examples/theorems.py` is the shortest program that prints both sides of all three theorems."
SOLVERS: dict[str, AbstractSolver | Fallback] = {
    "Broyden": Broyden(),
    "Broyden, causal": Broyden(memory=5, group="prefix"),
    "Anderson": Anderson(),
    "Anderson, causal": Anderson(group="prefix"),
    "plain iteration": FixedPointIteration(),
    "damped iteration": FixedPointIteration(damping=0.5),
    "Newton-Krylov": NewtonKrylov(),
    "Anderson, then Newton-Krylov": Fallback(Anderson(), NewtonKrylov()),
}
NEWTON_LIKE = ("Broyden", "Newton-Krylov")
ADJOINT_SOLVERS: dict[str, AbstractSolver] = {
    "Anderson": Anderson(),
    "Broyden": Broyden(),
    "GMRES": GMRES(),
    "plain iteration": FixedPointIteration(),
}


def theorem_1(workshop: Workshop) -> Outcome:
    numbers: dict[str, Any] = {}
    rows = []
    for name, (cell, x) in problems().items():
        workshop.tell(f"theorem 1: {name}")
        z, ours = implicit_gradients(cell, x)
        others = {"dense": dense_gradients(cell, x, z), f"{NUM_LAYERS} layers": unrolled_gradients(cell, x)}
        for part, which in (("inputs", slice(1)), ("parameters", slice(1, None))):
            sides = [grads[which] for grads in (ours, *others.values())]
            rows.append([f"{name}, {part}", *side_by_side(*sides)])
        numbers[name] = {
            "norm of the gradient": float(torch.cat([g.flatten() for g in ours]).norm()),
            **{
                other: {
                    "inputs": relative_difference(ours[:1], theirs[:1]),
                    "parameters": relative_difference(ours[1:], theirs[1:]),
                }
                for other, theirs in others.items()
            },
        }
    errors = {other: _worst(numbers, other) for other in ("dense", f"{NUM_LAYERS} layers")}
    first = [entries.split(", ")[0] for entries in rows[0][1:]]
    return Outcome(
        measured=f"{rows[0][0]}: the largest entry of the gradient is {first[0]}, of the right side with J_g as a "
        f"matrix {first[1]}, of backpropagation through {NUM_LAYERS} tied layers {first[2]}; largest relative "
        f"difference over all cells, inputs and parameters {_small(errors['dense'])} from the matrix, "
        f"{_small(errors[f'{NUM_LAYERS} layers'])} from the layers",
        scale="float64; tanh cell of width 10, transformer cell of width 8 and 6 positions",
        holds=max(errors.values()) <= SAME,
        numbers={
            **numbers,
            "largest": errors,
            "bar": SAME,
            "table": {
                "columns": ["gradient of", "deqkit", "-dl/dz* J_g^-1 df/d(.)", f"{NUM_LAYERS} tied layers"],
                "rows": rows,
            },
        },
        remark="Untrained cells, on which plain iteration converges, or the unrolled network would be no reference. "
        f"The table has the largest entries of each. {EXAMPLE}",
    )


def _small(difference: float) -> str:
    return "0" if difference == 0 else f"{difference:.0e}"


def _worst(numbers: dict[str, Any], other: str) -> float:
    return max(value for cell in numbers.values() for value in cell[other].values())


def theorem_2(workshop: Workshop) -> Outcome:
    """Two equilibria one after the other, and one that holds both."""
    numbers: dict[str, Any] = {}
    rows = []
    with torch.random.fork_rng():
        torch.manual_seed(2)
        seconds = {"tanh cell": TanhCell(7, 10).double(), "transformer cell": TanhCell(5, 8).double()}
    for name, (first, x) in problems().items():
        workshop.tell(f"theorem 2: {name}")
        settings = {"tol": TIGHT, "max_steps": 600, "adjoint": Implicit(solver=GMRES(), tol=TIGHT, max_steps=600)}
        x = x.requires_grad_()
        apart = DEQ(seconds[name], **settings)(DEQ(first, **settings)(x))
        _, together = DEQ(stack(first, seconds[name]), **settings)(x)
        inputs = [x, *touched(first, apart), *seconds[name].parameters()]
        grads = [torch.autograd.grad(z, inputs, direction(z)) for z in (together, apart)]
        for part, sides in (("state", [[apart], [together]]), ("gradient of x", [grads[1], grads[0]])):
            rows.append([f"{name}, then a tanh cell: {part}", *side_by_side(*sides)])
        numbers[f"{name}, then a tanh cell"] = {
            "state": relative_difference([together], [apart]),
            "gradients": relative_difference(*grads),
        }
    state, gradients = (max(n[part] for n in numbers.values()) for part in ("state", "gradients"))
    return Outcome(
        measured=f"{rows[0][0]} one after the other {rows[0][1]}, of one cell {rows[0][2]}; largest relative "
        f"difference {_small(state)} between the states, {_small(gradients)} between the gradients",
        scale="float64; a tanh or transformer cell, and a tanh cell of another width on its equilibrium",
        holds=max(state, gradients) <= SAME,
        numbers={
            **numbers,
            "bar": SAME,
            "table": {"columns": ["", "one after the other", "one equilibrium of one cell"], "rows": rows},
        },
        remark=f"The table has the largest entries of each. {EXAMPLE}",
    )


@torch.no_grad()
def theorem_3(workshop: Workshop) -> Outcome:
    """A network of different layers, as one tied cell applied as often as it has layers."""
    sizes, activations = (5, 11, 7, 9, 3), (torch.relu, torch.tanh, torch.sigmoid, torch.tanh)
    with torch.random.fork_rng():
        torch.manual_seed(3)
        layers = [nn.Linear(a, b, dtype=torch.float64) for a, b in itertools.pairwise(sizes)]
        x = torch.randn(4, sizes[0], dtype=torch.float64)
    hidden = _hidden_states(layers, activations, x)

    w_z, w_x, bias = block_matrices(layers)
    state = x.new_zeros(x.shape[0], bias.numel())
    for _ in layers:
        blocks = (state @ w_z.mT + x @ w_x.mT + bias).split(list(sizes[1:]), dim=1)
        state = torch.cat([act(block) for act, block in zip(activations, blocks, strict=True)], dim=1)

    cell = tie([_Layer(layer, act) for layer, act in zip(layers, activations, strict=True)])
    tied = cell.initial_state(x)
    for _ in layers:
        tied = cell(tied, x)
    outputs = side_by_side([hidden[-1]], [state[:, -sizes[-1] :]], [tied[-1]])
    rows = [list(row) for row in zip(("the network", "block matrices", "`tie`"), outputs, strict=True)]
    by_matrices = float((state - torch.cat(hidden, 1)).abs().max())
    by_cell = float((torch.cat(tied, 1) - torch.cat(hidden, 1)).abs().max())
    moved = float((torch.cat(cell(tied, x), 1) - torch.cat(tied, 1)).abs().max())
    return Outcome(
        measured=f"output of the network {rows[0][1]}, of one tied cell applied {len(layers)} times {rows[1][1]} "
        f"(block matrices) and {rows[2][1]} (`tie`); largest difference of a hidden unit {_small(by_matrices)} and "
        f"{_small(by_cell)}; applied once more the state moves by {_small(moved)}",
        scale=f"float64; {len(layers)} layers of widths {', '.join(map(str, sizes[1:]))}, three activations",
        holds=max(by_matrices, by_cell, moved) <= SAME,
        numbers={
            "block matrices": by_matrices,
            "tie": by_cell,
            "moved by one more": moved,
            "width of the state": int(bias.numel()),
            "hidden units of the network": sum(sizes[1:]),
            "bar": SAME,
            "table": {"columns": ["", "largest outputs"], "rows": rows},
        },
        remark=EXAMPLE,
    )


def _hidden_states(
    layers: Sequence[nn.Module], activations: Sequence[Callable[[Tensor], Tensor]], x: Tensor
) -> list[Tensor]:
    hidden = []
    for layer, activation in zip(layers, activations, strict=True):
        x = activation(layer(x))
        hidden.append(x)
    return hidden


class _Layer(nn.Module):
    def __init__(self, linear: nn.Linear, activation: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.activation = linear, activation

    def forward(self, x: Tensor) -> Tensor:
        return self.activation(self.linear(x))


def any_solver(workshop: Workshop) -> Outcome:
    """Every solver of the library, forward and backward, against the dense solution."""
    cell, x = problems()["transformer cell"]
    states, evals = {}, {}
    with torch.no_grad():
        for name, solver in SOLVERS.items():
            solution = fixed_point(cell, cell.initial_state(x), (x,), solver=solver, tol=TIGHT, max_steps=600)  # pyright: ignore[reportCallIssue]
            states[name], evals[name] = solution.z, float(solution.num_evals.double().mean())
    reference = next(iter(states.values()))
    apart = {name: relative_difference([z], [reference]) for name, z in states.items()}
    exact = dense_gradients(cell, x, reference)
    grads = {}
    for name, solver in SOLVERS.items():
        grads[f"forward {name}"] = relative_difference(implicit_gradients(cell, x, solver=solver)[1], exact)
    for name, solver in ADJOINT_SOLVERS.items():
        grads[f"backward {name}"] = relative_difference(implicit_gradients(cell, x, adjoint_solver=solver)[1], exact)
    radius = float(spectral_radius(cell, reference, (x,), generator=torch.Generator().manual_seed(0)).max())
    return Outcome(
        measured=f"{len(SOLVERS)} solvers: states differ by {max(apart.values()):.0e} at most, gradients (with "
        f"{len(ADJOINT_SOLVERS)} backward solvers) by {max(grads.values()):.0e}; they take "
        f"{min(evals.values()):.0f} to {max(evals.values()):.0f} evaluations",
        scale=f"float64; transformer cell of width 8, 6 positions, largest |eigenvalue| of J {radius:.2f}",
        holds=max(*apart.values(), *grads.values()) <= SAME,
        numbers={"states": apart, "gradients": grads, "evaluations": evals, "spectral radius": radius, "bar": SAME},
        remark="Where f has several equilibria, or plain iteration diverges, solvers may end at different points or "
        "none; on a trained cell see auxiliary-losses.",
    )


def figure_1a(workshop: Workshop) -> Outcome:
    """Paths to an equilibrium in two dimensions, one that attracts plain iteration and one that repels it."""
    panels, numbers = [], {}
    for title, gain in (("attracting", 0.95), ("repelling", 1.5)):
        found, series = {}, []
        for name in ("plain iteration", "Broyden", "Newton-Krylov"):
            cell = Spiral(gain)
            start = torch.tensor([[-0.4, 0.9]], dtype=torch.float64)
            tol = Tolerance(rtol=1e-8)
            solution = fixed_point(cell, start, solver=SOLVERS[name], tol=tol, max_steps=300, throw=False)
            xs, ys = zip(*cell.visited[:40], strict=True)
            series.append({"label": name, "x": list(xs), "y": list(ys)})
            found[name] = {
                "end": solution.z[0].tolist(),
                "evaluations": int(solution.num_evals),
                "residual": float(solution.residual),
                "converged": solution.status is Status.CONVERGED,
            }
        radius = float(spectral_radius(Spiral(gain), solution.z, generator=torch.Generator().manual_seed(0)))
        numbers[title] = {"gain": gain, "spectral radius": radius, **found}
        labels = {"x": "first coordinate", "y": "second coordinate", "log_x": False, "log_y": False}
        panels.append({"title": f"largest |eigenvalue| {radius:.2f}", **labels, "series": series})
    near, far = numbers["attracting"], numbers["repelling"]
    quicker = all(near[name]["evaluations"] < near["plain iteration"]["evaluations"] for name in NEWTON_LIKE)
    only = all(far[name]["converged"] for name in NEWTON_LIKE) and not far["plain iteration"]["converged"]
    same = math.dist(near["plain iteration"]["end"], near["Broyden"]["end"]) < 1e-6
    return Outcome(
        measured=f"evaluations to 1e-8 where the equilibrium attracts (|eigenvalue| {near['spectral radius']:.2f}): "
        + ", ".join(f"{name} {near[name]['evaluations']}" for name in ("plain iteration", *NEWTON_LIKE))
        + f"; where it repels ({far['spectral radius']:.2f}) plain iteration ends at "
        f"{far['plain iteration']['residual']:.1g}, Broyden and Newton-Krylov converge",
        scale="float64; A tanh(z) + b in two dimensions",
        holds=quicker and only and same,
        numbers={**numbers, "figures": panels},
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        row="theorem-1",
        where="theorem 1, appendix A",
        claim="the gradient through an equilibrium is -dl/dz* J_g^-1 df/d(.), for parameters and inputs alike",
        paper="proof",
        quick=theorem_1,
    ),
    Claim(
        row="theorem-2",
        where="theorem 2, appendix B",
        claim="an equilibrium on top of an equilibrium is one equilibrium of one cell",
        paper="proof",
        quick=theorem_2,
    ),
    Claim(
        row="theorem-3",
        where="theorem 3, appendix C",
        claim="any network is a weight-tied, input-injected one of the same depth, as wide as all its layers together",
        paper="proof",
        quick=theorem_3,
    ),
    Claim(
        row="any-solver",
        where="section 3.1",
        claim="output and gradient do not depend on the root-finder that was used",
        paper="-",
        quick=any_solver,
    ),
    Claim(
        row="figure-1a",
        where="figure 1, left",
        claim="(quasi-)Newton steps go to an equilibrium that stacking the layer only circles around",
        paper="a sketch",
        quick=figure_1a,
    ),
)
