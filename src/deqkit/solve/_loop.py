"""The one loop: it calls f, measures, judges every sample, keeps the best point and drops samples that are done."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Protocol

import torch
from torch import Tensor

from deqkit.solve._packing import Packing, select
from deqkit.solve._solution import Solution, Status
from deqkit.solve._solver import AbstractSolver
from deqkit.solve._tolerance import Tolerance

# B samples still in the batch, P groups of positions (1 unless the solver is causal), N numbers in a group

_ACTIVE = -1  # a group that still moves; afterwards its code is a Status.severity
_CONVERGED, _MAX_STEPS, _STALLED, _NONFINITE = (status.severity for status in Status)
# Whatever the loop asks of its tensors (`bool(x.any())`) is whether something unusual happened, so that an abstract run
# which answers no to everything, as `deqkit.analysis` makes to count memory, is the run of a solve that goes on.
_PROGRESS = 0.999  # a residual has fallen if it is this much smaller than when it last fell


class Problem(Protocol):
    """A batch of fixed-point problems in packed form."""

    can_compact: bool

    def evaluate(self, z_BPN: Tensor) -> Tensor:
        """f at every sample still in the batch."""
        ...

    def worth_compacting(self, num_left: int, num_now: int) -> bool:
        """Whether going on with fewer samples saves more than it costs."""
        ...

    def keep(self, index: Tensor) -> None:
        """Drop all samples but these."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class LoopOptions:
    """What the loop is asked to do; `fixed_point` documents each field."""

    tol: Tolerance
    max_steps: int
    compact: bool = True
    check_every: int = 1
    trace: bool = False
    keep_solver_state: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """Samples that an earlier solver left unsolved, and the evaluations each of them has left."""

    open_B: Tensor
    budget_B: Tensor


@dataclasses.dataclass
class _Batch:
    """What the loop knows about each sample in the batch. Every tensor is batch first."""

    sample_B: Tensor
    """Where the sample stands in the caller's batch."""
    budget_B: Tensor
    first_scale_BP: Tensor
    largest_BP: Tensor
    """||f(z)|| at the start, and the largest residual so far: together they tell a z that has run away."""
    z_BPN: Tensor | None
    best_z_BPN: Tensor
    best_BP: Tensor
    """Smallest residual so far, as a multiple of what the tolerance allows."""
    mark_BP: Tensor
    """The residual when it last fell noticeably, and the evaluations since."""
    waited_BP: Tensor
    codes_BP: Tensor
    norm_B: Tensor
    scale_B: Tensor
    steps_B: Tensor
    evals_B: Tensor
    amplification_B: Tensor
    previous: tuple[Tensor, Tensor] | None = None
    """The last point and f of it: what solvers keep too, so that they share the memory."""
    solver_state: Any = None


