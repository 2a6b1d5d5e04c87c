"""SIGKILL at any moment: resumed until it ends, a run has the metrics and weights of one that was left alone."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from deqkit.train.config import to_plain
from train.events import scalars_of
from train.runs import assert_same_run, everything, metrics_of, run

TESTS = Path(__file__).parents[1]
NUM_STEPS = {"random": 80, "slow-disk": 16, "each": 6}


def kill_and_resume(how, config, folder):
    """What `nursery.py` reports."""
    path = folder / "config.json"
    path.write_text(json.dumps(to_plain(config)), encoding="utf-8")
    command = [sys.executable, str(Path(__file__).with_name("nursery.py")), how, str(path), str(folder / "run")]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
@pytest.mark.parametrize("how", NUM_STEPS)
def test_killed_and_resumed_again_and_again_it_ends_as_if_left_alone(corpus, tmp_path, how):
    trackers = ("tensorboard",) if how == "random" else ()
    config = everything(corpus, steps=NUM_STEPS[how], checkpoint_every=1, trackers=trackers)
    run(config, tmp_path / "whole")
    report = kill_and_resume(how, config, tmp_path)
    assert report["num_kills"] >= (30 if how == "each" else 12)
    assert report["latest"] == sorted(report["latest"])  # nothing that was saved is ever lost
    assert_same_run(tmp_path / "run", tmp_path / "whole")
    assert len(metrics_of(tmp_path / "run")) == 2 * config.steps
    left = {path.name for path in (tmp_path / "run" / "checkpoints").iterdir()}
    assert not any(name.startswith(".") for name in left)
    if trackers:
        assert scalars_of(tmp_path / "run") == scalars_of(tmp_path / "whole")
