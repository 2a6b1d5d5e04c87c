"""Broyden's method with a bounded memory."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from deqkit.solve._linalg import solve_or_zero
from deqkit.solve._solver import AbstractSolver, check_damping
from deqkit.solve._tolerance import Tolerance

# B samples, N numbers in a state, M remembered pairs


@dataclasses.dataclass
class BroydenMemory:
    """The inverse Jacobian of g(z) = f(z) - z as `-I - F K^-1 S'`, from the last M steps of every sample."""

    dz_BMN: Tensor
    """S: steps, scaled to length one."""
    df_BMN: Tensor
    """F: changes of f over the same steps, on the same scale."""
    k_BMM: Tensor
    """K: -s_i.df_j where i is newer than j, else -s_i.dg_j with dg = df - dz."""
    last: tuple[Tensor, Tensor] | None = None
    count: int = 0

    @property
    def used(self) -> int:
        return min(self.count, self.k_BMM.shape[1])

    def apply_transposed(self, v_BN: Tensor) -> Tensor:
        """`(I - J)^-T v` according to this memory: the start of a backward solve that SHINE proposes."""
        n = self.used
        if n == 0:
            return v_BN
        dots_BM = (self.df_BMN[:, :n] @ v_BN.unsqueeze(2)).squeeze(2).double()
        weights_BM = solve_or_zero(self.k_BMM[:, :n, :n].mT, dots_BM).to(v_BN.dtype)
        return v_BN + (weights_BM.unsqueeze(1) @ self.dz_BMN[:, :n]).squeeze(1)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Broyden(AbstractSolver):
    """The paper's method: "good" Broyden from B = -I with Sherman-Morrison updates, `z' = z - damping * B g(z)`.

    The product of the last `memory` updates is kept in compact form (Byrd, Nocedal and Schnabel 1994, theorem 6.1):
    forgetting the oldest pair leaves exactly the matrix that the others build from -I. Dropping a factor of the
    usual product form instead leaves factors that were computed with it, which is why that form diverges.

    Not causal: inner products run over the whole sample, so before convergence a position depends on later ones.
    Use `Anderson(group="prefix")` where that matters (language models).
    """

    memory: int = 20
    """Pairs kept per sample: `2 * memory` states at most, grown as needed."""
    damping: float = 1.0
    """Step size, in (0, 1]."""

    def __post_init__(self) -> None:
        if self.memory < 1:
            raise ValueError(f"memory must be at least 1, got {self.memory}")
        check_damping("damping", self.damping)

    def init(self, z_BPN: Tensor, tol: Tolerance) -> BroydenMemory:
        size, _, width = z_BPN.shape
        room = min(self.memory, 4)
        return BroydenMemory(
            dz_BMN=z_BPN.new_empty(size, room, width),
            df_BMN=z_BPN.new_empty(size, room, width),
            k_BMM=torch.zeros(size, room, room, dtype=torch.float64, device=z_BPN.device),
        )

    def step(self, z_BPN: Tensor, fz_BPN: Tensor, state: BroydenMemory) -> tuple[Tensor, BroydenMemory]:
        z_BN, g_BN = z_BPN.squeeze(1), (fz_BPN - z_BPN).squeeze(1)
        if state.last is None:
            state.last = (z_BN, g_BN)
            return torch.lerp(z_BPN, fz_BPN, self.damping), state

        last_z_BN, last_g_BN = state.last
        state.last = (z_BN, g_BN)
        dots_BM = self._remember(state, z_BN - last_z_BN, g_BN - last_g_BN, g_BN)
        n = state.used
        weights_BM = solve_or_zero(state.k_BMM[:, :n, :n], dots_BM).to(z_BN.dtype)
        direction_BN = g_BN + (weights_BM.unsqueeze(1) @ state.df_BMN[:, :n]).squeeze(1)
        return (z_BN + self.damping * direction_BN).unsqueeze(1), state

    def _remember(self, state: BroydenMemory, dz_BN: Tensor, dg_BN: Tensor, g_BN: Tensor) -> Tensor:
        """Put the newest pair in the place of the oldest; returns S'g."""
        room = state.k_BMM.shape[1]
        if state.count == room < self.memory:
            state.dz_BMN, state.df_BMN = (_grown(t, self.memory) for t in (state.dz_BMN, state.df_BMN))
            grown = state.dz_BMN.shape[1] - room
            state.k_BMM = torch.nn.functional.pad(state.k_BMM, (0, grown, 0, grown))
        slot = state.count % state.k_BMM.shape[1]
        state.count += 1
        n = state.used

        length_B1 = torch.linalg.vector_norm(dz_BN, dim=1, keepdim=True).clamp_min(torch.finfo(dz_BN.dtype).tiny)
        dz_BN, dg_BN = dz_BN / length_B1, dg_BN / length_B1
        state.dz_BMN[:, slot] = dz_BN
        state.df_BMN[:, slot] = dz_BN + dg_BN
        # Two passes over the memory give the newest row and column of K and the right-hand side.
        row_BM = (state.df_BMN[:, :n] @ dz_BN.unsqueeze(2)).squeeze(2).double()
        columns_BM2 = (state.dz_BMN[:, :n] @ torch.stack((dg_BN, g_BN), dim=2)).double()
        state.k_BMM[:, slot, :n] = -row_BM
        state.k_BMM[:, :n, slot] = -columns_BM2[..., 0]
        return columns_BM2[..., 1]


def _grown(buffer_BMN: Tensor, limit: int) -> Tensor:
    size, room, width = buffer_BMN.shape
    grown_BMN = buffer_BMN.new_empty(size, min(2 * room, limit), width)
    grown_BMN[:, :room] = buffer_BMN
    return grown_BMN
