"""Broyden's method with a bounded memory, per sample or strictly causal."""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from deqkit.solve._linalg import solve_or_zero, subtract_combination
from deqkit.solve._packing import OWNED
from deqkit.solve._solver import AbstractSolver, Evaluation, check_count, check_damping, check_group
from deqkit.solve._tolerance import Tolerance

# B samples, P groups of positions (1 for group="sample"), N numbers in a group, M remembered pairs


@dataclasses.dataclass
class BroydenMemory:
    """The inverse Jacobian of g(z) = f(z) - z as `-I - F K^-1 S'`, from the last M steps of every sample."""

    dz_BPMN: Tensor = dataclasses.field(metadata=OWNED)
    """S: steps."""
    df_BPMN: Tensor = dataclasses.field(metadata=OWNED)
    """F: changes of f over the same steps."""
    k_BPMM: Tensor
    """K: -s_i.df_j where i is newer than j, else -s_i.dg_j with dg = df - dz."""
    squares_BPM: Tensor
    """s_i.s_i, the scale of row and column i."""
    dots_BPM: Tensor
    """s_i.g at the current point."""
    last: tuple[Tensor, Tensor] | None = None
    count: int = 0

    @classmethod
    def gather(cls, parts: list[tuple[Tensor, BroydenMemory]]) -> BroydenMemory:
        """The memories of samples that were done at different times, in the order of the samples."""
        room = max(memory.used for _, memory in parts)
        order = torch.argsort(torch.cat([samples for samples, _ in parts]))

        def joined(name: str) -> Tensor:
            rows = []
            for _, memory in parts:
                cut = getattr(memory, name)[:, :, : memory.used]
                cut = cut[..., : memory.used] if name == "k_BPMM" else cut
                short = room - memory.used
                pads = {"squares_BPM": (0, short), "dots_BPM": (0, short), "k_BPMM": (0, short, 0, short)}.get(
                    name, (0, 0, 0, short)
                )
                rows.append(torch.nn.functional.pad(cut, pads))
            return torch.cat(rows).index_select(0, order)

        return cls(
            dz_BPMN=joined("dz_BPMN"),
            df_BPMN=joined("df_BPMN"),
            k_BPMM=joined("k_BPMM"),
            squares_BPM=joined("squares_BPM"),
            dots_BPM=joined("dots_BPM"),
            count=room,
        )

    @property
    def used(self) -> int:
        return min(self.count, self.k_BPMM.shape[2])

    def apply_transposed(self, v_BPN: Tensor) -> Tensor:
        """`(I - J)^-T v` according to this memory: the start of a backward solve that SHINE proposes."""
        n = self.used
        if n == 0:
            return v_BPN
        dots_BPM = (v_BPN.unsqueeze(2) @ self.df_BPMN[:, :, :n].mT).squeeze(2).double()
        weights_BPM = self.solve(self.k_BPMM[:, :, :n, :n].mT, dots_BPM)
        return subtract_combination(v_BPN, -weights_BPM, self.dz_BPMN[:, :, :n])

    def solve(self, k_BPMM: Tensor, rhs_BPM: Tensor) -> Tensor:
        return solve_or_zero(k_BPMM, rhs_BPM, self.squares_BPM[:, :, : rhs_BPM.shape[2]])


