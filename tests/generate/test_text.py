"""Texts in and texts out, in Python and on the command line."""

import json
import sys

import pytest
import torch

from deqkit.cli import main
from deqkit.generate import generate_text, trained_context
from deqkit.train.load import load_run


def words_of(path, *words: str) -> list[str]:
    return ["generate", str(path), *words]


def test_text_is_that_of_the_tokens(run_of_bytes):
    run = load_run(run_of_bytes)
    pieces: list[tuple[int, str]] = []
    written = generate_text(
        run, ["the cell", "of"], max_tokens=9, seed=2, on_text=lambda sample, piece: pieces.append((sample, piece))
    )
    expected = run.model.generate([list(b"the cell"), list(b"of")], max_tokens=9, seed=2, context=trained_context(run))
    for number, text in enumerate(written):
        assert list(text.tokens) == expected.tokens[number].tolist()
        assert list(text.log_probs) == expected.log_probs[number].tolist()
        assert list(text.num_evals) == expected.num_evals[number].tolist()
        assert text.text == bytes(text.tokens).decode(errors="replace")
        assert "".join(piece for sample, piece in pieces if sample == number) == text.prompt + text.text
    assert pieces[0] == (0, "the cell")


def test_the_context_is_as_far_as_training_looked(run_of_bytes):
    run = load_run(run_of_bytes)
    assert trained_context(run) == 8 + 6  # a segment and its memory
    prompt = "the equilibrium of a cell"
    told = generate_text(run, [prompt], max_tokens=5, seed=0)
    same = generate_text(run, [prompt], max_tokens=5, seed=0, context=14)
    other = generate_text(run, [prompt], max_tokens=5, seed=0, context=3)
    assert told == same and told[0].log_probs != other[0].log_probs


def scripted(monkeypatch, run, tokens: list[int]) -> None:
    """Make the model write these tokens."""
    script = iter(tokens)

    def choose(self, log_probs_BV, generators):
        return torch.tensor([next(script)])

    monkeypatch.setattr("deqkit.model.decode_sample.Sampling.choose", choose)


def test_characters_are_shown_when_they_are_whole(run_of_bytes, monkeypatch):
    run = load_run(run_of_bytes)
    scripted(monkeypatch, run, list("aé€".encode()) + [0xC3, ord("b"), 0xE2])
    pieces: list[str] = []
    written = generate_text(run, ["x"], max_tokens=9, on_text=lambda _, piece: pieces.append(piece))
    assert pieces == ["x", "a", "é", "€", "\ufffdb", "\ufffd"]
    assert written[0].text == "aé€\ufffdb\ufffd"


def test_words_have_spaces_between_them(run_of_words, monkeypatch):
    run = load_run(run_of_words)
    ids = {word: run.corpus().encode(word)[0] for word in ("the", "cell", "of", "\n")}
    scripted(monkeypatch, run, [ids["of"], ids["\n"], ids["the"], ids["cell"]])
    pieces: list[str] = []
    written = generate_text(run, ["the  cell"], max_tokens=4, on_text=lambda _, piece: pieces.append(piece))
    assert pieces == ["the cell", " of", "\n", "the", " cell"]
    assert written[0].prompt + written[0].text == "the cell of\nthe cell"


def test_a_text_ends_at_its_stop(run_of_words, monkeypatch):
    run = load_run(run_of_words)
    ids = {word: run.corpus().encode(word)[0] for word in ("the", "\n")}
    scripted(monkeypatch, run, [ids["the"], ids["\n"], ids["the"]])
    assert generate_text(run, ["cell"], max_tokens=9, stop="\n")[0].text == " the\n"
    with pytest.raises(ValueError, match="stop must be one token of the vocabulary, but 'the cell' is 2"):
        generate_text(run, ["cell"], max_tokens=9, stop="the cell")


