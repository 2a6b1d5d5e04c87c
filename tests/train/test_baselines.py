"""LSTM, GRU and TCN go through the same training, evaluation and reports as the equilibrium models."""

import json
from dataclasses import replace

import pytest
import torch

from deqkit.cli import main
from deqkit.layers import ConvolutionConfig, RecurrentConfig
from deqkit.model import SequenceModel, num_parameters
from deqkit.report import write_report
from deqkit.report.history import read_history
from deqkit.report.measure import Missing, measure
from deqkit.report.sections.converging import converging_section
from deqkit.report.sections.overview import describe_layers, describe_model
from deqkit.report.sections.solving import solving_section
from deqkit.train.config import from_plain, to_plain
from deqkit.train.load import load_run
from deqkit.train.recipes import RECIPES
from train.runs import WIDTH, assert_same_run, losses_of, run, tiny, weights_of_run

SIZES = {  # parameters in all: table 1 has 14 thousand for the recurrent networks and 16 for the TCN
    "copy-memory-lstm": 14_000,
    "copy-memory-gru": 14_000,
    "copy-memory-tcn": 16_000,
}
CELLS = {
    "lstm": RecurrentConfig(
        unit="lstm", input_width=WIDTH, hidden_width=24, output_width=WIDTH, num_layers=2, dropout=0.1
    ),
    "gru": RecurrentConfig(unit="gru", input_width=WIDTH, hidden_width=WIDTH),
    "tcn": ConvolutionConfig(input_width=WIDTH, hidden_width=WIDTH, kernel_size=2, num_levels=3, dropout=0.1),
}
every_kind = pytest.mark.parametrize("kind", CELLS)


def config_of(kind, source, **options):
    return tiny(source, model={"cell": CELLS[kind], "depth": 1}, **options)


def count(config):
    with torch.device("meta"):
        return num_parameters(SequenceModel(config.model))


@pytest.fixture(scope="module", params=CELLS)
def trained(request, corpus, tmp_path_factory):
    """A run of every kind, and the same one interrupted after its second step."""
    config = config_of(request.param, corpus, steps=12, eval_every=6)
    folder = tmp_path_factory.mktemp(request.param)
    run(config, folder / "whole")
    run(config, folder / "stopped", max_steps=2)
    run(config, folder / "stopped", resume=True)
    return config, folder / "whole", folder / "stopped"


@pytest.mark.parametrize("name", SIZES)
def test_copy_memory_sizes_are_those_of_table_1(name):
    config, original = RECIPES[name](), RECIPES["copy-memory"]()
    assert count(config).total == pytest.approx(SIZES[name], rel=0.01)
    assert config.data == replace(original.data, batch=config.data.batch) and config.data.copy_T == 400


@pytest.mark.parametrize("name", ["ptb-mini", "wikitext-2-mini"])
def test_language_models_are_as_large_as_what_they_are_compared_with(name):
    config, original = RECIPES[f"{name}-lstm"](), RECIPES[name]()
    assert isinstance(config.model.cell, RecurrentConfig) and config.model.cell.unit == "lstm"
    assert config.model.vocabulary == original.model.vocabulary and config.model.vocabulary.tie_weights
    sizes = [found.total - found.start for found in (count(config), count(original))]  # a start is the solver's
    assert sizes[0] == pytest.approx(sizes[1], rel=0.01)
    assert count(config).rest == pytest.approx(count(original).rest, rel=0.01)
    assert (config.data, config.steps) == (original.data, original.steps)
    assert config.optimiser == replace(original.optimiser, lr=config.optimiser.lr)
    assert config.devices.warmup_steps == config.regulariser.spectral == 0 and config.model.mem_len > 0


def test_training_lowers_the_loss(trained):
    _, folder, _ = trained
    losses = losses_of(folder)
    assert losses[-1] < 0.9 * losses[0]


def test_a_run_that_was_interrupted_ends_the_same(trained):
    """The memory of earlier segments and dropout go on where they were."""
    _, whole, stopped = trained
    assert_same_run(stopped, whole)


def test_a_run_loads_as_it_was(trained):
    config, folder, _ = trained
    loaded = load_run(folder, "latest")
    assert loaded.config == config
    weights = weights_of_run(folder)
    named = dict(loaded.model.named_parameters())
    assert weights.keys() == named.keys()
    assert all(torch.equal(named[name], tensor) for name, tensor in weights.items())


