"""GMRES as a proposer of points: every product with I - J is one evaluation of f by the loop.

Samples advance on their own: while one probes f along its next basis vector, another tries its finished step.
"""

from __future__ import annotations

import dataclasses
import functools

import torch
from torch import Tensor

from deqkit.solve._packing import OWNED
from deqkit.solve._tolerance import Tolerance

# B samples, N numbers in a state, M room for basis vectors


@dataclasses.dataclass
class KrylovState:
    """Where every sample stands. `base` is the point at which J is probed, `basis` spans the Krylov space there."""

    base_z_BN: Tensor
    base_f_BN: Tensor
    norm_B: Tensor
    """||f - z|| at the base point."""
    basis_BMN: Tensor = dataclasses.field(metadata=OWNED)
    hessenberg_BMM: Tensor
    projection_BM: Tensor
    """Inner products of the base point with the basis, for the length of the solution."""
    index_B: Tensor
    """The basis vector along which f is probed now."""
    probing_B: Tensor
    """Whether the point just evaluated was a probe; otherwise it was a candidate."""
    reach_B: Tensor
    """Distance of probes from the base point."""
    direction_BN: Tensor
    length_B: Tensor
    """The step from the base point that is being tried, and the share of it taken."""
    high: int = 0
    """No sample uses basis vectors at or above this."""


def init_krylov(z_BN: Tensor, room: int) -> KrylovState:
    size, width = z_BN.shape
    zeros = functools.partial(torch.zeros, dtype=torch.float64, device=z_BN.device)
    return KrylovState(
        base_z_BN=z_BN,
        base_f_BN=z_BN,
        norm_B=z_BN.new_full((size,), float("inf")),
        basis_BMN=z_BN.new_zeros(size, min(room, 8) + 1, width),
        hessenberg_BMM=zeros(size, room + 1, room),
        projection_BM=zeros(size, room + 1),
        index_B=torch.zeros(size, dtype=torch.int64, device=z_BN.device),
        probing_B=torch.zeros(size, dtype=torch.bool, device=z_BN.device),
        reach_B=z_BN.new_zeros(size),
        direction_BN=z_BN,
        length_B=z_BN.new_ones(size),
    )


def extend_basis(state: KrylovState, fz_BN: Tensor) -> None:
    """One Arnoldi step for the samples that were probing: w = -J v or (I - J) v, made orthogonal to the basis.

    Both span the same space. Of (I - J) v most may be v itself, which J v is spared; where J is close to I it is the
    other way round, and 1 - v.Jv would be lost to cancellation.
    """
    room = state.hessenberg_BMM.shape[2]
    high = state.high = min(state.high + 1, room)
    _grow(state, high + 1)
    samples_B = torch.arange(fz_BN.shape[0], device=fz_BN.device)
    # Samples that are not probing go through the motions on a column of theirs, which is put back in the end.
    column_B = state.index_B.clamp_max(high - 1)
    row_B = column_B + 1
    jv_BN = (fz_BN - state.base_f_BN) / state.reach_B.unsqueeze(1)
    w_BN = state.basis_BMN[samples_B, column_B] - jv_BN
    close_B = torch.linalg.vector_norm(w_BN, dim=1) < 0.5 * torch.linalg.vector_norm(jv_BN, dim=1)
    w_BN = torch.where(close_B.unsqueeze(1), w_BN, -jv_BN)
    basis_BMN = state.basis_BMN[:, :high]
    coefficients_BM = torch.zeros_like(state.hessenberg_BMM[:, :, 0])
    coefficients_BM[samples_B, column_B] = (~close_B).double()  # of I, where w has none of it; those of w follow
    length_B = whole_B = torch.linalg.vector_norm(w_BN, dim=1)
    again_B = torch.ones_like(state.probing_B)
    # Gram-Schmidt twice is orthogonal to rounding; once is enough for samples of which not much was taken away.
    for _ in range(2):
        dots_B1M = torch.where(again_B.view(-1, 1, 1), w_BN.unsqueeze(1) @ basis_BMN.mT, 0)
        w_BN = torch.baddbmm(w_BN.unsqueeze(1), dots_B1M, basis_BMN, alpha=-1).squeeze(1)
        coefficients_BM[:, :high] += dots_B1M.squeeze(1).double()
        length_B = torch.linalg.vector_norm(w_BN, dim=1)
        again_B = length_B < 0.5 * whole_B
        if not bool(again_B.any()):
            break
    coefficients_BM[samples_B, row_B] = length_B.double()
    noise_B1 = 8 * torch.finfo(w_BN.dtype).eps * (1 + whole_B.double().unsqueeze(1))
    coefficients_BM = torch.where(coefficients_BM.abs() <= noise_B1, 0, coefficients_BM)
    new_BN = w_BN / length_B.clamp_min(torch.finfo(w_BN.dtype).tiny).unsqueeze(1)
    projection_B = (new_BN * state.base_z_BN).sum(1).double()

    probing_B, probing_B1 = state.probing_B, state.probing_B.unsqueeze(1)
    old_BM = state.hessenberg_BMM[samples_B, :, column_B]
    state.hessenberg_BMM[samples_B, :, column_B] = torch.where(probing_B1, coefficients_BM, old_BM)
    state.basis_BMN[samples_B, row_B] = torch.where(probing_B1, new_BN, state.basis_BMN[samples_B, row_B])
    old_B = state.projection_BM[samples_B, row_B]
    state.projection_BM[samples_B, row_B] = torch.where(probing_B, projection_B, old_B)
    state.index_B = torch.where(probing_B, row_B, state.index_B)


