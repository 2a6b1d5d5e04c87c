"""One run, one process at a time; and no tracker that is silently left out."""

import pytest

from deqkit.train.loop import train
from deqkit.train.run_folder import MetricsFile, RunError, RunFolder
from train.runs import tiny


def test_a_run_that_is_being_trained_is_not_touched(tmp_path):
    path = tmp_path / "metrics.jsonl"
    first = MetricsFile(path)
    first.write({"step": 1})
    with pytest.raises(RunError, match="another process"):
        MetricsFile(path)
    assert path.read_text() == '{"step": 1}\n'
    first.close()
    MetricsFile(path).close()


def test_a_tracker_that_is_not_installed_is_refused(tmp_path):
    with pytest.raises(ValueError, match="tracker 'aim' is not installed"):
        train(tiny(tmp_path, trackers=("aim",)), RunFolder(tmp_path / "run"))
    assert not (tmp_path / "run").exists()
