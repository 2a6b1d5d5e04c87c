"""What a solve knows about the samples that it works on: residuals, verdicts, the best point of each."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import torch
from torch import Tensor

from deqkit.solve._packing import cut
from deqkit.solve._solution import Status
from deqkit.solve._solver import Evaluation

# B samples still in the batch, P groups of positions (1 unless the solver is causal), N numbers in a group

ACTIVE = -1  # a group that still moves; afterwards its code is a Status.severity
CONVERGED, MAX_STEPS, STALLED, NONFINITE = (status.severity for status in Status)
_PROGRESS = 0.999  # a residual has fallen if it is this much smaller than when it last fell


@dataclasses.dataclass(frozen=True, slots=True)
class Residuals:
    """Of one evaluation; their sizes in float64."""

    at: Evaluation
    bound_BP: Tensor
    """The norm that the tolerance allows."""
    ratio_BP: Tensor
    """The norm as a multiple of that, which tells points apart."""

    @property
    def norm_BP(self) -> Tensor:
        return self.at.norm_BP

    @property
    def scale_BP(self) -> Tensor:
        return self.at.scale_BP


@dataclasses.dataclass
class Batch:
    """Every tensor is batch first."""

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
    """The last residual and f: what solvers keep too, so that they share the memory."""
    solver_state: Any = None

    @classmethod
    def new(cls, z_BPN: Tensor, *, max_steps: int) -> Batch:
        """Before the first evaluation."""
        size, groups, _ = z_BPN.shape
        integers = lambda *shape: torch.zeros(shape, dtype=torch.int64, device=z_BPN.device)  # noqa: E731
        # Norms are kept in float64: squares of small float32 numbers (gradients) underflow.
        reals = lambda *shape, value: torch.full(shape, value, dtype=torch.float64, device=z_BPN.device)  # noqa: E731
        return cls(
            sample_B=torch.arange(size, device=z_BPN.device),
            budget_B=integers(size).fill_(max_steps),
            first_scale_BP=reals(size, groups, value=0.0),
            largest_BP=reals(size, groups, value=0.0),
            z_BPN=z_BPN,
            best_z_BPN=z_BPN,
            best_BP=reals(size, groups, value=float("inf")),
            mark_BP=reals(size, groups, value=float("inf")),
            waited_BP=integers(size, groups),
            codes_BP=integers(size, groups).fill_(ACTIVE),
            norm_B=reals(size, value=float("nan")),
            scale_B=reals(size, value=float("nan")),
            steps_B=integers(size),
            evals_B=integers(size),
            amplification_B=reals(size, value=float("nan")),
        )

    def part(self, index: Tensor) -> Batch:
        """Some of the samples; of those that the solver remembers, no others are left."""
        return cut(self, index)

    def account(self) -> Batch:
        """Without what only a solve that goes on needs."""
        return dataclasses.replace(self, z_BPN=None, previous=None, solver_state=None)

    def goes_on(
        self, found: Residuals, active_BP: Tensor | None, alive_B: Tensor, *, patience: int, causal: bool
    ) -> bool:
        """Take note of an evaluation that ends nothing, as most do: the same as `judge` and `record` would note.

        Samples that are alive, those with active positions (`None` if all are), must have evaluations left. False, and
        nothing is noted, where one position has converged, stalled, or become inf or nan.
        """
        if active_BP is None and self._all_fall(found):
            self._note_fall(found)
            return True
        ratio_BP = found.ratio_BP
        fell_BP = ratio_BP < _PROGRESS * self.mark_BP
        waited_BP = (self.waited_BP + 1).masked_fill_(fell_BP, 0)
        open_BP = (found.norm_BP > found.bound_BP) & (ratio_BP + found.scale_BP < math.inf) & (waited_BP < patience)
        ends_BP = ~open_BP if active_BP is None else active_BP & ~open_BP
        if bool(ends_BP.any()):
            return False
        improved_BP = ratio_BP < self.best_BP
        if active_BP is not None:
            fell_BP, improved_BP = fell_BP & active_BP, improved_BP & active_BP
        self.waited_BP, self.mark_BP = waited_BP, torch.where(fell_BP, ratio_BP, self.mark_BP)
        self.best_z_BPN = torch.where(improved_BP.unsqueeze(2), found.at.z_BPN, self.best_z_BPN)
        self.best_BP = torch.where(improved_BP, ratio_BP, self.best_BP)
        self.record(found, alive_B, improved_BP[:, 0], causal=causal)
        return True

    def _all_fall(self, found: Residuals) -> bool:
        """Whether every residual has fallen, to no less than is asked. False where one is not finite."""
        falls_BP = found.ratio_BP < torch.minimum(_PROGRESS * self.mark_BP, self.best_BP)
        return not bool((~(falls_BP & (found.norm_BP > found.bound_BP))).any())

    def _note_fall(self, found: Residuals) -> None:
        self.best_z_BPN = found.at.z_BPN
        self.best_BP = self.mark_BP = found.ratio_BP
        self.waited_BP = torch.zeros_like(self.waited_BP)
        self.norm_B, self.scale_B = found.norm_BP[:, -1], found.scale_BP[:, -1]
        self.steps_B, self.evals_B = self.evals_B, self.evals_B + 1

    def judge(self, found: Residuals, *, atol: float, patience: int, causal: bool) -> Tensor:
        """Decide which positions are done; returns those for which this point is the one to keep, (B, P)."""
        norm_BP, scale_BP, ratio_BP = found.norm_BP, found.scale_BP, found.ratio_BP
        active_BP = self.codes_BP == ACTIVE
        dead_BP = active_BP & ~(torch.isfinite(norm_BP) & torch.isfinite(scale_BP))
        # A residual that is small only relative to a z that has run away: f(z) = z + 1 has no fixed point.
        away_BP = (scale_BP > 10 * self.first_scale_BP) & (norm_BP > 0.9 * self.largest_BP) & (norm_BP > atol)
        solved_BP = active_BP & (norm_BP <= found.bound_BP) & ~away_BP
        improved_BP = active_BP & (ratio_BP < self.best_BP)  # False for nan: a best point is always finite
        fell_BP = active_BP & (ratio_BP < _PROGRESS * self.mark_BP)
        self.mark_BP = torch.where(fell_BP, ratio_BP, self.mark_BP)
        self.waited_BP = torch.where(fell_BP, 0, self.waited_BP + 1)
        stalled_BP = active_BP & (self.waited_BP >= patience)

        # A position may rest only when all before it do, or it could not follow them.
        ends_BP = ~active_BP | solved_BP | stalled_BP
        ends_BP = active_BP & ~dead_BP & (ends_BP.cummin(1).values if causal else ends_BP)
        self.codes_BP = torch.where(ends_BP, torch.where(solved_BP, CONVERGED, STALLED), self.codes_BP)
        self.codes_BP = torch.where(dead_BP, NONFINITE, self.codes_BP)
        spent_B1 = (self.evals_B + 1 >= self.budget_B).unsqueeze(1)
        self.codes_BP = torch.where((self.codes_BP == ACTIVE) & spent_B1, MAX_STEPS, self.codes_BP)

        taken_BP = improved_BP | (ends_BP & solved_BP)
        self.best_BP = torch.where(taken_BP, ratio_BP, self.best_BP)
        return taken_BP

    def record(self, found: Residuals, alive_B: Tensor, taken_B: Tensor, *, causal: bool) -> None:
        """Keep the account of every sample that was still going before this evaluation was judged."""
        self.evals_B = self.evals_B + alive_B
        if causal:
            # The state returned is put together from every position's own best point; from the moment that a sample
            # has failed positions, what is evaluated is that state.
            taken_B = alive_B | (self.codes_BP != CONVERGED).any(1)
        self.steps_B = torch.where(taken_B, self.evals_B - 1, self.steps_B)
        taken_B = taken_B | (alive_B & self.norm_B.isnan())  # f was never finite: say so
        self.norm_B = torch.where(taken_B, found.norm_BP[:, -1], self.norm_B)
        self.scale_B = torch.where(taken_B, found.scale_BP[:, -1], self.scale_B)

    def measure_again(self, moved_BP: Tensor, found: Residuals) -> None:
        """Samples have another residual than when they were solved: the one that was just found where they are."""
        moved_B = moved_BP[:, -1]
        self.norm_B = torch.where(moved_B, found.norm_BP[:, -1], self.norm_B)
        self.scale_B = torch.where(moved_B, found.scale_BP[:, -1], self.scale_B)

    def open_again(self, again_BP: Tensor, found: Residuals) -> None:
        """Samples count as unsolved again."""
        self.codes_BP = torch.where(again_BP, ACTIVE, self.codes_BP)
        self.best_BP = torch.where(again_BP, found.ratio_BP, self.best_BP)
        self.mark_BP = torch.where(again_BP, found.ratio_BP, self.mark_BP)
        self.waited_BP = self.waited_BP.masked_fill(again_BP, 0)

    def estimate_amplification(self, at: Evaluation, finished_B: Tensor) -> None:
        """||dz|| / ||dresidual|| of the last step: how far z is from the solution for a residual of a given size."""
        assert self.previous is not None
        last_residual_BPN, last_fz_BPN = self.previous
        change_BPN = at.residual_BPN - last_residual_BPN
        moved_B = torch.linalg.vector_norm(at.fz_BPN - last_fz_BPN - change_BPN, dim=(1, 2), dtype=torch.float64)
        changed_B = torch.linalg.vector_norm(change_BPN, dim=(1, 2), dtype=torch.float64)
        usable_B = finished_B & (changed_B > 0)
        self.amplification_B = torch.where(usable_B, moved_B / changed_B, self.amplification_B)


def norms(*parts_BPN: Tensor, look: bool) -> Tensor:
    """||x|| of every part in float64. Squares of float32 may under- or overflow; only then is the slower way needed.

    The two ways round differently: which one it is depends on the norm alone, not on its neighbours or on `look`.
    """
    norms_XBP = torch.stack([torch.linalg.vector_norm(x_BPN, dim=2) for x_BPN in parts_BPN]).double()
    usual_XBP = (norms_XBP > 1e-15) & (norms_XBP < 1e18)  # nan counts as unusual
    if look and not bool((~usual_XBP).any()):
        return norms_XBP
    exact_XBP = torch.stack([torch.linalg.vector_norm(x_BPN, dim=2, dtype=torch.float64) for x_BPN in parts_BPN])
    return torch.where(usual_XBP, norms_XBP, exact_XBP)


def ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where a is 0 whatever b is."""
    return (a / b).masked_fill_(a == 0, 0)


def concatenate(parts: list[Any]) -> Any:
    """Batches of one structure, one after the other."""
    first = parts[0]
    if isinstance(first, Tensor):
        return torch.cat(parts)
    if isinstance(first, tuple | list):
        return type(first)(concatenate(list(items)) for items in zip(*parts, strict=True))
    if dataclasses.is_dataclass(first):
        names = [field.name for field in dataclasses.fields(first)]
        joined = {name: concatenate([getattr(part, name) for part in parts]) for name in names}
        return dataclasses.replace(first, **joined)  # pyright: ignore[reportArgumentType]
    return first
