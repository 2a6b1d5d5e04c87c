"""Gradients reach everything f touches, once, and only when they are asked for."""

from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from adjoint.cells import (
    TIGHT,
    RatedCell,
    TanhCell,
    gradients,
    loss_of,
    matrix,
    normal,
    relative_error,
    solve_tightly,
)
from deqkit import DEQ, Tolerance
from deqkit.adjoint import Implicit, OneStep, Phantom, ReuseForward, Reversible, Unrolled
from deqkit.solve import Broyden

# B samples, N numbers in a state

REFERENCE = Unrolled(steps=200)
# Settings under which each rule gives the gradient of the equilibrium to 1e-5 on cells that contract by a half.
RULES = {
    "implicit": {"adjoint": Implicit(tol=TIGHT, max_steps=200), "tol": TIGHT, "max_steps": 200},
    "phantom": {"adjoint": Phantom(steps=40), "tol": TIGHT, "max_steps": 200},
    "unrolled": {"adjoint": Unrolled(steps=60)},
    "checkpointed": {"adjoint": Unrolled(steps=60, checkpoint=True)},
    "reversible": {"adjoint": Reversible(), "tol": Tolerance(rtol=1e-8), "max_steps": 80},
    "reuse-forward": {
        "adjoint": ReuseForward(refine=100, tol=TIGHT),
        "solver": Broyden(),
        "tol": TIGHT,
        "max_steps": 200,
    },
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())
TWICE = ("implicit", "phantom", "unrolled", "checkpointed", "reuse-forward")


def check(rule, make, inputs, *, create_graph=False):
    """`make(settings)` solves with a DEQ of these settings; compare with a network of 200 layers."""
    actual = gradients(lambda: make(rule), inputs, create_graph=create_graph)
    expected = gradients(lambda: make({"adjoint": REFERENCE}), inputs)
    assert relative_error(actual, expected) < 1e-5


@rules
def test_parameters_and_input(rule):
    cell, x = TanhCell(norm=0.5), normal(3, 4, seed=5).requires_grad_()
    check(rule, lambda settings: DEQ(cell, **settings)(x), [x, *cell.parameters()])


@rules
def test_an_input_that_other_layers_made(rule):
    cell, encoder = TanhCell(norm=0.5), nn.Sequential(nn.Linear(3, 4), nn.Tanh()).double()
    u = normal(3, 3, seed=5)
    check(rule, lambda settings: DEQ(cell, **settings)(encoder(u)), [*encoder.parameters(), *cell.parameters()])


@rules
def test_leaves_that_f_closes_over(rule):
    weight, scale = matrix(4, norm=0.5, seed=0).requires_grad_(), normal(4, seed=2).requires_grad_()
    x = normal(3, 4, seed=5)
    cell = lambda z, x: torch.tanh(z @ weight.mT + scale * x)  # noqa: E731
    check(rule, lambda settings: DEQ(cell, **settings)(x), [weight, scale])


@rules
def test_results_of_other_layers_that_f_closes_over(rule):
    raw = normal(4, seed=2).requires_grad_()
    x = normal(3, 4, seed=5)

    def solve(settings):
        scale = raw.sin()  # made once, outside f: its graph must survive every use
        return DEQ(lambda z, x: torch.tanh(0.5 * z * scale + x), **settings)(x)

    check(rule, solve, [raw])


@rules
def test_a_weight_used_inside_f_and_to_make_its_input(rule):
    """Tied weights: both paths count, and none counts twice."""
    cell, u = TanhCell(norm=0.5), normal(3, 4, seed=5)
    check(rule, lambda settings: DEQ(cell, **settings)(torch.tanh(u @ cell.weight)), list(cell.parameters()))


@rules
def test_arguments_made_from_each_other(rule):
    x = normal(3, 4, seed=5).requires_grad_()
    cell = lambda z, a, b: torch.tanh(0.5 * z + a * b)  # noqa: E731
    check(rule, lambda settings: DEQ(cell, **settings)(x, x.exp()), [x])


@pytest.mark.parametrize("name", TWICE)
@pytest.mark.parametrize("case", ["parameters", "tied", "chained"])
def test_create_graph_does_not_change_the_first_derivative(name, case):
    cell, x = TanhCell(norm=0.5), normal(3, 4, seed=5).requires_grad_()
    if case == "parameters":
        make = lambda settings: DEQ(cell, **settings)(x)  # noqa: E731
    elif case == "tied":
        make = lambda settings: DEQ(cell, **settings)(torch.tanh(x @ cell.weight))  # noqa: E731
    else:
        both = lambda z, a, b: cell(z, a * b)  # noqa: E731
        make = lambda settings: DEQ(both, **settings)(x, x.exp())  # noqa: E731
    check(RULES[name], make, [x, *cell.parameters()], create_graph=True)


