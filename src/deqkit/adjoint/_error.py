"""How wrong a gradient may be, judged from the solves it came from."""

from __future__ import annotations

import math
from dataclasses import replace

import torch
from torch import Tensor

from deqkit.adjoint._graph import Equation, Linearised
from deqkit.solve import Solution, Tolerance
from deqkit.solve._batch import ratio

# B samples, P groups of positions, N numbers in a group


def gradient_error(
    forward: Solution, backward: Solution, size_B: Tensor, given_B: Tensor, curvature: Tensor | None
) -> float:
    """Estimated relative error of the gradient, from the errors of z and of y; `size_B` is ||y||, a sample's weight.

    A residual is stretched by (I - J)^-1 into an error, by as much as the solves were seen to stretch it, and no less
    than it stretches v to y (`given_B` is ||v||), which in a stiff sample may be far more. An error in
    z moves dl/dz and df/dtheta by about as much (a loss and a cell that change over their own scale), and an error
    in y enters as it is. What J changes between z and z* comes on top (`curvature`, of every sample or of one that
    stands for all): little for smooth cells, most of the error where f has kinks (ReLU). Without it, None, the
    estimate is of first order.
    """
    if not size_B.numel():
        return 0.0
    stretch_B = torch.fmax(_stretch(forward, backward), ratio(size_B, given_B))
    squared_B = (stretch_B * forward.residual).square() + (stretch_B * backward.residual).square()
    if curvature is not None:
        squared_B = squared_B + curvature.square()
    return _weighted_mean(squared_B, (size_B / size_B.max()).square()) ** 0.5  # whatever the scale of the loss


def _stretch(forward: Solution, backward: Solution) -> Tensor:
    return torch.fmax(forward.amplification, backward.amplification).nan_to_num(1.0)


def forward_error(forward: Solution) -> float:
    """The part of it that is known before the backward pass, all samples weighed alike."""
    squared_B = (forward.amplification.nan_to_num(1.0) * forward.residual).square()
    if forward.curvature is not None:
        squared_B = squared_B + forward.curvature.square()
    return _weighted_mean(squared_B, torch.ones_like(squared_B)) ** 0.5


def _weighted_mean(values_B: Tensor, weights_B: Tensor) -> float:
    total = float(weights_B.sum())
    return float((values_B * weights_B).sum()) / total if total > 0 else 0.0  # nan too: all weights are 0 / 0


def curvature_ahead(equation: Equation, z_BPN: Tensor, solution: Solution) -> Tensor:
    """The curvature at every sample before the backward pass: y is not known yet, so a random vector stands for it."""
    here = Linearised(equation, z_BPN)
    generator = torch.Generator().manual_seed(0)
    w_BPN = torch.randn(z_BPN.shape, generator=generator, dtype=torch.float64).to(z_BPN)
    stretch_B = solution.amplification.nan_to_num(1.0)
    error_BPN = stretch_B.view(-1, 1, 1) * (here.value.detach() - z_BPN)
    return stretch_B * _change_of_products(equation, z_BPN + error_BPN, w_BPN, here.transposed(w_BPN))


def curvature_from_one(
    equation: Equation, here: Linearised, v_BPN: Tensor, y_BPN: Tensor, forward: Solution, backward: Solution
) -> Tensor:
    """The curvature at every sample, measured at the one from which the error of z reaches the gradient most.

    The farther z is from z* the more J changes, and the more a sample stretches it: the others are judged by that.
    """
    stretch_B, away_B = _stretch(forward, backward), forward.amplification.nan_to_num(1.0) * forward.residual
    size_B = torch.linalg.vector_norm(y_BPN, dim=(1, 2), dtype=torch.float64)
    index_1 = (stretch_B * forward.residual * size_B).argmax().unsqueeze(0)
    parts = (here.source, here.value, v_BPN, y_BPN, forward.amplification.nan_to_num(1.0))
    z_1PN, fz_1PN, v_1PN, y_1PN, far_1 = (part.detach().index_select(0, index_1) for part in parts)
    ahead_1PN = z_1PN + far_1.view(-1, 1, 1) * (fz_1PN - z_1PN)
    change_1 = _change_of_products(equation.again(index=index_1), ahead_1PN, y_1PN, y_1PN - v_1PN)  # y = J'y + v
    return stretch_B * away_B * ratio(change_1, away_B.index_select(0, index_1))


def _change_of_products(equation: Equation, ahead_BPN: Tensor, y_BPN: Tensor, product_BPN: Tensor) -> Tensor:
    """||D'y|| / ||y||, where D is what J changes between z and the likely place of z*; one evaluation and product.

    That place is `amplification * (f(z) - z)` ahead, and D moves y by (I - J)^-T D'y. `product_BPN` is J'y at z.
    """
    change_BPN = Linearised(equation, ahead_BPN).transposed(y_BPN) - product_BPN
    change_B, size_B = (torch.linalg.vector_norm(x, dim=(1, 2), dtype=torch.float64) for x in (change_BPN, y_BPN))
    return ratio(change_B, size_B).to(y_BPN.dtype)


def next_tolerance(
    solution: Solution, tol: Tolerance, error: float, grad_rtol: float, max_steps: int
) -> Tolerance | None:
    """A tighter one than `tol` for a solve whose share of the error exceeds a quarter of `grad_rtol`; None otherwise.

    A quarter, because there are two shares and estimates may be low.
    """
    largest = float(solution.residual.max())  # not finite where the state is empty, or its equilibrium zero
    if error <= grad_rtol / 4 or not math.isfinite(largest) or int(solution.num_evals.max()) >= max_steps - 1:
        return None
    factor = min(0.5, max(0.01, grad_rtol / (5 * error)))
    return replace(tol, rtol=factor * largest, atol=factor * tol.atol)