def least_squares(state: KrylovState) -> tuple[Tensor, Tensor, Tensor]:
    """The best step in the Krylov space: its coefficients, the residual it predicts, the size of the new point."""
    high = state.high
    # Columns that a sample has not filled get a 1 in a row of their own, so their coefficients are exactly zero.
    hessenberg_BMM = state.hessenberg_BMM[:, : high + 1, :high].clone()
    columns_M = torch.arange(high, device=hessenberg_BMM.device)
    unused_BM = columns_M >= state.index_B.unsqueeze(1)
    hessenberg_BMM = torch.where(unused_BM.unsqueeze(1), 0, hessenberg_BMM)
    hessenberg_BMM[:, columns_M + 1, columns_M] += unused_BM.double()
    rhs_BM = torch.zeros_like(hessenberg_BMM[:, :, 0])
    rhs_BM[:, 0] = state.norm_B.double()
    q_BMM, r_BMM = torch.linalg.qr(hessenberg_BMM)
    rotated_BM1 = q_BMM.mT @ rhs_BM.unsqueeze(2)
    y_BM = torch.linalg.solve_triangular(r_BMM, rotated_BM1, upper=True).squeeze(2)
    y_BM = torch.where(torch.isfinite(y_BM), y_BM, 0)
    misfit_BM = rhs_BM - (hessenberg_BMM @ y_BM.unsqueeze(2)).squeeze(2)
    predicted_B = torch.linalg.vector_norm(misfit_BM, dim=1)
    base_B = torch.linalg.vector_norm(state.base_z_BN, dim=1).double()
    cross_B = (y_BM * state.projection_BM[:, :high]).sum(1)
    size_B = (base_B.square() + 2 * cross_B + y_BM.square().sum(1)).clamp_min(0).sqrt()
    return y_BM, predicted_B, size_B


def combine(state: KrylovState, y_BM: Tensor) -> Tensor:
    """The step with these coefficients: a pass over the whole basis, so only for those who take it."""
    return (y_BM.to(state.basis_BMN.dtype).unsqueeze(1) @ state.basis_BMN[:, : state.high]).squeeze(1)


def restart(state: KrylovState, z_BN: Tensor, fz_BN: Tensor, norm_B: Tensor, where_B: Tensor) -> None:
    """Make the point just evaluated the base of a new Krylov space for the samples `where_B`."""
    if not bool(where_B.any()):
        return
    chosen_B1 = where_B.unsqueeze(1)
    safe_B1 = norm_B.clamp_min(torch.finfo(norm_B.dtype).tiny).unsqueeze(1)
    state.base_z_BN = torch.where(chosen_B1, z_BN, state.base_z_BN)
    state.base_f_BN = torch.where(chosen_B1, fz_BN, state.base_f_BN)
    state.norm_B = torch.where(where_B, norm_B, state.norm_B)
    state.index_B = torch.where(where_B, 0, state.index_B)
    state.probing_B = state.probing_B | where_B
    first_BN = torch.where(chosen_B1, (fz_BN - z_BN) / safe_B1, state.basis_BMN[:, 0])
    state.basis_BMN[:, 1 : state.high + 1].masked_fill_(where_B.view(-1, 1, 1), 0)
    state.basis_BMN[:, 0] = first_BN
    state.projection_BM.masked_fill_(chosen_B1, 0)
    state.projection_BM[:, 0] = (first_BN * state.base_z_BN).sum(1).double()


def target_norm(tol: Tolerance, size_B: Tensor) -> Tensor:
    """The residual to aim at: a hair below what the loop asks, as it measures what we only predict."""
    return 0.999 * tol.bound(size_B, 1)


def _grow(state: KrylovState, needed: int) -> None:
    room = state.basis_BMN.shape[1]
    if needed <= room:
        return
    limit = state.hessenberg_BMM.shape[1]
    state.basis_BMN = torch.nn.functional.pad(state.basis_BMN, (0, 0, 0, min(2 * room, limit) - room))
