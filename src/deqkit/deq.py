"""The equilibrium of a cell as an `nn.Module`."""

from __future__ import annotations

import collections
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn

from deqkit._compile import Compile, allow_products, check_compile, compiled, never_compiled
from deqkit.adjoint import AbstractAdjoint, Implicit
from deqkit.adjoint._graph import WithParameters, refuse_tangents, refuse_transforms
from deqkit.solve import AbstractSolver, Broyden, Fallback, Solution, Status, Tolerance, fixed_point
from deqkit.solve._fixed_point import check_settings, join
from deqkit.solve._hoist import can_hoist
from deqkit.solve._packing import tensors_in
from deqkit.solve._solution import raise_if_failed
from deqkit.solve._solver import check_count


class DEQ(nn.Module):
    """`deq(x)` is the fixed point z* = cell(z*, x), differentiable in the cell's parameters and in x.

    The cell may be any callable `cell(z, *args) -> z` that is one fixed function while a solve runs. Two methods of
    the cell are used if it has them:

    - `initial_state(*args)`: the start z0 (otherwise zeros like the first argument).
    - `bind(*args) -> (f, args)`: called once per solve, with gradients, to do what does not depend on z: draw dropout
      masks, normalise weights, project inputs. The solve then evaluates `f(z, *args)`; tensors in the new args are
      batch first, tensors shared by all samples are closed over.

    A cell may also state `independent_samples = True`: no sample's f depends on another sample. A solve without
    gradients then spares the evaluation of the whole batch at its end, which sees to it once samples have left.

    Samples that do not converge (MAX_STEPS, STALLED) do not raise; they are counted in `verdicts` and
    `backward_verdicts`. A sample that becomes inf or nan raises `NonFiniteError`, forward or backward.
    """

    def __init__(
        self,
        cell: Any,
        *,
        solver: AbstractSolver | Fallback | None = None,
        tol: Tolerance | None = None,
        max_steps: int | None = None,
        adjoint: AbstractAdjoint | None = None,
        compact: bool = True,
        hoist: bool = True,
        check_every: int = 1,
        compile: Compile = False,
    ) -> None:
        """
        Args:
            cell: the function whose fixed point is wanted; an `nn.Module`, or any callable.
            solver: forward solver; `Broyden()` if left out. Not for adjoints that iterate by themselves.
            tol: forward tolerance; `Tolerance()` if left out.
            max_steps: upper bound on the evaluations of the cell in one forward solve; 40 if left out.
            adjoint: how gradients are computed; `Implicit()` if left out.
            compact: let samples leave the batch when they are done, in both solves; with `compile` they stay, because
                every size of the batch would have to be compiled. False for an f that closes over its batch.
            hoist: compute what the cell makes of anything but z (projections of its arguments, normalised weights)
                once per solve, as `fixed_point` does. Not for a cell with `bind`, which sees to that itself, nor for
                adjoints that iterate by themselves.
            check_every: look at the verdicts every so many evaluations.
            compile: evaluate what `torch.compile` makes of the cell; or a dict of its arguments. The first solves
                then take a minute, and there are no second derivatives. It sets two switches of torch for the
                process: a graph may be used again, and functions may be compiled for more than eight cases.
        """
        super().__init__()
        check_settings(solver, tol, max_steps)
        _check_adjoint(adjoint)
        check_count("check_every", check_every)
        check_compile(compile)
        self.cell = cell
        self.adjoint = Implicit() if adjoint is None else adjoint
        if self.adjoint.owns_forward and solver is not None:
            raise ValueError(f"{self.adjoint!r} runs its own iteration: leave out solver={solver!r}")
        self.adjoint.check_solver(solver or Broyden())
        self.solver = solver
        self.tol = Tolerance() if tol is None else tol
        self.max_steps = 40 if max_steps is None else max_steps
        self.compact = compact and compile is False
        self.hoist = hoist
        self.check_every = check_every
        self._how_to_compile = compile  # `compile` is a method of modules
        self.verdicts: collections.Counter[Status] = collections.Counter()
        self.backward_verdicts: collections.Counter[Status] = collections.Counter()

    @never_compiled  # the loop depends on data; compile the cell instead
    def forward(  # pyright: ignore[reportIncompatibleMethodOverride]
        self,
        *args: Any,
        z0: Any = None,
        solver: AbstractSolver | Fallback | None = None,
        tol: Tolerance | None = None,
        max_steps: int | None = None,
        adjoint: AbstractAdjoint | None = None,
        return_solution: bool = False,
        trace: bool = False,
    ) -> Any:
        """The equilibrium for `args` (batch first); any setting can be overridden for this call.

        Returns:
            z*, or (z*, solution) with `return_solution=True`. Gradients are attached whenever grad mode is on.
        """
        refuse_transforms("DEQ")
        refuse_tangents("DEQ", (*tensors_in(args), *self.parameters()))
        check_settings(solver, tol, max_steps)
        _check_adjoint(adjoint)
        adjoint = self.adjoint if adjoint is None else adjoint
        adjoint = adjoint if self.compact else adjoint.without_compaction()
        tol = self.tol if tol is None else tol
        max_steps = self.max_steps if max_steps is None else max_steps
        is_guess = z0 is None and not hasattr(self.cell, "initial_state")
        if z0 is None:
            z0 = self._initial_state(args)
        is_bound = hasattr(self.cell, "bind")
        f, args = _checked(self.cell.bind(*args)) if is_bound else (self.cell, args)
        f = self._compiled(f)
        hoist = self.hoist and not is_bound and can_hoist(f)
        if isinstance(self.cell, nn.Module) and torch.is_grad_enabled():
            f = WithParameters(f, self.cell)
        if adjoint.owns_forward:
            if solver is not None:
                raise ValueError(f"{adjoint!r} runs its own iteration: leave out solver={solver!r}")
            if trace:
                raise ValueError(f"{adjoint!r} runs its own iteration and records no trace")
            with _explaining_start(z0 if is_guess else None):
                z, solution = adjoint.solve(f, z0, args, tol=tol, max_steps=max_steps, compact=self.compact)
        else:
            solver = solver or self.solver or Broyden()
            if torch.is_grad_enabled():
                adjoint.check_solver(solver)
            solve = functools.partial(
                fixed_point,
                f,
                args=args,
                solver=solver,
                throw=False,
                compact=self.compact,
                # The adjoints evaluate f for all samples anyway, and look then.
                check_samples=not (torch.is_grad_enabled() or getattr(self.cell, "independent_samples", False)),
                hoist=hoist,
                check_every=self.check_every,
                trace=trace,
                keep_solver_state=adjoint.needs_solver_state and torch.is_grad_enabled(),
            )
            with _explaining_start(z0 if is_guess else None):
                solution = solve(z0, tol=tol, max_steps=max_steps)
            while torch.is_grad_enabled() and (tol := adjoint.tighter(f, solution, args, tol, max_steps)) is not None:
                left = max_steps - int(solution.num_evals.max())
                solution = join(solution, solve(solution.z, tol=tol, max_steps=left))
            z = solution.z
        self.verdicts.update(solution.sample_status)
        raise_if_failed(solution, where=f"forward solve of {self._name()}", above=Status.STALLED)
        if not adjoint.owns_forward:
            z = adjoint.attach(f, z, args, solution=solution, on_backward=self._count_backward)
        return (z, solution) if return_solution else z

    def _compiled(self, f: Any) -> Any:
        """As `compile` says, or as torch.compile(cell) was told."""
        as_told = getattr(self.cell, "dynamo_ctx", None)
        if as_told is None:
            return compiled(f, self._how_to_compile)
        allow_products()
        return f if f is self.cell else as_told(f)

    def _initial_state(self, args: tuple[Any, ...]) -> Any:
        if hasattr(self.cell, "initial_state"):
            if not callable(self.cell.initial_state):
                raise ValueError(
                    "initial_state of a cell is a method that makes z0 of its args, got "
                    f"{type(self.cell.initial_state).__name__}; give a tensor another name, and expand it in the method"
                )
            return self.cell.initial_state(*args)
        if args and isinstance(args[0], Tensor) and (args[0].is_floating_point() or args[0].is_complex()):
            return torch.zeros_like(args[0])
        raise ValueError(
            "the start of the solve is unknown: pass z0, give the cell a method initial_state(*args), or make its "
            "first argument a floating-point tensor of the state's shape"
        )

    def _count_backward(self, solution: Solution) -> None:
        self.backward_verdicts.update(solution.sample_status)

    def _name(self) -> str:
        return f"DEQ({type(self.cell).__name__})"

    def extra_repr(self) -> str:
        parts = [] if self.adjoint.owns_forward else [f"solver={self.solver or Broyden()}"]
        parts += [f"tol={self.tol}", f"max_steps={self.max_steps}", f"adjoint={self.adjoint}"]
        if not self.compact:
            parts.append("compact=False")
        if not self.hoist:
            parts.append("hoist=False")
        if self._how_to_compile is not False:
            parts.append(f"compile={self._how_to_compile}")
        return ", ".join(parts)


def _check_adjoint(adjoint: Any) -> None:
    if adjoint is not None and not isinstance(adjoint, AbstractAdjoint):
        raise ValueError(f"adjoint must be one of deqkit.adjoint, for example Implicit(), got {adjoint!r}")


def _checked(bound: Any) -> tuple[Any, tuple[Any, ...]]:
    """What a cell's `bind` returned."""
    if not (isinstance(bound, tuple) and len(bound) == 2 and callable(bound[0]) and isinstance(bound[1], tuple)):
        raise ValueError(
            "bind of a cell returns (f, args), a function f(z, *args) and the tuple of its further arguments, "
            f"got {type(bound).__name__}"
        )
    return bound


@contextlib.contextmanager
def _explaining_start(guess: Tensor | None) -> Iterator[None]:
    """An error about sizes may come from a start whose shape nobody chose."""
    try:
        yield
    except RuntimeError as error:
        if guess is not None and ("size" in str(error) or "shape" in str(error)):
            error.add_note(
                f"The solve began with zeros in the shape of the first argument, {tuple(guess.shape)}. If the state "
                "has another, pass z0, or give the cell a method initial_state(*args)"
            )
        raise
