"""The rows about training devices on tiny models, and what decides them."""

import copy

import pytest
import torch

from deqkit.paper import devices, imbalance
from deqkit.paper.solves import sample_text
from deqkit.paper.subjects import untrained
from paper.tiny_scale import check_outcome, make_workshop


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return make_workshop(tmp_path_factory.getbasetemp() / "tiny-scale")


def full_checks():
    return {claim.row: claim.full.func for claim in (*devices.CLAIMS, *imbalance.CLAIMS)}  # pyright: ignore


@pytest.mark.parametrize("row", full_checks())
def test_a_row_on_a_tiny_model(row, setting):
    workshop, scale = setting
    check_outcome(full_checks()[row](workshop, scale=scale))


def test_trainings_differ_in_one_thing(setting, monkeypatch):
    """Weight norm, dropout, warm-up, subsequences: each variant changes what its row is about and nothing else."""
    workshop, scale = setting
    asked = {}

    def note(workshop, scale, name, change):
        asked[change.recipe] = change
        raise ValueError("enough")

    plain = scale.plain(workshop)
    monkeypatch.setattr(devices, "_pair", note)
    changes = {}
    for check in (devices.weight_norm, devices.dropout, devices.warm_up, devices.subsequences):
        with pytest.raises(ValueError, match="enough"):
            check(workshop, scale=scale)
        changes[check.__name__] = copy.copy(asked[plain.recipe])
    cell = changes["weight_norm"].model.cell
    assert cell.normalise == "weight" and cell.dropout == plain.model.cell.dropout > 0
    without = changes["dropout"].model
    assert without.cell.dropout == without.cell.hidden_dropout == without.input_dropout == 0
    assert changes["warm_up"].devices.warmup_steps == plain.steps // 2 and changes["warm_up"].model == plain.model
    assert changes["subsequences"].model.subsequences == 2 and changes["subsequences"].devices == plain.devices


def training(*, first=6.0, last=8.0, seconds=10.0, work=1000.0, perplexity=100.0, backward=0.5, unconverged=0.0):
    return {
        "step": [1, 2],
        "forward": [first, last],
        "backward": [backward * first, backward * last],
        "first quarter": {"forward": first, "backward": backward * first},
        "last quarter": {"forward": last, "backward": backward * last},
        "unconverged, last quarter": unconverged,
        "seconds": seconds,
        "work": work,
        "perplexity": perplexity,
    }


def decided(check, setting, monkeypatch, plain, other):
    """The outcome of a row for trainings that went in a certain way."""
    workshop, scale = setting
    run = workshop.trained(scale.plain(workshop))
    monkeypatch.setattr(devices, "_pair", lambda *args: ((run, run), plain, other))
    return check(workshop, scale=scale)


@pytest.mark.parametrize(("last", "holds"), [(7.0, True), (9.0, False)])
def test_weight_norm_is_decided_by_growth(last, holds, setting, monkeypatch):
    other = training(first=6.0, last=last)
    assert decided(devices.weight_norm, setting, monkeypatch, training(), other).holds is holds


def test_solves_that_end_at_their_limit_are_told(setting, monkeypatch):
    other = training(first=15.0, last=15.0, unconverged=0.987)
    told = decided(devices.weight_norm, setting, monkeypatch, training(), other).measured
    assert told.count("of the last quarter's solves at their limit") == 1 and "(99% of the last" in told


@pytest.mark.parametrize(
    ("work", "perplexity", "holds"), [(500.0, 100.5, True), (500.0, 110.0, False), (1100.0, 90.0, False)]
)
def test_warm_up_must_save_work_at_no_loss(work, perplexity, holds, setting, monkeypatch):
    one, poor = training(work=work, perplexity=perplexity), training(work=500.0, perplexity=110.0)
    run = setting[0].trained(setting[1].plain(setting[0]))
    for same_steps, more_steps in ((one, poor), (poor, one)):
        monkeypatch.setattr(devices, "_trained", lambda *args, found=more_steps: (run, found))
        outcome = decided(devices.warm_up, setting, monkeypatch, training(), same_steps)
        assert outcome.holds is holds


def test_a_longer_warm_up_differs_in_its_steps_alone(setting, monkeypatch):
    workshop, scale = setting
    plain, asked = scale.plain(workshop), []

    def note(workshop, config, scale):
        asked.append(config)
        raise ValueError("enough")

    monkeypatch.setattr(devices, "_pair", lambda *args: ((None, None), {}, {}))
    monkeypatch.setattr(devices, "_trained", note)
    with pytest.raises(ValueError, match="enough"):
        devices.warm_up(workshop, scale=scale)
    (longer,) = asked
    assert longer.steps == 1.5 * plain.steps == 2 * longer.devices.warmup_steps
    assert (longer.model, longer.optimiser, longer.data) == (plain.model, plain.optimiser, plain.data)


