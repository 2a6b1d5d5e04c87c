"""The rows of the benchmark: every library, solver and gradient that is compared."""

from __future__ import annotations

import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from deqkit.adjoint import Implicit
from deqkit.analysis.solver_bench.measure import State, initial_state
from deqkit.deq import DEQ
from deqkit.solve import GMRES, Anderson, Broyden, FixedPointIteration, Tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What every method is given alike."""

    tol: float
    """Relative tolerance of the forward and of the backward solve."""
    max_steps: int
    """Limit of the forward and of the backward solve."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Equilibrium:
    """What a library returns: the state with its graph, and its own estimate of the gradient's error."""

    z: State
    grad_error: Callable[[], float | None] = lambda: None
    """To be called after the backward pass; None when the library has no such estimate."""
    status: str | None = None
    """The library's own verdict on the forward solve; None when it gives none."""
    solver_overhead: float | None = None
    """Time of the forward solve outside f, as a share of that inside, by the library's own clock."""


class Solve(Protocol):
    """A library set up for one cell: finds the equilibrium for an input."""

    def __call__(self, x: Tensor) -> Equilibrium: ...


@dataclass(frozen=True, kw_only=True, slots=True)
class Method:
    """One way to find an equilibrium and its gradient."""

    library: str
    name: str
    build: Callable[[nn.Module, Settings], Solve]
    causal: bool = False
    """Only for states with positions, on axis 1, before their features."""

    @property
    def label(self) -> str:
        return f"{self.library}/{self.name}"


DEFAULT = "deqkit/default"
"""The label of the row the bars are about: a user who chooses nothing but the tolerance gets this one."""
NO_COMPACTION = "deqkit/default, compact=False"


def all_methods() -> list[Method]:
    """Every row, without torchdeq's if torchdeq is not installed."""
    return (_torchdeq_methods() if torchdeq_installed() else []) + _deqkit_methods()


def torchdeq_installed() -> bool:
    return importlib.util.find_spec("torchdeq") is not None


def _torchdeq_methods() -> list[Method]:
    solvers = ("fixed_point_iter", "anderson", "broyden")
    methods = [Method(library="torchdeq", name=name, build=_torchdeq(name)) for name in solvers]
    # Its plain iteration is its best row; with hook_ift it saves one evaluation and half the memory.
    hooked = _torchdeq("fixed_point_iter", hook_ift=True)
    return [*methods, Method(library="torchdeq", name="fixed_point_iter hook", build=hooked)]


def _torchdeq(solver: str, *, hook_ift: bool = False) -> Callable[[nn.Module, Settings], Solve]:
    def build(cell: nn.Module, settings: Settings) -> Solve:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # its docstrings have invalid escapes, of which Python warns once
            from torchdeq import get_deq  # optional: the extra [bench]

        deq = get_deq(
            f_solver=solver,
            b_solver=solver,
            f_max_iter=settings.max_steps,
            b_max_iter=settings.max_steps,
            f_tol=settings.tol,
            b_tol=settings.tol,
            f_stop_mode="rel",
            b_stop_mode="rel",
            ift=not hook_ift,
            hook_ift=hook_ift,
        )

        def solve(x: Tensor) -> Equilibrium:
            leaves, spec = tree_flatten(initial_state(cell, x))
            if len(leaves) == 1:
                states, _ = deq(lambda z: tree_leaves(cell(tree_unflatten([z], spec), x))[0], leaves[0])
                return Equilibrium(z=tree_unflatten([states[-1]], spec))
            states, _ = deq(lambda *z: tree_leaves(cell(tree_unflatten(z, spec), x)), leaves)
            return Equilibrium(z=tree_unflatten(states[-1], spec))

        return solve

    return build


def _deqkit_methods() -> list[Method]:
    pairs: dict[str, tuple[Any, Any]] = {
        "broyden + gmres": (Broyden(), GMRES()),
        "anderson prefix": (Anderson(memory=3, group="prefix"), Anderson()),  # the small language models'
        "broyden prefix": (Broyden(memory=5, group="prefix"), Anderson()),
        "anderson": (Anderson(), Anderson()),
        "broyden": (Broyden(), Broyden()),
        "plain": (FixedPointIteration(), FixedPointIteration()),
    }
    return [
        Method(library="deqkit", name="default", build=_deqkit()),
        Method(library="deqkit", name="default, compact=False", build=_deqkit(compact=False)),
        Method(library="deqkit", name="default, hoist=False", build=_deqkit(hoist=False)),
        # The error of the gradient comes mostly from the forward solve: the same effort, better spent.
        Method(library="deqkit", name="0.4 tol fwd, 3 tol bwd", build=_deqkit(forward_factor=0.4, backward_factor=3.0)),
        Method(
            library="deqkit",
            name="anderson, 0.4 tol fwd, 3 tol bwd",
            build=_deqkit(solver=Anderson(), forward_factor=0.4, backward_factor=3.0),
        ),
        Method(
            library="deqkit",
            name="gmres, 0.6 tol fwd, 6 tol bwd",
            build=_deqkit(adjoint_solver=GMRES(), forward_factor=0.6, backward_factor=6.0),
        ),
        # torchdeq returns f of the point whose residual it has measured: as exact as its plain iteration.
        Method(
            library="deqkit",
            name="plain, 0.4 tol",
            build=_deqkit(
                solver=FixedPointIteration(),
                adjoint_solver=FixedPointIteration(),
                forward_factor=0.4,
                backward_factor=0.4,
            ),
        ),
        *(
            Method(
                library="deqkit",
                name=name,
                build=_deqkit(solver=forward, adjoint_solver=backward),
                causal=forward.group == "prefix",
            )
            for name, (forward, backward) in pairs.items()
        ),
    ]


def _deqkit(
    *,
    solver: Any = None,
    adjoint_solver: Any = None,
    compact: bool = True,
    hoist: bool = True,
    forward_factor: float = 1.0,
    backward_factor: float = 1.0,
) -> Callable[[nn.Module, Settings], Solve]:
    """A row of ours; a solver that is not given is left to the library's default."""
    adjoint_options = {} if adjoint_solver is None else {"solver": adjoint_solver}

    def build(cell: nn.Module, settings: Settings) -> Solve:
        tol = Tolerance(rtol=forward_factor * settings.tol)
        backward_tol = Tolerance(rtol=backward_factor * settings.tol)
        adjoint = Implicit(tol=backward_tol, max_steps=settings.max_steps, compact=compact, **adjoint_options)
        settled: dict[str, Any] = {"max_steps": settings.max_steps, "compact": compact, "hoist": hoist}
        deq = DEQ(cell, solver=solver, tol=tol, adjoint=adjoint, **settled)

        def solve(x: Tensor) -> Equilibrium:
            z, solution = deq(x, return_solution=True)
            return Equilibrium(
                z=z,
                grad_error=lambda: solution.grad_error,
                status=solution.status.name,
                solver_overhead=solution.seconds_outside_f / solution.seconds_in_f,
            )

        return solve

    return build
