"""Deep equilibrium models: z* = f(z*; x) by any solver, with gradients from the implicit function theorem."""

from deqkit.deq import DEQ as DEQ
from deqkit.solve import NonFiniteError as NonFiniteError
from deqkit.solve import NotConvergedError as NotConvergedError
from deqkit.solve import NumericalWarning as NumericalWarning
from deqkit.solve import Solution as Solution
from deqkit.solve import Status as Status
from deqkit.solve import Tolerance as Tolerance
from deqkit.solve import fixed_point as fixed_point

__version__ = "0.1.0"

__all__ = [
    "DEQ",
    "NonFiniteError",
    "NotConvergedError",
    "NumericalWarning",
    "Solution",
    "Status",
    "Tolerance",
    "__version__",
    "fixed_point",
]
