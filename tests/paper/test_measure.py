"""What is reported of trained models, against their own records."""

import math
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from deqkit.analysis.training_memory import training_memory
from deqkit.model import SequenceModel, num_parameters
from deqkit.paper import causality, copy_memory, language
from deqkit.paper.cost import training_costs
from deqkit.paper.measure import (
    COLUMNS,
    Contender,
    _few_steps,
    bars,
    compare,
    listed,
    measure,
    ratios,
    relative,
    spread,
    table,
    told_commits,
    verdict_of,
)
from deqkit.paper.run import read_measured
from deqkit.paper.workshop import Workshop
from deqkit.train.config import RegulariserConfig
from deqkit.train.recipes import RECIPES, layers
from deqkit.train.tasks import make_task
from train.runs import BYTES, TRELLIS, tiny


@pytest.fixture(scope="module")
def workshop(tmp_path_factory):
    return Workshop(runs=tmp_path_factory.mktemp("runs"))


def equilibrium(corpus):
    return tiny(corpus, devices={"warmup_steps": 2})


def stack(corpus):
    return layers(tiny(corpus), 3, tied=True)


def test_an_equilibrium(workshop, corpus):
    config = equilibrium(corpus)
    found = measure(workshop, config)
    records = workshop.metrics(workshop.trained(config))
    assert found["parameters"] > found["parameters_outside_embedding"] > 0
    assert found["steps"] == len(records) == 6
    task = make_task(config)
    assert found["epochs"] == pytest.approx(6 * 4 * 8 / len(task.corpus.split("train")))  # pyright: ignore
    assert found["minutes"] == pytest.approx(sum(r["seconds"] for r in records) / 60)
    assert found["training_us_per_token"] == pytest.approx(60e6 * found["minutes"] / (6 * 4 * 8))
    solved = [r for r in records if "evals" in r]
    assert len(solved) == 4  # two were shallow
    assert min(r["evals"] for r in solved) <= found["evaluations"] <= max(r["evals"] for r in solved)
    assert found["products"] > 0 and found["leak"] == 0 and found["training_memory_mib"] > 0
    assert found["test"]["perplexity"] < 10 * BYTES and found["valid"]["step"] == found["best_step"]
    assert measure(workshop, config) is found  # not measured again


def test_layers_have_no_solves(workshop, corpus):
    found = measure(workshop, stack(corpus))
    assert found["evaluations"] is None and found["products"] is None and found["late_tokens_per_second"] > 0


def test_copy_memory_has_no_perplexity(workshop):
    found = measure(workshop, replace(tiny("copy-memory"), recipe="tiny-copy"))
    assert found["headline"] == "loss" and found["epochs"] is None and "perplexity" not in found["test"]


def test_a_comparison_over_seeds(workshop, corpus):
    contenders = (
        Contender(label="one", config=lambda workshop: equilibrium(corpus), seeds=(0, 1)),
        Contender(label="other", config=lambda workshop: stack(corpus)),
    )
    one, other = compare(workshop, contenders)
    tests = [run["test"]["perplexity"] for run in one["runs"]]
    assert one["seeds"] == [0, 1] and one["test"] == pytest.approx(statistics.fmean(tests))
    assert (one["lowest"], one["highest"]) == (min(tests), max(tests))
    assert spread(one) == f"{one['test']:.1f} ({min(tests):.1f} to {max(tests):.1f})"
    assert spread(other) == f"{other['test']:.1f}"
    rows = table([one, other])["rows"]
    assert all(len(row) == len(COLUMNS) for row in rows) and rows[0][2] == "0, 1" and rows[1][9] == "-"


def test_too_little_to_compare_is_an_error(workshop, corpus):
    contenders = [
        Contender(label="one", config=lambda workshop: equilibrium(corpus), seeds=(5,)),
        Contender(label="other", config=lambda workshop: stack(corpus), seeds=(5, 7)),
    ]
    with pytest.raises(ValueError, match="leaves too little of one, other to compare"):
        compare(replace(workshop, seeds=(7,)), contenders)
    apart = [contenders[0], Contender(label="other", config=lambda workshop: stack(corpus), seeds=(7,))]
    with pytest.raises(ValueError, match="one and other have no seed in common"):
        compare(workshop, apart)


