"""A run is used elsewhere: from another folder, without its data, on other text."""

import json
import shutil

import pytest

from deqkit.cli import main
from deqkit.data import DataError, VocabularyMismatchError, open_corpus
from deqkit.generate import generate_text
from deqkit.train.load import load_run
from deqkit.train.run_folder import RunFolder
from train.runs import make_text, run, tiny

SMALL = ("cell.width 8", "cell.num-heads 2", "cell.hidden-width 8", "vocabulary.embedding-width 8")
OPTIONS = [word for option in SMALL for word in f"--model.{option}".split()]
OPTIONS += "--data.batch 2 --data.length 8 --data.eval-batch 2 --data.eval-length 8 --devices.warmup-steps 1".split()
OPTIONS += ["--trackers"]


def train(*words):
    return main(["train", "text", *OPTIONS, *map(str, words)])


@pytest.fixture
def home(tmp_path, monkeypatch):
    """Text, and a run of three steps whose data was named relative to the folder."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "text.txt").write_text(make_text(2000), encoding="utf-8")
    prepared = ["data", "prepare", "text", "--from", "text.txt", "--out", "data", "--vocab-size", "300"]
    assert main(prepared) == 0
    assert train("--data.source", "data", "--steps", "3", "--out", "run") == 0
    return tmp_path


def test_from_another_working_folder(home, monkeypatch, capsys):
    (home / "elsewhere").mkdir()
    monkeypatch.chdir(home / "elsewhere")
    assert main(["eval", str(home / "run")]) == 0
    assert main(["generate", str(home / "run"), "--prompt", "the", "--max-tokens", "2"]) == 0


def test_generation_needs_the_run_alone(home, tmp_path_factory):
    before = generate_text(load_run(home / "run"), ["the cell"], max_tokens=5, seed=0)
    away = tmp_path_factory.mktemp("away") / "run"
    shutil.move(home / "run", away)
    shutil.rmtree(home / "data")
    assert generate_text(load_run(away), ["the cell"], max_tokens=5, seed=0) == before
    with pytest.raises(DataError, match="not there any more.*--data"):
        load_run(away).task()


def test_its_vocabulary_is_that_of_its_data_without_the_text(home):
    own, data = load_run(home / "run").corpus(), open_corpus(home / "data")
    assert own.fingerprint == data.fingerprint
    assert own.decode(own.encode("the equilibrium")) == "the equilibrium"
    with pytest.raises(DataError, match="a vocabulary without text"):
        own.split("train")


def test_a_vocabulary_of_another_run_is_refused(home):
    (home / "other.txt").write_text(make_text(500).upper(), encoding="utf-8")
    assert main(["data", "prepare", "text", "--from", "other.txt", "--out", "other", "--vocab-size", "300"]) == 0
    shutil.rmtree(home / "run" / "vocabulary")
    open_corpus(home / "other").save_vocabulary(home / "run" / "vocabulary")
    with pytest.raises(VocabularyMismatchError):
        load_run(home / "run").corpus()


def test_other_text_is_prepared_with_the_vocabulary_of_the_run(home, capsys):
    (home / "other.txt").write_text(make_text(500).upper(), encoding="utf-8")
    assert main(["data", "prepare", "text", "--from", "other.txt", "--out", "own", "--vocab-size", "300"]) == 0
    assert main(["eval", "run", "--data", "own"]) == 1
    assert "deqkit data prepare text --vocabulary run --from TEXT --out DIR" in capsys.readouterr().err
    for vocabulary, out in (("run", "one"), ("data", "two")):
        words = ["data", "prepare", "text", "--from", "other.txt", "--out", out, "--vocabulary", vocabulary]
        assert main(words) == 0
        assert main(["eval", "run", "--data", out]) == 0
    assert open_corpus("one").data_hash == open_corpus("two").data_hash


@pytest.mark.parametrize("option", [("--tokens", "bytes"), ("--vocab-size", "300")], ids=lambda option: option[0])
def test_a_given_vocabulary_leaves_nothing_to_choose(home, capsys, option):
    words = ["data", "prepare", "text", "--from", "text.txt", "--out", "x", "--vocabulary", "run", *option]
    assert main(words) == 2
    assert "--vocabulary says what a token is" in capsys.readouterr().err


def test_a_vocabulary_of_bytes_is_told_apart(home, capsys):
    assert main(["data", "prepare", "text", "--from", "text.txt", "--out", "bytes", "--tokens", "bytes"]) == 0
    words = ["data", "prepare", "text", "--from", "text.txt", "--out", "x", "--vocabulary", "bytes"]
    assert main(words) == 1
    assert "--tokens bytes" in capsys.readouterr().err


def test_an_evaluation_with_other_settings_leaves_the_usual_one_as_it_is(home):
    assert main(["eval", "run", "--split", "test"]) == 0
    usual = (home / "run" / "evaluation-test.json").read_text()
    for words in (["--max-batches", "1"], ["--max-steps", "2"], ["--tol", "0.5"], ["--checkpoint", "latest"]):
        assert main(["eval", "run", "--split", "test", *words]) == 0
    assert (home / "run" / "evaluation-test.json").read_text() == usual
    others = sorted(path.name for path in (home / "run").glob("other-evaluation-test-*.json"))
    assert len(others) == 4
    assert json.loads(usual)["data_sha256"] == RunFolder(home / "run").read()["data_sha256"]


def test_a_training_that_is_shallow_to_its_end_says_so(home, capsys):
    assert train("--data.source", "data", "--steps", "2", "--out", "shallow", "--devices.warmup-steps", "7") == 0
    captured = capsys.readouterr()
    assert "the equilibrium is never trained" in captured.err and "--devices.warmup-steps 1" in captured.err
    assert "of 2 layers: its equilibrium was never trained" in captured.out or "of 4 layers" in captured.out


def test_a_run_of_an_earlier_version_has_no_vocabulary_and_gets_one(corpus, tmp_path):
    config = tiny(corpus)
    run(config, tmp_path / "run", max_steps=2)
    shutil.rmtree(tmp_path / "run" / "vocabulary")
    assert load_run(tmp_path / "run").corpus().fingerprint == open_corpus(corpus).fingerprint
    run(config, tmp_path / "run", resume=True)
    assert (tmp_path / "run" / "vocabulary" / "tokenizer.json").exists()


@pytest.mark.parametrize(("name", "words"), [("a file", "is a file"), ("a folder", "not of a run")])
def test_a_place_that_is_taken_by_something_else(home, capsys, name, words):
    if name == "a file":
        (home / name).write_text("mine")
    else:
        (home / name).mkdir()
        (home / name / "mine").write_text("mine")
    assert train("--data.source", "data", "--out", name) == 1
    error = capsys.readouterr().err
    assert words in error and "--resume" not in error


def test_a_damaged_line_of_metrics_is_named(home, capsys):
    path = home / "run" / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join([lines[0].replace("{", "-"), *lines[1:]]))
    assert main(["train", "--resume", "run"]) == 1
    assert "line 1 of run/metrics.jsonl is damaged" in capsys.readouterr().err


def test_a_folder_with_the_name_of_built_in_data_changes_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "copy-memory").mkdir()
    sizes = "--data.copy-T 4 --data.copy-train 32 --data.copy-test 8 --model.cell.width 8 --model.cell.num-heads 2"
    sizes += " --model.vocabulary.embedding-width 8 --steps 1 --devices.warmup-steps 0 --trackers"
    assert main(["train", "copy-memory-mini", "--out", "run", *sizes.split()]) == 0
    assert RunFolder(tmp_path / "run").config().data.source == "copy-memory"


def test_the_next_command_can_be_pasted(home, capsys):
    assert train("--data.source", "data", "--steps", "2", "--out", "a run") == 0
    assert "deqkit eval 'a run' --split test" in capsys.readouterr().out