def test_a_run_is_evaluated(trained, capsys):
    _, folder, _ = trained
    assert main(["eval", str(folder), "--split", "test", "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["leak"] == 0 and result["figures"]["perplexity"] > 1 and "evals" not in result["figures"]
    assert main(["eval", str(folder), "--sweep"]) == 1
    assert "is solved: there is no tolerance or step limit to sweep" in capsys.readouterr().err


def test_a_page_says_what_a_network_does_not_have(trained):
    """Everything else is measured."""
    config, folder, _ = trained
    (measured,) = measure([read_history(folder)], lambda *_: None)
    assert not isinstance(measured.memory, Missing) and measured.memory.counterpart is None
    assert not isinstance(measured.samples, Missing) and measured.parameters == count(config)
    assert "no cell to solve or to apply again" in str(converging_section(measured, key="r1", level=2))
    assert "This network is run once: nothing is solved" in str(solving_section(measured, key="r1", level=2))
    assert describe_model(config) in {
        "An LSTM with 24 hidden units, in 2 layers",
        "A GRU with 16 hidden units, in 1 layer",
        "A TCN with 16 channels, in 3 levels",
    }
    assert describe_layers(config) in {"2 layers", "1 layer", "3 levels"}


@pytest.mark.slow
def test_a_comparison_with_an_equilibrium(corpus, tmp_path):
    paths = [tmp_path / "lstm", tmp_path / "equilibrium"]
    for path, config in zip(paths, (config_of("lstm", corpus), tiny(corpus)), strict=True):
        run(replace(config, recipe=path.name, steps=2, eval_every=2), path)
    page = write_report(paths, out=tmp_path / "page.html").read_text(encoding="utf-8")
    assert "An LSTM with 24 hidden units, in 2 layers" in page and "solved to its equilibrium" in page
    assert "could not be" not in page


@every_kind
def test_configurations_survive_json(kind, corpus):
    config = config_of(kind, corpus)
    assert from_plain(json.loads(json.dumps(to_plain(config)))) == config


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"devices": {"warmup_steps": 2}}, "one depth: set devices.warmup_steps to 0"),
        ({"devices": {"random_steps": 2}}, "random_steps"),
        ({"regulariser": {"spectral": 0.1}}, "penalties are for an equilibrium"),
        ({"regulariser": {"jacobian": 0.1}}, "penalties are for an equilibrium"),
    ],
    ids=str,
)
def test_what_only_an_equilibrium_has_is_refused(options, message, corpus):
    with pytest.raises(ValueError, match=message):
        config_of("lstm", corpus, **options)


TINY = ["--data.copy-T", "4", "--data.copy-train", "32", "--data.copy-test", "8", "--data.batch", "4"]
TINY += ["--steps", "3", "--eval-every", "3", "--trackers"]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("copy-memory-lstm", ["--model.cell.num-layers", "2", "--model.cell.forget-bias", "0.5"]),
        ("copy-memory-gru", ["--model.cell.hidden-width", "7"]),
        ("copy-memory-tcn", ["--model.cell.kernel-size", "3", "--model.cell.dropout", "0.1"]),
    ],
)
def test_recipes_run_from_the_command_line(name, words, tmp_path, capsys):
    """With every field of their network as an option."""
    assert main(["train", name, *TINY, *words, "--out", str(tmp_path / "run"), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["finished"] and result["loss"] > 0
    cell = load_run(tmp_path / "run").config.model.cell
    for option, value in zip(words[::2], words[1::2], strict=True):
        field = option.removeprefix("--model.cell.").replace("-", "_")
        assert str(getattr(cell, field)) == value


def test_depth_is_no_option_for_a_network_that_is_run_once(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "copy-memory-lstm", *TINY, "--model.depth", "4"]) == 2
    complaint = capsys.readouterr().err
    assert "a recurrent network is run once and has no equilibrium: depth must be 1, got 4" in complaint
    assert list(tmp_path.iterdir()) == [] and complaint.count("\n") == 1


def test_a_bfloat16_run_carries_its_memory(corpus, tmp_path, without_onednn):
    for kind in CELLS:
        run(config_of(kind, corpus, precision="bf16", steps=3), tmp_path / kind)
        assert all(0 < loss < 10 for loss in losses_of(tmp_path / kind))