def test_with_a_contender_missing_a_claim_can_fail_but_not_hold(workshop, corpus):
    contenders = [
        Contender(label="one", config=lambda workshop: equilibrium(corpus)),
        Contender(label="other", config=lambda workshop: stack(corpus)),
        Contender(label="third", config=lambda workshop: stack(corpus), seeds=(5,)),
    ]
    found = compare(replace(workshop, seeds=(0,)), contenders)
    assert [one["label"] for one in found] == ["one", "other"]
    assert verdict_of(True, contenders, found) == (None, " Not trained: third.")
    assert verdict_of(False, contenders, found)[0] is False and verdict_of(None, contenders, found)[0] is None
    assert verdict_of(True, contenders[:2], found) == (True, "")


def test_what_was_measured_before_is_not_trained_again(workshop, corpus, tmp_path):
    """Only the same training on the same data counts; what is there is measured anew."""
    config = equilibrium(corpus)
    before = measure(workshop, config)
    # Of a version that counted the memory of the equilibrium alone: that needs no training to be counted again.
    older = {name: value for name, value in before.items() if name != "last_stage_memory_mib"}
    older["training_memory_mib"] = before["last_stage_memory_mib"]
    elsewhere = Workshop(runs=tmp_path, seeds=(), reusable={before["training_hash"]: older})
    assert measure(elsewhere, config) == before and not elsewhere.has(config)
    assert before["training_memory_mib"] > before["last_stage_memory_mib"]  # it begins with two layers
    contenders = [
        Contender(label="one", config=lambda workshop: config, seeds=(0, 1)),
        Contender(label="same", config=lambda workshop: replace(config, checkpoint_every=5)),
    ]
    assert [one["runs"] for one in compare(elsewhere, contenders)] == [[before], [before]]
    another = [contenders[0], Contender(label="other", config=lambda workshop: replace(config, steps=7))]
    with pytest.raises(ValueError, match="leaves too little of one, other to compare"):
        compare(elsewhere, another)
    assert measure(replace(workshop, reusable={before["training_hash"]: {}}), config) is before  # it is there
    elsewhere.trained(replace(config, steps=7))  # of the same name, but another training
    assert measure(elsewhere, config) == before and measure(elsewhere, replace(config, steps=7)) != before


@pytest.mark.parametrize("recipe", ["ptb-mini", "ptb-deq-trellisnet-mini"])
def test_memory_is_counted_at_a_step_limit_from_which_on_it_does_not_grow(recipe):
    model: Any = RECIPES[recipe]().model
    fewer: Any = _few_steps(model)
    assert (fewer.max_steps, fewer.adjoint.max_steps) < (model.max_steps, model.adjoint.max_steps)
    peaks = [training_memory(one, batch=2, length=16).peak for one in (model, fewer)]
    assert peaks[0] == peaks[1]


def test_results_have_models_to_reuse():
    """Rows that are no comparisons have other things by the same name."""
    results = Path(__file__).parents[2] / "results"
    reusable = read_measured(results)
    assert {run["recipe"] for run in reusable.values()} >= {"ptb-mini-tied-16", "ptb-mini-lstm"}
    assert all(run["commit"] and run["test"][run["headline"]] > 0 for run in reusable.values())


def test_models_trained_by_different_versions_are_told_apart():
    def found(*commits):
        return [{"runs": [{"commit": commit} for commit in commits]}]

    assert told_commits(found("a" * 40, "a" * 40)) == ""
    assert told_commits(found("b" * 40, "a" * 40)).startswith(
        " Trained at commit aaaaaaaaaa, commit bbbbbbbbbb: their times"
    )


def run_of(seed: int, perplexity: float) -> dict[str, Any]:
    return {"seed": seed, "headline": "perplexity", "test": {"perplexity": perplexity}}


