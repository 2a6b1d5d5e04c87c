"""The rows about auxiliary losses on tiny models, and what decides them."""

from dataclasses import replace

import pytest
import torch

from deqkit.paper import auxiliary
from deqkit.paper.solves import sample_text
from deqkit.train.recipes import layers
from paper.tiny_scale import check_outcome, make_workshop


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return make_workshop(tmp_path_factory.getbasetemp() / "tiny-scale")


@pytest.mark.parametrize("claim", auxiliary.CLAIMS, ids=lambda claim: claim.row)
def test_a_row_on_a_tiny_model(claim, setting, monkeypatch):
    workshop, scale = setting
    monkeypatch.setattr(auxiliary, "LENGTH", 12)
    check_outcome(claim.full.func(workshop, scale=scale))


@pytest.mark.parametrize(
    ("early", "late", "further", "holds"),
    [
        (0.3, 1e-12, 0.0, True),
        (1e-4, 1e-12, 0.0, False),  # every solver goes through the same states: these could be layers
        (0.3, 1e-3, 0.0, False),  # and has an equilibrium of its own
        (0.3, 1e-12, 0.1, False),  # a further layer has something to add
    ],
)
def test_auxiliary_losses_are_decided_by_iterates_and_gradients(early, late, further, holds, setting, monkeypatch):
    workshop, scale = setting
    main = torch.ones(3, dtype=torch.float64)
    monkeypatch.setattr(auxiliary, "_apart", lambda equation, steps: early if steps == auxiliary.EARLY else late)
    monkeypatch.setattr(auxiliary, "_on_top", lambda model, tokens: ([main], {1: [main + further]}))
    monkeypatch.setattr(auxiliary, "_of_stack", lambda *args: [main])
    assert auxiliary.auxiliary_losses(workshop, scale=scale).holds is holds


LOW, HIGH = {"losses": [3.0, 2.0], "changes": [0.1]}, {"losses": [4.0, 2.0], "changes": [0.2]}


@pytest.mark.parametrize(
    ("supervised", "holds"),
    [
        (LOW, True),
        (HIGH, False),  # as far from the target, and from each other
        ({**LOW, "changes": HIGH["changes"]}, False),  # as far from each other
        ({**LOW, "losses": HIGH["losses"]}, False),
    ],
)
def test_the_effect_is_decided_by_losses_and_changes(supervised, holds, setting, monkeypatch):
    workshop, scale = setting
    found = lambda run, depth, scale: supervised if "auxiliary" in run.config.recipe else HIGH  # noqa: E731
    monkeypatch.setattr(auxiliary, "_by_layer", found)
    assert auxiliary.auxiliary_effect(workshop, scale=scale).holds is holds


def test_layers_are_followed_as_they_are_applied(setting):
    """Against the stack cut off after each layer."""
    workshop, scale = setting
    config = layers(scale.plain(workshop), 3, tied=True)
    run = workshop.trained(config)
    found = auxiliary._by_layer(run, 3, scale)
    tokens = sample_text(run.task(), length=config.data.eval_length + 1, count=scale.num_samples)
    with torch.no_grad():
        cut = [run.model(tokens[:, :-1], tokens[:, 1:], depth=n) for n in (1, 2, 3)]
    assert found["losses"] == pytest.approx([float(output.loss) for output in cut], rel=1e-6)
    expected = [float((b.hidden - a.hidden).norm() / a.hidden.norm()) for a, b in zip(cut, cut[1:], strict=False)]
    assert found["changes"] == pytest.approx(expected, rel=1e-5)


def test_a_deeply_supervised_stack_differs_by_its_losses_alone(setting):
    workshop, scale = setting
    config = layers(scale.plain(workshop), 12, tied=False)
    supervised = auxiliary.deeply_supervised(config)
    assert supervised.regulariser.auxiliary_every == 3
    assert replace(supervised, recipe=config.recipe, regulariser=config.regulariser) == config
