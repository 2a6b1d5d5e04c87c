"""SIGINT and SIGTERM: the step is finished, a checkpoint written, and the run goes on as if nothing had been."""

import os
import signal
import threading

import pytest

from deqkit.train import loop
from deqkit.train.checkpoint import CheckpointWriter
from deqkit.train.evaluate import evaluate
from train.runs import assert_same_run, everything, latest, metrics_of, run, tiny

SIGNALS = [signal.SIGINT, signal.SIGTERM]
by_signal = pytest.mark.parametrize("number", SIGNALS, ids=lambda number: number.name)


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    run(everything(corpus), path)
    return path


def sender(number, step):
    """Sends this process a signal when a step is recorded."""

    def on_record(record):
        if record["kind"] == "train" and record["step"] == step:
            os.kill(os.getpid(), number)

    return on_record


@by_signal
@pytest.mark.parametrize("step", [1, 3])
def test_a_signal_ends_the_run_after_the_step_with_a_checkpoint(undisturbed, corpus, tmp_path, number, step):
    before = [signal.getsignal(n) for n in SIGNALS]
    config, path = everything(corpus, checkpoint_every=100), tmp_path / "run"
    result = run(config, path, on_record=sender(number, step))
    assert (result["step"], result["finished"], result["signal"]) == (step, False, number)
    assert latest(path).name == f"step-{step:08d}"
    assert [r["step"] for r in metrics_of(path, "train")] == list(range(1, step + 1))
    assert [signal.getsignal(n) for n in SIGNALS] == before
    run(config, path, resume=True)
    assert_same_run(path, undisturbed)


@by_signal
def test_a_signal_during_an_evaluation_is_not_lost(undisturbed, corpus, tmp_path, monkeypatch, number):
    def interrupted(*args, **kwargs):
        os.kill(os.getpid(), number)
        return evaluate(*args, **kwargs)

    monkeypatch.setattr(loop, "evaluate", interrupted)
    result = run(everything(corpus), tmp_path / "run")
    assert result["step"] == 2  # the step after it
    monkeypatch.undo()
    run(everything(corpus), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", undisturbed)


@by_signal
def test_a_signal_while_a_checkpoint_is_written_lets_it_be_finished(undisturbed, corpus, tmp_path, monkeypatch, number):
    add_json = CheckpointWriter.add_json

    def interrupted(writer, name, record):
        os.kill(os.getpid(), number)
        add_json(writer, name, record)

    monkeypatch.setattr(CheckpointWriter, "add_json", interrupted)
    result = run(everything(corpus), tmp_path / "run")
    assert not result["finished"]
    monkeypatch.undo()
    run(everything(corpus), tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", undisturbed)


def test_a_run_in_another_thread_leaves_signals_alone(corpus, tmp_path):
    """Only the main thread may set handlers."""
    before = [signal.getsignal(n) for n in SIGNALS]
    results = []
    thread = threading.Thread(target=lambda: results.append(run(tiny(corpus, steps=2), tmp_path / "run")))
    thread.start()
    thread.join()
    assert results[0]["finished"]
    assert [signal.getsignal(n) for n in SIGNALS] == before
