"""The rows about the precision of solves on tiny models, and what decides them."""

from typing import Any

import pytest
import torch

from deqkit.paper import precision
from deqkit.paper.equalities import relative_difference
from deqkit.paper.precision import Gradient, gradient, in_float64, variants
from deqkit.paper.solves import sample_text
from deqkit.paper.stability import PAPER_FORWARD
from deqkit.solve import Tolerance
from paper.tiny_scale import check_outcome, make_workshop


@pytest.fixture(scope="module")
def setting(tmp_path_factory):
    return make_workshop(tmp_path_factory.getbasetemp() / "tiny-scale")


@pytest.mark.parametrize("claim", precision.CLAIMS, ids=lambda claim: claim.row)
def test_a_row_on_a_tiny_model(claim, setting):
    workshop, scale = setting
    check_outcome(claim.full.func(workshop, scale=scale))


def test_the_gradient_is_that_of_finite_differences(setting):
    workshop, scale = setting
    run = workshop.trained(scale.transformer(workshop))
    model = in_float64(run)
    tokens = sample_text(run.task(), length=7, count=2)
    weight = model.core.cell.contract.weight
    names = [name for name, _ in model.named_parameters()]
    found = gradient(model, tokens)
    assert len(found.parts) == len(names) and found.forward["converged"] == found.backward["converged"] == 1
    by_name = dict(zip(names, found.parts, strict=True))
    step = 1e-5
    losses = []
    for sign in (1, -1):
        with torch.no_grad():
            weight[1, 2] += sign * step
        losses.append(gradient(model, tokens).loss)
        with torch.no_grad():
            weight[1, 2] -= sign * step
    slope = (losses[0] - losses[1]) / (2 * step)
    assert float(by_name["core.cell.contract.weight"][1, 2]) == pytest.approx(slope, rel=1e-4, abs=1e-9)


def errors_by_tolerance(setting, monkeypatch, *, forward, backward, paper=1e-5):
    """The row for gradients whose error depends on the tolerances in a certain way."""
    workshop, scale = setting

    def with_error(model, tokens, *, forward=precision.EXACT, backward=precision.EXACT):
        if forward is PAPER_FORWARD:
            error = paper
        else:
            error = error_of["forward"](forward.rtol) + error_of["backward"](backward.rtol)
        counts = {"evaluations": {"mean": 3.0}}
        return Gradient([torch.tensor([1.0 + error], dtype=torch.float64)], 3.0, counts, counts)

    error_of = {
        "forward": lambda rtol: 0.0 if rtol == precision.EXACT.rtol else forward(rtol),
        "backward": lambda rtol: 0.0 if rtol == precision.EXACT.rtol else backward(rtol),
    }
    monkeypatch.setattr(precision, "gradient", with_error)
    return precision.gradient_precision(workshop, scale=scale)


@pytest.mark.parametrize(
    ("forward", "backward", "paper", "holds"),
    [
        (lambda rtol: rtol, lambda rtol: 2 * rtol, 1e-5, True),
        (lambda rtol: rtol, lambda rtol: 2 * rtol, 1e-2, False),  # the paper's tolerances would not do
        (lambda rtol: 0.1, lambda rtol: rtol, 1e-5, False),  # the forward tolerance makes no difference
        (lambda rtol: rtol, lambda rtol: 1e-8 / rtol, 1e-5, False),  # a tighter backward solve is worse
    ],
)
def test_gradient_precision_is_decided_by_the_errors(forward, backward, paper, holds, setting, monkeypatch):
    outcome = errors_by_tolerance(setting, monkeypatch, forward=forward, backward=backward, paper=paper)
    assert outcome.holds is holds


def test_trainings_differ_in_the_precision_of_their_solves_alone(setting):
    workshop, scale = setting
    plain = scale.plain(workshop)
    found = variants(plain, tight=True)
    assert found["own"] == plain and list(variants(plain, tight=False)) == [
        "own",
        "a-little-loose",
        "loose",
        "few-steps",
    ]
    rtols = [config.model.tol.rtol for config in found.values()]
    assert rtols[:4] == sorted(set(rtols[:4])) and rtols[4] == rtols[1]
    assert found["few-steps"].model.max_steps == precision.FEW_EVALS < plain.model.max_steps
    assert found["loose"].model.adjoint.tol.rtol > plain.model.adjoint.tol.rtol  # pyright: ignore
    assert len({config.recipe for config in found.values()}) == len(found)
    for config in found.values():
        assert (config.steps, config.data, config.model.eval_tol) == (plain.steps, plain.data, plain.model.eval_tol)


def training(*, work, perplexity):
    return {"work": work, "perplexity": perplexity, "evaluations": 5.0, "products": 3.0, "unconverged": 0.0}


NO_GAIN = training(work=1000, perplexity=99.0)


@pytest.mark.parametrize(
    ("a_little", "loose", "few", "holds"),
    [
        (NO_GAIN, training(work=800, perplexity=100.5), training(work=700, perplexity=99.0), True),
        (NO_GAIN, training(work=800, perplexity=103.0), training(work=700, perplexity=99.0), False),
        (NO_GAIN, training(work=800, perplexity=100.5), training(work=700, perplexity=103.0), False),
        (NO_GAIN, NO_GAIN, training(work=700, perplexity=99.0), False),
        (training(work=900, perplexity=99.0), NO_GAIN, training(work=700, perplexity=99.0), True),
    ],
)
def test_training_tolerance_is_decided_by_work_and_perplexity(a_little, loose, few, holds, setting, monkeypatch):
    workshop, scale = setting
    found = {"a-little-loose": a_little, "plain-loose": loose, "few-steps": few}

    def measured(workshop, run, scale):
        (name,) = [n for n in found if run.config.recipe.endswith(n)] or ["own"]
        return found.get(name, training(work=1000, perplexity=100.0))

    monkeypatch.setattr(precision, "_training", measured)
    assert precision.training_tolerance(workshop, scale=scale).holds is holds


def test_a_loose_tolerance_gives_another_gradient(setting):
    workshop, scale = setting
    run = workshop.trained(scale.transformer(workshop))
    model, tokens = in_float64(run), sample_text(run.task(), length=9, count=2)
    exact = gradient(model, tokens)
    looser: list[dict[str, Any]] = [{"forward": Tolerance(rtol=0.1)}, {"backward": Tolerance(rtol=0.1)}]
    for loose in looser:
        error = relative_difference(gradient(model, tokens, **loose).parts, exact.parts)
        assert 1e-4 < error < 1


@pytest.mark.parametrize(
    ("products", "converged", "holds"), [(6.0, 1.0, True), (6.7, 1.0, False), (9.0, 1.0, False), (6.0, 0.9, None)]
)
def test_fewer_products_are_decided_at_equal_tolerances(products, converged, holds, setting, monkeypatch):
    asked = []

    def counted(model, tokens, *, forward, backward, backward_solver=None):
        asked.append((forward, backward))
        assert model.config.start == "zeros"  # a learned start would have begun the forward solve's work
        counts = ({"evaluations": {"median": count}, "converged": converged} for count in (10.0, products))
        return Gradient([torch.ones(1)], 3.0, *counts)

    monkeypatch.setattr(precision, "gradient", counted)
    workshop, scale = setting
    assert precision.backward_fewer(workshop, scale=scale).holds is holds
    assert all(forward == backward for forward, backward in asked[:-2]) and asked[-1][0] is PAPER_FORWARD