@dataclasses.dataclass(frozen=True, slots=True)
class Broyden(AbstractSolver):
    """The paper's method: "good" Broyden from B = -I with Sherman-Morrison updates, `z' = z - damping * B g(z)`.

    The product of the last `memory` updates is kept in compact form (Byrd, Nocedal and Schnabel 1994, theorem 6.1):
    forgetting the oldest pair leaves exactly the matrix that the others build from -I. Dropping a factor of the
    usual product form instead leaves factors that were computed with it, which is why that form diverges.
    """

    memory: int = 6
    """Pairs kept per sample: `2 * memory` states at most, grown as needed."""
    _: dataclasses.KW_ONLY
    damping: float = 1.0
    """Step size, in (0, 1]."""
    group: str = "sample"
    """As for `Anderson`: with `"prefix"` position t has its own inverse, from inner products over positions up to t,
    so that nothing at t depends on later tokens (for a causal f). Without it, unconverged positions do."""

    def __post_init__(self) -> None:
        check_count("memory", self.memory)
        check_damping("damping", self.damping)
        check_group(self.group)

    def init(self, z_BPN: Tensor, tol: Tolerance) -> BroydenMemory:
        size, groups, width = z_BPN.shape
        room = min(self.memory, 8)
        zeros = functools.partial(torch.zeros, dtype=torch.float64, device=z_BPN.device)
        return BroydenMemory(
            dz_BPMN=z_BPN.new_empty(size, groups, room, width),
            df_BPMN=z_BPN.new_empty(size, groups, room, width),
            k_BPMM=zeros(size, groups, room, room),
            squares_BPM=zeros(size, groups, room),
            dots_BPM=zeros(size, groups, room),
        )

    def step(self, at: Evaluation, state: BroydenMemory) -> tuple[Tensor, BroydenMemory]:
        z_BPN, fz_BPN = at.z_BPN, at.fz_BPN
        if state.last is None:
            state.last = (at.residual_BPN, fz_BPN)
            return torch.lerp(z_BPN, fz_BPN, self.damping), state

        dots_BPM = self._remember(state, at)
        n = state.used
        weights_BPM = state.solve(state.k_BPMM[:, :, :n, :n], dots_BPM)
        full_BPN = subtract_combination(fz_BPN, -weights_BPM, state.df_BPMN[:, :, :n])
        return (full_BPN if self.damping == 1 else torch.lerp(z_BPN, full_BPN, self.damping)), state

    def _remember(self, state: BroydenMemory, at: Evaluation) -> Tensor:
        """Put the newest pair in the place of the oldest; returns S'g."""
        assert state.last is not None
        if state.count == state.k_BPMM.shape[2] < self.memory:
            self._grow(state)
        slot = state.count % state.k_BPMM.shape[2]
        state.count += 1
        n = state.used
        last_g_BPN, last_fz_BPN = state.last
        state.last = (at.residual_BPN, at.fz_BPN)
        dg_BPN = at.residual_BPN - last_g_BPN
        df_BPN = torch.sub(at.fz_BPN, last_fz_BPN, out=state.df_BPMN[:, :, slot])
        dz_BPN = torch.sub(df_BPN, dg_BPN, out=state.dz_BPMN[:, :, slot])

        # Two passes over the memory give the newest row and column of K; the column is also what the change of g adds
        # to S'g.
        row_BPM = (dz_BPN.unsqueeze(2) @ state.df_BPMN[:, :, :n].mT).squeeze(2)
        column_BPM = (dg_BPN.unsqueeze(2) @ state.dz_BPMN[:, :, :n].mT).squeeze(2)
        square_BP = torch.linalg.vector_norm(dz_BPN, dim=2).square()
        changed_BP = torch.linalg.vector_norm(dg_BPN, dim=2).square()
        own_BP = torch.linalg.vecdot(dz_BPN, at.residual_BPN)
        scalars_BP3 = torch.stack((square_BP, changed_BP, own_BP), dim=2)
        small_BPS = torch.cat((row_BPM, column_BPM, scalars_BP3), dim=2).double()
        if self.group == "prefix":
            small_BPS = small_BPS.cumsum(1)
        row_BPM, column_BPM, scalars_BP3 = small_BPS.split((n, n, 3), dim=2)
        square_BP, changed_BP, own_BP = scalars_BP3.unbind(2)
        # A residual that has changed by no more than rounding: the pair drops out, or it would send z off.
        told_BP = changed_BP.sqrt() > at.rounding_BP
        state.k_BPMM[:, :, slot, :n] = -row_BPM
        state.k_BPMM[:, :, :n, slot] = -column_BPM
        state.dots_BPM[:, :, :n] += column_BPM
        state.squares_BPM[:, :, slot], state.dots_BPM[:, :, slot] = square_BP * told_BP, own_BP
        return state.dots_BPM[:, :, :n]

    def _grow(self, state: BroydenMemory) -> None:
        room = state.k_BPMM.shape[2]
        more = min(2 * room, self.memory) - room
        pad = torch.nn.functional.pad
        state.dz_BPMN, state.df_BPMN = pad(state.dz_BPMN, (0, 0, 0, more)), pad(state.df_BPMN, (0, 0, 0, more))
        state.k_BPMM = pad(state.k_BPMM, (0, more, 0, more))
        state.squares_BPM, state.dots_BPM = pad(state.squares_BPM, (0, more)), pad(state.dots_BPM, (0, more))