def test_models_are_compared_seed_by_seed():
    """A hard seed that only one of them has says nothing."""
    one = {"runs": [run_of(0, 99.0), run_of(1, 120.0), run_of(2, 500.0)]}
    other = {"runs": [run_of(1, 100.0), run_of(0, 110.0)]}
    labelled = [("one", one), ("other", other)]
    assert ratios(one, other) == [0.9, 1.2]
    both = [{**model, "label": name, "seeds": [run["seed"] for run in model["runs"]]} for name, model in labelled]
    assert listed(both) == "one 99.0, 120.0 and 500.0 (seeds 0, 1 and 2), other 100.0 and 110.0 (seeds 1 and 0)"
    assert [bar["value"] for bar in bars(both, y="perplexity")["bars"]] == [109.5, 105.0]
    assert relative(one, other) == pytest.approx(math.sqrt(0.9 * 1.2))


def test_rows_of_the_language_models(workshop, corpus, monkeypatch):
    """Their verdicts follow from their figures, whatever these are."""
    contenders = (
        Contender(label="DEQ", config=lambda workshop: equilibrium(corpus)),
        Contender(label="tied", config=lambda workshop: stack(corpus)),
        Contender(label="untied", config=lambda workshop: layers(tiny(corpus), 2, tied=False)),
    )
    monkeypatch.setattr(language, "unigram_perplexity", lambda config: 1e9)
    small = language.small_models(workshop, contenders=contenders, text="a text")
    deq, tied, untied = (one["test"] for one in small.numbers["found"])
    standings = [language.standing(deq / other) for other in (tied, untied)]
    assert small.holds == (False if "behind" in standings else None if "level" in standings else True)
    assert f"{deq:.1f}" in small.measured and all(state in small.measured for state in standings)
    pair = language.trellis(workshop, contenders=contenders[:2], text="a text")
    assert pair.holds == (deq <= 1.02 * tied)
    lstm = language.against_lstm(workshop, contenders=contenders[:2], text="a text")
    state = language.standing(deq / tied)
    assert lstm.holds == {"ahead": True, "behind": False, "level": None}[state]
    assert {"ahead": "the DEQ is ahead", "behind": "the LSTM is ahead", "level": "they are level"}[
        state
    ] in lstm.measured
    assert f"in {lstm.numbers['cost']:.2f} times the LSTM's processor time" in lstm.measured


@pytest.mark.parametrize(
    ("deq", "lstm", "cost", "holds"),
    [
        (90.0, 100.0, 1.0, True),
        (90.0, 100.0, 1.3, None),  # it has had more time
        (90.0, 100.0, 0.5, True),
        (99.5, 100.0, 1.0, None),  # level
        (110.0, 100.0, 1.0, False),
        (110.0, 100.0, 0.5, None),  # the LSTM has had more time
        (110.0, 100.0, 2.0, False),
    ],
)
def test_who_is_ahead_in_the_same_time(workshop, corpus, monkeypatch, deq, lstm, cost, holds):
    found = [
        {"label": label, "seeds": [0], "test": value, "lowest": value, "highest": value, "runs": [run]}
        for label, value, run in (("DEQ", deq, run_of(0, deq)), ("LSTM", lstm, run_of(0, lstm)))
    ]
    contenders = [Contender(label=one["label"], config=lambda workshop: equilibrium(corpus)) for one in found]
    monkeypatch.setattr(language, "compare", lambda *_: found)
    monkeypatch.setattr(language, "_numbers", lambda *_: {})
    monkeypatch.setattr(language, "describe_runs", lambda _: "")
    monkeypatch.setattr(language, "told_commits", lambda _: "")
    monkeypatch.setattr(language, "training_costs", lambda *_: {"DEQ": cost, "LSTM": 1.0})
    monkeypatch.setattr(language, "unigram_perplexity", lambda config: 1e9)
    outcome = language.against_lstm(workshop, contenders=contenders, text="a text", as_long=True)
    assert outcome.holds is holds and ("No verdict" in outcome.remark) == (holds is None and deq != 99.5)


def test_training_too_short_for_a_verdict(workshop, corpus, monkeypatch):
    contenders = (
        Contender(label="DEQ", config=lambda workshop: equilibrium(corpus)),
        Contender(label="tied", config=lambda workshop: stack(corpus)),
    )
    monkeypatch.setattr(language, "unigram_perplexity", lambda config: 1.0)
    short = language.trellis(workshop, contenders=contenders[:2], text="a text")
    assert short.holds is None and "training was too short for a verdict" in short.remark


