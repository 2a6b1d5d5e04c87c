"""`deqkit bench runtime` on the command line."""

import json
from dataclasses import replace

import pytest
import torch

from deqkit.cli import main
from deqkit.cli.runtime import compiled_copy
from deqkit.model import SequenceModel
from deqkit.train.loop import train
from deqkit.train.recipes import RECIPES, layers
from deqkit.train.run_folder import RunFolder
from train.runs import make_corpus, make_text, tiny

FEW = "--rounds 1 --steps 1 --layers 2".split()


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"), make_text(120))


def test_a_run(tmp_path, corpus, capsys):
    train(tiny(corpus, regulariser={"spectral": 0.1}), RunFolder(tmp_path / "run"))
    out = tmp_path / "runtime.json"
    assert main(["bench", "runtime", str(tmp_path / "run"), *FEW, "--out", str(out)]) == 0
    printed = capsys.readouterr().out
    lines = printed.splitlines()
    assert lines[-1] == f"Results written to {out}" and "untrained" not in printed
    assert max(len(line.rstrip()) for line in lines[:-1]) <= 120
    for text in ("embedding", "products a solve", "evaluations a token", "2 tied layers", "2 untied layers"):
        assert text in printed
    results = json.loads(out.read_text())
    assert results["config"]["subject"] == "tiny" and results["config"]["step"] in (3, 6)
    assert str(tmp_path) not in out.read_text()
    for phase, length in (("training", 8), ("inference", 16)):
        part = results["breakdown"][phase]
        assert part["total"] == pytest.approx(sum(part["seconds"].values()))
        assert results["evaluations_per_token"][phase] == pytest.approx(part["evaluations"] / length)
        assert set(results["comparison"][phase]["ratios"]) == {"2 tied layers", "2 untied layers"}


def test_bfloat16_is_timed_in_training(tmp_path, corpus, capsys, without_onednn):
    train(tiny(corpus), RunFolder(tmp_path / "run"))
    out = tmp_path / "runtime.json"
    assert main(["bench", "runtime", str(tmp_path / "run"), *FEW, "--bf16", "--out", str(out)]) == 0
    results = json.loads(out.read_text())
    layers = {"2 tied layers", "2 untied layers"}
    assert set(results["comparison"]["training"]["ratios"]) == {*layers, "DEQ, bf16"}
    assert set(results["comparison"]["inference"]["ratios"]) == layers
    assert results["config"]["precision"] == "float32"


def test_a_recipe_is_untrained_and_says_so(tmp_path, corpus, capsys, monkeypatch):
    monkeypatch.setitem(RECIPES, "tiny", lambda: tiny(""))
    words = ["bench", "runtime", "tiny", "--data", corpus, *FEW, "--out", str(tmp_path / "out.json")]
    assert main(words) == 0
    assert "The model is untrained" in capsys.readouterr().out
    assert main([*words, "--json"]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["config"]["step"] is None and results == json.loads((tmp_path / "out.json").read_text())


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["demoo"], "did you mean 'demo'?"),
        (["demo", "--rounds", "0"], "rounds must be at least 1, got 0"),
        (["demo-tied-12"], "demo-tied-12 is a stack of layers"),
        (["ptb-mini"], "needs text"),
    ],
)
def test_mistakes(words, message, capsys, monkeypatch):
    if words == ["demo-tied-12"]:  # the embedded corpus takes a while
        monkeypatch.setitem(RECIPES, "demo-tied-12", lambda: layers(tiny("copy-memory"), 12, tied=True))
    assert main(["bench", "runtime", *words]) != 0
    complaint = capsys.readouterr().err
    assert message in complaint and complaint.count("\n") == 1


def test_the_compiled_model_is_the_same_model(corpus):
    config = tiny(corpus)
    model = SequenceModel(config.model)
    other_config, other = compiled_copy(config, model)
    assert other_config.model == replace(config.model, compile=True)
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in other.state_dict().items())
