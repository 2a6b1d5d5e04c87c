"""A stage imports only the stages above it, and the solver core needs torch alone (DESIGN.md, "The house")."""

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / "src" / "deqkit"
STAGES = ["data", "layers", "solve", "adjoint", "deq", "model"]
STAGES += ["analysis", "train", "generate", "report", "interop", "paper", "cli"]
CORE = ["solve", "adjoint", "deq"]


def imported_names(path: Path, package: Path) -> Iterator[tuple[int, str]]:
    """Yield line and absolute dotted name of every import in a file, those inside functions included."""
    parents = [package.name, *path.relative_to(package).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = parents[: len(parents) - node.level + 1] if node.level else []
            if node.module:
                base = [*base, node.module]
            yield from ((node.lineno, ".".join([*base, alias.name])) for alias in node.names)


def stage_of(name: str) -> str | None:
    """Return the stage a dotted name of the package lives in; None for a private module or `__version__`."""
    part = (name.split(".") + [""])[1]
    if part.startswith("_"):
        return None
    return part if part in STAGES else "deq"  # `import deqkit`, `from deqkit import DEQ`: what __init__.py re-exports


def may_import(importer: str) -> list[str]:
    """Return the stages that a top-level module of the package may import."""
    if importer in CORE:
        return CORE[: CORE.index(importer) + 1]
    if importer == "__init__":
        return STAGES[: STAGES.index("deq") + 1]
    if importer == "__main__":
        return STAGES
    if importer.startswith("_"):  # a private helper is below nobody, so that every stage may use it
        return []
    return STAGES[: STAGES.index(importer) + 1]


def violations(package: Path) -> Iterator[str]:
    """Yield one line for every top-level name that is no stage and for every import that breaks the order."""
    for entry in sorted(package.iterdir()):
        importer = entry.name.removesuffix(".py")
        if entry.name.startswith(".") or entry.name in ("__pycache__", "py.typed"):
            continue
        if importer not in STAGES and not importer.startswith("_"):
            yield f"{entry.name}: not a stage; add it to the house or move it into a stage"
            continue
        needs_torch_alone = importer in CORE or (importer.startswith("_") and importer != "__main__")
        for path in sorted(entry.rglob("*.py")) if entry.is_dir() else [entry]:
            for line, name in imported_names(path, package):
                where = f"{path.relative_to(package).as_posix()}:{line}"
                root = name.split(".")[0]
                if root == package.name:
                    if (stage := stage_of(name)) and stage not in may_import(importer):
                        yield f"{where}: {importer} may not import {stage}"
                elif needs_torch_alone and root != "torch" and root not in sys.stdlib_module_names:
                    yield f"{where}: {importer} needs torch alone, not {root}"


def test_the_house_is_in_order():
    assert list(violations(PACKAGE)) == []


def violations_of(package: Path, path: str, code: str) -> list[str]:
    """Return what the checker says of a package made of this one file."""
    file = package / path
    file.parent.mkdir(parents=True)
    file.write_text(code)
    return list(violations(package))


@pytest.mark.parametrize(
    ("path", "code", "expected"),
    [
        ("solve/loop.py", "from deqkit.cli import main", "solve/loop.py:1: solve may not import cli"),
        ("solve/loop.py", "from ..adjoint import Implicit", "solve/loop.py:1: solve may not import adjoint"),
        ("solve/__init__.py", "from .. import adjoint", "solve/__init__.py:1: solve may not import adjoint"),
        ("solve/deep/er.py", "from ...deq import DEQ", "solve/deep/er.py:1: solve may not import deq"),
        ("solve/loop.py", "def f():\n    import deqkit.train.loop", "solve/loop.py:2: solve may not import train"),
        ("adjoint/implicit.py", "from deqkit import DEQ", "adjoint/implicit.py:1: adjoint may not import deq"),
        ("layers/cells.py", "import deqkit", "layers/cells.py:1: layers may not import deq"),
        ("deq.py", "from .layers import Cell", "deq.py:1: deq may not import layers"),
        ("__init__.py", "from .model import SequenceModel", "__init__.py:1: __init__ may not import model"),
        ("_util.py", "from .data import Corpus", "_util.py:1: _util may not import data"),
        ("solve/loop.py", "import numpy as np", "solve/loop.py:1: solve needs torch alone, not numpy"),
        ("deq.py", "from scipy.linalg import lu", "deq.py:1: deq needs torch alone, not scipy"),
        ("utils/misc.py", "", "utils: not a stage; add it to the house or move it into a stage"),
        ("helpers.py", "", "helpers.py: not a stage; add it to the house or move it into a stage"),
    ],
)
def test_the_checker_finds(path, code, expected, tmp_path):
    assert violations_of(tmp_path / "deqkit", path, code) == [expected]


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("solve/loop.py", "import abc\nimport torch.nn\nfrom . import status\nfrom .._util import x"),
        ("adjoint/implicit.py", "from deqkit.solve import Anderson\nfrom deqkit import solve"),
        ("data/corpus.py", "import numpy"),
        ("analysis/leak.py", "from deqkit import DEQ, __version__\nfrom .. import model"),
        ("cli/main.py", "from deqkit.report import page\nimport deqkit.data.corpus"),
        ("__init__.py", "from .deq import DEQ as DEQ\nfrom . import solve"),
        ("__main__.py", "from deqkit.cli import main"),
        ("py.typed", ""),
    ],
)
def test_the_checker_allows(path, code, tmp_path):
    assert violations_of(tmp_path / "deqkit", path, code) == []
