"""A loss, gradient or solve that is not finite stops the run before the update, and the message says what to try."""

import json
import math

import pytest
import torch
from accelerate import Accelerator

from deqkit.train import loop
from deqkit.train.evaluate import evaluate
from deqkit.train.loop import TrainingError
from deqkit.train.objective import Objective
from deqkit.train.state import TrainingState
from train.runs import assert_same_run, latest, metrics_of, run, tiny


@pytest.fixture
def states(monkeypatch):
    """The states of all runs, to look at when they have failed."""
    found = []
    init = TrainingState.__init__

    def recorded(self, *args, **kwargs):
        init(self, *args, **kwargs)
        found.append(self)

    monkeypatch.setattr(TrainingState, "__init__", recorded)
    return found


def spoil(monkeypatch, step, change):
    """At a step, put something else in the place of the objective's three results."""
    forward, calls = Objective.forward, []

    def spoiled(self, *args, **kwargs):
        calls.append(1)
        results = forward(self, *args, **kwargs)
        return change(*results) if len(calls) == step else results

    monkeypatch.setattr(Objective, "forward", spoiled)


class NanGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):
        return grads[0] * math.nan


def spoil_gradient(objective, added, output):
    """The loss is fine; what comes back through the softmax is not."""
    softmax_bias = output.hidden.sum() * 0
    return objective + NanGradient.apply(softmax_bias), added, output


SPOILT = {
    "nan-loss": (lambda objective, added, output: (objective * math.nan, added, output), "the loss of step 4"),
    "inf-loss": (lambda objective, added, output: (objective + math.inf, added, output), "the loss of step 4"),
    "gradient": (spoil_gradient, "step 4"),
}


@pytest.mark.parametrize("how", SPOILT)
def test_the_run_stops_before_the_update(corpus, tmp_path, monkeypatch, states, how):
    change, what = SPOILT[how]
    config = tiny(corpus, checkpoint_every=3)
    spoil(monkeypatch, 4, change)
    with pytest.raises(TrainingError, match=what) as caught:
        run(config, tmp_path / "run")
    for word in (
        "not finite",
        "weights were left as they were",
        "learning rate",
        "warm-up",
        "clip",
        "regulariser.spectral",
    ):
        assert word in str(caught.value)
    saved = latest(tmp_path / "run")
    assert saved.name == "step-00000003"
    reference = TrainingState(config, states[0].task, states[0].accelerator)
    reference.load(saved)
    for (name, parameter), expected in zip(
        states[0].model.named_parameters(), reference.model.parameters(), strict=True
    ):
        assert torch.equal(parameter, expected), name
    assert states[0].step == 3
    assert all(r["step"] <= 3 for r in metrics_of(tmp_path / "run"))
    monkeypatch.undo()
    run(config, tmp_path / "run", resume=True)
    run(config, tmp_path / "whole")
    assert_same_run(tmp_path / "run", tmp_path / "whole")


def test_a_gradient_of_a_parameter_alone(corpus, tmp_path, states, monkeypatch):
    """Not through the solve: the norm of the gradient tells."""
    backward = Accelerator.backward

    def spoiled(accelerator, loss, **options):
        backward(accelerator, loss, **options)
        next(states[0].model.parameters()).grad.view(-1)[0] = math.inf

    monkeypatch.setattr(Accelerator, "backward", spoiled)
    with pytest.raises(TrainingError, match="the gradient of step 1 is not finite"):
        run(tiny(corpus), tmp_path / "run")
    assert all(torch.isfinite(p).all() for p in states[0].model.parameters())


@pytest.mark.parametrize("depth", ["equilibrium", 3])
def test_a_learning_rate_that_is_far_too_high(corpus, tmp_path, states, depth):
    """Whether a solve, a loss or an evaluation notices first, it is one error with advice."""
    config = tiny(
        corpus, model={"depth": depth}, optimiser={"name": "sgd", "lr": 1e30, "clip": 0.0, "schedule": "constant"}
    )
    with pytest.raises(TrainingError, match="is not finite: begin a new run with a lower learning"):
        run(config, tmp_path / "run")
    metrics = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert "NaN" not in metrics and "Infinity" not in metrics


def test_an_evaluation_that_is_not_finite(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(loop, "evaluate", lambda *a, **k: {**evaluate(*a, **k), "loss": math.nan})
    with pytest.raises(TrainingError, match="the validation loss after step 3 is not finite"):
        run(tiny(corpus), tmp_path / "run")
    assert latest(tmp_path / "run").name == "step-00000002"
    assert [r["kind"] for r in metrics_of(tmp_path / "run")] == ["train"] * 3


def test_a_figure_that_could_not_be_measured_is_null(corpus, tmp_path, monkeypatch):
    """An estimate may overflow while training is fine: that is no reason to stop, or to write no JSON."""
    account = loop._account
    monkeypatch.setattr(loop, "_account", lambda *args: {**account(*args), "grad_error": math.inf})
    run(tiny(corpus, steps=1), tmp_path / "run")
    lines = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert json.loads(lines[0])["grad_error"] is None