class Loop:
    """One pass over a batch with one solver. `run` may be called once."""

    def __init__(
        self,
        problem: Problem,
        z_BPN: Tensor,
        solver: AbstractSolver,
        options: LoopOptions,
        packing: Packing,
        unfinished: Unfinished | None = None,
    ) -> None:
        self._problem, self._solver, self._options, self._packing = problem, solver, options, packing
        self._patience = options.tol.patience + solver.num_probes
        self._causal = solver.group == "prefix"
        self._seconds_in_f = 0.0
        self._left: list[_Batch] = []
        self._states: list[tuple[Tensor, Any]] = []  # samples that are done, and the solver's memory of them then
        self._kept_B: Tensor | None = None  # set when the batch was cut down since the last evaluation
        self._trace: list[tuple[Tensor, Tensor, Tensor]] = []
        self._num_evals = 0
        self._all_active = unfinished is None
        self._least_budget = options.max_steps if unfinished is None else 0
        size, groups, _ = z_BPN.shape
        integers = lambda *shape: torch.zeros(shape, dtype=torch.int64, device=z_BPN.device)  # noqa: E731
        # Norms are kept in float64: squares of small float32 numbers (gradients) underflow.
        reals = lambda *shape, value: torch.full(shape, value, dtype=torch.float64, device=z_BPN.device)  # noqa: E731
        self._now = _Batch(
            sample_B=torch.arange(size, device=z_BPN.device),
            budget_B=integers(size).fill_(options.max_steps),
            first_scale_BP=reals(size, groups, value=0.0),
            largest_BP=reals(size, groups, value=0.0),
            z_BPN=z_BPN,
            best_z_BPN=z_BPN,
            best_BP=reals(size, groups, value=float("inf")),
            mark_BP=reals(size, groups, value=float("inf")),
            waited_BP=integers(size, groups),
            codes_BP=integers(size, groups).fill_(_ACTIVE),
            norm_B=reals(size, value=float("nan")),
            scale_B=reals(size, value=float("nan")),
            steps_B=integers(size),
            evals_B=integers(size),
            amplification_B=reals(size, value=float("nan")),
        )
        if unfinished is not None:
            self._now.budget_B = unfinished.budget_B
            self._now.codes_BP.masked_fill_(~unfinished.open_B.unsqueeze(1), _CONVERGED)
        tokens_per_group = packing.num_tokens / max(groups, 1)
        self._tokens_P = torch.arange(1, groups + 1, device=z_BPN.device).double() * tokens_per_group

    def run(self) -> Solution:
        started = time.perf_counter()
        if self._now.best_z_BPN.numel():
            tol = self._options.tol.resolved(self._packing.num_tokens)
            self._now.solver_state = self._solver.init(self._now.best_z_BPN, tol)
            self._solve()
            if self._causal:
                self._measure_composite()
        return self._collect(started)

    def _solve(self) -> None:
        options = self._options
        for num_evals in range(1, options.max_steps + 1):
            z_BPN = self._now.z_BPN
            assert z_BPN is not None
            fz_BPN = self._evaluate(z_BPN)
            checking = num_evals % options.check_every == 0
            self._judge(z_BPN, fz_BPN, checking=checking)
            # A causal solve returns every position's own best point: the last evaluation is kept to measure that.
            if num_evals >= options.max_steps - int(self._causal):
                return
            if checking and not self._go_on_with_unsolved():
                return
            self._step(z_BPN, fz_BPN)

    def _evaluate(self, z_BPN: Tensor) -> Tensor:
        begin = time.perf_counter()
        fz_BPN = self._problem.evaluate(z_BPN)
        self._seconds_in_f += time.perf_counter() - begin
        return fz_BPN

    def _norms(self, z_BPN: Tensor, fz_BPN: Tensor) -> tuple[Tensor, Tensor]:
        """||f(z) - z|| and ||f(z)|| of every sample, or of every position with those before it."""
        look = self._options.check_every == 1
        norm_BP, scale_BP = _norm(fz_BPN - z_BPN, look=look), _norm(fz_BPN, look=look)
        if self._causal:
            norm_BP = norm_BP.square().cumsum(1).sqrt()
            scale_BP = scale_BP.square().cumsum(1).sqrt()
        return norm_BP, scale_BP

    def _judge(self, z_BPN: Tensor, fz_BPN: Tensor, *, checking: bool) -> None:
        """Decide which positions are done, and keep the best point of each."""
        now, tol = self._now, self._options.tol
        norm_BP, scale_BP = self._norms(z_BPN, fz_BPN)
        bound_BP = tol.bound(scale_BP, self._tokens_P)
        # Without a tolerance the size of the residual itself tells points apart.
        ratio_BP = norm_BP if tol.rtol == tol.atol == 0 else _ratio(norm_BP, bound_BP)
        if self._num_evals == 0:
            now.first_scale_BP = scale_BP
        self._num_evals += 1
        now.largest_BP = torch.fmax(now.largest_BP, norm_BP)
        if checking and self._all_fall(norm_BP, bound_BP, ratio_BP):
            self._note_progress(z_BPN, norm_BP, scale_BP, ratio_BP)
            return

        active_BP = now.codes_BP == _ACTIVE
        dead_BP = active_BP & ~(torch.isfinite(norm_BP) & torch.isfinite(scale_BP))
        # A residual that is small only relative to a z that has run away: f(z) = z + 1 has no fixed point.
        away_BP = (scale_BP > 10 * now.first_scale_BP) & (norm_BP > 0.9 * now.largest_BP) & (norm_BP > tol.atol)
        solved_BP = active_BP & (norm_BP <= bound_BP) & ~away_BP
        improved_BP = active_BP & (ratio_BP < now.best_BP)  # False for nan: a best point is always finite
        fell_BP = active_BP & (ratio_BP < _PROGRESS * now.mark_BP)
        now.mark_BP = torch.where(fell_BP, ratio_BP, now.mark_BP)
        now.waited_BP = torch.where(fell_BP, 0, now.waited_BP + 1)
        stalled_BP = active_BP & (now.waited_BP >= self._patience)

        # A position may rest only when all before it do, or it could not follow them.
        ends_BP = ~active_BP | solved_BP | stalled_BP
        ends_BP = active_BP & ~dead_BP & (ends_BP.cummin(1).values if self._causal else ends_BP)
        now.codes_BP = torch.where(ends_BP, torch.where(solved_BP, _CONVERGED, _STALLED), now.codes_BP)
        now.codes_BP = torch.where(dead_BP, _NONFINITE, now.codes_BP)
        spent_B1 = (now.evals_B + 1 >= now.budget_B).unsqueeze(1)
        now.codes_BP = torch.where((now.codes_BP == _ACTIVE) & spent_B1, _MAX_STEPS, now.codes_BP)

        taken_BP = improved_BP | (ends_BP & solved_BP)
        now.best_BP = torch.where(taken_BP, ratio_BP, now.best_BP)
        now.best_z_BPN = _choose(taken_BP, z_BPN, now.best_z_BPN, look=checking)
        alive_B = active_BP.any(1)
        self._record(norm_BP[:, -1], scale_BP[:, -1], alive_B, taken_BP[:, 0])
        finished_B = alive_B & (now.codes_BP != _ACTIVE).all(1)
        if not checking or bool(finished_B.any()):
            self._look_back(z_BPN, fz_BPN, finished_B)
        self._all_active = False  # or not known

    def _all_fall(self, norm_BP: Tensor, bound_BP: Tensor, ratio_BP: Tensor) -> bool:
        """Whether this is the usual step, of which little is to be noted: every residual has fallen, to no less than
        is asked. False where one is not finite."""
        if not self._all_active or self._num_evals >= self._least_budget:
            return False
        now = self._now
        falls_BP = (ratio_BP < torch.minimum(_PROGRESS * now.mark_BP, now.best_BP)) & (norm_BP > bound_BP)
        return not bool((~falls_BP).any())

    def _note_progress(self, z_BPN: Tensor, norm_BP: Tensor, scale_BP: Tensor, ratio_BP: Tensor) -> None:
        now = self._now
        now.best_z_BPN = z_BPN
        now.best_BP = now.mark_BP = ratio_BP
        now.waited_BP = torch.zeros_like(now.waited_BP)
        now.norm_B, now.scale_B = norm_BP[:, -1], scale_BP[:, -1]
        now.steps_B = now.evals_B
        now.evals_B = now.evals_B + 1
        if self._options.trace:
            everyone_B = torch.ones_like(now.sample_B, dtype=torch.bool)
            self._trace.append((now.sample_B, everyone_B, _ratio(now.norm_B, now.scale_B)))

    def _record(self, norm_B: Tensor, scale_B: Tensor, alive_B: Tensor, taken_B: Tensor) -> None:
        """Keep the account of every sample that was still going."""
        now = self._now
        now.evals_B = now.evals_B + alive_B
        if self._causal:
            # The state returned is put together from every position's own best point; from the moment that a sample
            # has failed positions, what is evaluated is that state.
            taken_B = alive_B | (now.codes_BP != _CONVERGED).any(1)
        now.steps_B = torch.where(taken_B, now.evals_B - 1, now.steps_B)
        taken_B = taken_B | (alive_B & now.norm_B.isnan())  # f was never finite: say so
        now.norm_B = torch.where(taken_B, norm_B, now.norm_B)
        now.scale_B = torch.where(taken_B, scale_B, now.scale_B)
        if self._options.trace:
            self._trace.append((now.sample_B, alive_B, _ratio(norm_B, scale_B)))

    def _look_back(self, z_BPN: Tensor, fz_BPN: Tensor, finished_B: Tensor) -> None:
        """For samples that have just finished: what their last step and the solver's memory tell."""
        if self._now.previous is not None:
            self._estimate_amplification(z_BPN, fz_BPN, finished_B)
        if self._options.keep_solver_state and bool(finished_B.any()):
            self._keep_states(finished_B)

    def _keep_states(self, done_B: Tensor) -> None:
        index = torch.nonzero(done_B).flatten()
        self._states.append((self._now.sample_B.index_select(0, index), select(self._now.solver_state, index)))

    def _estimate_amplification(self, z_BPN: Tensor, fz_BPN: Tensor, finished_B: Tensor) -> None:
        """||dz|| / ||dresidual|| of the last step: how far z is from the solution for a residual of a given size."""
        now = self._now
        assert now.previous is not None
        last_z_BPN, last_fz_BPN = now.previous
        dz_BPN = z_BPN - last_z_BPN
        moved_B = torch.linalg.vector_norm(dz_BPN, dim=(1, 2), dtype=torch.float64)
        changed_B = torch.linalg.vector_norm(fz_BPN - last_fz_BPN - dz_BPN, dim=(1, 2), dtype=torch.float64)
        usable_B = finished_B & (changed_B > 0)
        now.amplification_B = torch.where(usable_B, moved_B / changed_B, now.amplification_B)

    def _go_on_with_unsolved(self) -> bool:
        """Drop samples that are done if that pays; False when none is left."""
        if self._all_active:
            return True
        now = self._now
        done_B = (now.codes_BP != _ACTIVE).all(1)
        size, num_done = done_B.numel(), int(done_B.sum())
        if num_done == size:
            return False
        if self._causal:  # positions that failed are still to be measured together with the rest
            done_B = (now.codes_BP == _CONVERGED).all(1)
            num_done = int(done_B.sum())
        if not (num_done and self._options.compact and self._problem.can_compact):
            return True
        if not self._problem.worth_compacting(size - num_done, size):
            return True
        slim = dataclasses.replace(now, z_BPN=None, previous=None, solver_state=None)
        self._left.append(select(slim, torch.nonzero(done_B).flatten()))
        index = torch.nonzero(~done_B).flatten()
        self._now = select(now, index)
        self._problem.keep(index)
        self._kept_B = index
        return True

    def _step(self, z_BPN: Tensor, fz_BPN: Tensor) -> None:
        now = self._now
        if (kept_B := self._kept_B) is not None:
            z_BPN, fz_BPN = z_BPN.index_select(0, kept_B), fz_BPN.index_select(0, kept_B)
            self._kept_B = None
        proposed_BPN, now.solver_state = self._solver.step(z_BPN, fz_BPN, now.solver_state)
        if proposed_BPN.dtype != self._packing.dtype:  # f sees the rounded point, so that is the point
            proposed_BPN = proposed_BPN.to(self._packing.dtype).to(proposed_BPN.dtype)
        now.previous = (z_BPN, fz_BPN)
        active_BP = now.codes_BP == _ACTIVE
        if not self._all_active and self._options.check_every == 1:
            self._all_active = not bool((~active_BP).any())
        now.z_BPN = proposed_BPN
        if not self._all_active:
            now.z_BPN = torch.where(active_BP.unsqueeze(2), proposed_BPN, now.best_z_BPN)

    def _measure_composite(self) -> None:
        """Measure the state put together from every position's best point, unless it is the one just evaluated."""
        now = self._now
        open_B = (now.codes_BP != _CONVERGED).any(1)
        if now.z_BPN is None or not bool(open_B.any()) or torch.equal(now.z_BPN, now.best_z_BPN):
            return
        fz_BPN = self._evaluate(now.best_z_BPN)
        norm_BP, scale_BP = self._norms(now.best_z_BPN, fz_BPN)
        now.norm_B = torch.where(open_B, norm_BP[:, -1], now.norm_B)
        now.scale_B = torch.where(open_B, scale_BP[:, -1], now.scale_B)
        now.evals_B = now.evals_B + open_B
        if self._options.trace:
            self._trace.append((now.sample_B, open_B, _ratio(norm_BP[:, -1], scale_BP[:, -1])))

    def _collect(self, started: float) -> Solution:
        if self._options.keep_solver_state and self._now.best_z_BPN.numel():
            kept = torch.cat([samples for samples, _ in self._states] or [self._now.sample_B[:0]])
            if bool((missing_B := ~torch.isin(self._now.sample_B, kept)).any()):
                self._keep_states(missing_B)
        now = dataclasses.replace(self._now, z_BPN=None, previous=None, solver_state=None)
        if self._left:
            now = _concatenate([*self._left, now])
            now = select(now, torch.argsort(now.sample_B))
        rest = _MAX_STEPS if now.best_z_BPN.numel() else _CONVERGED  # of nothing, nothing is left to solve
        codes_BP = torch.where(now.codes_BP == _ACTIVE, rest, now.codes_BP)
        codes_B = codes_BP.amax(1) if codes_BP.numel() else codes_BP.new_full((codes_BP.shape[0],), _CONVERGED)
        dtype = self._packing.work_dtype
        return Solution(
            z=now.best_z_BPN,
            residual=_ratio(now.norm_B, now.scale_B).to(dtype),
            residual_norm=now.norm_B.to(dtype),
            codes=codes_B,
            num_steps=now.steps_B,
            num_evals=now.evals_B,
            amplification=now.amplification_B.to(dtype),
            seconds_in_f=self._seconds_in_f,
            seconds_outside_f=time.perf_counter() - started - self._seconds_in_f,
            trace=self._collect_trace(codes_B.numel()) if self._options.trace else None,
            solver_state=self._states or None,
        )

    def _collect_trace(self, num_samples: int) -> tuple[Tensor, ...]:
        traces: list[list[float]] = [[] for _ in range(num_samples)]
        for sample_B, counted_B, residual_B in self._trace:
            for sample, counted, residual in zip(
                sample_B.tolist(), counted_B.tolist(), residual_B.tolist(), strict=True
            ):
                if counted:
                    traces[sample].append(residual)
        return tuple(torch.tensor(values, dtype=self._packing.work_dtype) for values in traces)