def test_work_counts_evaluations_and_products():
    shallow = {"shallow": True}
    solved = {"shallow": False, "evals": 6.0, "backward_evals": 3.0}
    assert devices.work([shallow, shallow, solved], warmup_depth=2) == 4 + 4 + 11


def found(evals, loss=3.0, converged=1.0):
    return {"evaluations": {"mean": evals, "max": evals}, "loss": loss, "converged": converged}


@pytest.mark.parametrize(
    ("pieces", "first", "holds"),
    [
        (found(5.0), 5.0, True),
        (found(9.0), 5.0, False),
        (found(7.6), 5.0, None),  # by too little
        (found(5.0), 19.0, None),
        (found(5.0), 30.0, False),  # harder before training
        (found(5.0, 3.2), 5.0, None),
        (found(5.0, converged=0.2), 5.0, None),
    ],
)
def test_pieces_must_be_easier_and_give_the_same(pieces, first, holds, setting, monkeypatch):
    workshop, scale = setting
    begun = untrained(workshop.trained(scale.transformer(workshop))).state_dict()

    def in_pieces(run, count, scale):
        if all(torch.equal(tensor, begun[name]) for name, tensor in run.model.state_dict().items()):
            return found(first if count > 1 else 20.0)
        return pieces if count > 1 else found(8.0)

    monkeypatch.setattr(devices, "_in_pieces", in_pieces)
    outcome = decided(devices.subsequences, setting, monkeypatch, training(), training())
    assert outcome.holds is holds and f"before training 20.0 in 1, {first:.1f} in 4" in outcome.measured


@pytest.mark.parametrize(
    ("noisy", "error", "converged", "holds"),
    [
        (9.0, 0.4, 1.0, True),
        (7.0, 0.4, 1.0, False),
        (9.0, 0.6, 1.0, None),
        (7.0, 0.6, 1.0, None),
        (9.0, 0.4, 0.5, None),
    ],
)
def test_dropout_is_decided_on_one_model(noisy, error, converged, holds, setting, monkeypatch):
    noise = {**found(noisy, converged=converged), "solves": 8}
    solved = {"with": noise, "without": found(8.0), "difference": noisy - 8.0}
    monkeypatch.setattr(devices, "_with_and_without_masks", lambda *args: {**solved, "standard error": error})
    assert decided(devices.dropout, setting, monkeypatch, training(), training()).holds is holds


def test_masks_are_drawn_and_the_model_is_left_in_evaluation_mode(setting):
    workshop, scale = setting
    run = workshop.trained(scale.plain(workshop))
    found = devices._with_and_without_masks(run, scale)
    noisy, clean = found["with"], found["without"]
    assert noisy["largest residual"] != clean["largest residual"] and not run.model.training
    assert noisy["solves"] == devices.NUM_DRAWS * clean["solves"]
    mean_difference = noisy["evaluations"]["mean"] - clean["evaluations"]["mean"]
    assert found["difference"] == pytest.approx(mean_difference, abs=1e-9)
    torch.manual_seed(5)
    assert devices._with_and_without_masks(run, scale) == found  # whatever the global seed is


def test_pieces_are_solved_one_by_one(setting):
    workshop, scale = setting
    run = workshop.trained(scale.plain(workshop))
    whole, pieces = (devices._in_pieces(run, count, scale) for count in (1, 4))
    assert whole["solves"] == scale.num_samples and pieces["solves"] == 4 * scale.num_samples
    assert pieces["loss"] == pytest.approx(whole["loss"], abs=0.01)


def test_compaction_changes_time_and_nothing_else(setting):
    workshop, scale = setting
    run = workshop.trained(scale.transformer(workshop))
    tokens = sample_text(run.task(), length=16, count=4)
    tokens[0] = tokens[0, 0]
    measured = imbalance._compaction(run, tokens, rounds=2)
    assert measured["evaluations"]["min"] <= measured["evaluations"]["mean"] <= measured["evaluations"]["max"]
    assert set(measured["seconds"]) == {"compact", "whole batch"} and measured["time"]["ratio"] > 0
    assert run.model.core.compact


@pytest.mark.parametrize(("largest", "holds"), [(12, True), (16, False)])
def test_imbalance_is_decided_by_the_slowest(largest, holds, setting, monkeypatch):
    workshop, scale = setting
    one = {"evaluations": {"min": 8, "mean": 10.0, "max": largest}, "time": {"ratio": 1.0, "low": 1.0, "high": 1.0}}
    monkeypatch.setattr(imbalance, "_compaction", lambda *args: one)
    assert imbalance.imbalance(workshop, scale=scale).holds is holds
