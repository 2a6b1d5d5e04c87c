"""GMRES for affine f, such as the backward system of an equilibrium."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from deqkit.solve._krylov import KrylovState, combine, extend_basis, init_krylov, least_squares, restart, target_norm
from deqkit.solve._solver import AbstractSolver, Evaluation, check_count
from deqkit.solve._tolerance import Tolerance

# B samples, N numbers in a state


@dataclasses.dataclass(frozen=True, slots=True)
class GMRES(AbstractSolver):
    """Restarted GMRES per sample for an f that is affine in z: the smallest residual over the Krylov space.

    Meant for backward solves (`Implicit(solver=GMRES())`), whose f is `y -> J'y + v`. On an f that is not affine it
    does not converge; use `NewtonKrylov` there. Points that the loop evaluates are probes until the recurrence
    predicts a residual below the tolerance; then the solution is formed and checked. Memory: `restart + 3` states.
    """

    restart: int = 30
    """Basis vectors before the space is rebuilt from the current solution."""

    def __post_init__(self) -> None:
        check_count("restart", self.restart)

    @property
    def num_probes(self) -> int:  # pyright: ignore[reportIncompatibleVariableOverride]
        return self.restart

    def init(self, z_BPN: Tensor, tol: Tolerance) -> tuple[KrylovState, Tolerance]:
        return init_krylov(z_BPN.squeeze(1), self.restart), tol

    def step(
        self, at: Evaluation, state: tuple[KrylovState, Tolerance]
    ) -> tuple[Tensor, tuple[KrylovState, Tolerance]]:
        krylov, tol = state
        z_BN, fz_BN = at.z_BPN.squeeze(1), at.fz_BPN.squeeze(1)
        candidate_B = ~krylov.probing_B
        extend_basis(krylov, fz_BN)
        y_BM, predicted_B, size_B = least_squares(krylov)
        ready_B = predicted_B <= target_norm(tol, size_B)
        ready_B = krylov.probing_B & (ready_B | (krylov.index_B >= self.restart))

        krylov.probing_B = krylov.probing_B & ~ready_B
        norm_B = at.norm_BP.squeeze(1).to(z_BN.dtype)
        restart(krylov, z_BN, fz_BN, norm_B, candidate_B)
        krylov.reach_B = torch.where(candidate_B, norm_B, krylov.reach_B)  # f is affine: any distance will do
        samples_B = torch.arange(z_BN.shape[0], device=z_BN.device)
        offset_BN = krylov.reach_B.unsqueeze(1) * krylov.basis_BMN[samples_B, krylov.index_B]
        if bool(ready_B.any()):
            offset_BN = torch.where(ready_B.unsqueeze(1), combine(krylov, y_BM), offset_BN)
        return (krylov.base_z_BN + offset_BN).unsqueeze(1), (krylov, tol)
