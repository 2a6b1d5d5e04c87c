"""Newton's method without a Jacobian, for stiff cells and as a reference."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from deqkit.solve._krylov import KrylovState, combine, extend_basis, init_krylov, least_squares, restart, target_norm
from deqkit.solve._solver import AbstractSolver, Evaluation, check_count
from deqkit.solve._tolerance import Tolerance

# B samples, N numbers in a state

_DECREASE = 1e-4  # Armijo: the share of the promised decrease that a step must deliver
_SHORTEST = 2.0**-6  # a step is taken at this length even if the residual does not fall


@dataclasses.dataclass(frozen=True, slots=True)
class NewtonKrylov(AbstractSolver):
    """Newton's method on f(z) - z = 0: each step solves (I - J) dz = f(z) - z by GMRES, matrix free.

    Products with J are differences of f, so any f will do, and every product is one evaluation counted against
    `max_steps`. A step that does not lower the residual is halved. It finds equilibria that repel plain iteration, at
    a higher price than Anderson or Broyden where those converge. It needs float32 or better. Not causal.
    """

    inner_steps: int = 30
    """Products with J at most before a step is taken."""
    _: dataclasses.KW_ONLY
    forcing: float = 0.1
    """How well each linear system is solved: reduction of its residual, in (0, 1)."""

    def __post_init__(self) -> None:
        check_count("inner_steps", self.inner_steps)
        if not 0 < self.forcing < 1:
            raise ValueError(f"forcing must be in (0, 1), got {self.forcing!r}")

    @property
    def num_probes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.inner_steps

    def init(self, z_BPN: Tensor, tol: Tolerance) -> tuple[KrylovState, Tolerance]:
        return init_krylov(z_BPN.squeeze(1), self.inner_steps), tol

    def step(
        self, at: Evaluation, state: tuple[KrylovState, Tolerance]
    ) -> tuple[Tensor, tuple[KrylovState, Tolerance]]:
        krylov, tol = state
        z_BN, fz_BN = at.z_BPN.squeeze(1), at.fz_BPN.squeeze(1)
        tried_B = ~krylov.probing_B
        extend_basis(krylov, fz_BN)
        y_BM, predicted_B, size_B = least_squares(krylov)
        enough_B = torch.maximum(self.forcing * krylov.norm_B.double(), target_norm(tol, size_B))
        ready_B = krylov.probing_B & ((predicted_B <= enough_B) | (krylov.index_B >= self.inner_steps))
        if bool(ready_B.any()):
            krylov.direction_BN = torch.where(ready_B.unsqueeze(1), combine(krylov, y_BM), krylov.direction_BN)
            krylov.length_B = torch.where(ready_B, 1, krylov.length_B)

        norm_B = at.norm_BP.squeeze(1).to(z_BN.dtype)
        fell_B = norm_B <= (1 - _DECREASE * krylov.length_B) * krylov.norm_B
        accepted_B = tried_B & (fell_B | (krylov.length_B <= _SHORTEST))
        krylov.length_B = torch.where(tried_B & ~accepted_B, krylov.length_B / 2, krylov.length_B)
        krylov.probing_B = krylov.probing_B & ~ready_B
        restart(krylov, z_BN, fz_BN, norm_B, accepted_B)
        # Half the digits for the difference, half for its truncation error.
        size_B = 1 + torch.linalg.vector_norm(krylov.base_z_BN, dim=1)
        krylov.reach_B = torch.where(accepted_B, torch.finfo(z_BN.dtype).eps ** 0.5 * size_B, krylov.reach_B)

        samples_B = torch.arange(z_BN.shape[0], device=z_BN.device)
        probe_BN = krylov.reach_B.unsqueeze(1) * krylov.basis_BMN[samples_B, krylov.index_B]
        trial_BN = krylov.length_B.unsqueeze(1) * krylov.direction_BN
        offset_BN = torch.where(krylov.probing_B.unsqueeze(1), probe_BN, trial_BN)
        return (krylov.base_z_BN + offset_BN).unsqueeze(1), (krylov, tol)