def test_a_shallow_checkpoint_writes_with_the_layers_it_was_trained_with(run_of_bytes):
    run = load_run(run_of_bytes)
    object.__setattr__(run.config.devices, "warmup_steps", run.step)
    assert set(generate_text(run, ["a"], max_tokens=3)[0].num_evals) == {run.config.devices.warmup_depth}


def test_the_command_streams_one_text(run_of_bytes, capsys, monkeypatch):
    writes: list[str] = []
    plain = sys.stdout.write
    monkeypatch.setattr(sys.stdout, "write", lambda text: (writes.append(text), plain(text))[1])
    assert main(words_of(run_of_bytes, "--prompt", "the cell", "--max-tokens", "7", "--seed", "4")) == 0
    printed = capsys.readouterr()
    expected = generate_text(load_run(run_of_bytes), ["the cell"], max_tokens=7, seed=4)[0]
    assert printed.out == "the cell" + expected.text + "\n"
    assert [text for text in writes if text][0] == "the cell" and len(writes) >= 5  # not all at once
    assert printed.err.startswith("deqkit: 7 tokens, ") and printed.err.rstrip().endswith("seed 4")


def test_the_command_writes_several_texts(run_of_bytes, capsys):
    options = ("--prompt", "the", "--prompt", "of a", "--max-tokens", "5", "--temperature", "0")
    assert main(words_of(run_of_bytes, *options)) == 0
    texts = generate_text(load_run(run_of_bytes), ["the", "of a"], max_tokens=5, temperature=0)
    assert capsys.readouterr().out == "".join(
        [f"--- 0\nthe{texts[0].text}\n", f"\n--- 1\nof a{texts[1].text}\n"],
    )


def test_json_has_everything(run_of_bytes, capsys):
    options = ("--prompt", "the", "--max-tokens", "4", "--top-k", "3", "--top-p", "0.9", "--json", "--context", "5")
    assert main(words_of(run_of_bytes, *options)) == 0
    first = json.loads(capsys.readouterr().out)
    assert first["context"] == 5 and first["step"] > 0 and first["seconds"] > 0
    assert len(first["texts"][0]["tokens"]) == len(first["texts"][0]["log_probs"]) == 4
    # the seed that was made up gives the same text again
    assert main(words_of(run_of_bytes, *options, "--seed", str(first["seed"]))) == 0
    assert json.loads(capsys.readouterr().out)["texts"] == first["texts"]


def test_solves_that_fail_are_told(run_of_bytes, capsys):
    options = ("--prompt", "the", "--max-tokens", "3", "--tol", "1e-9", "--max-steps", "3")
    assert main(words_of(run_of_bytes, *options)) == 0
    assert "3 solves did not converge: raise --max-steps or loosen --tol" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("run", "words", "status", "message"),
    [
        ("bytes", [], 1, 'pass --prompt "some text"'),
        ("bytes", ["--prompt", ""], 1, "prompt 0 is empty: begin with at least one word"),
        ("bytes", ["--prompt", "a", "--temperature", "-1"], 1, "temperature must be at least 0"),
        ("bytes", ["--prompt", "a", "--top-k", "0"], 1, "top_k must be a whole number of at least 1"),
        ("bytes", ["--prompt", "a", "--top-p", "2"], 1, "top_p must be above 0 and at most 1"),
        ("bytes", ["--prompt", "a", "--max-tokens", "0"], 1, "max_tokens must be a whole number"),
        ("bytes", ["--prompt", "a", "--max-tokns", "3"], 2, "did you mean --max-tokens?"),
        ("words", ["--prompt", "the zebra"], 1, "prompt 0: line 1: 'zebra' is not in the vocabulary"),
        ("copies", ["--prompt", "a"], 1, "was trained on copy-memory, which is no text"),
    ],
)
def test_mistakes_are_one_line(run, words, status, message, request, capsys):
    assert main(words_of(request.getfixturevalue(f"run_of_{run}"), *words)) == status
    complaint = capsys.readouterr().err
    assert message in complaint and complaint.count("\n") == 1, complaint
