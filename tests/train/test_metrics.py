"""metrics.jsonl, TensorBoard, the run folder, and what callers are told."""

import json
import math

import pytest

from deqkit.train import loop
from deqkit.train.run_folder import RunError, RunFolder, read_metrics
from train.events import scalars_of
from train.runs import assert_same_run, everything, losses_of, metrics_of, run, tiny

ALWAYS = {"kind", "step", "epoch", "loss", "lr", "grad_norm", "shallow", "memory_mib"}
ALWAYS |= {"seconds", "processor_seconds", "tokens_per_second"}
FORWARD = {"evals", "residual", "unconverged"}
BACKWARD = {"backward_evals", "backward_residual", "backward_unconverged", "grad_error"}


@pytest.fixture(scope="module")
def tracked(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("tracked") / "run"
    run(tiny(corpus, trackers=("tensorboard",)), path)
    return path


def test_every_step_logs_what_the_issue_lists(tracked):
    """Loss, rate, gradient norm, solver steps, residuals, share not converged, gradient error, speed, memory."""
    records = [r for r in read_metrics(tracked / "metrics.jsonl") if r["kind"] == "train"]
    assert [r["step"] for r in records] == [1, 2, 3, 4, 5, 6]
    for record in records:
        assert record.keys() == ALWAYS | FORWARD | BACKWARD
        assert 1 <= record["evals"] <= 12 and 1 <= record["backward_evals"] <= 10
        assert 0 <= record["unconverged"] <= 1 and 0 <= record["backward_unconverged"] <= 1
        assert record["residual"] > 0 and record["backward_residual"] > 0 and record["grad_error"] > 0
        assert 0 < record["processor_seconds"]
        assert record["tokens_per_second"] == pytest.approx(32 / record["seconds"], rel=1e-6)
        assert 100 < record["memory_mib"] < 10_000


def test_a_stack_logs_no_solves(corpus, tmp_path):
    run(tiny(corpus, model={"depth": 2}, steps=1), tmp_path / "run")
    assert next(read_metrics(tmp_path / "run" / "metrics.jsonl")).keys() == ALWAYS


def test_an_evaluation_logs_its_figures(tracked):
    records = [r for r in read_metrics(tracked / "metrics.jsonl") if r["kind"] == "valid"]
    assert [r["step"] for r in records] == [3, 6]
    for record in records:
        assert record.keys() == {"kind", "step", "seconds", "complete", "num_tokens"} | FORWARD | {
            "loss",
            "perplexity",
            "bits_per_byte",
        }
        assert record["perplexity"] == pytest.approx(math.exp(record["loss"]))
        # one byte a token, and the first of the text is not predicted
        share = record["num_tokens"] / (record["num_tokens"] + 1)
        assert record["bits_per_byte"] == pytest.approx(share * record["loss"] / math.log(2))


def test_the_last_step_is_evaluated_in_any_case(corpus, tmp_path):
    run(tiny(corpus, steps=4, eval_every=3), tmp_path / "run")
    assert [r["step"] for r in metrics_of(tmp_path / "run", "valid")] == [3, 4]


def test_tensorboard_has_every_number_at_every_step(tracked):
    curves = scalars_of(tracked)
    records = metrics_of(tracked)
    for kind, steps in (("train", [1, 2, 3, 4, 5, 6]), ("valid", [3, 6])):
        for name in ("loss", "evals", "residual", "unconverged"):
            curve = curves[f"{kind}/{name}"]
            assert [step for step, _ in curve] == steps
            expected = [r[name] for r in records if r["kind"] == kind]
            assert [value for _, value in curve] == pytest.approx(expected, rel=1e-6)
    assert {"train/lr", "train/grad_norm", "train/grad_error", "train/backward_evals", "valid/perplexity"} <= set(
        curves
    )


def test_tensorboard_goes_on_after_a_resume_without_repeating_steps(tracked, corpus, tmp_path):
    """Also when steps after the checkpoint were logged already, as they are when a run is killed."""
    config = tiny(corpus, trackers=("tensorboard",), checkpoint_every=100)

    def die(record):
        if record["kind"] == "train" and record["step"] == 6:  # the last checkpoint is of step 3, the best so far
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(config, tmp_path / "run", on_record=die)
    assert [step for step, _ in scalars_of(tmp_path / "run")["train/loss"]] == [1, 2, 3, 4, 5]
    run(config, tmp_path / "run", resume=True, max_steps=2)
    run(config, tmp_path / "run", resume=True)
    assert scalars_of(tmp_path / "run") == scalars_of(tracked)


def test_an_unknown_tracker_is_refused_before_anything_is_written(corpus, tmp_path):
    with pytest.raises(ValueError, match="tensorbord.*tensorboard"):
        run(tiny(corpus, trackers=("tensorbord",)), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_callers_see_every_record_and_the_result(corpus, tmp_path):
    seen = []
    result = run(tiny(corpus), tmp_path / "run", on_record=seen.append)
    assert seen == list(read_metrics(tmp_path / "run" / "metrics.jsonl"))
    assert result == {**seen[-1], "finished": True, "signal": None}


def test_evaluating_more_often_changes_no_training_loss(corpus, tmp_path):
    """Evaluation draws no random numbers, and does not touch the memory of training."""
    for every in (1, 2, 6):
        run(tiny(corpus, cell={"dropout": 0.2}, eval_every=every), tmp_path / str(every))
    assert losses_of(tmp_path / "1") == losses_of(tmp_path / "2") == losses_of(tmp_path / "6")


def test_checkpointing_more_often_changes_nothing(corpus, tmp_path):
    for every in (1, 6):
        run(everything(corpus, checkpoint_every=every), tmp_path / str(every))
    assert_same_run(tmp_path / "1", tmp_path / "6")


def test_two_runs_in_one_process_do_not_disturb_each_other(corpus, tmp_path):
    run(tiny(corpus), tmp_path / "a")
    run(tiny("copy-memory", seed=3), tmp_path / "b")
    run(tiny(corpus), tmp_path / "c")
    assert_same_run(tmp_path / "a", tmp_path / "c")


def test_the_folder_records_where_the_run_comes_from(tracked, corpus):
    record = json.loads((tracked / "config.json").read_text())
    assert record.keys() == {"deqkit", "torch", "commit", "data_sha256", "config"}
    assert len(record["data_sha256"]) == 64
    assert RunFolder(tracked).config() == tiny(corpus, trackers=("tensorboard",))


def test_a_mistake_is_told_before_a_folder_is_made(corpus, tmp_path):
    for config, words in (
        (tiny(corpus, data={"batch": 400}), "needs at least"),
        (tiny(corpus, data={"source": str(tmp_path / "nowhere")}), "nowhere"),
        (tiny("copy-memory", data={"source": corpus}), "the model has 10 tokens and the data 256"),
        (tiny(corpus, data={"source": ""}), "needs text"),
    ):
        with pytest.raises(ValueError, match=words):
            run(config, tmp_path / "run")
        assert not (tmp_path / "run").exists()


def test_a_folder_left_by_a_kill_during_its_making_can_be_used(corpus, tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / ".config.json.abc.tmp").write_text("{")
    run(tiny(corpus, steps=1), tmp_path / "run")
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes.txt").write_text("")
    with pytest.raises(RunError, match="not of a run"):
        run(tiny(corpus, steps=1), tmp_path / "other")


def test_try_step_keeps_nothing(corpus, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    record = loop.try_step(tiny(corpus))
    assert record.keys() == ALWAYS | FORWARD | BACKWARD and record["step"] == 1
    assert list(tmp_path.iterdir()) == []
