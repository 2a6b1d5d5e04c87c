"""torchdeq and deqkit, measured side by side on the same cells: the library behind `deqkit bench solvers`."""

from deqkit.analysis.solver_bench.run import SolverBenchConfig as SolverBenchConfig
from deqkit.analysis.solver_bench.run import run_solver_bench as run_solver_bench
