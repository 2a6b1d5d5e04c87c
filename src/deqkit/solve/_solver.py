"""The contract between the loop and a solver."""

from __future__ import annotations

import abc
import dataclasses
from typing import Any

import torch
from torch import Tensor

from deqkit.solve._tolerance import Tolerance

# B samples, P groups of positions (1, or every position if steps must be causal), N numbers in a group


@dataclasses.dataclass(frozen=True, slots=True)
class Evaluation:
    """A point at which f was evaluated, and what the loop has measured there."""

    z_BPN: Tensor
    fz_BPN: Tensor
    residual_BPN: Tensor
    """f(z) - z"""
    norm_BP: Tensor
    scale_BP: Tensor
    """||f(z) - z|| and ||f(z)|| in float64: of a sample, or with `group="prefix"` of each position with the ones before
    it."""

    @property
    def rounding_BP(self) -> Tensor:
        """The length below which a change of the residual is rounding noise, which must not steer a step."""
        return torch.finfo(self.fz_BPN.dtype).eps * self.scale_BP


class AbstractSolver(abc.ABC):
    """Proposes the next point; the loop evaluates f, measures, judges, keeps the best point and stops.

    Solvers are frozen values: all that changes during a solve lives in the state that `init` returns and `step`
    passes on. A state is a dataclass, tuple or dict whose tensors are batch first, so that the loop can drop samples
    that are done. A solver must treat samples independently, and must not write to the tensors it is given.
    """

    group: str = "sample"
    """The scope of inner products: a whole sample, or (`"prefix"`) each position with the ones before it."""
    num_probes: int = 0
    """How many evaluations in a row may be spent on probing f rather than on improving the residual."""

    @abc.abstractmethod
    def init(self, z_BPN: Tensor, tol: Tolerance) -> Any:
        """The state before the first evaluation. `tol` is what the loop will ask of the result."""

    @abc.abstractmethod
    def step(self, at: Evaluation, state: Any) -> tuple[Tensor, Any]:
        """The next point at which to evaluate f, given the last one."""


def check_damping(name: str, value: float) -> None:
    if not 0 < value <= 1:
        raise ValueError(f"{name} must be in (0, 1], 1 being the full step; got {value!r}")


def check_group(value: str) -> None:
    if value not in ("sample", "prefix"):
        raise ValueError(f'group must be "sample" or "prefix", got {value!r}')


def check_count(name: str, value: int, *, minimum: int = 1) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < minimum:
        raise ValueError(f"{name} must be a whole number of at least {minimum}, got {value!r}")