def test_a_gradient_can_be_asked_for_at_a_result_f_closes_over():
    raw, x = normal(4, seed=2).requires_grad_(), normal(3, 4, seed=5)
    scale = raw.sin()

    def solve(settings):
        return DEQ(lambda z, x: torch.tanh(0.5 * z * scale + x), **settings)(x)

    check(RULES["implicit"], solve, [scale])
    # With a graph of its own the gradient goes to leaves and args only; asking elsewhere fails, and says so.
    with pytest.raises(RuntimeError, match="closes over"):
        torch.autograd.grad(solve(RULES["implicit"]).sum(), scale, create_graph=True)


class Pair(NamedTuple):
    offset: Tensor
    rate: Tensor


@rules
@pytest.mark.parametrize("container", [tuple, dict, Pair])
def test_tensors_inside_containers(rule, container):
    """The hard sample outlasts the others, so the containers are also cut down to some samples and back."""
    cell = RatedCell()
    x, rate = RatedCell.batch(0.0, 0.01, 0.02, 0.01, 0.5)
    x.requires_grad_()
    if container is dict:
        inputs, f = {"x": x, "rate": rate}, lambda z, given: cell(z, given["x"], given["rate"])
    else:
        inputs = Pair(x, rate) if container is Pair else (x, rate)
        f = lambda z, given: cell(z, *given)  # noqa: E731
    start = torch.zeros_like(x)
    check(rule, lambda settings: DEQ(f, **settings)(inputs, z0=start), [x, cell.weight])


@rules
def test_present_in_eval_mode_and_absent_under_no_grad(rule):
    cell, x = TanhCell(norm=0.5), normal(3, 4, seed=5).requires_grad_()
    deq = DEQ(cell, **rule).eval()
    check(rule, lambda settings: DEQ(cell, **settings).eval()(x), [x, *cell.parameters()])
    with torch.no_grad():
        assert not deq(x).requires_grad
    with torch.inference_mode():
        assert not deq(x).requires_grad


@rules
def test_frozen_parameters_get_none_and_a_wholly_frozen_solve_has_no_graph(rule):
    cell, x = TanhCell(norm=0.5), normal(3, 4, seed=5)
    cell.weight.requires_grad_(False)
    DEQ(cell, **rule)(x).sum().backward()
    assert cell.weight.grad is None and cell.bias.grad is not None
    cell.bias.requires_grad_(False)
    assert not DEQ(cell, **rule)(x).requires_grad


@pytest.mark.parametrize("adjoint", [Implicit(), OneStep(), Phantom()], ids=["implicit", "one-step", "phantom"])
def test_the_start_of_a_solve_has_no_gradient(adjoint):
    """An equilibrium does not depend on where the search began; only rules that differentiate their steps do."""
    cell, z0 = TanhCell(), normal(3, 4, seed=6).requires_grad_()
    z = DEQ(cell, adjoint=adjoint)(normal(3, 4, seed=5), z0=z0)
    assert torch.autograd.grad(z.sum(), z0, allow_unused=True) == (None,)


def test_an_f_that_ignores_its_state_still_has_gradients():
    x = normal(3, 4, seed=5).requires_grad_()
    (grad,) = torch.autograd.grad(loss_of(solve_tightly(lambda z, x: x.sin())(x)), x)
    torch.testing.assert_close(grad, torch.autograd.grad(loss_of(x.sin()), x)[0], rtol=1e-12, atol=0)


def test_an_f_that_ignores_everything_else_has_no_graph():
    z = solve_tightly(lambda z: 0.5 * z)(z0=torch.ones(2, 3))
    assert not z.requires_grad


