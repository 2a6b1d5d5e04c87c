"""Fixed-point problems whose answers do not come from deqkit: closed forms, or a dense Newton in float64.

`PROBLEMS` lists the makers; each takes a dtype. The state is batch first; everything that belongs to a sample is in
`args`, so that solves can compact. `SOLVERS` lists what the contract suite runs: adding a solver is one line.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from deqkit.solve import GMRES, Anderson, Broyden, Evaluation, Fallback, FixedPointIteration, NewtonKrylov

# B samples, N numbers in a state, T positions, D width

SOLVERS = {
    "plain": FixedPointIteration(),
    "damped": FixedPointIteration(damping=0.4),
    "plain-prefix": FixedPointIteration(group="prefix"),
    "anderson": Anderson(),
    "anderson-mixing": Anderson(memory=3, mixing=0.5),
    "anderson-prefix": Anderson(group="prefix"),
    "broyden": Broyden(memory=60),
    "broyden-small": Broyden(memory=3),
    "broyden-damped": Broyden(damping=0.7),
    "broyden-prefix": Broyden(group="prefix"),
    "newton-krylov": NewtonKrylov(),
    "gmres": GMRES(),
    "gmres-restarted": GMRES(restart=3),
    "fallback": Fallback(Anderson(), NewtonKrylov()),
}


def evaluation(z_BPN: Tensor, fz_BPN: Tensor) -> Evaluation:
    """What the loop tells a solver, for steps by hand."""
    residual_BPN = fz_BPN - z_BPN
    norm_BP, scale_BP = (torch.linalg.vector_norm(x_BPN, dim=2).double() for x_BPN in (residual_BPN, fz_BPN))
    return Evaluation(z_BPN, fz_BPN, residual_BPN, norm_BP, scale_BP)


@dataclasses.dataclass(frozen=True, eq=False, kw_only=True)
class Problem:
    """z_star = f(z_star, *args), with what a solver must be able to do to find it from z0."""

    name: str
    f: Callable[..., Any]
    z0: Any
    args: tuple[Any, ...]
    z_star: Any
    affine: bool = False
    contracts: bool = True
    """Plain iteration converges."""
    causal: bool = False
    """The state is (B, T, ...) and position t of f depends on positions up to t alone."""
    hard_for: tuple[str, ...] = ()
    """Solvers that may fail here, by name, for the reason given where the problem is made."""

    def solved_by(self, name: str) -> bool:
        solver = SOLVERS[name]
        if name in self.hard_for or (solver.group == "prefix" and not self.causal):
            return False
        if isinstance(solver, GMRES):
            return self.affine
        return self.contracts or name not in ("plain", "plain-prefix")


def leaves(state: Any) -> list[Tensor]:
    """The tensors of a state, dicts by sorted key."""
    if isinstance(state, Tensor):
        return [state]
    return [state[key] for key in sorted(state)] if isinstance(state, dict) else list(state)


def flat(state: Any) -> Tensor:
    """A state as one row a sample."""
    return torch.cat([t.flatten(1) for t in leaves(state)], dim=1)


def relative_residual(f: Callable[..., Any], z: Any, args: tuple[Any, ...] = ()) -> Tensor:
    """||f(z) - z|| / ||f(z)|| per sample, the definition."""
    fz = flat(f(z, *args))
    return (fz - flat(z)).norm(dim=1) / fz.norm(dim=1)


def affine_map(z_BN: Tensor, a_BNN: Tensor, b_BN: Tensor) -> Tensor:
    # Multiply and sum, so that a sample's bits cannot depend on the size of the batch.
    return (a_BNN * z_BN.unsqueeze(1)).sum(2) + b_BN


def affine_problem(name: str, a_BNN: Tensor, b_BN: Tensor, dtype: torch.dtype, **traits: Any) -> Problem:
    """z = A z + b with z* = (I - A)^-1 b, from float64 A and b."""
    z_star_BN = torch.linalg.solve(torch.eye(a_BNN.shape[1]).double() - a_BNN, b_BN)
    a_BNN, b_BN, z_star_BN = a_BNN.to(dtype), b_BN.to(dtype), z_star_BN.to(dtype)
    z0_BN = torch.zeros_like(b_BN)
    return Problem(name=name, f=affine_map, z0=z0_BN, args=(a_BNN, b_BN), z_star=z_star_BN, affine=True, **traits)


def contraction(*, norm: float, batch: int, size: int, seed: int, dtype: torch.dtype = torch.float64) -> Problem:
    """A random linear map of the given spectral norm."""
    a_BNN, b_BN = normal(seed, batch, size, size), normal(seed + 1, batch, size)
    a_BNN = a_BNN * (norm / torch.linalg.matrix_norm(a_BNN, 2))[:, None, None]
    return affine_problem(f"contraction {norm}", a_BNN, b_BN, dtype)


def linear(dtype: torch.dtype) -> Problem:
    return contraction(norm=0.8, batch=4, size=6, seed=0, dtype=dtype)


def non_normal(dtype: torch.dtype) -> Problem:
    """Spectral radius 0.4, yet powers of A grow fortyfold first."""
    a_BNN = 0.4 * torch.eye(5).double() + 2 * torch.diag(torch.ones(4).double(), 1)
    hard_for = ("gmres-restarted",)  # so does that of scipy: three directions are not enough here
    return affine_problem("non-normal", a_BNN.expand(3, 5, 5), normal(2, 3, 5), dtype, hard_for=hard_for)


def expansive(dtype: torch.dtype) -> Problem:
    """Eigenvalues down to -3: plain iteration diverges, the fixed point is well conditioned."""
    q_BNN, _ = torch.linalg.qr(normal(3, 3, 5, 5))
    eigenvalues_N = torch.tensor([-3.0, -1.5, -0.5, 0.2, 0.5]).double()
    a_BNN = q_BNN @ (eigenvalues_N.unsqueeze(1) * q_BNN.mT)
    return affine_problem("expansive", a_BNN, normal(4, 3, 5), dtype, contracts=False)


def tanh(dtype: torch.dtype) -> Problem:
    """z = 2 tanh(W z / 2 + x), ||W|| = 0.9."""
    w_NN = normal(5, 6, 6)
    w_NN = 0.9 * w_NN / torch.linalg.matrix_norm(w_NN, 2)

    def f(z_BN: Tensor, x_BN: Tensor) -> Tensor:
        return 2 * torch.tanh((w_NN.to(z_BN.dtype) * z_BN.unsqueeze(1) / 2).sum(2) + x_BN)

    return newton_problem("tanh", f, torch.zeros(4, 6), (normal(6, 4, 6),), dtype)


def two_tensors(dtype: torch.dtype) -> Problem:
    """A tuple of tensors of different shapes that feed each other."""
    w = normal(7, 4, 3) / 4

    def f(z: tuple[Tensor, Tensor], x: Tensor) -> tuple[Tensor, Tensor]:
        first, second = z
        joint = torch.tanh(second.flatten(1) @ w.to(x.dtype) + x)
        return joint, 0.5 * torch.sin(joint @ w.mT.to(x.dtype) + first[:, :1]).unflatten(1, (2, 2))

    return newton_problem("two tensors", f, (torch.zeros(3, 3), torch.zeros(3, 2, 2)), (normal(8, 3, 3),), dtype)


def dict_state(dtype: torch.dtype) -> Problem:
    """h = 0.5 c + x, c = 0.4 h - 1, returned in another order than it came; h* = (x - 0.5) / 0.8."""

    def f(z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        return {"c": 0.4 * z["h"] - 1, "h": 0.5 * z["c"] + x}

    x = normal(9, 3, 4)
    h = (x - 0.5) / 0.8
    z_star = {"h": h.to(dtype), "c": (0.4 * h - 1).to(dtype)}
    z0 = {"h": torch.ones_like(z_star["h"]), "c": torch.zeros_like(z_star["h"])}
    return Problem(name="dict", f=f, z0=z0, args=(x.to(dtype),), z_star=z_star, affine=True)


def causal_mixing(dtype: torch.dtype, *, batch: int = 3, length: int = 6, seed: int = 10) -> Problem:
    """z_t = tanh(W mean of z_s over s <= t + x_t)."""
    w_DD = normal(seed, 3, 3)
    w_DD = 0.9 * w_DD / torch.linalg.matrix_norm(w_DD, 2)

    def f(z_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        counts_T1 = torch.arange(1, z_BTD.shape[1] + 1, dtype=z_BTD.dtype).unsqueeze(1)
        mean_BTD = z_BTD.cumsum(1) / counts_T1
        return torch.tanh((w_DD.to(z_BTD.dtype) * mean_BTD.unsqueeze(2)).sum(3) + x_BTD)

    x_BTD = normal(seed + 1, batch, length, 3)
    return newton_problem("causal mixing", f, torch.zeros(batch, length, 3), (x_BTD,), dtype, causal=True)


def causal_attention(dtype: torch.dtype, *, batch: int = 2, length: int = 6, gain: float = 1.0) -> Problem:
    """z = tanh(softmax(q k') v + x) with causal attention and the input in q, k and v."""
    w_3DD = gain * normal(12, 3, 4, 4) / 2

    def f(z_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        q_BTD, k_BTD, v_BTD = ((z_BTD + x_BTD) @ w_DD for w_DD in w_3DD.to(z_BTD.dtype))
        future_TT = torch.ones(z_BTD.shape[1], z_BTD.shape[1], dtype=torch.bool).triu(1)
        scores_BTT = (q_BTD @ k_BTD.mT / 2).masked_fill(future_TT, float("-inf"))
        return torch.tanh(scores_BTT.softmax(-1) @ v_BTD + x_BTD)

    x_BTD = normal(13, batch, length, 4)
    return newton_problem("causal attention", f, torch.zeros(batch, length, 4), (x_BTD,), dtype, causal=True)


PROBLEMS = (linear, non_normal, expansive, tanh, two_tensors, dict_state, causal_mixing, causal_attention)


def transformer_cell(width: int = 32, heads: int = 2) -> tuple[Callable[[Tensor, Tensor], Tensor], Tensor]:
    """Post-LN causal block, N(0, 0.05 * sqrt(256 / width)): the gain of the cell in PEERS.md 4, smaller.

    Plain iteration takes 61 evaluations to 1e-3 and 109 to 1e-5 (float32).
    """
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) * 0.05 * (256 / width) ** 0.5

    qkv, inject, project = draw(width, 3 * width), draw(width, 3 * width), draw(width, width)
    up, down = draw(width, 4 * width), draw(4 * width, width)

    def cell(z_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        parts = (z_BTD @ qkv + x_BTD @ inject).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        mixed_BTD = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        u_BTD = F.layer_norm(z_BTD + mixed_BTD @ project, (width,))
        return F.layer_norm(u_BTD + F.relu(u_BTD @ up) @ down, (width,))

    return cell, torch.randn(2, 48, width, generator=generator)


def without_fixed_point(z: Tensor) -> Tensor:
    return z + 1


def nan_in_marked_samples(f: Callable[..., Tensor], *, evaluation: int = 3) -> Callable[..., Tensor]:
    """f with one more argument, a mask over samples: those are nan from this evaluation on."""
    count = 0

    def wrapped(z_B: Tensor, *args: Any) -> Tensor:
        nonlocal count
        count += 1
        fz_B, marked_B = f(z_B, *args[:-1]), args[-1]
        marked_B = marked_B.view(-1, *[1] * (fz_B.ndim - 1))
        return torch.where(marked_B & (count >= evaluation), float("nan"), fz_B)

    return wrapped


def normal(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def newton_problem(
    name: str, f: Callable[..., Any], z0: Any, args: tuple[Tensor, ...], dtype: torch.dtype, **traits: Any
) -> Problem:
    """The problem in `dtype`, answered by plain iteration and Newton's method with a dense Jacobian in float64."""
    shapes = [t.shape for t in leaves(z0)]

    def unflat(z_BN: Tensor, to: torch.dtype) -> Any:
        parts = z_BN.to(to).split([shape[1:].numel() for shape in shapes], dim=1)
        tensors = tuple(part.reshape(shape) for part, shape in zip(parts, shapes, strict=True))
        return tensors[0] if isinstance(z0, Tensor) else tensors

    def g(z_N: Tensor) -> Tensor:
        z_BN = z_N.view(shapes[0][0], -1)
        return (flat(f(unflat(z_BN, torch.float64), *args)) - z_BN).flatten()

    z_N = flat(z0).double().flatten()
    for _ in range(100):  # plain iteration first: Newton converges from nearby
        z_N = z_N + g(z_N)
    for _ in range(4):
        z_N = z_N - torch.linalg.solve(torch.func.jacrev(g)(z_N), g(z_N))
    assert g(z_N).abs().max() < 1e-13, f"{name}: the reference solution is not one"
    z_star_BN = z_N.view(shapes[0][0], -1)
    return Problem(
        name=name,
        f=f,
        z0=unflat(torch.zeros_like(z_star_BN), dtype),
        args=tuple(t.to(dtype) for t in args),
        z_star=unflat(z_star_BN, dtype),
        **traits,
    )
