"""The search of learning rates, on tiny trainings."""

from dataclasses import replace

import pytest

from deqkit.paper.measure import Contender
from deqkit.paper.rates import FACTORS, MODELS, learning_rates, short
from deqkit.paper.workshop import Workshop
from deqkit.train.recipes import RECIPES, layers
from paper.tiny_scale import check_outcome
from train.runs import tiny


@pytest.fixture(scope="module")
def search(corpus, tmp_path_factory):
    """Two models: one whose rate is far too low, so that twice the rate is better, and one at its best."""
    slow = tiny(corpus, optimiser={"lr": 1e-4}, devices={"warmup_steps": 3})
    stack = replace(layers(tiny(corpus), 2, tied=True), recipe="stack")
    workshop = Workshop(runs=tmp_path_factory.mktemp("runs"))

    def run(tuned):
        contenders = [
            Contender(label="slow", config=lambda workshop: slow),
            Contender(label="stack", config=lambda workshop: stack),
        ]
        return learning_rates(workshop, contenders=contenders, text="bytes", steps=4, tuned=tuned)

    return workshop, run


def test_a_short_training_keeps_its_shallow_share_and_falls_to_its_end():
    config = RECIPES["ptb-mini"]()
    found = short(config, 2.0, steps=400)
    assert found.optimiser.lr == 2 * config.optimiser.lr and found.steps == found.eval_every == 400
    assert found.devices.warmup_steps / 400 == config.devices.warmup_steps / config.steps
    assert replace(found.optimiser, lr=config.optimiser.lr) == config.optimiser and found.model == config.model


def test_every_rate_is_trained_and_the_verdict_is_of_the_recipes(search):
    workshop, run = search
    outcome = run(tuned=1.0)
    numbers = check_outcome(outcome)
    for label, trials in numbers["rates"].items():
        assert [one["factor"] for one in trials] == list(FACTORS)
        lowest = min(one["perplexity"] for one in trials)
        assert numbers["above the lowest"][label] == pytest.approx(trials[1]["perplexity"] / lowest)
    slow = numbers["rates"]["slow"]
    assert slow[2]["perplexity"] < slow[1]["perplexity"] < slow[0]["perplexity"]
    assert outcome.holds is False and run(tuned=2.0).holds is True
    folder = workshop.runs / "tiny-4-steps-lr-0.0002-seed-0"
    assert folder.is_dir() and len(list(workshop.runs.iterdir())) == 2 * len(FACTORS)


def test_the_models_of_the_comparison_are_searched(tmp_path):
    names = [one.label for one in MODELS]
    assert names == ["DEQ-Transformer", "tied stack of 16", "untied stack of 4", "LSTM"]
    with pytest.raises(ValueError, match="ptb is needed"):
        MODELS[0].config(Workshop(runs=tmp_path, data=tmp_path))
