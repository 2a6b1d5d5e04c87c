"""`fixed_point`: the public way into the loop."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deqkit.solve._batch import ratio
from deqkit.solve._calls import random_state
from deqkit.solve._hoist import Hoist, can_hoist
from deqkit.solve._loop import Loop, LoopOptions, Problem, Unfinished
from deqkit.solve._packing import Packing, check_batch_first, select, tensors_in
from deqkit.solve._solution import Solution, Status, raise_if_failed
from deqkit.solve._solver import AbstractSolver, Evaluation, check_count
from deqkit.solve._tolerance import Tolerance
from deqkit.solve.broyden import Broyden
from deqkit.solve.fallback import Fallback

# B samples still in the batch, P groups of positions, N numbers in a group


def fixed_point(
    f: Callable[..., Any],
    z0: Any,
    args: tuple[Any, ...] = (),
    *,
    solver: AbstractSolver | Fallback | None = None,
    tol: Tolerance | None = None,
    max_steps: int = 40,
    throw: bool = True,
    compact: bool = True,
    check_samples: bool = True,
    hoist: bool = True,
    check_every: int = 1,
    trace: bool = False,
    keep_solver_state: bool = False,
) -> Solution:
    """Find z with `z = f(z, *args)`, every sample on its own.

    No gradient is recorded: `deqkit.DEQ`, or the `attach` of an adjoint, makes the result differentiable.

    Args:
        f: one fixed function of the state; it must keep the state's structure, shapes, dtype and device.
        z0: the start, a tensor or a tuple or dict of tensors, batch first.
        args: further arguments of f whose tensors are batch first. Tensors that all samples share are closed over.
        solver: how the next point is proposed; `Broyden()` if left out.
        tol: when a sample counts as solved; `Tolerance()` if left out.
        max_steps: upper bound on the evaluations of f. A causal solver (`group="prefix"`) that runs out may take one
            more, to measure what it returns: every position's own best point.
        throw: raise unless every sample converged. With False, read `solution.status`.
        compact: let samples leave the batch when they are done. It needs `args` to know what belongs to a sample: an
            f that closes over its batch is solved without. Results are the same up to rounding.
        check_samples: evaluate f once more for all samples if some have left, or have failed and so are returned as
            they were at different evaluations. An f that gives samples another result alone than beside the others is
            refused; one whose samples depend on each other and none of which has left gets its residuals from there.
        hoist: compute what f makes of anything but z (projections of its arguments, normalised weights, masks) in the
            first evaluations and not again, which needs the memory for it. Results are the same. Not in inference
            mode, nor for an f that is compiled.
        check_every: look at the verdicts every so many evaluations (each look waits for the device). Samples that are
            done stay as they are in between, so results do not depend on it (`num_evals` of causal solves that stall
            may, by one).
        trace: record the residual of every evaluation.
        keep_solver_state: hand back the solver's memory in `solution.solver_state`.

    Raises:
        NotConvergedError: if `throw` and some sample did not converge; `NonFiniteError` if one became inf or nan.
        ValueError: if f does not keep the state's shape, dtype or device, or is not one fixed function.
    """
    check_settings(solver, tol)
    check_count("max_steps", max_steps)
    check_count("check_every", check_every)
    if not isinstance(args, tuple):
        raise ValueError(f"args must be a tuple of the further arguments of f, got {type(args).__name__}")
    solver = Broyden() if solver is None else solver
    packing = Packing.of(z0, causal=solver.group == "prefix")
    check_batch_first(args, packing.batch_size)
    options = LoopOptions(
        tol=Tolerance() if tol is None else tol,
        max_steps=max_steps,
        compact=compact,
        check_every=check_every,
        trace=trace,
        keep_solver_state=keep_solver_state,
    )
    with torch.no_grad():
        start_BPN = packing.pack(z0).clone()  # the result must not share memory with the caller's z0
        hoist = hoist and can_hoist(f)
        solution = iterate(lambda: FunctionProblem(f, packing, args, hoist=hoist), start_BPN, solver, options, packing)
        if check_samples and (solution.independent or _may_be_apart(solution, solver)):
            began = time.perf_counter()
            whole = FunctionProblem(f, packing, args)
            check_together(lambda: whole.evaluate(solution.z), solution.z, solution, whole.rounding)
            solution.seconds_in_f += time.perf_counter() - began
    solution.z = packing.unpack(solution.z)
    if throw:
        raise_if_failed(solution, where="fixed_point")
    return solution


def check_settings(solver: Any = None, tol: Any = None, max_steps: Any = None) -> None:
    """Raise a ValueError for a setting of the wrong kind; None stands for a default."""
    if solver is not None and not isinstance(solver, AbstractSolver | Fallback):
        raise ValueError(f"solver must be one of deqkit.solve, for example Broyden(), got {solver!r}")
    if tol is not None and not isinstance(tol, Tolerance):
        raise ValueError(f"tol must be a Tolerance, for example Tolerance(rtol=1e-3), got {tol!r}")
    if max_steps is not None:
        check_count("max_steps", max_steps)


class FunctionProblem:
    """f(z, *args) as the caller wrote it."""

    def __init__(
        self,
        f: Callable[..., Any],
        packing: Packing,
        args: tuple[Any, ...],
        *,
        hoist: bool = False,
        computes_in: torch.dtype | None = None,
    ) -> None:
        """`computes_in` is the dtype whose rounding f has, if that is not the state's."""
        self._f, self._packing, self._args = f, packing, args
        self._hoist = Hoist() if hoist else None
        self._computes_in = packing.dtype if computes_in is None else computes_in
        self._num_checks = 3  # dropout of zeros is zero: an f that draws random numbers is looked at again
        self._returned: Tensor | None = None  # by the evaluation before
        self._was_cut = False  # since the last evaluation
        self._is_whole = True
        self.can_compact = bool(tensors_in(args))

    def evaluate(self, z_BPN: Tensor) -> Tensor:
        if self._num_checks:
            self._num_checks -= 1
            return self._evaluate_and_check(z_BPN)
        if self._was_cut:
            self._was_cut = False
            return self._evaluate_after_cut(z_BPN)
        return self._packing.pack(self._apply(self._packing.unpack(z_BPN)))

    def _apply(self, state: Any) -> Any:
        if self._hoist is None:
            return self._f(state, *self._args)
        return self._hoist.evaluate(self._f, state, self._args)

    def _evaluate_after_cut(self, z_BPN: Tensor) -> Tensor:
        """The first time without samples that have left: an f that closes over its batch is found out here."""
        try:
            output = self._apply(self._packing.unpack(z_BPN))
        except (RuntimeError, IndexError) as error:
            error.add_note(f"This was the first evaluation of f after samples had left the batch. {CLOSES_OVER}")
            raise
        num_samples = z_BPN.shape[0]
        if any(t.shape[:1] != (num_samples,) for t in tensors_in(output)):
            raise ValueError(f"f was given {num_samples} samples and returned another number. {CLOSES_OVER}")
        return self._packing.pack(output)

    def _evaluate_and_check(self, z_BPN: Tensor) -> Tensor:
        """Check what f returns, what it leaves of its arguments, and whether it draws random numbers that matter."""
        state = self._packing.unpack(z_BPN)
        before = random_state(self._packing.device)
        kept = [] if self._returned is None else [self._returned]
        seen = [_Version(t) for t in (z_BPN, *kept, *tensors_in(self._args))]
        output = self._apply(state)
        if any(version.has_changed() for version in seen):
            raise ValueError(IN_PLACE)
        self._packing.check_output(output, z_BPN.shape[0], autocast=self._autocast_dtype() is not None)
        fz_BPN = self._packing.pack(output)
        if torch.equal(before, random_state(self._packing.device)):
            # Once more, to see whether f writes into what it returned.
            self._num_checks, self._returned = (1, fz_BPN) if self._returned is None else (0, None)
            return fz_BPN
        self._hoist = None  # it draws random numbers
        again_BPN = self._packing.pack(self._apply(state))
        if not torch.equal(fz_BPN.nan_to_num(), again_BPN.nan_to_num()):
            raise ValueError(NOT_FIXED)
        return fz_BPN

    def worth_compacting(self, num_left: int, num_now: int) -> bool:
        # Dropping samples copies the solver's memory of the others, so large batches wait for an eighth to be done.
        return num_now - num_left >= max(1, num_now // 8)

    def keep(self, index: Tensor, at: Evaluation) -> None:
        self._args = select(self._args, index)
        self._was_cut = True
        hoist, self._hoist = self._hoist, None
        if self._is_whole:
            self._is_whole = False
            self._check_independence(select((at.z_BPN, at.fz_BPN), index[:2]))
        if hoist is not None:
            hoist.begin_again()
            self._hoist = hoist

    def _check_independence(self, was: tuple[Tensor, Tensor]) -> None:
        """f must give two of the samples alone what it gave them beside all others, or none may leave."""
        z_BPN, fz_BPN = was
        args, self._args = self._args, select(self._args, torch.arange(z_BPN.shape[0], device=z_BPN.device))
        alone_BPN = self._evaluate_after_cut(z_BPN)
        if _differ(alone_BPN, fz_BPN, self.rounding):
            again_BPN = self._evaluate_after_cut(z_BPN)
            raise ValueError(NOT_FIXED if _differ(again_BPN, alone_BPN, self.rounding / 10) else DEPENDENT)
        self._args = args

    @property
    def rounding(self) -> float:
        """Kernels for batches of other sizes round differently, by far less than this share of the value."""
        return min(0.1, 10 * torch.finfo(self._autocast_dtype() or self._computes_in).eps ** 0.5)

    def _autocast_dtype(self) -> torch.dtype | None:
        device = self._packing.device.type
        on = torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device)
        return torch.get_autocast_dtype(device) if on else None


