"""How stiff an equilibrium is, as numbers to look at and as penalties to train with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from deqkit.adjoint._graph import transposed_product, twice_differentiable
from deqkit.solve._packing import Packing

# B samples, P = 1, N numbers in a state, M Krylov vectors


def jacobian_penalty(
    f: Callable[..., Any],
    z: Any,
    args: tuple[Any, ...] = (),
    *,
    probes: int = 1,
    generator: torch.Generator | None = None,
) -> Tensor:
    """Hutchinson's estimate of ||J||_F^2 / N, the mean over the batch, differentiable in what f touches.

    E ||v'J||^2 = ||J||_F^2 for v ~ N(0, I). Costs one evaluation of f and `probes` products with a graph. Add it to
    the loss with a small weight to keep the solve easy (Bai et al. 2021); z is held fixed.
    """
    if probes < 1:
        raise ValueError(f"probes must be at least 1, got {probes}")
    value_BPN, at_BPN = _evaluate(f, z, args)
    total = value_BPN.new_zeros(())
    for _ in range(probes):
        v_BPN = _normal_like(value_BPN, generator)
        total = total + transposed_product(value_BPN, at_BPN, v_BPN, create_graph=True).square().sum()
    return total / (probes * max(value_BPN.numel(), 1))


def spectral_penalty(
    f: Callable[..., Any],
    z: Any,
    args: tuple[Any, ...] = (),
    *,
    steps: int = 3,
    threshold: float = 1.0,
    generator: torch.Generator | None = None,
) -> Tensor:
    """A hinge on the dominant mode: mean over the batch of relu(||J'q|| - threshold)^2.

    q comes from `steps` power iterations with J' per sample, without a graph. A few outlying modes are what makes
    trained cells stiff; this reaches them and leaves the rest of J alone. z is held fixed.
    """
    if steps < 0:
        raise ValueError(f"steps must be at least 0, got {steps}")
    value_BPN, at_BPN = _evaluate(f, z, args)
    q_BPN = _unit(_normal_like(value_BPN, generator))
    for _ in range(steps):
        q_BPN = _unit(transposed_product(value_BPN, at_BPN, q_BPN, create_graph=False))
    sigma_B = torch.linalg.vector_norm(transposed_product(value_BPN, at_BPN, q_BPN, create_graph=True), dim=(1, 2))
    return torch.relu(sigma_B - threshold).square().mean()


def spectral_radius(
    f: Callable[..., Any],
    z: Any,
    args: tuple[Any, ...] = (),
    *,
    steps: int = 40,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The largest |eigenvalue| of J = df/dz per sample, by `steps` Arnoldi steps with J' (which has the same ones).

    Right for complex pairs, where a power iteration with a Rayleigh quotient is not. Plain iteration converges
    locally if and only if this is below one.
    """
    if steps < 1:
        raise ValueError(f"steps must be at least 1, got {steps}")
    value_BPN, at_BPN = _evaluate(f, z, args)
    with torch.no_grad():
        size, _, width = value_BPN.shape
        steps = min(steps, width)
        basis_BMN = value_BPN.new_zeros(size, steps + 1, width)
        hessenberg_BMM = torch.zeros(size, steps + 1, steps, dtype=torch.float64, device=value_BPN.device)
        basis_BMN[:, :1] = _unit(_normal_like(value_BPN, generator))
        # What is left of a vector after its projection is noise if it is this small: the space is exhausted.
        noise = 100 * torch.finfo(value_BPN.dtype).eps
        for step in range(steps):
            w_B1N = transposed_product(value_BPN, at_BPN, basis_BMN[:, step : step + 1], create_graph=False)
            before_B = torch.linalg.vector_norm(w_B1N, dim=(1, 2))
            for _ in range(2):
                dots_B1M = w_B1N @ basis_BMN[:, : step + 1].mT
                w_B1N = w_B1N - dots_B1M @ basis_BMN[:, : step + 1]
                hessenberg_BMM[:, : step + 1, step] += dots_B1M.squeeze(1).double()
            length_B = torch.linalg.vector_norm(w_B1N, dim=(1, 2))
            length_B = torch.where(length_B > noise * before_B, length_B, 0)
            hessenberg_BMM[:, step + 1, step] = length_B.double()
            basis_BMN[:, step + 1 : step + 2] = torch.where(length_B.view(-1, 1, 1) > 0, _unit(w_B1N), 0)
        return torch.linalg.eigvals(hessenberg_BMM[:, :steps]).abs().amax(1).to(value_BPN.dtype)


def _evaluate(f: Callable[..., Any], z: Any, args: tuple[Any, ...]) -> tuple[Tensor, Tensor]:
    packing = Packing.of(z, causal=False)
    at_BPN = packing.pack(z).detach().clone().requires_grad_()
    with torch.enable_grad(), twice_differentiable():
        return packing.pack(f(packing.unpack(at_BPN), *args)), at_BPN


def _normal_like(tensor: Tensor, generator: torch.Generator | None) -> Tensor:
    return torch.randn(tensor.shape, dtype=tensor.dtype, device=tensor.device, generator=generator)


def _unit(v_BPN: Tensor) -> Tensor:
    length_B11 = torch.linalg.vector_norm(v_BPN, dim=(1, 2), keepdim=True)
    return v_BPN / length_B11.clamp_min(torch.finfo(v_BPN.dtype).tiny)
