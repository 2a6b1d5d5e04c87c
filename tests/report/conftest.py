"""A run of every kind and its page, made once."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from deqkit.analysis.training_memory import TrainingMemory
from deqkit.report import measure, samples
from deqkit.report.comparison import Run
from deqkit.report.page import gather, render
from report.small import KINDS, make_corpus, small_of, train_run


@pytest.fixture(scope="session")
def corpus(tmp_path_factory) -> str:
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture(scope="session")
def runs(corpus, tmp_path_factory) -> dict[str, Path]:
    """A finished run of every kind. Not to be changed: see `copied`."""
    folder = tmp_path_factory.mktemp("runs")
    return {kind: train_run(small_of(kind, corpus), folder / kind) for kind in KINDS}


@pytest.fixture(scope="session")
def gathered(runs) -> dict[str, Run]:
    """What was measured of them."""
    return dict(zip(runs, gather(list(runs.values())), strict=True))


@pytest.fixture(scope="session")
def pages(gathered) -> dict[str, str]:
    """A page of every kind, and "several" of all of them."""
    found = {kind: render([replace(run, key="run1")]) for kind, run in gathered.items()}
    return found | {"several": render(list(gathered.values()))}


@pytest.fixture
def quick(monkeypatch) -> None:
    """No counting of memory, which takes longer than all the rest, and short samples."""
    monkeypatch.setattr(samples, "NUM_TOKENS", 8)
    memory = TrainingMemory(parameters=1000, gradients=10, activations=3000, solver=2000)
    monkeypatch.setattr(measure, "training_memory", lambda *args, **options: memory)


@pytest.fixture
def copied(runs, tmp_path):
    """A run of one's own."""

    def copy(kind: str) -> Path:
        return Path(shutil.copytree(runs[kind], tmp_path / kind))

    return copy