ONE_SAMPLE = "make what belongs together one sample: DEQ(lambda z, x: f(z[0], x[0])[None])(x[None])[0]"
NOT_FIXED = (
    "f is not one fixed function: at the same point it gave two results. A dropout layer in training mode does this: "
    "draw its mask once per solve, outside f (pass it in args), or call eval() on the layer. So does spectral_norm in "
    "training mode, whose power iteration takes a step at every call: compute the weight once per solve, in the cell's "
    "`bind`. So does an f in which samples depend on each other, such as batch norm in training mode, when some of "
    f"them are solved and the others go on: call eval() on the layer, or {ONE_SAMPLE}"
)
DEPENDENT = (
    "f gives samples another result alone than beside the others: they depend on each other, as through batch norm in "
    "training mode (call eval() on it; if it does not see z, apply it before the solve), attention over the wrong axis "
    f"(batch_first=True), or the edges of a graph. Then {ONE_SAMPLE}"
)
IN_PLACE = (
    "f changes its state, its arguments or what it returned before in place, which are still needed. Let it make a new "
    "tensor: no z.add_(...), no h += ..., no nn.ReLU(inplace=True) as the first thing that z meets, and no buffer of "
    "its own that it returns (out=)"
)
CLOSES_OVER = (
    "If f closes over tensors with an entry for each sample, pass them in args, which are cut as the batch is, or use "
    f"compact=False; if samples depend on each other, as the nodes of a graph do, {ONE_SAMPLE}"
)


