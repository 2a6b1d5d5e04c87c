"""The rows about appendix E's remarks on tiny models, and what decides them."""

from dataclasses import replace

import pytest
import torch

from deqkit.paper import remarks
from deqkit.paper.precision import Gradient
from deqkit.train.config import DeviceConfig
from paper.tiny_scale import check_outcome, make_workshop


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return make_workshop(tmp_path_factory.getbasetemp() / "tiny-scale")


@pytest.mark.parametrize("claim", remarks.CLAIMS, ids=lambda claim: claim.row)
def test_a_row_on_a_tiny_model(claim, setting, monkeypatch):
    workshop, scale = setting
    monkeypatch.setattr(remarks, "LENGTH", 12)
    check_outcome(claim.full.func(workshop, scale=scale))


def test_a_shallow_stack_has_no_shallower_start(setting):
    workshop, scale = setting
    config = replace(scale.transformer(workshop), devices=DeviceConfig(warmup_depth=2, warmup_steps=5))
    stack = remarks.shallow(config, 1)
    assert stack.model.depth == 1 and stack.model.tied and stack.devices.warmup_steps == 0
    assert (stack.steps, stack.data, stack.optimiser) == (config.steps, config.data, config.optimiser)


@pytest.mark.parametrize(("perplexity", "holds"), [(120.0, True), (104.0, False), (90.0, False)])
def test_a_plateau_is_decided_against_the_worse_of_the_deep_models(perplexity, holds, setting, monkeypatch):
    workshop, scale = setting

    def quality(workshop, run, scale):
        depth = run.config.model.depth
        test = {"equilibrium": 95.0, 3: 100.0}.get(depth, perplexity)
        return {"step": [1, 2], "validation": [9.0, 8.0], "last third": None, "perplexity": test}

    monkeypatch.setattr(remarks, "_quality", quality)
    outcome = remarks.shallow_plateau(workshop, scale=scale)
    assert outcome.holds is holds and "differ in the rest alone" not in outcome.remark


def test_a_shared_start_is_told(setting):
    workshop, scale = setting
    config = replace(scale.transformer(workshop), devices=DeviceConfig(warmup_depth=2, warmup_steps=5))
    assert "The first 5 steps of the first two are those of a stack of 2 layers" in remarks._told_start(config)


@pytest.mark.parametrize(
    ("error", "num_bytes", "holds"), [(1e-11, 100, True), (1e-3, 100, False), (1e-11, 150, False)]
)  # exact in no more memory; a gradient that lacks a term; more memory
def test_pieces_are_decided_by_difference_and_memory(error, num_bytes, holds, setting, monkeypatch):
    workshop, scale = setting

    def with_error(model, tokens):
        part = torch.tensor([1.0 + (error if model.config.subsequences > 1 else 0)], dtype=torch.float64)
        return Gradient([part], 3.0, {"evaluations": {"mean": 3.0}}, {})

    monkeypatch.setattr(remarks, "gradient", with_error)
    monkeypatch.setattr(remarks, "_memory", lambda run, subsequences=1, **_: num_bytes if subsequences > 1 else 100)
    assert remarks.subsequence_gradient(workshop, scale=scale).holds is holds


def test_pieces_without_gradients_between_them_are_seen(setting, monkeypatch):
    """Detaching what a piece leaves to the next drops term B of the paper's equation."""
    workshop, scale = setting
    monkeypatch.setattr(remarks, "LENGTH", 12)
    monkeypatch.setattr(remarks, "_memory", lambda run, **_: 100)
    cell = type(workshop.trained(scale.transformer(workshop)).model.core.cell)
    remember = cell.remember

    def detached(self, memory, z, x, u, limit=None):
        return remember(self, memory, z.detach(), x, u.detach(), limit)

    monkeypatch.setattr(cell, "remember", detached)
    outcome = remarks.subsequence_gradient(workshop, scale=scale)
    assert outcome.holds is False and outcome.numbers["transformer"]["difference"]["2"] > 1e-3
    assert outcome.numbers["trellis"]["difference"]["2"] <= remarks.SAME
