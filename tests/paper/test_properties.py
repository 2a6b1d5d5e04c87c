"""The rows about section 3 on tiny models, and what decides them."""

import pytest
import torch
import torch.nn.functional as F

from deqkit.analysis import peak_memory
from deqkit.paper import properties
from deqkit.paper.properties import Without, jacobian_bytes, with_gain
from deqkit.paper.solves import equation_of, sample_text
from paper.tiny_scale import check_outcome, make_workshop


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return make_workshop(tmp_path_factory.getbasetemp() / "tiny-scale")


@pytest.mark.parametrize("claim", properties.CLAIMS, ids=lambda claim: claim.row)
def test_a_row_on_a_tiny_model(claim, setting, monkeypatch):
    workshop, scale = setting
    monkeypatch.setattr(properties, "MAX_STEPS", 6)
    check_outcome(claim.full.func(workshop, scale=scale))


@pytest.mark.parametrize(
    ("products", "num_bytes", "holds"), [(9.0, 400, True), (9.0, 40_000, False), (100.0, 400, False)]
)
def test_vector_products_are_decided_by_memory_and_count(products, num_bytes, holds, setting, monkeypatch):
    workshop, scale = setting
    point = {"length": 8, "products": products, "bytes": num_bytes, "state": 100, "Jacobian": jacobian_bytes(100)}
    monkeypatch.setattr(properties, "backward_pass", lambda run, tokens: point)
    assert properties.vector_products(workshop, scale=scale).holds is holds


def test_a_backward_pass_that_builds_the_jacobian_is_seen(setting):
    """The meter that finds so little in our backward pass does see the matrix where there is one."""
    workshop, scale = setting
    run = workshop.trained(scale.transformer(workshop))
    tokens = sample_text(run.task(), length=9, count=1)
    found = properties.backward_pass(run, tokens)
    equation = equation_of(run.model, tokens[:, :-1])
    assert found["length"] == 8 and found["state"] == equation.start.numel() and found["products"] >= 1
    jacobian = torch.autograd.functional.jacobian
    dense = peak_memory(lambda: jacobian(lambda z: equation.f(z, *equation.args), equation.start))
    assert dense.peak_bytes >= found["Jacobian"] == dense.result.nbytes


def test_what_constrains_a_cell_can_be_left_out():
    x = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    with Without(F.layer_norm):
        assert F.layer_norm(x, x.shape[-1:]) is x
        assert torch.equal(torch.tanh(x), x.tanh())
    assert not torch.equal(F.layer_norm(x, x.shape[-1:]), x)


def test_gains_act_on_the_state_and_not_on_the_input(setting):
    workshop, scale = setting
    for make in (scale.transformer, scale.trellis):
        config = make(workshop)
        one, two = (dict(with_gain(config, gain).core.cell.named_parameters()) for gain in (1, 2))
        for name, weight in one.items():
            larger = name.endswith("weight") and not name.startswith("injection")
            assert torch.equal(two[name], 2 * weight if larger else weight), name


def state(size, solved):
    return {"size": size, "solved": solved, "norm": size}


@pytest.mark.parametrize(
    ("constrained", "free", "holds"),
    [
        (state(1.0, 1.0), state(None, 0.0), True),
        (state(1.0, 1.0), state(1e4, 0.5), True),
        (state(3.0, 1.0), state(None, 0.0), False),  # not bounded with it
        (state(1.0, 1.0), state(2.0, 0.0), False),  # bounded without it
        (state(1.0, 0.5), state(None, 0.5), False),  # as many are solved without it
    ],
)
def test_stable_cell_is_decided_by_sizes_and_solves(constrained, free, holds, setting, monkeypatch):
    workshop, scale = setting
    ended = {"with": constrained, "without": free}

    def behaviour(model, equation):
        is_free = torch.overrides._get_current_function_mode() is not None
        return ended["without" if is_free else "with"]

    monkeypatch.setattr(properties, "_behaviour", behaviour)
    assert properties.stable_cell(workshop, scale=scale).holds is holds