def _differ(left_BPN: Tensor, right_BPN: Tensor, rounding: float) -> bool:
    """Whether a sample of the two differs by more than this share of its size; nan does not."""
    off_B = torch.linalg.vector_norm(left_BPN - right_BPN, dim=(1, 2))
    return bool((off_B > rounding * torch.linalg.vector_norm(right_BPN, dim=(1, 2))).any())


def _may_be_apart(solution: Solution, solver: AbstractSolver | Fallback) -> bool:
    """Whether the samples may never have been evaluated as they are returned, beside each other.

    Those that are solved stay as they are until all are; a causal solver measures what it puts together.
    """
    if solution.codes.numel() < 2 or solver.group != "sample":
        return False
    failed_B, steps_B = solution.codes != Status.CONVERGED.severity, solution.num_steps
    return isinstance(solver, Fallback) or bool(failed_B.any() & (steps_B != steps_B[0]).any())


def check_together(
    evaluate: Callable[[], Tensor], z_BPN: Tensor, solution: Solution, rounding: float, fz_BPN: Tensor | None = None
) -> None:
    """Hold f at the solution, all samples side by side, against what the solve saw of each.

    Args:
        evaluate: f at the solution.
        fz_BPN: the same, if it is known already.

    Raises:
        ValueError: f is not one fixed function, or gives samples another result alone than beside the others.
    """
    with torch.no_grad():
        fz_BPN = evaluate() if fz_BPN is None else fz_BPN
        # In float64, as in the solve: squares of small float32 are zero.
        norm_B, scale_B = (
            torch.linalg.vector_norm(x_BPN, dim=(1, 2), dtype=torch.float64) for x_BPN in (fz_BPN - z_BPN, fz_BPN)
        )
        off_B = (norm_B - solution.residual_norm).abs() > rounding * scale_B
        if not bool(off_B.any()):
            return
        # What rounding makes of one function at one point is far less than what it makes of another batch.
        if off_B.numel() == 1 or _differ(evaluate(), fz_BPN, rounding**2):
            raise ValueError(NOT_FIXED)
        if solution.independent:
            raise ValueError(DEPENDENT)
        _measure_again(solution, off_B, norm_B, scale_B)


