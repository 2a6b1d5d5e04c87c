"""What a solve hands back: the state, the verdicts, and what they cost."""

from __future__ import annotations

import dataclasses
import enum
from typing import Any

import torch
from torch import Tensor


class Status(enum.Enum):
    """How a solve ended. Listed from best to worst; the status of a batch is its worst sample's."""

    CONVERGED = "residual within tolerance"
    MAX_STEPS = "step budget spent first; raise max_steps, loosen tol or try another solver"
    STALLED = "residual stopped falling; the tolerance is below rounding, or the solver does not suit this cell"
    NONFINITE = "f returned inf or nan; damp the solver, lower the learning rate or check the inputs"

    @property
    def severity(self) -> int:
        return _SEVERITY[self]

    def __repr__(self) -> str:
        return f"Status.{self.name}"


_SEVERITY = {status: rank for rank, status in enumerate(Status)}
_BY_SEVERITY = tuple(Status)


@dataclasses.dataclass(kw_only=True, repr=False)
class Solution:
    """The best state found for every sample, with an honest account of it.

    All per-sample fields have shape (B,). `residual` and `residual_norm` were measured at the returned `z`.
    """

    z: Any
    """The state, in the structure of z0."""
    residual: Tensor
    """||f(z) - z|| / ||f(z)|| per sample; nan where f never returned a finite value."""
    residual_norm: Tensor
    """||f(z) - z|| per sample."""
    codes: Tensor
    """Verdict per sample as an integer (`Status.severity`); see `sample_status`."""
    num_steps: Tensor
    """Steps that led from z0 to the returned z."""
    num_evals: Tensor
    """Evaluations of f spent on each sample."""
    seconds_in_f: float
    """Wall time inside f. On an accelerator f is asynchronous, and this is only the time to launch it."""
    seconds_outside_f: float
    """Wall time of everything else in the solve: the solver's own algebra, norms, verdicts."""
    amplification: Tensor
    """Estimate of ||dz|| / ||dresidual|| near the solution, i.e. of ||(I - J)^-1|| where the residual points; nan
    where fewer than two points were evaluated."""
    curvature: Tensor | None = None
    """Error of the gradient because J changes between z and the solution, per sample; only `grad_rtol` measures it
    before the backward pass."""
    independent: bool = False
    """Whether samples have left the batch, and the rest gave the same without them."""
    trace: tuple[Tensor, ...] | None = None
    """One 1-D tensor a sample: the relative residual at each of its evaluations. None unless asked for."""
    backward: Solution | None = None
    """The solve of the latest backward pass through this solution; None before one."""
    grad_error: float | None = None
    """Estimated relative error of the gradient of the latest backward pass; None before one."""
    solver_state: Any = None
    """Pairs (samples, the solver's memory when they were done), kept only on request, for `ReuseForward`."""

    @property
    def status(self) -> Status:
        """The worst verdict in the batch."""
        return _BY_SEVERITY[int(self.codes.max())] if self.codes.numel() else Status.CONVERGED

    @property
    def sample_status(self) -> tuple[Status, ...]:
        """One verdict per sample."""
        return tuple(_BY_SEVERITY[code] for code in self.codes.tolist())

    def __repr__(self) -> str:
        return f"Solution({self.describe()})"

    def describe(self) -> str:
        """One line for people: verdicts, worst residual, evaluations."""
        if not self.codes.numel():
            return "empty batch"
        counts = ", ".join(
            f"{self.codes.eq(status.severity).sum().item()} {status.name}"
            for status in Status
            if self.codes.eq(status.severity).any()
        )
        evals = f"{self.num_evals.min().item()}-{self.num_evals.max().item()}"
        return f"{counts}; worst residual {self.residual.max().item():.2e}; {evals} evaluations per sample"


class NumericalWarning(UserWarning):
    """The numbers are doubtful, but the computation went on."""


class NotConvergedError(RuntimeError):
    """A solve did not reach its tolerance; `solution` holds the best state found."""

    def __init__(self, message: str, solution: Solution) -> None:
        super().__init__(message)
        self.solution = solution

    def __reduce__(self) -> tuple[type[NotConvergedError], tuple[str, Solution]]:
        return type(self), (str(self), self.solution)


class NonFiniteError(NotConvergedError):
    """f, or the gradient that enters a backward solve, is inf or nan."""


def raise_if_failed(solution: Solution, *, where: str, above: Status = Status.CONVERGED) -> None:
    """Raise for the worst verdict of `solution` if it is worse than `above`."""
    if solution.codes.numel() == 0 or not bool((solution.codes > above.severity).any()):
        return
    status = solution.status
    samples = torch.nonzero(solution.codes == status.severity).flatten().tolist()
    named = ", ".join(map(str, samples[:8])) + (", ..." if len(samples) > 8 else "")
    error = NonFiniteError if status is Status.NONFINITE else NotConvergedError
    raise error(f"{where}: {status.name} for sample {named} ({status.value}); {solution.describe()}", solution)
