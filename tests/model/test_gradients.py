"""Gradients of every parameter, against unrolling, finite differences and each other."""

from typing import Any

import pytest
import torch

from deqkit import Tolerance
from deqkit.adjoint import Implicit, OneStep, Phantom, ReuseForward, Reversible, Unrolled
from deqkit.solve import GMRES, Anderson, Broyden
from model.models import (
    BOTH,
    CELLS,
    TIGHT,
    assert_same_gradients,
    first,
    flat,
    gradients,
    in_segments,
    make,
    reconfigured,
    tokens,
)

# B samples, T positions

kinds = pytest.mark.parametrize("kind", CELLS)
both = pytest.mark.parametrize("kind", BOTH)


def batch(length: int = 9) -> tuple[Any, Any]:
    targets = tokens(length=length, seed=6)
    targets[0, 3] = -1  # padding
    return tokens(length=length), targets


def memory_of(model: Any, length: int = 5) -> Any:
    with torch.no_grad():
        return model(tokens(length=length, seed=8)).memory


@kinds
@pytest.mark.parametrize("with_memory", [False, True])
def test_implicit_gradients_are_those_of_hundreds_of_layers(kind, with_memory):
    model = make(kind)
    ids, targets = batch()
    memory = memory_of(model) if with_memory else None
    expected = gradients(model, model(ids, targets, memory, depth=300).loss)
    assert_same_gradients(gradients(model, model(ids, targets, memory).loss), expected)


@kinds
@pytest.mark.parametrize(("pieces", "with_memory"), [(2, True), (4, False), (9, True)])
def test_subsequences_have_the_gradients_of_the_joint_solve(kind, pieces, with_memory):
    model = make(kind)
    split = reconfigured(model, subsequences=pieces)
    ids, targets = batch()
    memory = memory_of(model) if with_memory else None
    expected = gradients(model, model(ids, targets, memory).loss)
    assert_same_gradients(gradients(split, split(ids, targets, memory).loss), expected)


@both
@pytest.mark.parametrize("pieces", [1, 3])
def test_a_loss_at_the_last_position_reaches_the_first_token(kind, pieces):
    """Across pieces too, and only there: a detached memory between them would lose it."""
    model = make(kind, subsequences=pieces)
    x = model.embed(tokens(length=9)).detach().requires_grad_()
    last = flat(model.run_body(x).z)[:, -1]
    (grad,) = torch.autograd.grad(last.sin().sum(), x)
    assert (grad.abs().amax(2) > 1e-12).all()


@both
def test_finite_differences_of_the_loss(kind):
    """Along a random direction in the space of all parameters, with memory and subsequences."""
    model = make(kind, subsequences=2)
    ids, targets = batch()
    memory = memory_of(model)
    grads = gradients(model, model(ids, targets, memory).loss)
    parameters = {name: p for name, p in model.named_parameters() if p.numel()}
    for name in (*grads, "all of them"):
        chosen = list(grads) if name == "all of them" else [name]
        direction = {n: torch.randn(parameters[n].shape, dtype=torch.float64) for n in chosen}
        step, losses = 1e-5, []
        for sign in (step, -2 * step, step):
            with torch.no_grad():
                for n in chosen:
                    parameters[n].add_(direction[n], alpha=sign)
                losses.append(float(model(ids, targets, memory).loss))
        slope = (losses[0] - losses[1]) / (2 * step)
        expected = sum(float((grads[n] * direction[n]).sum()) for n in chosen)
        assert abs(slope - expected) < 1e-6 * (1 + abs(expected)), name


@kinds
def test_memory_is_cut_off_from_what_made_it(kind):
    """The gradient of a segment is that of the segment, its memory a constant."""
    model = make(kind)
    ids, targets = batch()
    outputs = in_segments(model, ids, targets, [4])
    assert not any(t.requires_grad for m in outputs[0].memory for t in m)
    memory = tuple(type(m)(*(t.clone() for t in m)) for m in outputs[0].memory)
    alone = gradients(model, model(ids[:, 4:], targets[:, 4:], memory).loss)
    assert_same_gradients(gradients(model, outputs[1].loss), alone, 1e-12)  # pyright: ignore