@pytest.mark.parametrize(
    ("ratio", "state"), [(0.985, "ahead"), (0.995, "level"), (1.0, "level"), (1.005, "level"), (1.02, "behind")]
)
def test_neither_is_ahead_within_what_seeds_differ_by(ratio, state):
    assert language.standing(ratio) == state


@pytest.mark.parametrize(
    ("standings", "seeds", "ahead"),
    [
        (["ahead", "ahead"], 1, True),
        (["ahead", "behind"], 1, False),
        (["ahead", "level"], 1, None),  # one seed may err
        (["ahead", "level"], 2, False),
        (["level", "behind"], 1, False),
    ],
)
def test_being_level_refutes_a_claim_to_be_ahead_on_several_seeds(standings, seeds, ahead):
    labels = ["tied", "untied"]
    by_seed = {label: [1.0] * seeds for label in labels}
    assert language._is_ahead(dict(zip(labels, standings, strict=True)), by_seed) is ahead


@pytest.mark.parametrize(("by_seed", "ahead"), [([0.996, 0.995, 0.997], None), ([0.996, 1.001, 0.997], False)])
def test_a_small_lead_on_every_seed_is_not_refuted(by_seed, ahead):
    assert language._is_ahead({"tied": "level"}, {"tied": by_seed}) is ahead


def test_a_learned_start_is_counted_and_tried_without(workshop, corpus):
    config = equilibrium(corpus)
    learned = replace(config, recipe="learned", model=replace(config.model, start="learned"))
    assert language._told_start(workshop, Contender(label="DEQ", config=lambda workshop: config)) == ""
    contender = Contender(label="DEQ", config=lambda workshop: learned)
    told = language._told_start(workshop, contender)
    count = num_parameters(SequenceModel(learned.model))
    assert f"has {count.start:,} parameters" in told and "From zeros" not in told  # nobody has trained it
    workshop.trained(learned)
    told = language._told_start(workshop, contender)
    assert f"{count.start / count.rest:.1%} more outside embedding and softmax" in told
    tight = workshop.tested(workshop.trained(learned), tol=language.FROM_ZEROS, max_steps=language.FROM_ZEROS_STEPS)
    assert f"seed 0 has {tight['perplexity']:.1f} without it" in told


def test_the_cost_of_a_training_is_that_of_its_stages(workshop, corpus):
    """Twice the steps at the equilibrium cost nearly twice as much; a solve of more evaluations costs more."""
    config = equilibrium(corpus)
    shallow = replace(
        config,
        model=replace(config.model, start="learned"),
        regulariser=RegulariserConfig(spectral=0.01),
        devices=replace(config.devices, warmup_steps=2, warmup_depth=1),
    )
    runs = {"evaluations": 3.0, "products": 2.0}, {"evaluations": 12.0, "products": 10.0}
    contenders = [
        Contender(label=label, config=lambda workshop, c=changed: c)
        for label, changed in (("short", config), ("shallow", shallow), ("long", replace(config, steps=12)))
    ]
    found = [{"label": one.label, "runs": [runs[one.label == "long"]]} for one in contenders]
    costs = training_costs(workshop, contenders, found)
    assert costs["short"] > 0 and costs["long"] > 2 * costs["short"] > 2 * 0.5 * costs["shallow"]


def test_the_perplexity_of_frequencies(corpus):
    task = make_task(tiny(corpus))
    train, test = (task.corpus.split(name).tolist() for name in ("train", "test"))  # pyright: ignore
    probabilities = [(train.count(token) + 1) / (len(train) + BYTES) for token in test]
    expected = math.exp(-statistics.fmean(math.log(p) for p in probabilities))
    assert language.unigram_perplexity(tiny(corpus)) == pytest.approx(expected)


def test_a_truncated_solver_that_mixes_positions_leaks_and_ours_does_not(workshop, corpus):
    outcome = causality.causal(workshop, config=lambda workshop: equilibrium(corpus), max_batches=2)
    points = outcome.numbers["points"]
    assert outcome.holds is True and outcome.numbers["leak"] == 0
    assert {p["leak"] for p in points["causal"]} == {0.0}
    assert max(p["leak"] for p in points["not causal"]) > 0


