"""The public surface is a list: adding or removing a name is a decision, and it is made here."""

import importlib
import tomllib
from pathlib import Path

import pytest

import deqkit

ERRORS = ["NonFiniteError", "NotConvergedError", "NumericalWarning"]
SOLVE = ["Solution", "Status", "Tolerance", "fixed_point", *ERRORS]
EXPECTED = {
    "deqkit.data": [
        "AbstractBatches",
        "Batch",
        "CopyBatches",
        "CopyGrowth",
        "CopyMemory",
        "Corpus",
        "DataError",
        "EvaluationPass",
        "Manifest",
        "PrepareConfig",
        "Streams",
        "VocabularyMismatchError",
        "check_vocabulary",
        "copy_memory",
        "embedded_corpus",
        "embedded_text",
        "open_corpus",
        "prepare",
    ],
    "deqkit.layers": [
        "ConvolutionConfig",
        "ConvolutionMemory",
        "ConvolutionNetwork",
        "Embedding",
        "RecurrentConfig",
        "RecurrentMemory",
        "RecurrentNetwork",
        "Softmax",
        "TransformerCell",
        "TransformerConfig",
        "TransformerMemory",
        "TrellisCell",
        "TrellisConfig",
        "TrellisMemory",
        "VocabularyConfig",
        "stack",
        "tie",
    ],
    "deqkit.model": ["Generation", "ModelConfig", "ModelOutput", "ParameterCount", "SequenceModel", "num_parameters"],
    "deqkit.report": ["write_report"],
    "deqkit.interop": ["OriginalError", "import_original", "load_original"],
    "deqkit": ["DEQ", "__version__", *SOLVE],
    "deqkit.solve": [
        "AbstractSolver",
        "Anderson",
        "Broyden",
        "Evaluation",
        "Fallback",
        "FixedPointIteration",
        "GMRES",
        "NewtonKrylov",
        *SOLVE,
    ],
    "deqkit.adjoint": ["AbstractAdjoint", "Implicit", "OneStep", "Phantom", "ReuseForward", "Reversible", "Unrolled"],
    "deqkit.analysis": [
        "causality_leak",
        "convergence_trace",
        "jacobian_penalty",
        "peak_memory",
        "spectral_penalty",
        "spectral_radius",
    ],
}


@pytest.mark.parametrize("name", EXPECTED)
def test_public_names(name):
    module = importlib.import_module(name)
    assert sorted(module.__all__) == sorted(EXPECTED[name])
    assert [public for public in module.__all__ if not hasattr(module, public)] == []


def test_version_is_that_of_the_package():
    pyproject = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8"))
    assert deqkit.__version__ == pyproject["project"]["version"]
