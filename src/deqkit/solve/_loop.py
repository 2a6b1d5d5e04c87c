"""The one loop: it calls f, measures, judges every sample, keeps the best point and drops samples that are done."""

from __future__ import annotations

import dataclasses
import time
from typing import Any, Protocol

import torch
from torch import Tensor

from deqkit.solve._batch import ACTIVE, CONVERGED, MAX_STEPS, STALLED, Batch, Residuals, concatenate, norms, ratio
from deqkit.solve._hoist import own_solve
from deqkit.solve._packing import Packing, rows_left, select
from deqkit.solve._solution import Solution
from deqkit.solve._solver import AbstractSolver, Evaluation
from deqkit.solve._tolerance import Tolerance

# B samples still in the batch, P groups of positions (1 unless the solver is causal), N numbers in a group

# Whatever the loop asks of its tensors (`bool(x.any())`) is whether something unusual happened, so that an abstract run
# which answers no to everything, as `deqkit.analysis` makes to count memory, is the run of a solve that goes on.


class Problem(Protocol):
    """A batch of fixed-point problems in packed form."""

    can_compact: bool

    def evaluate(self, z_BPN: Tensor) -> Tensor:
        """f at every sample still in the batch."""
        ...

    def worth_compacting(self, num_left: int, num_now: int) -> bool:
        """Whether going on with fewer samples saves more than it costs."""
        ...

    def keep(self, index: Tensor, at: Evaluation) -> None:
        """Drop all samples but these; the evaluation is of all of them."""
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
    hand_over: bool = False
    """Another solver goes on with samples that stall."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Unfinished:
    """Samples that an earlier solver left unsolved, and the evaluations each of them has left."""

    open_B: Tensor
    budget_B: Tensor
    codes_B: Tensor
    """The verdicts of the others."""
    norm_B: Tensor | None
    """The norms of all residuals, if samples may depend on each other: those that are solved may not stay so. None if
    they cannot."""


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
        self._left: list[Batch] = []
        self._states: list[tuple[Tensor, Any]] = []  # samples that are done, and the solver's memory of them then
        self._kept_B: Tensor | None = None  # set when the batch was cut down since the last evaluation
        self._trace: list[tuple[Tensor, Tensor, Tensor]] = []
        self._num_evals = 0
        self._least_budget = options.max_steps if unfinished is None else 0
        self._now = Batch.new(z_BPN, max_steps=options.max_steps)
        self._active_BP: Tensor | None = None  # None while all are
        self._together = not (options.compact and problem.can_compact)  # samples that cannot leave may be dependent
        self._may_open_again = unfinished is None or unfinished.norm_B is not None
        if unfinished is not None:
            self._now.budget_B = unfinished.budget_B
            self._now.codes_BP = torch.where(unfinished.open_B, ACTIVE, unfinished.codes_B).unsqueeze(1)
            if unfinished.norm_B is not None:
                self._now.norm_B = torch.where(unfinished.open_B, self._now.norm_B, unfinished.norm_B.double())
            self._active_BP = self._now.codes_BP == ACTIVE
        groups = z_BPN.shape[1]
        tokens_per_group = packing.num_tokens / max(groups, 1)
        self._tokens_P = torch.arange(1, groups + 1, device=z_BPN.device).double() * tokens_per_group

    def run(self) -> Solution:
        started = time.perf_counter()
        with own_solve() as tell:
            if self._now.best_z_BPN.numel():
                tol = self._options.tol.resolved(self._packing.num_tokens)
                self._now.solver_state = self._solver.init(self._now.best_z_BPN, tol)
                self._solve()
                if self._causal:
                    self._measure_composite()
            solution = self._collect(started)
            tell(solution.z)
        return solution

    def _solve(self) -> None:
        options = self._options
        for num_evals in range(1, options.max_steps + 1):
            z_BPN = self._now.z_BPN
            assert z_BPN is not None
            found = self._evaluate(z_BPN)
            checking = num_evals % options.check_every == 0
            may_have_ended = self._judge(found, checking=checking)
            if num_evals >= options.max_steps:
                self._open_again(found)
                return
            if may_have_ended:
                if checking and not self._go_on_with_unsolved(found.at) and not self._open_again(found):
                    return
                self._note_active()
            self._step(found.at)

    def _evaluate(self, z_BPN: Tensor) -> Residuals:
        """f, and the residual of every sample, or of every position with those before it."""
        begin = time.perf_counter()
        fz_BPN = self._problem.evaluate(z_BPN)
        self._seconds_in_f += time.perf_counter() - begin
        look, tol = self._options.check_every == 1, self._options.tol
        residual_BPN = fz_BPN - z_BPN
        norms_2BP = norms(residual_BPN, fz_BPN, look=look)
        if self._causal:
            norms_2BP = norms_2BP.square_().cumsum(2).sqrt_()
        norm_BP, scale_BP = norms_2BP.unbind(0)
        bound_BP = tol.bound(scale_BP, self._tokens_P)
        # Without a tolerance the size of the residual itself tells points apart.
        ratio_BP = norm_BP if tol.rtol == tol.atol == 0 else ratio(norm_BP, bound_BP)
        return Residuals(Evaluation(z_BPN, fz_BPN, residual_BPN, norm_BP, scale_BP), bound_BP, ratio_BP)

    def _judge(self, found: Residuals, *, checking: bool) -> bool:
        """Decide which positions are done, and keep the best point of each; False if certainly none has just ended."""
        now = self._now
        if self._num_evals == 0:
            now.first_scale_BP = found.scale_BP
        self._num_evals += 1
        now.largest_BP = torch.fmax(now.largest_BP, found.norm_BP)
        active_BP = self._active_BP
        alive_B = torch.ones_like(now.sample_B, dtype=torch.bool) if active_BP is None else active_BP.any(1)
        if self._options.trace:
            self._note_trace(found, alive_B)
        how = {"patience": self._patience, "causal": self._causal}
        if checking and self._num_evals < self._least_budget and now.goes_on(found, active_BP, alive_B, **how):
            return False
        taken_BP = now.judge(found, atol=self._options.tol.atol, **how)
        now.best_z_BPN = _choose(taken_BP, found.at.z_BPN, now.best_z_BPN, look=checking)
        now.record(found, alive_B, taken_BP[:, 0], causal=self._causal)
        finished_B = alive_B & (now.codes_BP != ACTIVE).all(1)
        if not checking or bool(finished_B.any()):
            self._look_back(found.at, finished_B)
        return True

    def _note_trace(self, found: Residuals, counted_B: Tensor) -> None:
        residual_B = ratio(found.norm_BP[:, -1], found.scale_BP[:, -1])
        self._trace.append((self._now.sample_B, counted_B, residual_B))

    def _look_back(self, at: Evaluation, finished_B: Tensor) -> None:
        """For samples that have just finished: what their last step and the solver's memory tell."""
        if self._now.previous is not None:
            self._now.estimate_amplification(at, finished_B)
        if self._options.keep_solver_state and bool(finished_B.any()):
            self._keep_states(finished_B)

    def _keep_states(self, done_B: Tensor) -> None:
        index = torch.nonzero(done_B).flatten()
        self._states.append((self._now.sample_B.index_select(0, index), select(self._now.solver_state, index)))

    def _forget_states(self, samples: Tensor) -> None:
        found, self._states = self._states, []
        for kept, state in found:
            index = torch.nonzero(~torch.isin(kept, samples)).flatten()
            if index.numel():
                self._states.append((kept.index_select(0, index), select(state, index)))

    def _open_again(self, found: Residuals) -> bool:
        """Go on with samples that were judged while the rest still moved, and are no longer as they were judged: they
        depend on the rest.

        They have stayed where they were, so the last evaluation, of the state as it is returned, tells their residual.
        """
        if self._causal or not self._may_open_again:
            return False
        now, noise_BP = self._now, 10 * found.at.rounding_BP
        solved_BP = now.codes_BP == CONVERGED
        moved_BP = (found.norm_BP - now.norm_B.unsqueeze(1)).abs() > noise_BP
        now.measure_again(solved_BP & moved_BP, found)
        again_BP = solved_BP & (found.norm_BP > 2 * found.bound_BP + noise_BP)
        stalled_BP = (now.codes_BP == STALLED) & moved_BP
        if self._together and not self._options.hand_over and bool(stalled_BP.any()):
            again_BP = again_BP | (stalled_BP & (found.at.z_BPN == now.best_z_BPN).all(2))
        if not bool(again_BP.any()):
            return False
        now.open_again(again_BP, found)
        self._forget_states(now.sample_B[again_BP[:, -1]])
        return True

    def _go_on_with_unsolved(self, at: Evaluation) -> bool:
        """Drop samples that are done if that pays; False when none is left."""
        now = self._now
        done_B = (now.codes_BP != ACTIVE).all(1)
        size, num_done = done_B.numel(), int(done_B.sum())
        if num_done == size:
            return False
        if self._causal:  # positions that failed are still to be measured together with the rest
            done_B = (now.codes_BP == CONVERGED).all(1)
            num_done = int(done_B.sum())
        if self._together or not num_done:
            return True
        if not self._problem.worth_compacting(size - num_done, size):
            return True
        index = rows_left(done_B, size - num_done)
        self._problem.keep(index, at)
        self._left.append(now.account().part(torch.nonzero(done_B).flatten()))
        self._now = now.part(index)
        self._kept_B = index
        return True

    def _note_active(self) -> None:
        active_BP = self._now.codes_BP == ACTIVE
        looking = self._options.check_every == 1
        self._active_BP = None if looking and not bool((~active_BP).any()) else active_BP

    def _step(self, at: Evaluation) -> None:
        now = self._now
        if (kept_B := self._kept_B) is not None:
            at = select(at, kept_B)
            self._kept_B = None
        proposed_BPN, now.solver_state = self._solver.step(at, now.solver_state)
        if proposed_BPN.dtype != self._packing.dtype:  # f sees the rounded point, so that is the point
            proposed_BPN = proposed_BPN.to(self._packing.dtype).to(proposed_BPN.dtype)
        now.previous = (at.residual_BPN, at.fz_BPN)
        now.z_BPN = proposed_BPN
        if self._active_BP is not None:
            now.z_BPN = torch.where(self._active_BP.unsqueeze(2), proposed_BPN, now.best_z_BPN)

    def _measure_composite(self) -> None:
        """Measure the states put together from every position's best point, unless they are those just evaluated.

        One evaluation more than `max_steps` allows. Were it one of them, the step that it stands for would be lost to
        all solves, or its place taken only where later positions fare well, which would tell earlier ones of them.
        """
        now = self._now
        assert now.z_BPN is not None
        open_B = (now.codes_BP != CONVERGED).any(1) & (now.z_BPN != now.best_z_BPN).flatten(1).any(1)
        if not bool(open_B.any()):
            return
        found = self._evaluate(now.best_z_BPN)
        now.norm_B = torch.where(open_B, found.norm_BP[:, -1], now.norm_B)
        now.scale_B = torch.where(open_B, found.scale_BP[:, -1], now.scale_B)
        now.evals_B = now.evals_B + open_B
        if self._options.trace:
            self._note_trace(found, open_B)

    def _collect(self, started: float) -> Solution:
        if self._options.keep_solver_state and self._now.best_z_BPN.numel():
            kept = torch.cat([samples for samples, _ in self._states] or [self._now.sample_B[:0]])
            if bool((missing_B := ~torch.isin(self._now.sample_B, kept)).any()):
                self._keep_states(missing_B)
        now = self._now.account()
        if self._left:
            now = concatenate([*self._left, now])
            now = now.part(torch.argsort(now.sample_B))
        rest = MAX_STEPS if now.best_z_BPN.numel() else CONVERGED  # of nothing, nothing is left to solve
        codes_BP = torch.where(now.codes_BP == ACTIVE, rest, now.codes_BP)
        codes_B = codes_BP.amax(1) if codes_BP.numel() else codes_BP.new_full((codes_BP.shape[0],), CONVERGED)
        dtype = self._packing.work_dtype
        return Solution(
            z=now.best_z_BPN,
            residual=ratio(now.norm_B, now.scale_B).to(dtype),
            residual_norm=now.norm_B.to(dtype),
            codes=codes_B,
            num_steps=now.steps_B,
            num_evals=now.evals_B,
            amplification=now.amplification_B.to(dtype),
            seconds_in_f=self._seconds_in_f,
            seconds_outside_f=time.perf_counter() - started - self._seconds_in_f,
            independent=bool(self._left),
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
