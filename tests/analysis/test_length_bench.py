"""`bench length`: the same model at several lengths."""

import json

import pytest
import torch

from deqkit.analysis import length_bench
from deqkit.analysis.length_bench import LengthBenchConfig, run_length_bench
from deqkit.analysis.timing import Timing
from deqkit.cli import main
from deqkit.train.recipes import RECIPES
from model.models import make
from train.runs import make_corpus, make_text, tiny

SMALL = LengthBenchConfig(lengths=(4, 8, 16), batch=2, rounds=1)


def quiet(*_):
    pass


def test_every_length_is_measured_on_the_text_itself():
    model = make("post", mem_len=0)
    text = torch.arange(SMALL.num_tokens) % 13
    seen = []
    model.register_forward_pre_hook(lambda module, args: seen.append(args))
    results = run_length_bench(SMALL, model, text=text, on_progress=quiet)
    assert [row["length"] for row in results["rows"]] == [4, 8, 16]
    assert {tokens.shape for tokens, _ in seen} == {(2, 4), (2, 8), (2, 16)}
    for tokens, targets in seen:
        assert torch.equal(tokens.flatten(), text[: tokens.numel()])
        assert torch.equal(targets.flatten(), text[1 : tokens.numel() + 1])
    for row in results["rows"]:
        assert row["training"]["evaluations"] > 1 and row["training"]["products"] > 1
        assert "products" not in row["inference"] and row["peak_bytes"] > 0
    assert not any(parameter.grad is not None for parameter in model.parameters())


def test_growth_is_that_of_the_longest_beside_the_shortest(monkeypatch):
    """Seconds that grow with the square of the length: a token takes four times as long at four times the length."""
    monkeypatch.setattr(
        length_bench,
        "interleaved",
        lambda calls, **_: {name: (call(), Timing((int(name) ** 2.0,)))[1] for name, call in calls.items()},
    )
    peaks = iter([1000, 1000 + 4 * 50, 1000 + 4 * 50 + 8 * 75])
    monkeypatch.setattr(length_bench, "_peak_of_training", lambda *_: next(peaks))
    results = run_length_bench(SMALL, make("post"), on_progress=quiet)
    assert [row["value"] for row in results["summary"]] == pytest.approx([4, 4, 75 / 50])
    assert not any(row["holds"] for row in results["summary"])


def test_a_trellis_in_pieces_takes_as_many_evaluations_at_any_length():
    """And one more token as much memory."""
    config = LengthBenchConfig(lengths=(32, 64, 128), batch=4, rounds=1)
    results = run_length_bench(config, make("trellis", subsequence_length=8), on_progress=quiet)
    evals = [row["training"]["evaluations"] for row in results["rows"]]
    assert max(evals) < 1.2 * min(evals)
    assert results["summary"][2]["holds"]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"lengths": (8,)}, "two or more"),
        ({"lengths": (8, 4)}, "that grow"),
        ({"lengths": (0, 4)}, "positive"),
        ({"batch": 0}, "batch"),
    ],
)
def test_mistakes(options, words):
    with pytest.raises(ValueError, match=words):
        LengthBenchConfig(**options)


def test_a_text_that_is_too_short():
    with pytest.raises(ValueError, match="33 tokens are needed, the text has 5"):
        run_length_bench(SMALL, make("post"), text=torch.zeros(5), on_progress=quiet)


def test_the_command(tmp_path, capsys, monkeypatch):
    corpus = make_corpus(tmp_path, make_text(120))
    monkeypatch.setitem(RECIPES, "tiny", lambda: tiny(""))
    out = tmp_path / "length.json"
    words = ["bench", "length", "tiny", "--data", corpus, "--lengths", "4", "8", "16", "--batch", "2", "--rounds", "1"]
    assert main([*words, "--out", str(out)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == f"Results written to {out}" and sum("positions:" in line for line in lines) == 3
    assert main([*words, "--out", str(out), "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results == json.loads(out.read_text()) and results["run"] == {"recipe": "tiny", "step": None}