class CentredCell(nn.Module):
    """f closes over what was made of its argument: the mean over samples, which cannot be in args, and the weights."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(matrix(4, norm=0.3, seed=2))

    def bind(self, u):
        mean = (u * u).mean(0, keepdim=True)
        return (lambda z, u: torch.tanh(z @ self.weight + u + mean)), (u,)


MADE = {
    "leaf": lambda x, weight: x,
    "made": lambda x, weight: torch.sin(x),
    "made with the cell's weights": lambda x, weight: x @ weight,
}


@rules
@pytest.mark.parametrize("made", MADE.values(), ids=MADE.keys())
@pytest.mark.parametrize("create_graph", [False, True])
def test_an_argument_that_f_also_closes_over(rule, made, create_graph):
    cell, x = CentredCell(), normal(3, 4, seed=5).requires_grad_()

    def make(settings):
        return DEQ(cell, **settings)(made(x, cell.weight))

    check(rule, make, [x, cell.weight], create_graph=create_graph)


def test_second_derivatives_by_an_argument_that_f_also_closes_over():
    cell, x = CentredCell(), normal(2, 4, seed=5).requires_grad_()
    deq = DEQ(cell, **RULES["implicit"])
    assert torch.autograd.gradgradcheck(lambda x, weight: deq(x @ weight), (x, cell.weight))


@pytest.mark.parametrize("create_graph", [False, True])
@rules
def test_parameters_that_were_computed_get_their_own_gradient(rule, create_graph):
    """Fast weights: `functional_call` with tensors that are no leaves, whose gradient is asked for."""
    cell, x = TanhCell(norm=0.5), normal(3, 4, seed=5)
    fast = {f"cell.{name}": 0.9 * p for name, p in cell.named_parameters()}
    check(
        rule,
        lambda settings: torch.func.functional_call(DEQ(cell, **settings), fast, (x,)),
        list(fast.values()),
        create_graph=create_graph,
    )


@pytest.mark.parametrize("num_inner", [1, 2, 3])
def test_gradients_through_steps_of_gradient_descent(num_inner):
    """MAML: the weights of each inner step were made by the backward pass of the one before."""
    cell, x = TanhCell(norm=0.5), normal(3, 4, seed=5)

    def outer(settings):
        deq = DEQ(cell, **settings)
        fast: dict[str, Tensor] = dict(deq.named_parameters())
        for _ in range(num_inner):
            loss = loss_of(torch.func.functional_call(deq, fast, (x,)))
            grads = torch.autograd.grad(loss, list(fast.values()), create_graph=True)
            fast = {name: p - 0.05 * grad for (name, p), grad in zip(fast.items(), grads, strict=True)}
        return torch.func.functional_call(deq, fast, (x,))

    check(RULES["implicit"], outer, list(cell.parameters()))


CLOSED_OVER = {"first order": False, "create_graph": True}


@pytest.mark.parametrize("create_graph", CLOSED_OVER.values(), ids=CLOSED_OVER.keys())
@rules
def test_a_computed_tensor_that_f_closes_over_gets_its_gradient_or_an_error(rule, create_graph):
    """Rules that send gradients straight to the leaves would pass it by, without a word."""
    leaf, x = matrix(4, norm=0.5, seed=1).requires_grad_(), normal(3, 4, seed=5)

    def gradient(settings, *, of_leaf=False):
        weight = leaf * 1.0
        z = DEQ(lambda z, x: torch.tanh(z @ weight.mT + x), **settings)(x)
        return torch.autograd.grad(loss_of(z) + weight.sum(), leaf if of_leaf else weight, create_graph=create_graph)

    reference = {"adjoint": REFERENCE}
    assert relative_error(gradient(rule, of_leaf=True), gradient(reference, of_leaf=True)) < 1e-5
    straight = isinstance(rule["adjoint"], Reversible)
    straight |= create_graph and isinstance(rule["adjoint"], Implicit | ReuseForward)
    if straight:
        with pytest.raises(RuntimeError, match=r"closes over.*pass it to f as an argument"):
            gradient(rule)
    else:
        assert relative_error(gradient(rule), gradient(reference)) < 1e-5


@pytest.mark.parametrize("create_graph", CLOSED_OVER.values(), ids=CLOSED_OVER.keys())
@rules
def test_hooks_on_parameters_and_inputs_run_once(rule, create_graph):
    cell, leaf = TanhCell(norm=0.5), normal(3, 4, seed=5).requires_grad_()
    calls = []

    def gradient(factor):
        x = leaf * 1.0
        hooks = [t.register_hook(lambda grad: (calls.append(grad), factor * grad)[1]) for t in (cell.weight, x)]
        found = gradients(lambda: DEQ(cell, **rule)(x), [cell.weight, leaf], create_graph=create_graph)
        for hook in hooks:
            hook.remove()
        return found

    plain, tripled = gradient(1), gradient(3)
    assert len(calls) == 4 and all(isinstance(grad, Tensor) for grad in calls)
    assert relative_error(tripled, [3 * grad for grad in plain]) < 1e-12


@rules
def test_an_empty_batch_has_an_empty_equilibrium(rule):
    x = torch.zeros(0, 4, dtype=torch.float64, requires_grad=True)
    z = DEQ(TanhCell(), **rule)(x)
    z.sum().backward()
    assert z.shape == (0, 4)
