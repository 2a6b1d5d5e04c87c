"""Small dense systems, one a sample or one a position, always in float64 and always finite."""

from __future__ import annotations

import torch
from torch import Tensor

# B samples, P groups of positions, M unknowns


def solve_normal_equations(gram_BPMM: Tensor, rhs_BPM: Tensor, *, ridge: float, floor_BP: Tensor) -> Tensor:
    """argmin_gamma ||r - R gamma|| from R'R and R'r, regularised relative to the problem.

    Columns of R are scaled to length one before `ridge` is added to the diagonal, so the result does not depend on
    the units of the problem; columns no longer than sqrt(floor) are noise and fade out. Rows or columns that are not
    finite (a sample that overflowed) give zeros, i.e. a plain step.
    """
    square_BPM = gram_BPMM.diagonal(dim1=2, dim2=3) + floor_BP.unsqueeze(2)
    scale_BPM = square_BPM.clamp_min(torch.finfo(square_BPM.dtype).tiny).rsqrt()
    scaled_BPMM = gram_BPMM * scale_BPM.unsqueeze(3) * scale_BPM.unsqueeze(2)
    scaled_BPMM.diagonal(dim1=2, dim2=3).fill_(1 + ridge)
    # Not by Cholesky's method, which would do: many small systems, one a position, take it twice as long.
    solution_BPM, _ = torch.linalg.solve_ex(scaled_BPMM, rhs_BPM * scale_BPM)
    gamma_BPM = solution_BPM * scale_BPM
    finite_BP = torch.isfinite(gamma_BPM).all(2, keepdim=True)
    return torch.where(finite_BP, gamma_BPM, 0)


def subtract_combination(start_BPN: Tensor, weights_BPM: Tensor, rows_BPMN: Tensor) -> Tensor:
    """start - sum_m weights_m rows_m, in one pass."""
    weights_BP1M = weights_BPM.to(start_BPN.dtype).unsqueeze(2)
    flat = torch.baddbmm(
        start_BPN.unsqueeze(2).flatten(0, 1), weights_BP1M.flatten(0, 1), rows_BPMN.flatten(0, 1), alpha=-1
    )
    return flat.view_as(start_BPN)


def solve_or_zero(matrix_BPMM: Tensor, rhs_BPM: Tensor, squares_BPM: Tensor) -> Tensor:
    """K^-1 b, row and column i scaled by 1/sqrt(squares_i); zeros, i.e. a plain step, where that is not possible.

    Rows whose scale is zero (a position that no longer moves) drop out.
    """
    moving_BPM = squares_BPM > 0
    scale_BPM = torch.where(moving_BPM, squares_BPM, 1).rsqrt() * moving_BPM
    scaled_BPMM = matrix_BPMM * scale_BPM.unsqueeze(3) * scale_BPM.unsqueeze(2)
    scaled_BPMM.diagonal(dim1=2, dim2=3).add_((~moving_BPM).double())
    scaled_BPMM = torch.nan_to_num(scaled_BPMM, nan=0.0, posinf=0.0, neginf=0.0)
    solution_BPM, failed_BP = torch.linalg.solve_ex(scaled_BPMM, rhs_BPM * scale_BPM)
    solution_BPM = solution_BPM * scale_BPM
    usable_BP1 = (failed_BP == 0).unsqueeze(2) & torch.isfinite(solution_BPM).all(2, keepdim=True)
    return torch.where(usable_BP1, solution_BPM, 0)
