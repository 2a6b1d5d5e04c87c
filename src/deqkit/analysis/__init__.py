"""Stage 5: what happened. Memory, stability, convergence, causality, and the benchmarks built on them."""

from deqkit.analysis.causality import causality_leak as causality_leak
from deqkit.analysis.convergence import convergence_trace as convergence_trace
from deqkit.analysis.memory import peak_memory as peak_memory
from deqkit.analysis.stability import jacobian_penalty as jacobian_penalty
from deqkit.analysis.stability import spectral_penalty as spectral_penalty
from deqkit.analysis.stability import spectral_radius as spectral_radius

__all__ = [
    "causality_leak",
    "convergence_trace",
    "jacobian_penalty",
    "peak_memory",
    "spectral_penalty",
    "spectral_radius",
]
