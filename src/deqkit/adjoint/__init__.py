"""Stage 4: dl/dz* -> dl/dtheta. One file per gradient rule."""

from deqkit.adjoint._base import AbstractAdjoint as AbstractAdjoint
from deqkit.adjoint.implicit import Implicit as Implicit
from deqkit.adjoint.one_step import OneStep as OneStep
from deqkit.adjoint.phantom import Phantom as Phantom
from deqkit.adjoint.reuse_forward import ReuseForward as ReuseForward
from deqkit.adjoint.reversible import Reversible as Reversible
from deqkit.adjoint.unrolled import Unrolled as Unrolled

__all__ = [
    "AbstractAdjoint",
    "Implicit",
    "OneStep",
    "Phantom",
    "ReuseForward",
    "Reversible",
    "Unrolled",
]
