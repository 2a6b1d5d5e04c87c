"""Two processes with half the batch each do what one does with the whole: losses, evaluation, resuming, stopping."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch.distributed as dist

from deqkit.train.checkpoint import CheckpointError
from train.pair import PENALTIES, refusals, scenarios
from train.runs import (
    EXACT,
    assert_same_run,
    contractive,
    everything,
    latest,
    make_corpus,
    make_text,
    metrics_of,
    run,
    tiny,
)

TESTS = Path(__file__).parents[1]
NAMES = ("text", "unequal", "adaptive", "copy-memory", "accumulate", "regularised", "shallow", "layers")

pytestmark = [pytest.mark.slow, pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")]


@pytest.fixture(scope="module")
def hard(tmp_path_factory):
    """A text whose training part has capital letters, which are harder to solve for, in its second half."""
    text = make_text()
    cut = len(text) // 5
    return make_corpus(tmp_path_factory.mktemp("hard"), text[:cut] + text[cut:].upper())


@pytest.fixture(scope="module")
def pair(corpus, hard, tmp_path_factory):
    """The folder of the runs of two processes, and what each process reported."""
    folder = tmp_path_factory.mktemp("pair")
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [str(Path(__file__).with_name("pair.py")), corpus, hard, str(folder)]
    environment = {**os.environ, "PYTHONPATH": str(TESTS), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, timeout=150, env=environment)
    assert done.returncode == 0, done.stderr
    return folder, [json.loads((folder / f"rank{rank}.json").read_text()) for rank in (0, 1)]


def test_the_names_are_those_of_the_scenarios(corpus, hard):
    assert NAMES == tuple(scenarios(corpus, hard))


@pytest.mark.parametrize("name", NAMES)
def test_losses_are_those_of_one_process_with_the_whole_batch(pair, corpus, hard, tmp_path, name):
    """To 1e-5, with solves to 1e-6: looser ones may stop a step apart because of rounding."""
    folder, _ = pair
    with contractive():
        run(scenarios(corpus, hard)[name], tmp_path / "run")
    two, one = metrics_of(folder / name), metrics_of(tmp_path / "run")
    assert [(r["kind"], r["step"]) for r in two] == [(r["kind"], r["step"]) for r in one]
    for ours, expected in zip(two, one, strict=True):
        assert ours["loss"] == pytest.approx(expected["loss"], abs=1e-5)
        for key in {"activation", "temporal", "lr"} & expected.keys():
            assert ours[key] == pytest.approx(expected[key], rel=1e-4)
        for key in {"num_tokens", "epoch", "shallow"} & expected.keys():
            assert ours[key] == expected[key]
    assert two[0]["grad_norm"] == pytest.approx(one[0]["grad_norm"], rel=1e-5)


def test_the_processes_took_different_numbers_of_steps(pair):
    """Otherwise the test above would say nothing about them."""
    _, (first, second) = pair
    for easy, difficult in zip(first["unequal"]["evals"], second["unequal"]["evals"], strict=True):
        assert easy < 0.8 * difficult


@pytest.mark.parametrize("name", [*NAMES, "penalised", "resumed"])
def test_both_processes_have_the_same_weights(pair, name):
    _, (first, second) = pair
    assert first[name]["weights"] == second[name]["weights"]


def test_penalties_are_the_same_in_the_mean_only(pair, corpus, tmp_path):
    """Each process draws probes of its own. The loss before the first update does not depend on them."""
    folder, _ = pair
    with contractive():
        run(tiny(corpus, model=EXACT, regulariser=PENALTIES, steps=3), tmp_path / "run")
    two, one = metrics_of(folder / "penalised", "train"), metrics_of(tmp_path / "run", "train")
    assert two[0]["loss"] == pytest.approx(one[0]["loss"], abs=1e-5)
    for ours, expected in zip(two, one, strict=True):
        assert ours["jacobian"] == pytest.approx(expected["jacobian"], rel=0.3)


def test_resuming_with_two_processes_is_exact(pair):
    """With dropout, for which each process has random numbers of its own."""
    folder, _ = pair
    assert_same_run(folder / "resumed", folder / "whole")
    assert {path.name for path in latest(folder / "whole").glob("rank-*")} == {
        f"rank-{rank}.{kind}" for rank in (0, 1) for kind in ("json", "safetensors")
    }


def test_a_signal_to_one_process_stops_both(pair):
    folder, reports = pair
    assert [(r["stopped"]["step"], r["stopped"]["finished"]) for r in reports] == [(3, False), (3, False)]
    assert_same_run(folder / "stopped", folder / "whole")


def test_another_number_of_processes_is_refused(pair, corpus):
    folder, _ = pair
    with pytest.raises(CheckpointError, match="made by 2 processes; resume with as many, not 1"):
        run(everything(corpus), folder / "whole", resume=True)


@pytest.mark.parametrize("name", ["batch", "parts", "eval_batch"])
def test_what_cannot_be_shared_out_is_refused_before_anything_is_written(pair, corpus, name):
    folder, reports = pair
    assert name in refusals(corpus)
    for report in reports:
        assert "2 processes" in report[f"refused-{name}"] and "must be a multiple of" in report[f"refused-{name}"]
    assert not (folder / f"refused-{name}").exists()