def test_what_a_solver_that_mixes_positions_gains_most_is_told(workshop, corpus, monkeypatch):
    """Not where it leaks most: there it may lose."""
    perplexities = {True: iter([9.0, 8.0, 7.0, 6.0, 5.0, 4.0]), False: iter([9.5, 8.0, 6.5, 6.1, 5.0, 4.0])}

    def tested(self, run, split="test", *, solver, max_steps, **settings):
        return {"perplexity": next(perplexities[solver.group == "prefix"]), "num_tokens": 10}

    def leak(run, task, split, *, solver=None, max_steps=0, **settings):
        return 0.0 if solver is None or solver.group == "prefix" else {2: 0.5}.get(max_steps, 0.1)

    monkeypatch.setattr(Workshop, "tested", tested)
    monkeypatch.setattr(causality, "measure_leak", leak)
    outcome = causality.causal(workshop, config=lambda workshop: equilibrium(corpus), max_batches=2)
    assert "cut off after 2 evaluations, lets the future change a token's loss by up to 0.5 nats" in outcome.measured
    assert "cut off after 4, it would have claimed a perplexity of 6.50 for the causal 7.00" in outcome.measured
    assert "has the lower perplexity at 1 of the 6 limits and the higher one at 2." in outcome.remark
    (_, difference) = outcome.numbers["figures"]
    assert difference["series"][0]["y"][:3] == [0.5, 0.0, -0.5]
    assert outcome.holds is True
    monkeypatch.setattr(Workshop, "tested", lambda self, run, **settings: {"perplexity": 9.0, "num_tokens": 10})
    monkeypatch.setattr(causality, "measure_leak", lambda *args, **settings: 0.0)
    blind = causality.causal(workshop, config=lambda workshop: equilibrium(corpus), max_batches=2)
    assert blind.holds is None  # it did not see the other solver's leak


def test_the_quick_lstm_has_the_size_of_the_demo(workshop):
    with torch.device("meta"):
        demo, lstm = (
            num_parameters(SequenceModel(config.model))
            for config in (workshop.recipe("demo"), language.quick_lstm(workshop))
        )
    assert lstm.total == pytest.approx(demo.total - demo.start, rel=0.01)


def test_the_quick_lstm_for_as_long_differs_in_its_steps_alone(workshop):
    short, long = language.quick_lstm(workshop), language.quick_lstm_as_long(workshop)
    assert long == replace(short, recipe="demo-lstm-long", steps=3 * short.steps)


def test_copy_memory_at_another_length(workshop):
    config = replace(tiny("copy-memory"), recipe="tiny-copy")
    outcome = copy_memory.longer(workshop, config=lambda workshop: config, lengths=(5, 10), growth=(2, 2))
    (short, long), tried = outcome.numbers["points"].values()
    assert short["num_tokens"] == 6 * 25 and long["num_tokens"] == 6 * 30
    assert long["chance"] == pytest.approx(10 * math.log(8) / 30)
    assert outcome.holds == (long["loss"] < long["chance"] / 2)
    assert "Tried: Training begins with T = 2, which grows up to step 4." in outcome.remark
    assert [one["T"] for one in tried] == [5, 10] and tried[1]["loss"] != long["loss"]
    assert f"T = 10: {tried[1]['loss']:.2g}" in outcome.remark
    assert workshop.has(copy_memory.growing(config, 2, 2))


def test_the_longest_copy(workshop):
    config = replace(tiny("copy-memory"), recipe="tiny-copy")
    outcome = copy_memory.longest(
        workshop, configs=lambda workshop: [copy_memory.at_T(config, T) for T in (4, 6)], asked=6, solved=1e-4
    )
    assert outcome.holds is False and outcome.numbers["longest"] is None  # six steps solve nothing
    assert [one["T"] for one in outcome.numbers["found"]] == [4, 6]
    assert (workshop.runs / "tiny-copy-T-6-seed-0").is_dir()
    assert "grows" not in outcome.remark


