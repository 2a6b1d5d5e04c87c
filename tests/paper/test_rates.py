"""The search of learning rates, on tiny trainings."""

from dataclasses import replace
from functools import partial
from typing import cast

import pytest

from deqkit.paper import language, rates
from deqkit.paper.measure import Contender
from deqkit.paper.rates import FACTORS, learning_rates, short
from deqkit.paper.workshop import Workshop, training_hash
from deqkit.train.recipes import RECIPES, layers
from deqkit.train.run_folder import RunFolder, read_metrics
from paper.tiny_scale import check_outcome
from train.runs import tiny

LONG = 12
"""Steps of a training to its end."""


@pytest.fixture(scope="module")
def search(corpus, tmp_path_factory):
    """Two models: one whose rate is far too low, so that twice the rate is better, and one near its best."""
    slow = replace(tiny(corpus, optimiser={"lr": 1e-4}, devices={"warmup_steps": 3}), steps=LONG)
    stack = replace(layers(tiny(corpus), 2, tied=True), recipe="stack", steps=LONG)
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
    assert (workshop.runs / "tiny-4-steps-lr-0.0002-seed-0").is_dir()


def test_a_rate_that_short_trainings_prefer_is_trained_to_the_end(search):
    workshop, run = search
    outcome = run(tuned=1.0)
    slow = outcome.numbers["to the end"]["slow"]
    assert [one["factor"] for one in slow] == [1.0, 2.0] and "slow trained to the end" in outcome.measured
    for one, name in zip(slow, ("tiny-seed-0", "tiny-lr-0.0002-seed-0"), strict=True):
        folder = RunFolder(workshop.runs / name)
        assert folder.config().optimiser.lr == one["lr"] and folder.config().steps == LONG
        evaluations = [record for record in read_metrics(folder.metrics) if record["kind"] == "valid"]
        assert one["perplexity"] == min(record["perplexity"] for record in evaluations)
        assert evaluations[-1]["step"] == LONG
    assert outcome.numbers["above the lowest at the end"]["slow"] > 1.0  # so the row does not hold
    satisfied = run(tuned=2.0)
    assert satisfied.numbers["to the end"] == {} and "to the end" not in satisfied.measured


def test_what_is_better_at_the_end_decides(search, monkeypatch):
    """A recipe's rate that is worse in short trainings, and better in long ones, suits it."""
    _, run = search

    def better(workshop, config, trials):
        return [{**one, "perplexity": 10.0 if one["factor"] == 1.0 else 11.0} for one in trials]

    monkeypatch.setattr(rates, "_to_the_end", better)
    assert run(tuned=1.0).holds is True


def test_models_that_were_not_searched_leave_the_claim_open(search, corpus):
    workshop, _ = search
    config = replace(layers(tiny(corpus), 2, tied=True), recipe="stack", steps=LONG)
    stack = Contender(label="stack", config=lambda workshop: config)
    other = Contender(label="other", config=stack.config)
    outcome = learning_rates(
        workshop, contenders=[stack], text="bytes", steps=LONG, tuned=99.0, compared=[stack, other]
    )
    assert outcome.holds is None and "Not trained: other." in outcome.remark
    assert "Short trainings" not in outcome.remark  # all the steps that its recipe has


def test_what_was_measured_before_is_not_trained_again(corpus, tmp_path):
    config = tiny(corpus)
    workshop = Workshop(runs=tmp_path, reusable={training_hash(config): {"valid": {"perplexity": 5.0}}})
    trial = {"factor": 1.0, "lr": config.optimiser.lr, "perplexity": 9.0}
    assert rates._to_the_end(workshop, config, [trial]) == [{**trial, "perplexity": 5.0}]
    assert not list(tmp_path.iterdir())


def test_all_models_that_are_compared_after_as_many_steps_are_searched():
    searched = [one for claim in rates.CLAIMS for one in contenders_of(claim)]
    rows = {claim.row: contenders_of(claim) for claim in language.CLAIMS if "contenders" in keywords_of(claim)}
    missing = {(row, one.label) for row, compared in rows.items() for one in compared if one not in searched}
    # Of the same training there may be several contenders; the stack of 10 is no contender, but what the shallow start
    # of the others comes to alone.
    long = {(row, one.label) for row, compared in rows.items() if row.startswith("best-") for one in compared}
    again = {("lstm", language.DEQ), ("lstm-wikitext-2", language.DEQ), ("table-2-ptb", language.LSTM)}
    assert missing == {("table-2-ptb", "tied stack of 10"), *again, *long}


def keywords_of(claim):
    return cast(partial, claim.full).keywords


def contenders_of(claim):
    return keywords_of(claim)["contenders"]
