"""How wrong a gradient may be, judged from the solves it came from."""

from __future__ import annotations

import torch
from torch import Tensor

from deqkit.adjoint._graph import Equation, Linearised
from deqkit.solve import Solution, Tolerance

# B samples, P groups of positions, N numbers in a group


def gradient_error(forward: Solution, backward: Solution, size_B: Tensor) -> float:
    """Estimated relative error of the gradient, from the errors of z and of y; `size_B` is ||y||, a sample's weight.

    A residual is stretched by (I - J)^-1 into an error, by as much as the solves were seen to stretch it. An error in
    z moves dl/dz and df/dtheta by about as much (a loss and a cell that change over their own scale), and an error
    in y enters as it is. First order only: where f has kinks (ReLU) J may jump, and the true error be several times
    larger; `grad_rtol` looks at that too.
    """
    if not size_B.numel():
        return 0.0
    stretch_B = torch.fmax(forward.amplification, backward.amplification).nan_to_num(1.0)
    squared_B = (stretch_B * forward.residual).square() + (stretch_B * backward.residual).square()
    if forward.curvature is not None:
        squared_B = squared_B + forward.curvature.square()
    return _weighted_mean(squared_B, size_B.square()) ** 0.5


def forward_error(forward: Solution) -> float:
    """The part of it that is known before the backward pass, all samples weighed alike."""
    squared_B = (forward.amplification.nan_to_num(1.0) * forward.residual).square()
    if forward.curvature is not None:
        squared_B = squared_B + forward.curvature.square()
    return _weighted_mean(squared_B, torch.ones_like(squared_B)) ** 0.5


def _weighted_mean(values_B: Tensor, weights_B: Tensor) -> float:
    total = float(weights_B.sum())
    return float((values_B * weights_B).sum()) / total if total > 0 else 0.0


def measure_curvature(equation: Equation, z_BPN: Tensor, solution: Solution) -> Tensor:
    """How much J changes between z and the likely place of z*, as a relative error of y. Two evaluations and products.

    z* is about `amplification * (f(z) - z)` away, and a change D of J moves y by (I - J)^-T D'y; y is not known yet,
    so a random vector stands for it.
    """
    here = Linearised(equation, z_BPN)
    residual_BPN = here.value.detach() - z_BPN
    amplification_B = solution.amplification.nan_to_num(1.0)
    there = Linearised(equation, z_BPN + amplification_B.view(-1, 1, 1) * residual_BPN)
    generator = torch.Generator().manual_seed(0)
    w_BPN = torch.randn(z_BPN.shape, generator=generator, dtype=torch.float64).to(z_BPN)
    change_BPN = there.transposed(w_BPN) - here.transposed(w_BPN)
    size_B = torch.linalg.vector_norm(w_BPN, dim=(1, 2))
    return amplification_B * torch.linalg.vector_norm(change_BPN, dim=(1, 2)) / size_B


def next_tolerance(solution: Solution, error: float, grad_rtol: float, max_steps: int) -> Tolerance | None:
    """A tolerance for a solve whose share of the error exceeds a quarter of `grad_rtol`; None if it does not.

    A quarter, because there are two shares and estimates may be low.
    """
    if error <= grad_rtol / 4 or int(solution.num_evals.max()) >= max_steps - 1:
        return None
    factor = min(0.5, max(0.01, grad_rtol / (5 * error)))
    return Tolerance(rtol=factor * float(solution.residual.max()))