def test_the_longest_copy_says_how_it_grows(workshop):
    config = tiny("copy-memory", data={"copy_T": 6, "copy_first_T": 2, "copy_first_steps": 2})
    outcome = copy_memory.longest(workshop, configs=lambda workshop: [config], asked=6, solved=1e-4)
    assert "Training begins with T = 2, which grows up to step 4." in outcome.remark
    records = workshop.metrics(workshop.trained(config, "tiny-T-6-seed-0"))
    lengths = [round(r["tokens_per_second"] * r["seconds"] / config.data.batch) - 20 for r in records]
    assert lengths == [2, 2, 2, 3, 6, 6]


def test_table_1(workshop):
    configs = {"DEQ-Transformer": tiny("copy-memory"), "LSTM": layers(tiny("copy-memory"), 2, tied=True)}
    contenders = [
        Contender(label=label, config=lambda workshop, c=config: replace(c, recipe=f"copy-{c.recipe}"), seeds=(0,))
        for label, config in configs.items()
    ]
    outcome = copy_memory.table_1(workshop, contenders=contenders, T=5, solved=1e-4, budget="Small.")
    assert outcome.holds is False and "test loss: DEQ-Transformer" in outcome.measured
    bars, curves = outcome.numbers["figures"]
    assert len(bars["bars"]) == len(curves["series"]) == 2 and curves["series"][0]["x"] == [1, 2, 3, 4, 5, 6]


@pytest.mark.parametrize(
    ("tcn", "lstm", "holds"), [(1e-6, 1.0, True), (1e-6, 0.6, True), (1e-6, 0.4, False), (1e-3, 1.0, False)]
)  # the LSTM's loss as a share of chance
def test_table_1_is_about_the_others_too(workshop, monkeypatch, tcn, lstm, holds):
    losses = {"DEQ-Transformer": 1e-7, "TCN": tcn, "LSTM": lstm * copy_memory.chance(5)}
    run = {"test": {"loss": 1.0}, "minutes": 1.0, "steps": 6, "evaluations": None, "parameters": 9, "headline": "loss"}
    found = [
        {"label": label, "paper": None, "seeds": [0], "test": loss, "lowest": loss, "highest": loss}
        | {"runs": [{**run, "seed": 0, "test": {"loss": loss}}]}
        for label, loss in losses.items()
    ]
    monkeypatch.setattr(copy_memory, "compare", lambda workshop, contenders: found)
    monkeypatch.setattr(copy_memory, "_curves", lambda workshop, contenders: {})
    contenders = [Contender(label=label, config=lambda workshop: tiny("copy-memory")) for label in losses]
    outcome = copy_memory.table_1(workshop, contenders=contenders, T=5, solved=1e-6, budget="")
    assert outcome.holds is holds
    assert ("begun to tell symbols apart" in outcome.remark) == (lstm < 1)
    compared = [*contenders, Contender(label="GRU", config=lambda workshop: tiny("copy-memory"))]
    outcome = copy_memory.table_1(workshop, contenders=contenders, T=5, solved=1e-6, budget="", compared=compared)
    assert outcome.holds is (False if holds is False else None) and "Not trained: GRU." in outcome.remark


def test_trellis_cells_are_measured_too(workshop, corpus):
    found = measure(workshop, replace(tiny(corpus, cell=TRELLIS, model={"mem_len": 1}), recipe="tiny-trellis"))
    assert found["leak"] == 0 and found["evaluations"] > 0


def test_a_short_copy_leaves_the_claim_about_longer_ones_open(workshop, monkeypatch):
    monkeypatch.setattr(copy_memory, "_minutes_to", lambda workshop, run, loss: 1.0)
    configs = {"configs": lambda workshop: [tiny("copy-memory", steps=1, data={"copy_T": 5})], "solved": 1.0}
    assert copy_memory.longest(workshop, asked=5, **configs).holds is None
    monkeypatch.setattr(copy_memory, "PAPER_T", 4)
    assert copy_memory.longest(workshop, asked=5, **configs).holds is True
    monkeypatch.setattr(copy_memory, "_minutes_to", lambda workshop, run, loss: None)
    assert copy_memory.longest(workshop, asked=5, **configs).holds is False
    monkeypatch.setattr(copy_memory, "PAPER_T", 3)
    assert copy_memory.longest(workshop, asked=4, **configs).holds is None  # more was tried than is asked
