"""Anderson acceleration, per sample or strictly causal."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from deqkit.solve._linalg import solve_normal_equations, subtract_combination
from deqkit.solve._packing import OWNED
from deqkit.solve._solver import AbstractSolver, Evaluation, check_count, check_damping, check_group
from deqkit.solve._tolerance import Tolerance

# B samples, P groups of positions (1 for group="sample"), N numbers in a group, M remembered differences


@dataclasses.dataclass
class _Memory:
    """The last M differences of residuals and of steps, their inner products, and residual and f before this one."""

    residuals_BPMN: Tensor = dataclasses.field(metadata=OWNED)
    steps_BPMN: Tensor = dataclasses.field(metadata=OWNED)
    gram_BPMM: Tensor
    rhs_BPM: Tensor
    """Inner products of the differences with the current residual."""
    last: tuple[Tensor, Tensor] | None = None
    count: int = 0


@dataclasses.dataclass(frozen=True, slots=True)
class Anderson(AbstractSolver):
    """Anderson acceleration (type II): the combination of past steps whose residual would be smallest.

    With r = f(z) - z and the differences dz_j, dr_j of the last `memory` points, the next point is
    `z + mixing r - sum_j gamma_j (dz_j + mixing dr_j)`, gamma minimising `||r - sum_j gamma_j dr_j||`. On a linear
    problem this is truncated GMRES. Memory is `2 * memory` states, whatever the number of steps.
    """

    memory: int = 5
    """How many differences are kept."""
    _: dataclasses.KW_ONLY
    mixing: float = 1.0
    """Weight of the new residual in the step, in (0, 1]. Less than 1 helps where J has large negative eigenvalues, as
    in cells trained without a penalty; where f contracts it costs evaluations."""
    ridge: float | None = None
    """Regularisation relative to the problem: added to the unit diagonal of the scaled Gram matrix. None follows
    the dtype (10 times its rounding)."""
    group: str = "sample"
    """`"sample"`: one gamma a sample, from inner products over all its positions. `"prefix"`: position t has its own,
    from positions up to t, so that no step, stop or choice at t depends on later tokens (for a causal f). On cells
    with kinks (ReLU) a single early position can stagnate and hold up the rest; `Broyden(group="prefix")` did not."""

    def __post_init__(self) -> None:
        check_count("memory", self.memory)
        if self.ridge is not None and not 0 <= self.ridge < 1:
            raise ValueError(f"ridge must be in [0, 1), got {self.ridge!r}")
        check_damping("mixing", self.mixing)
        check_group(self.group)

    def init(self, z_BPN: Tensor, tol: Tolerance) -> _Memory:
        size, groups, width = z_BPN.shape
        return _Memory(
            residuals_BPMN=z_BPN.new_empty(size, groups, self.memory, width),
            steps_BPMN=z_BPN.new_empty(size, groups, self.memory, width),
            gram_BPMM=torch.zeros(size, groups, self.memory, self.memory, dtype=torch.float64, device=z_BPN.device),
            rhs_BPM=torch.zeros(size, groups, self.memory, dtype=torch.float64, device=z_BPN.device),
        )

    def step(self, at: Evaluation, state: _Memory) -> tuple[Tensor, _Memory]:
        fz_BPN, residual_BPN = at.fz_BPN, at.residual_BPN
        plain_BPN = fz_BPN if self.mixing == 1 else torch.lerp(at.z_BPN, fz_BPN, self.mixing)
        if state.last is None:
            state.last = (residual_BPN, fz_BPN)
            return plain_BPN, state

        slot = state.count % self.memory
        state.count += 1
        used = min(state.count, self.memory)
        last_residual_BPN, last_fz_BPN = state.last
        state.last = (residual_BPN, fz_BPN)
        dr_BPN = torch.sub(residual_BPN, last_residual_BPN, out=state.residuals_BPMN[:, :, slot])
        step_BPN = torch.sub(fz_BPN, last_fz_BPN, out=state.steps_BPMN[:, :, slot])
        if self.mixing != 1:  # dz + mixing dr, where df = dz + dr
            step_BPN.add_(dr_BPN, alpha=self.mixing - 1)

        # One pass over the memory gives the new row of the Gram matrix, and what it adds to the right-hand side: the
        # residual has changed by dr.
        row_BPM = (dr_BPN.unsqueeze(2) @ state.residuals_BPMN[:, :, :used].mT).squeeze(2).double()
        own_BP1 = torch.linalg.vecdot(dr_BPN, residual_BPN).double().unsqueeze(2)
        if self.group == "prefix":
            row_BPM, own_BP1 = row_BPM.cumsum(1), own_BP1.cumsum(1)
        state.gram_BPMM[:, :, slot, :used] = state.gram_BPMM[:, :, :used, slot] = row_BPM
        state.rhs_BPM[:, :, :used] += row_BPM
        state.rhs_BPM[:, :, slot : slot + 1] = own_BP1

        gamma_BPM = solve_normal_equations(
            state.gram_BPMM[:, :, :used, :used],
            state.rhs_BPM[:, :, :used],
            ridge=self._ridge(fz_BPN.dtype),
            floor_BP=at.rounding_BP.square(),
        )
        return subtract_combination(plain_BPN, gamma_BPM, state.steps_BPMN[:, :, :used]), state

    def _ridge(self, dtype: torch.dtype) -> float:
        return 10 * torch.finfo(dtype).eps if self.ridge is None else self.ridge