def _choose(condition_BP: Tensor, yes_BPN: Tensor, no_BPN: Tensor, *, look: bool) -> Tensor:
    """`torch.where`, without a copy if the condition holds throughout and looking at it is free."""
    if look and not bool((~condition_BP).any()):
        return yes_BPN
    return torch.where(condition_BP.unsqueeze(2), yes_BPN, no_BPN)


def _norm(x_BPN: Tensor, *, look: bool) -> Tensor:
    """||x|| in float64. Squares of float32 numbers may under- or overflow; only then is the slower way needed."""
    if look:
        norm_BP = torch.linalg.vector_norm(x_BPN, dim=2).double()
        if not bool((~((norm_BP > 1e-15) & (norm_BP < 1e18))).any()):  # nan counts as unusual
            return norm_BP
    return torch.linalg.vector_norm(x_BPN, dim=2, dtype=torch.float64)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where a is 0 whatever b is."""
    return torch.where(a == 0, 0, a / b)


def _concatenate(parts: list[Any]) -> Any:
    """Batches of one structure, one after the other."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, tuple | list):
        return type(first)(_concatenate(list(items)) for items in zip(*parts, strict=True))
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        joined = {name: _concatenate([getattr(part, name) for part in parts]) for name in names}
        return dataclasses.replace(first, **joined)  # pyright: ignore[reportArgumentType]
    return first
