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
    factor_BPMM, _ = torch.linalg.cholesky_ex(scaled_BPMM)
    gamma_BPM = torch.cholesky_solve((rhs_BPM * scale_BPM).unsqueeze(3), factor_BPMM).squeeze(3) * scale_BPM
    finite_BP = torch.isfinite(gamma_BPM).all(2, keepdim=True)
    return torch.where(finite_BP, gamma_BPM, 0)


def solve_or_zero(matrix_BMM: Tensor, rhs_BM: Tensor) -> Tensor:
    """K^-1 b per sample, and zeros where K is singular or not finite, i.e. a plain step."""
    matrix_BMM = torch.nan_to_num(matrix_BMM, nan=0.0, posinf=0.0, neginf=0.0)
    solution_BM, failed_B = torch.linalg.solve_ex(matrix_BMM, rhs_BM)
    usable_B1 = (failed_B == 0).unsqueeze(1) & torch.isfinite(solution_BM).all(1, keepdim=True)
    return torch.where(usable_B1, solution_BM, 0)
