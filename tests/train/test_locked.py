"""One run, one process at a time; and no tracker that is silently left out."""

import dataclasses

import numpy
import pytest

from deqkit.solve import FixedPointIteration, Tolerance
from deqkit.train.checkpoint import CheckpointWriter
from deqkit.train.loop import train
from deqkit.train.run_folder import MetricsFile, RunError, RunFolder
from train.runs import make_corpus, tiny


def test_a_run_that_is_being_trained_is_not_touched(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.write({"step": 1})
    with pytest.raises(RunError, match="another process"):
        MetricsFile(path)
    assert path.read_text() == '{"step": 1}\n'
    first.close()
    MetricsFile(path).close()


def test_a_second_process_leaves_the_checkpoint_that_is_being_written(tmp_path):
    config = tiny(make_corpus(tmp_path / "corpus"), checkpoint_every=2)
    folder = RunFolder(tmp_path / "run")
    train(config, folder, max_steps=2)
    lock = MetricsFile(folder.metrics)  # somebody is training
    writer = CheckpointWriter(folder.checkpoints, 3)
    writer.begin()
    before = sorted(folder.checkpoints.iterdir())
    assert len(before) == 2
    with pytest.raises(RunError, match="another process"):
        train(config, folder, resume=True)
    assert sorted(folder.checkpoints.iterdir()) == before
    lock.close()
    assert train(config, folder, resume=True)["finished"]


@dataclasses.dataclass(frozen=True)
class MySolver(FixedPointIteration):
    pass


@pytest.mark.parametrize(("part", "message"), [("solver", "cannot be kept in a file.*MySolver"), ("steps", "whole")])
def test_a_configuration_that_could_not_be_read_back_is_refused_before_it_costs_a_training(part, message, tmp_path):
    corpus = make_corpus(tmp_path / "corpus")
    with pytest.raises(ValueError, match=message):
        config = tiny(corpus, model={"solver": MySolver()}) if part == "solver" else tiny(corpus, steps=6.0)
        train(config, RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()


def test_numbers_of_numpy_can_be_kept_in_a_file(tmp_path):
    tol = Tolerance(rtol=numpy.float64(1e-2))
    assert repr(tol) == repr(Tolerance(rtol=1e-2))
    config = tiny(make_corpus(tmp_path / "corpus"), model={"tol": tol})
    RunFolder(tmp_path / "run").create(config, data_hash="")
    assert RunFolder(tmp_path / "run").config() == config


def test_a_tracker_that_is_not_installed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tracker 'aim' is not installed"):
        train(tiny(tmp_path, trackers=("aim",)), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
