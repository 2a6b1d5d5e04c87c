"""Choose a solver and a gradient rule for a cell of your own by looking at what each costs and how good it is."""

import torch
from torch import Tensor, nn

from deqkit import DEQ, Tolerance, fixed_point
from deqkit.adjoint import AbstractAdjoint, Implicit, OneStep, Phantom, ReuseForward, Unrolled
from deqkit.analysis import spectral_radius
from deqkit.solve import GMRES, AbstractSolver, Anderson, Broyden, FixedPointIteration, NewtonKrylov


class Cell(nn.Module):
    """Replace this by yours."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(1.3 * torch.randn(width, width) / width**0.5)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ self.weight.T + x)


torch.manual_seed(0)
cell, x = Cell(64), torch.randn(16, 64)
tol = Tolerance(rtol=1e-4)
z = fixed_point(cell, torch.zeros_like(x), (x,), solver=NewtonKrylov(), max_steps=400).z
radius = spectral_radius(cell, z, (x,))
print(f"spectral radius of J: {radius.min():.2f} to {radius.max():.2f} (plain iteration needs less than 1)\n")

print("solver                          evaluations  verdict")
solvers: dict[str, AbstractSolver] = {
    "FixedPointIteration()": FixedPointIteration(),
    "FixedPointIteration(damping=.5)": FixedPointIteration(damping=0.5),
    "Anderson()": Anderson(),
    "Anderson(mixing=0.5)": Anderson(mixing=0.5),
    "Broyden()": Broyden(),
    "NewtonKrylov()": NewtonKrylov(),
}
for name, solver in solvers.items():
    solution = fixed_point(cell, torch.zeros_like(x), (x,), solver=solver, tol=tol, max_steps=200, throw=False)
    print(f"{name:31} {solution.num_evals.float().mean():11.1f}  {solution.status.name}")


def gradient(adjoint: AbstractAdjoint, solver: AbstractSolver | None = None) -> tuple[Tensor, str]:
    deq = DEQ(cell, solver=solver, tol=tol, max_steps=200, adjoint=adjoint)
    z_star, solution = deq(x, return_solution=True)
    cell.zero_grad()
    z_star.square().sum().backward()
    assert cell.weight.grad is not None
    products = "-" if solution.backward is None else f"{solution.backward.num_evals.float().mean():.1f}"
    return cell.weight.grad.clone(), products


exact, _ = gradient(Implicit(tol=Tolerance(rtol=1e-6), max_steps=200), Anderson())
print("\ngradient rule                   products  error    cosine")
rules: list[tuple[AbstractAdjoint, AbstractSolver | None]] = [
    (Implicit(tol=tol, max_steps=200), Anderson()),
    (Implicit(tol=tol, max_steps=200, solver=GMRES()), Anderson()),
    (ReuseForward(refine=10, tol=tol), Broyden()),
    (OneStep(), Anderson()),
    (Phantom(steps=5), Anderson()),
    (Unrolled(steps=60), None),
]
for rule, solver in rules:
    found, products = gradient(rule, solver)
    error = ((found - exact).norm() / exact.norm()).item()
    cosine = nn.functional.cosine_similarity(found.flatten(), exact.flatten(), dim=0).item()
    name = type(rule).__name__ + (" with GMRES" if isinstance(getattr(rule, "solver", None), GMRES) else "")
    print(f"{name:30}  {products:>8}  {error:7.1e}  {cosine:.4f}")