def _measure_again(solution: Solution, off_B: Tensor, norm_B: Tensor, scale_B: Tensor) -> None:
    """Samples depend on each other, none has left, and each is returned from an evaluation of its own.

    A verdict is withdrawn where the residual is more than twice the one that it was given for.
    """
    solved_B = solution.codes == Status.CONVERGED.severity
    withdrawn_B = off_B & solved_B & (norm_B > 2 * solution.residual_norm)
    worst = solution.codes.amax().clamp(min=Status.MAX_STEPS.severity)
    solution.codes = torch.where(withdrawn_B, worst, solution.codes)
    dtype = solution.residual.dtype
    solution.residual = torch.where(off_B, ratio(norm_B, scale_B).to(dtype), solution.residual)
    solution.residual_norm = torch.where(off_B, norm_B.to(dtype), solution.residual_norm)


class _Version:
    """Whether a tensor is changed in place; inference tensors count no versions."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self._before = tensor.clone() if tensor.is_inference() else tensor._version

    def has_changed(self) -> bool:
        if isinstance(self._before, Tensor):
            return not torch.equal(self._before.nan_to_num(), self._tensor.nan_to_num())
        return self._before != self._tensor._version


def iterate(
    make_problem: Callable[[], Problem],
    z_BPN: Tensor,
    solver: AbstractSolver | Fallback,
    options: LoopOptions,
    packing: Packing,
) -> Solution:
    """Run the loop on a packed state; with a `Fallback`, once for every solver that is needed."""
    if not isinstance(solver, Fallback):
        return Loop(make_problem(), z_BPN, solver, options, packing).run()
    first, *others = solver.solvers
    last = others[-1]
    problem = make_problem()
    # Samples that cannot leave may depend on each other, and what one solver has solved on what the next one moves.
    together = not (options.compact and problem.can_compact)
    impatient = dataclasses.replace(options.tol, patience=min(solver.patience, options.tol.patience))
    total = Loop(problem, z_BPN, first, dataclasses.replace(options, tol=impatient, hand_over=True), packing).run()
    for following in others:
        budget_B = options.max_steps - total.num_evals
        open_B = (total.codes >= Status.STALLED.severity) & (budget_B > 1)
        if not bool(open_B.any()):
            break
        tol = options.tol if following is last else impatient
        max_steps = int(budget_B[open_B].amax())
        again = dataclasses.replace(options, tol=tol, max_steps=max_steps, hand_over=following is not last)
        norm_B = total.residual_norm if together else None
        unfinished = Unfinished(open_B=open_B, budget_B=budget_B, codes_B=total.codes, norm_B=norm_B)
        found = Loop(make_problem(), total.z, following, again, packing, unfinished).run()
        if together:
            open_B = open_B | ~found.residual.isnan()  # and those whose residual the others have changed
        total = join(total, found, open_B, together=together)
    return total


def join(first: Solution, second: Solution, open_B: Tensor | None = None, *, together: bool = False) -> Solution:
    """The account of two solves in a row, the second of which started from the first one's result.

    The second solve took on the samples `open_B` only (all of them if left out). Of each sample the better result
    counts, or that of the second solve if they belong `together`.
    """
    took_B = torch.ones_like(first.codes, dtype=torch.bool) if open_B is None else open_B
    solved_B = second.codes == Status.CONVERGED.severity
    lower_B = (second.residual < first.residual) | first.residual.isnan()
    better_B = took_B if together else took_B & (solved_B | lower_B)
    moved_B = better_B & (second.num_evals > 0)

    def better(a: Any, b: Any) -> Any:
        if isinstance(a, dict):
            return {key: better(a[key], b[key]) for key in a}
        if isinstance(a, tuple):
            return tuple(better(*pair) for pair in zip(a, b, strict=True))
        return torch.where(better_B.view(-1, *[1] * (a.ndim - 1)), b, a)

    trace = None
    if first.trace is not None and second.trace is not None:
        trace = tuple(torch.cat(pair) for pair in zip(first.trace, second.trace, strict=True))
    return Solution(
        z=better(first.z, second.z),
        residual=better(first.residual, second.residual),
        residual_norm=better(first.residual_norm, second.residual_norm),
        codes=torch.where(took_B, second.codes, first.codes),
        num_steps=torch.where(moved_B, first.num_evals + second.num_steps, first.num_steps),
        num_evals=first.num_evals + second.num_evals,
        amplification=torch.where(second.amplification.isnan(), first.amplification, second.amplification),
        seconds_in_f=first.seconds_in_f + second.seconds_in_f,
        seconds_outside_f=first.seconds_outside_f + second.seconds_outside_f,
        trace=trace,
        independent=first.independent or second.independent,
        solver_state=second.solver_state,
    )
