"""Every recipe is complete: it builds, survives JSON, and has the names and sizes of the design."""

import json
import re
from dataclasses import replace

import pytest
import torch

from deqkit.layers import TransformerConfig
from deqkit.model import SequenceModel, num_parameters
from deqkit.train import loop
from deqkit.train.config import from_plain, to_plain
from deqkit.train.recipes import RECIPES, layers
from deqkit.train.tasks import make_task

every_recipe = pytest.mark.parametrize("name", RECIPES)
DESIGN = (
    "copy-memory",
    "ptb-deq-trellisnet",
    "wt103-deq-trellisnet",
    "wt103-deq-transformer-small",
    "wt103-deq-transformer-medium",
    "wt103-deq-transformer-adaptive",
    "demo",
)
PAPER = {  # millions of parameters, of all and outside embedding and softmax: tables 2 and 3
    "ptb-deq-trellisnet": (24, 20),
    "wt103-deq-trellisnet": (180, 45),
    "wt103-deq-transformer-small": (138, 4.5),
    "wt103-deq-transformer-small-tied-16": (138, 4.5),
    "wt103-deq-transformer-small-untied-4": (139, 4.9),
    "wt103-deq-transformer-medium": (172, 43),
    "wt103-deq-transformer-medium-untied-16": (165, 44),
    "wt103-deq-transformer-adaptive": (110, 70),
    "wt103-deq-transformer-adaptive-untied-18": (110, 72),
}


def count(config):
    with torch.device("meta"):
        return num_parameters(SequenceModel(config.model))


@every_recipe
def test_a_recipe_builds_and_survives_json(name):
    config = RECIPES[name]()
    assert config.recipe == name
    assert config == RECIPES[name]()
    assert from_plain(json.loads(json.dumps(to_plain(config), allow_nan=False))) == config
    assert count(config).total > 1_000
    assert config.expected_time


@every_recipe
def test_a_recipe_agrees_with_itself(name):
    """Devices end before the run does, and the best evaluation has a checkpoint."""
    config = RECIPES[name]()
    assert config.devices.warmup_steps + config.devices.early_adjoint_steps < config.steps
    assert config.optimiser.warmup_steps < config.steps
    assert config.eval_every <= config.steps and config.checkpoint_every <= config.steps
    assert config.eval_every % config.checkpoint_every == 0


def test_the_ptb_recipe_averages_its_weights():
    config = RECIPES["ptb-deq-trellisnet"]()
    assert config.optimiser.average_after is not None and config.optimiser.average_after < config.steps


@pytest.mark.parametrize("name", DESIGN)
def test_the_names_of_the_design(name):
    assert name in RECIPES


@pytest.mark.parametrize("family", ["ptb-deq-trellisnet", "wt103-deq-trellisnet", "wt103-deq-transformer"])
def test_every_family_has_a_mini_version_and_a_counterpart_with_layers(family):
    names = [name for name in RECIPES if name.startswith(family)]
    assert any("-mini" in name for name in names)
    assert any("tied-" in name for name in names)


@pytest.mark.parametrize("name", [name for name in RECIPES if re.search(r"tied-\d+$", name)])
def test_counterparts_are_what_their_names_say(name):
    """The same data and training, layers instead of an equilibrium, none of its devices; a small untied stack has a
    learning rate of its own."""
    base, kind, depth = name.rsplit("-", 2)
    config, original = RECIPES[name](), RECIPES[base]()
    assert (config.model.depth, config.model.tied) == (int(depth), kind == "tied")
    assert original.model.depth == "equilibrium"
    untied = {"ptb-mini-untied-4": 3e-3, "wikitext-2-mini-untied-4": 3e-3}
    lr = untied.get(name, original.optimiser.lr)
    assert config.optimiser == replace(original.optimiser, lr=lr)
    assert (config.data, config.steps) == (original.data, original.steps)
    assert config.regulariser.jacobian == config.regulariser.spectral == 0
    assert config.devices.early_adjoint_steps == 0
    if kind == "untied":
        assert config.devices.warmup_steps == 0


@pytest.mark.parametrize("name", PAPER)
def test_sizes_are_those_of_the_papers_tables(name):
    """To the paper's own rounding and two percent."""
    total, rest = PAPER[name]
    found = count(RECIPES[name]())
    assert found.total / 1e6 == pytest.approx(total, rel=0.02, abs=0.6)
    assert found.rest / 1e6 == pytest.approx(rest, rel=0.05, abs=0.6)


@every_recipe
def test_language_models_are_strictly_causal(name):
    config = RECIPES[name]()
    assert config.model.solver.group == "prefix"


def test_layers_keep_nothing_of_an_equilibrium():
    original = RECIPES["ptb-mini"]()
    for tied in (True, False):
        config = layers(original, 5, tied=tied)
        assert config.recipe == f"ptb-mini-{'tied' if tied else 'untied'}-5"
        assert isinstance(config.model.cell, TransformerConfig) and config.model.cell.inject is tied
        assert config.model.subsequences == 1


def test_a_recipe_without_text_says_what_to_do():
    with pytest.raises(ValueError, match="recipe ptb-mini needs text: pass --data.source with a text file, or"):
        make_task(RECIPES["ptb-mini"]())


@pytest.mark.parametrize("name", ["copy-memory-mini", "demo"])
def test_a_recipe_for_two_cores_takes_a_step(name, corpus):
    """The others differ in size and text; with a corpus of 256 tokens and small batches these are done quickly."""
    config = RECIPES[name]()
    if name == "demo":
        vocabulary = replace(config.model.vocabulary, size=256)
        data = replace(config.data, source=corpus, fit_vocabulary=False, batch=2, length=16)
        config = replace(config, model=replace(config.model, vocabulary=vocabulary), data=data)
    record = loop.try_step(replace(config, devices=replace(config.devices, warmup_steps=0)))
    assert record["step"] == 1 and record["loss"] < 8 and record["evals"] > 1
