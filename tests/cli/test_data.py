"""`deqkit data prepare` and `deqkit data info`, from the words of the command line to the files."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from deqkit.cli import main
from deqkit.data import open_corpus


@pytest.fixture
def raw(tmp_path) -> Path:
    """A small corpus of words with one unknown word in valid."""
    folder = tmp_path / "raw"
    folder.mkdir()
    (folder / "ptb.train.txt").write_text(" the cat sat \n the <unk> sat \n" * 20)
    (folder / "ptb.valid.txt").write_text(" the cat \n")
    (folder / "ptb.test.txt").write_text(" sat \n")
    return folder


def run(*words: object) -> int:
    return main(["data", *map(str, words)])


def test_prepare_writes_a_corpus_and_says_where(raw, tmp_path, capsys):
    assert run("prepare", "ptb", "--from", raw, "--out", tmp_path / "out") == 0
    printed = capsys.readouterr()
    assert printed.out.splitlines()[-1] == f"Corpus written to {tmp_path / 'out'}"
    assert "ptb, not as published: words, vocabulary 5" in printed.out
    assert "train 160 tokens instead of 929,589" in printed.out
    assert max(len(line.rstrip()) for line in printed.out.splitlines() if "split" in line or "train" in line[:8]) <= 120
    assert open_corpus(tmp_path / "out").decode([1, 2, 0]) == "the sat\n"
    assert "deqkit: encoding train" in printed.err.splitlines()
    assert "\x1b" not in printed.err  # no bar where there is no terminal


def test_words_outside_the_vocabulary_are_told(raw, tmp_path, capsys):
    (raw / "ptb.valid.txt").write_text("the zebra\n")
    (raw / "ptb.valid.txt").rename(raw / "wiki.valid.tokens")
    assert run("prepare", "wikitext-2", "--from", raw, "--out", tmp_path / "out") == 0
    printed = capsys.readouterr().out
    assert "Note: valid: 1 of 3 tokens are words outside the vocabulary and became <unk>" in printed


def test_json_is_the_manifest(raw, tmp_path, capsys):
    assert run("prepare", "ptb", "--from", raw, "--out", tmp_path / "out", "--json") == 0
    prepared = json.loads(capsys.readouterr().out)
    assert run("info", tmp_path / "out", "--json", "--verify") == 0
    told = json.loads(capsys.readouterr().out)
    assert told == prepared
    assert told["splits"]["train"]["num_tokens"] == 160 and told["vocab_size"] == 5
    assert told["data_hash"] == open_corpus(tmp_path / "out").data_hash


def test_info_tells_what_is_there_and_verify_what_was_changed(raw, tmp_path, capsys):
    run("prepare", "ptb", "--from", raw, "--out", tmp_path / "out")
    capsys.readouterr()
    assert run("info", tmp_path / "out", "--verify") == 0
    printed = capsys.readouterr().out
    row = next(line for line in printed.splitlines() if line.strip().startswith("train"))
    assert row.split() == ["train", "160", "600", "3.75", "0"]
    assert "Every file has the hash it was made with." in printed
    ids = tmp_path / "out" / "train.bin"
    ids.write_bytes(b"\2" + ids.read_bytes()[1:])
    assert run("info", tmp_path / "out") == 0
    capsys.readouterr()
    assert run("info", tmp_path / "out", "--verify") == 1
    assert "train.bin was changed since it was made; prepare the corpus again" in capsys.readouterr().err


def test_options_of_text_reach_the_corpus(tmp_path, capsys):
    source = tmp_path / "mine.txt"
    source.write_text("it was a dark and stormy night\n" * 100)
    words = ["--vocab-size", 270, "--valid-share", 0.2, "--test-share", 0.1]
    assert run("prepare", "text", "--from", source, "--out", tmp_path / "out", *words) == 0
    corpus = open_corpus(tmp_path / "out")
    assert corpus.vocab_size == 270
    assert [split.num_text_bytes for split in corpus.manifest.splits.values()] == [2170, 620, 310]
    assert "text: byte-level BPE, vocabulary 270" in capsys.readouterr().out
    assert run("prepare", "text", "--from", source, "--out", tmp_path / "out", "--overwrite", "--tokens", "bytes") == 0
    assert open_corpus(tmp_path / "out").vocab_size == 256


def test_a_terminal_gets_a_bar(raw, tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("FORCE_COLOR", "1")
    assert run("prepare", "ptb", "--from", raw, "--out", tmp_path / "out") == 0
    shown = capsys.readouterr().err
    assert "━" in shown and "encoding test" in shown
    assert "deqkit: encoding" not in shown


@pytest.mark.parametrize(
    ("words", "status", "message"),
    [
        ("prepare ptb --from {raw}", 2, "--out"),
        ("prepare imagenet --from {raw} --out {out}", 2, "imagenet"),
        ("prepare ptb --out {out}", 2, "either the raw files with --from or --download"),
        ("prepare ptb --from {raw} --out {out} --tokens bytes", 2, "--tokens is for text only, not for ptb"),
        ("prepare text --from {raw} --out {out} --vocab-size 3", 2, "vocab_size must be at least 256"),
        ("prepare text --download --out {out}", 2, "text has no public source"),
        ("prepare ptb --from {raw} --out {out} --overwite", 2, "unknown option --overwite"),
        ("prepare ptb --from {raw}/none --out {out}", 1, "does not exist"),
        ("prepare enwik8 --from {raw} --out {out}", 1, "enwik8 does not exist"),
        ("prepare ptb --from {raw} --out {raw}", 1, "is inside"),
        ("info {raw}", 1, "holds no corpus"),
        ("info {raw}/none", 1, "does not exist"),
        ("info", 2, "folder"),
    ],
)
def test_a_mistake_gives_one_clear_line_and_a_status(words, status, message, raw, tmp_path, capsys):
    out = tmp_path / "out"
    assert main(["data", *words.format(raw=raw, out=out).split()]) == status
    printed = capsys.readouterr()
    assert printed.out == ""
    complaints = printed.err.splitlines()
    assert len(complaints) == 1 and complaints[0].startswith("deqkit: ")
    assert message.lower() in complaints[0].lower()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw"]


def test_ctrl_c_leaves_no_debris(raw, tmp_path):
    with (raw / "ptb.train.txt").open("a") as file:
        for _ in range(100):
            file.write("the cat sat on the mat and thought of nothing at all\n" * 10_000)
    words = ["data", "prepare", "ptb", "--from", str(raw), "--out", str(tmp_path / "out")]
    process = subprocess.Popen(
        [sys.executable, "-m", "deqkit", *words],
        stderr=subprocess.PIPE,
        text=True,
        # A shell's background jobs ignore Ctrl-C, and so would their children.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )
    deadline = time.monotonic() + 30
    while len(list(tmp_path.iterdir())) == 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert [path.suffix for path in tmp_path.iterdir() if path != raw] == [".tmp"]
    process.send_signal(signal.SIGINT)
    _, complaints = process.communicate(timeout=30)
    assert process.returncode == 130 and complaints.splitlines()[-1] == "deqkit: interrupted"
    assert list(tmp_path.iterdir()) == [raw]
