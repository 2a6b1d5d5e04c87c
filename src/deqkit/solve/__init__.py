"""Stage 3: z* = f(z*; x). One loop, a verdict per sample, one file per method."""

from deqkit.solve._fixed_point import fixed_point as fixed_point
from deqkit.solve._solution import NonFiniteError as NonFiniteError
from deqkit.solve._solution import NotConvergedError as NotConvergedError
from deqkit.solve._solution import NumericalWarning as NumericalWarning
from deqkit.solve._solution import Solution as Solution
from deqkit.solve._solution import Status as Status
from deqkit.solve._solver import AbstractSolver as AbstractSolver
from deqkit.solve._solver import Evaluation as Evaluation
from deqkit.solve._tolerance import Tolerance as Tolerance
from deqkit.solve.anderson import Anderson as Anderson
from deqkit.solve.broyden import Broyden as Broyden
from deqkit.solve.fallback import Fallback as Fallback
from deqkit.solve.fixed_point_iteration import FixedPointIteration as FixedPointIteration
from deqkit.solve.gmres import GMRES as GMRES
from deqkit.solve.newton_krylov import NewtonKrylov as NewtonKrylov

__all__ = [
    "GMRES",
    "AbstractSolver",
    "Anderson",
    "Broyden",
    "Evaluation",
    "Fallback",
    "FixedPointIteration",
    "NewtonKrylov",
    "NonFiniteError",
    "NotConvergedError",
    "NumericalWarning",
    "Solution",
    "Status",
    "Tolerance",
    "fixed_point",
]
