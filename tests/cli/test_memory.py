"""`deqkit plan` and `deqkit bench memory` on the command line."""

import json

import pytest

from deqkit.cli import main


def test_plan_tells_what_a_recipe_needs(capsys):
    assert main(["plan", "copy-memory-mini", "--batch", "2", "--length", "16", "--json"]) == 0
    figures = json.loads(capsys.readouterr().out)["bytes"]
    assert figures["parameters"] == 14_006 * 4
    parts = ("parameters", "gradients", "activations", "solver", "optimiser")
    assert figures["total"] == sum(figures[part] for part in parts)
    assert main(["plan", "copy-memory-mini"]) == 0
    assert "14,006 parameters" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["plan", "transformer-smal"], "did you mean 'transformer-small'?"),
        (["plan", "demo", "--batch", "0"], "batch and length must be at least 1"),
        (["bench", "memory", "--length", "0"], "length must be at least 1"),
    ],
)
def test_mistakes(words, message, capsys):
    assert main(words) != 0
    complaint = capsys.readouterr().err
    assert message in complaint and complaint.count("\n") == 1


def test_bench_memory_writes_its_results(tmp_path, capsys):
    out = tmp_path / "memory.json"
    words = ["bench", "memory", "--batch", "1", "--length", "2", "--max-steps", "2", "--step-limits", "1", "2"]
    assert main([*words, "--out", str(out)]) == 0
    assert json.loads(out.read_text())["summary"]
    assert "trellis-ptb-tied-60, checkpointing" in capsys.readouterr().out
