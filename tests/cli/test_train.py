"""`deqkit train`, `eval` and `recipes` as a user calls them."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time

import pytest

from deqkit.cli import main
from deqkit.layers import TransformerConfig
from deqkit.train.load import load_run
from deqkit.train.recipes import RECIPES
from deqkit.train.run_folder import RunFolder, read_metrics

TINY = [
    "--model.cell.width",
    "8",
    "--model.cell.num-heads",
    "2",
    "--model.cell.hidden-width",
    "8",
    "--model.vocabulary.embedding-width",
    "8",
    "--data.copy-T",
    "4",
    "--data.copy-train",
    "32",
    "--data.copy-test",
    "8",
    "--devices.warmup-steps",
    "2",
    "--eval-every",
    "4",
    "--trackers",
]


def train(*words):
    return main(["train", "copy-memory-mini", *TINY, *words])


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("train") / "run"
    assert train("--steps", "6", "--out", str(folder)) == 0
    return folder


def test_a_run_is_a_folder_with_everything(run):
    assert {path.name for path in run.iterdir()} == {"config.json", "metrics.jsonl", "checkpoints"}
    config = RunFolder(run).config()
    assert config.steps == 6 and config.data.copy_T == 4
    assert isinstance(config.model.cell, TransformerConfig) and config.model.cell.width == 8
    kinds = [(record["kind"], record["step"]) for record in read_metrics(run / "metrics.jsonl")]
    assert kinds == [*[("train", i) for i in range(1, 5)], ("valid", 4), ("train", 5), ("train", 6), ("valid", 6)]


def test_evaluation_with_its_leak_and_a_sweep(run, tmp_path, capsys):
    assert main(["eval", str(run), "--split", "test", "--sweep", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result == json.loads((run / "evaluation-test.json").read_text())
    assert result["leak"] == 0 and result["figures"]["num_tokens"] == 8 * 24
    assert {"tolerance", "loss", "evals"} <= result["sweep"][0].keys() and "max_steps" in result["sweep"][-1]
    options = ["--tol", "0.1", "--max-steps", "5", "--solver", "Anderson(group='prefix')"]
    assert main(["eval", str(run), *options, "--out", str(tmp_path / "there.json")]) == 0
    assert "causality leak" in (told := capsys.readouterr().out) and "tokens a second" in told
    there = json.loads((tmp_path / "there.json").read_text())
    assert there["interruptions"] == 0 and 0 < there["seconds"] < 60


def test_a_dry_run_keeps_nothing(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert train("--dry-run", "--json") == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["parameters"] > 0 and figures["seconds_per_step"] > 0 and figures["tensor_memory_mib"] > 0
    assert list(tmp_path.iterdir()) == []


def test_a_dry_run_is_at_the_equilibrium_whatever_training_begins_with(capsys):
    early = [
        "--devices.warmup-steps",
        "5",
        "--devices.early-adjoint",
        "OneStep()",
        "--devices.early-adjoint-steps",
        "3",
    ]
    early += ["--devices.early-rtol", "0.1", "--devices.early-rtol-steps", "3"]
    assert train("--dry-run", "--json", *early) == 0
    figures = json.loads(capsys.readouterr().out)
    assert figures["evals"] > 0 and figures["backward_evals"] > 0


def test_recipes_are_all_listed(capsys):
    assert main(["recipes", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["recipe"] for row in rows] == list(RECIPES)
    counts = {row["recipe"]: row["parameters"] for row in rows}
    assert counts["copy-memory"] == 14_006 and counts["wt103-deq-transformer-small"] == 138_641_235
    assert main(["recipes"]) == 0
    assert "wt103-deq-transformer-adaptive-untied-18" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["train"], "train needs a recipe"),
        (["train", "copy-memry"], "did you mean 'copy-memory'?"),
        (["train", "demo", "--optimizer.lr", "1"], "did you mean --optimiser.lr?"),
        (["train", "demo", "--model.solver", "Broydn()"], "did you mean 'Broyden'?"),
        (["train", "demo", "--model.solver", "OneStep()"], "is not a solver"),
        (["train", "demo", "--optimiser.lr", "-1"], "lr must be positive"),
        (["train", "demo", "--model.no-tied"], "untied cells have no equilibrium"),
        (["train", "demo-tied-12", "--regulariser.spectral", "1"], "penalties are for an equilibrium"),
        (["train", "ptb-mini"], "needs text"),
        (["train", "ptb-mini", "--data.source", "absent-folder"], "absent-folder does not exist"),
        (["train", "--resume", "absent-run"], "absent-run is not a run"),
        (["eval", "absent-run"], "absent-run is not a run"),
    ],
)
def test_mistakes_give_one_line(words, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(words) != 0
    complaint = capsys.readouterr().err
    assert message in complaint and complaint.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_an_existing_run_is_not_overwritten(run, capsys):
    before = (run / "metrics.jsonl").read_bytes()
    assert train("--out", str(run)) == 1
    assert "--resume" in capsys.readouterr().err
    assert (run / "metrics.jsonl").read_bytes() == before


def test_a_vocabulary_that_does_not_match_is_refused(run, tmp_path, capsys):
    text = tmp_path / "text.txt"
    text.write_text("the quick brown fox jumps over the lazy dog\n" * 200)
    data = tmp_path / "data"
    assert main(["data", "prepare", "text", "--from", str(text), "--out", str(data), "--vocab-size", "260"]) == 0
    assert main(["eval", str(run), "--data", str(data)]) == 1
    assert "another vocabulary" in capsys.readouterr().err


def test_a_text_file_is_prepared_on_the_way(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    words = ["train", "text", "--data.source", "my.txt", "--out", "run", "--steps", "2", "--data.batch", "2"]
    words += ["--data.length", "8", "--data.eval-batch", "2", "--devices.warmup-steps", "1", "--trackers"]
    assert main(words) == 0
    assert (tmp_path / "run-data" / "manifest.json").exists()
    assert "The run is in run" in capsys.readouterr().out
    assert RunFolder(tmp_path / "run").config().model.vocabulary.size < 8192


def text_run(*words):
    options = ["--data.batch", "2", "--data.length", "8", "--data.eval-batch", "2", "--devices.warmup-steps", "1"]
    return main(["train", "text", "--data.source", "my.txt", "--steps", "1", *options, "--trackers", *words])


def test_another_text_is_prepared_anew_and_the_same_one_is_not(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("too short\n" * 8)
    assert text_run("--out", "run") == 1  # its data are there now, the run is not
    (tmp_path / "my.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    assert text_run("--out", "run") == 0
    assert "preparing my.txt" in capsys.readouterr().err
    manifest = (tmp_path / "run-data" / "manifest.json").read_bytes()
    (tmp_path / "my.txt").write_text("something else\n" * 2000)
    assert text_run("--out", "run") == 1  # there is a run, whose text must stay
    assert (tmp_path / "run-data" / "manifest.json").read_bytes() == manifest
    shutil.rmtree(tmp_path / "run")
    (tmp_path / "my.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    capsys.readouterr()
    assert text_run("--out", "run") == 0
    assert "preparing" not in capsys.readouterr().err


def test_a_dry_run_on_a_text_keeps_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    assert text_run("--out", "run", "--dry-run") == 0
    assert [path.name for path in tmp_path.iterdir()] == ["my.txt"]


@pytest.mark.parametrize(
    "words", [["--steps", "9"], ["--out", "other"], ["--optimiser.lr", "1"], ["--dry-run"]], ids=str
)
def test_resuming_takes_no_other_options(run, words, capsys):
    assert main(["train", "--resume", str(run), *words]) == 1
    assert "its own configuration" in capsys.readouterr().err
    assert main(["train", "demo", "--resume", str(run)]) == 2
    assert "leave out 'demo'" in capsys.readouterr().err
    assert main(["train", "--resume", str(run)]) == 0
    assert "All 6 steps had been done before. Validation" in capsys.readouterr().out
    assert main(["train", "--resume", str(run), "--json"]) == 0


def test_a_run_goes_on_with_data_that_was_moved(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "my.txt").write_text("the quick brown fox jumps over the lazy dog\n" * 400)
    assert text_run("--out", "run") == 0
    (tmp_path / "run-data").rename("elsewhere")
    assert main(["train", "--resume", "run"]) == 1
    assert "does not exist" in capsys.readouterr().err
    assert main(["train", "--resume", "run", "--data.source", "elsewhere"]) == 0
    (tmp_path / "my.txt").write_text("something else\n" * 2000)
    assert main(["data", "prepare", "text", "--vocabulary", "run", "--from", "my.txt", "--out", "other"]) == 0
    capsys.readouterr()
    assert main(["train", "--resume", "run", "--data.source", "other"]) == 1
    assert "was trained on other data" in capsys.readouterr().err


def test_an_equilibrium_that_was_never_trained_is_told_in_evaluation(tmp_path, capsys):
    folder = tmp_path / "shallow"
    assert train("--steps", "2", "--out", str(folder)) == 0
    assert main(["eval", str(folder), "--max-batches", "1"]) == 0
    assert "its equilibrium, which is evaluated here, was never trained" in capsys.readouterr().err


def test_a_run_that_was_compiled_is_loaded_without(run, tmp_path):
    record = json.loads((run / "config.json").read_text())
    record["config"]["model"]["compile"] = True
    shutil.copytree(run, tmp_path / "run")
    (tmp_path / "run" / "config.json").write_text(json.dumps(record))
    loaded = load_run(tmp_path / "run")
    assert loaded.config.model.compile and not loaded.model.config.compile


def test_ctrl_c_saves_and_says_how_to_go_on(tmp_path):
    folder = tmp_path / "run"
    command = [sys.executable, "-m", "deqkit", "train", "copy-memory-mini", "--steps", "100000", *TINY]
    process = subprocess.Popen(
        [*command, "--out", str(folder)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    deadline = time.monotonic() + 120
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").stat().st_size:
        assert time.monotonic() < deadline and process.poll() is None
        time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(timeout=60)
    assert process.returncode == 128 + signal.SIGINT, err  # or `train && eval` would evaluate half a run
    assert f"deqkit train --resume {folder}" in out
    assert list((folder / "checkpoints").glob("step-*"))