# --- every rule ------------------------------------------------------------------------------------------------------

EXACT_RULES: dict[str, dict[str, Any]] = {
    "anderson": {"adjoint": Implicit(solver=Anderson(), tol=TIGHT, max_steps=300)},
    "gmres": {"adjoint": Implicit(solver=GMRES(), tol=TIGHT, max_steps=200)},
    "phantom": {"adjoint": Phantom(steps=80)},
    "unrolled": {"adjoint": Unrolled(steps=80)},
    "checkpointed": {"adjoint": Unrolled(steps=80, checkpoint=True)},
    "reversible": {"adjoint": Reversible(damping=0.5), "max_steps": 60, "tol": Tolerance(rtol=1e-6)},
    "reuse-forward": {"adjoint": ReuseForward(refine=200, tol=TIGHT), "solver": Broyden()},
}


@both
@pytest.mark.parametrize("rule", EXACT_RULES.values(), ids=EXACT_RULES.keys())
@pytest.mark.parametrize("pieces", [1, 3])
def test_every_exact_rule_gives_the_gradient(kind, rule, pieces):
    model = make(kind, subsequences=pieces, **rule)
    ids, targets = batch(6)
    memory = memory_of(model, 3)
    reference = reconfigured(model, subsequences=1, tol=TIGHT, adjoint=EXACT_RULES["gmres"]["adjoint"])
    expected = gradients(reference, reference(ids, targets, memory).loss)
    output = model(ids, targets, memory)
    assert len(output.solutions) == pieces
    # Reversible rebuilds its states with errors that double at each step, so it must not take many.
    assert_same_gradients(gradients(model, output.loss), expected, 1e-2 if "Reversible" in repr(rule) else 1e-7)


@both
def test_one_step_is_the_gradient_of_f_with_z_held_fixed(kind):
    model = make(kind, adjoint=OneStep())
    ids, targets = batch()
    output = model(ids, targets)
    cell = model.cells[0]
    u = cell.inject(model.embed(ids))
    f, args = cell.bind(u)
    z = output.z.detach() if kind == "post" else tuple(part.detach() for part in output.z)
    loss = model.softmax.nll(cell.output(f(z, *args)), targets).sum() / (targets >= 0).sum()
    assert_same_gradients(gradients(model, output.loss), gradients(model, loss), 1e-8)


@both
def test_rules_can_be_chosen_per_call(kind):
    model = make(kind)
    ids, targets = batch(6)
    expected = gradients(model, model(ids, targets).loss)
    for name in ("phantom", "unrolled"):
        rule = EXACT_RULES[name]["adjoint"]
        assert_same_gradients(gradients(model, model(ids, targets, adjoint=rule).loss), expected, 1e-7)


@both
@pytest.mark.parametrize("adjoint", [Unrolled(steps=5), Reversible()], ids=["unrolled", "reversible"])
def test_another_rule_for_a_call_brings_back_the_configured_solver(kind, adjoint):
    """A rule with an iteration of its own takes no solver; a call with another rule uses `config.solver`."""
    model = make(kind, adjoint=adjoint)
    reference = reconfigured(model, adjoint=Implicit())
    for settings in ({"max_steps": 4}, {"max_steps": 6}):
        with torch.no_grad():
            actual = model(tokens(), adjoint=Implicit(), **settings).z
            expected = reference(tokens(), **settings).z
        torch.testing.assert_close(first(actual), first(expected), rtol=1e-12, atol=1e-12)
    with pytest.raises(ValueError, match="own iteration"):
        model(tokens(), solver=Broyden())


def test_reusing_the_forward_inverse_says_what_solver_it_needs():
    """The default solver is causal, whose inverse has no transpose."""
    with pytest.raises(ValueError, match='group="sample"'):
        make("post", adjoint=ReuseForward())(tokens())
