"""Table 4 on tiny models: what is timed, and what decides."""

from dataclasses import replace

import pytest
import torch

from deqkit.model import SequenceModel
from deqkit.paper import runtime
from deqkit.train.config import RegulariserConfig
from paper.tiny_scale import check_outcome, make_workshop


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return make_workshop(tmp_path_factory.getbasetemp() / "tiny-scale")


@pytest.mark.parametrize("check", [runtime.transformer, runtime.trellisnet])
def test_a_row_on_a_tiny_model(check, setting):
    workshop, scale = setting
    numbers = check_outcome(check(workshop, scale=scale))
    for phase in ("training", "inference"):
        (ratio,) = numbers[phase]["ratios"].values()
        assert ratio["low"] <= ratio["ratio"] <= ratio["high"]
        assert all(0 < figures["median"] < 1 for figures in numbers[phase]["seconds"].values())  # of a token
    assert numbers["breakdown"]["training"]["products"] > 0
    assert numbers["breakdown"]["inference"]["products"] is None


@pytest.mark.parametrize(
    ("training", "inference", "perplexity", "holds"),
    [(0.9, 0.8, 100.0, True), (1.1, 0.8, 100.0, False), (0.9, 1.1, 100.0, False), (0.9, 0.8, 110.0, False)],
)
def test_the_ratios_and_the_perplexity_decide(training, inference, perplexity, holds, setting, monkeypatch):
    workshop, scale = setting

    def compared(models, batches, *, training: bool, rounds, ratios=(inference, training)):
        value = ratios[training]
        return {"ratios": {name: {"ratio": value, "low": value, "high": value} for name in list(models)[1:]}}

    def tested(self, run, split="test", **settings):
        return {"perplexity": perplexity if run.config.model.depth == "equilibrium" else 100.0}

    monkeypatch.setattr(runtime, "compare_models", compared)
    monkeypatch.setattr(type(workshop), "tested", tested)
    assert runtime.transformer(workshop, scale=scale).holds is holds


@pytest.mark.parametrize(("perplexities", "expected"), [((101.0, 99.5, 98.0), 0.1), ((101.0, 101.0, 101.0), None)])
def test_inference_is_timed_at_the_loosest_tolerance_that_is_good_enough(perplexities, expected, setting, monkeypatch):
    workshop, scale = setting
    of = dict(zip(runtime.LOOSER, perplexities, strict=False))
    timed = []

    def tested(self, run, split="test", *, tol=None, **settings):
        stack = run.config.model.depth != "equilibrium"
        return {"perplexity": 100.0 if stack else of.get(tol.rtol, 101.0) if tol else 97.0}

    def compared(models, batches, *, training, rounds):
        timed.append(models[runtime.DEQ][1].config.eval_tol)
        return {"ratios": {name: {"ratio": 0.5, "low": 0.5, "high": 0.5} for name in list(models)[1:]}}

    monkeypatch.setattr(runtime, "compare_models", compared)
    monkeypatch.setattr(type(workshop), "tested", tested)
    outcome = runtime.transformer(workshop, scale=scale)
    recipe = scale.transformer(workshop).model.eval_tol
    assert timed == [replace(recipe, rtol=expected) if expected else recipe] * 2
    assert f"solved to {timed[0].rtol:g}" in outcome.measured


def test_a_measurement_leaves_the_weights(setting):
    workshop, scale = setting
    run = workshop.trained(scale.transformer(workshop))
    before = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    stack = runtime.stacked(run.config, run.model, 2, tied=True)
    assert torch.equal(stack[1].core.cell.qkv.weight, run.model.core.cell.qkv.weight)
    assert stack[0].regulariser.spectral == 0 and stack[0].model.depth == 2
    batches = runtime.phases(run.config, run.task(), 2)["training"]
    models = {"DEQ": (run.config, run.model), "2 layers": stack}
    compared = runtime.compare_models(models, batches, training=True, rounds=1)
    assert compared["steps a round"] == 3  # one of them with the penalty
    assert set(compared["ratios"]) == {"2 layers"}
    assert all(torch.equal(tensor, before[name]) for name, tensor in run.model.state_dict().items())


def test_a_training_is_timed_in_its_own_arithmetic(setting):
    workshop, scale = setting
    run = workshop.trained(scale.transformer(workshop))
    assert runtime.training_options(run.config, run.model)["bf16"] is False
    assert runtime.training_options(replace(run.config, precision="bf16"), run.model)["bf16"] is True


def test_penalties_are_those_of_training(setting):
    workshop, scale = setting
    run = workshop.trained(scale.transformer(workshop))
    assert runtime.penalty_of(RegulariserConfig(activation=1.0)) is None
    penalty = runtime.penalty_of(RegulariserConfig(jacobian=0.5, every=2))
    assert penalty is not None
    batch = runtime.phases(run.config, run.task(), 1)["training"][0]
    output = run.model(batch.tokens_BT, batch.targets_BT)
    assert penalty(output, 1) is None
    added = penalty(output, 2)
    assert added is not None and added.item() > 0 and added.requires_grad


def test_untied_layers_have_weights_of_their_own(setting):
    workshop, scale = setting
    run = workshop.trained(scale.transformer(workshop))
    _, model = runtime.stacked(run.config, run.model, 3, tied=False)
    assert len(model.cells) == 3


def test_a_stack_takes_over_the_cell_and_leaves_a_learned_start(setting):
    workshop, scale = setting
    config = scale.transformer(workshop)
    config = replace(config, model=replace(config.model, start="learned"))
    model = SequenceModel(config.model)
    counterpart, stack = runtime.stacked(config, model, 3, tied=True)
    assert counterpart.model.start == "zeros" and stack.start is None and model.start is not None
    weights = model.state_dict()
    assert all(torch.equal(weights[name], tensor) for name, tensor in stack.state_dict().items())
