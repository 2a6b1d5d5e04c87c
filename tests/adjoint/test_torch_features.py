"""DEQ under the rest of PyTorch: torch.func, autocast, torch.compile, activation checkpointing, forward mode."""

import copy

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call
from torch.utils.checkpoint import checkpoint

from adjoint.cells import EXACT, TIGHT, RatedCell, TanhCell, gradients, loss_of, normal, relative_error, solve_tightly
from deqkit import DEQ, Tolerance
from deqkit.adjoint import Implicit, OneStep, Phantom, ReuseForward, Reversible, Unrolled
from deqkit.solve import Broyden, FixedPointIteration

# B samples, N numbers in a state

ALL_RULES = {
    "implicit": {"adjoint": Implicit()},
    "one-step": {"adjoint": OneStep()},
    "phantom": {"adjoint": Phantom(steps=20)},
    "unrolled": {"adjoint": Unrolled(steps=30)},
    "checkpointed": {"adjoint": Unrolled(steps=30, checkpoint=True)},
    "reversible": {"adjoint": Reversible()},
    "reuse-forward": {"adjoint": ReuseForward(refine=20), "solver": Broyden()},
}
# What torch 2.13 says about itself: forward mode loads scripted decompositions, Dynamo looks at `.grad` of its inputs.
forward_mode = pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning")
compiles = pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor:UserWarning")
all_rules = pytest.mark.parametrize("rule", ALL_RULES.values(), ids=ALL_RULES.keys())


# --- torch.func ------------------------------------------------------------------------------------------------------


@forward_mode
@all_rules
@pytest.mark.parametrize("transform", ["vmap", "jvp", "grad", "jacrev"])
def test_function_transforms_are_refused_in_plain_words(transform, rule):
    deq, x = DEQ(TanhCell(), **rule), normal(3, 4, seed=5)
    calls = {
        "vmap": lambda: torch.func.vmap(deq)(x.unsqueeze(1)),
        "jvp": lambda: torch.func.jvp(deq, (x,), (x,)),
        "grad": lambda: torch.func.grad(lambda x: deq(x).sum())(x),
        "jacrev": lambda: torch.func.jacrev(deq)(x),
    }
    with pytest.raises(NotImplementedError, match="torch.func"):
        calls[transform]()


def test_batched_gradients_are_refused_in_plain_words():
    """`is_grads_batched` and `jacobian(vectorize=True)` run the backward pass under vmap."""
    x = normal(3, 4, seed=5).requires_grad_()
    z = DEQ(TanhCell())(x)
    with pytest.raises(NotImplementedError, match="torch.func|vmap"):
        torch.autograd.grad(z.sum(0), x, torch.eye(4, dtype=torch.float64), is_grads_batched=True)


@forward_mode
@pytest.mark.parametrize("grad", [True, False])
def test_forward_mode_is_refused(grad):
    """Tangents would follow the solver's steps, whose derivative at a loose tolerance is not that of z*."""
    deq, x = DEQ(TanhCell(), solver=FixedPointIteration(), tol=Tolerance(rtol=1e-1)), normal(3, 4, seed=5)
    with forward_ad.dual_level(), torch.set_grad_enabled(grad), pytest.raises(NotImplementedError):
        deq(forward_ad.make_dual(x, torch.ones_like(x)))


@all_rules
def test_functional_call_sees_and_differentiates_the_given_parameters(rule):
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    deq = DEQ(cell, **rule)
    other = copy.deepcopy(deq)
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.mul_(0.7)
    given = {name: p.detach().clone().requires_grad_() for name, p in other.named_parameters()}
    expected = gradients(lambda: other(x), [x, *other.parameters()])
    actual = gradients(lambda: functional_call(deq, given, (x,)), [x, *given.values()])
    assert relative_error(actual, expected) < 1e-12
    assert all(p.grad is None for p in deq.parameters())


def test_functional_call_of_second_order_and_with_compaction():
    """Both evaluate f again in the backward pass, when the given parameters are no longer in place."""
    cell = RatedCell()
    x, rate = RatedCell.batch(0.0, 0.1, 0.1, 0.9)
    deq = solve_tightly(cell, Implicit(tol=TIGHT, max_steps=400))
    given = {"cell.weight": (0.9 * cell.weight.detach()).requires_grad_()}
    other = RatedCell()
    other.weight.data.mul_(0.9)

    def both_orders(run, weight):
        (grad,) = torch.autograd.grad(loss_of(run()), weight, create_graph=True)
        return grad, *torch.autograd.grad(grad.sin().sum(), weight)

    actual = both_orders(lambda: functional_call(deq, given, (x, rate)), given["cell.weight"])
    expected = both_orders(lambda: solve_tightly(other, Unrolled(steps=400))(x, rate), other.weight)
    assert relative_error(actual, expected) < 1e-8
    plain = torch.autograd.grad(loss_of(functional_call(deq, given, (x, rate))), given["cell.weight"])
    assert relative_error(plain, expected[:1]) < 1e-9


# --- autocast --------------------------------------------------------------------------------------------------------


@all_rules
@pytest.mark.parametrize("last", ["tanh", "linear"])
def test_autocast_keeps_a_float32_state_and_every_gradient(rule, last):
    """The linear layer ends in bfloat16, the tanh in float32; the state stays what z0 is."""
    layer, x = nn.Linear(8, 8), normal(4, 8, seed=1, dtype=torch.float32).requires_grad_()
    with torch.no_grad():
        layer.weight.mul_(0.8 / torch.linalg.matrix_norm(layer.weight, 2))

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, z, x):
            return torch.tanh(layer(z) + x) if last == "tanh" else layer(torch.tanh(z) + x)

    deq = DEQ(Cell(), **rule)
    inputs = [x, layer.weight, layer.bias]
    z = deq(x)
    expected = torch.autograd.grad(loss_of(z), inputs)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = deq(x)
    assert cast.dtype == torch.float32
    actual = torch.autograd.grad(loss_of(cast), inputs)  # raises if one is missing
    assert all(g.dtype == torch.float32 and bool(g.isfinite().all()) for g in actual)
    assert relative_error([cast], [z]) < 2e-2
    assert relative_error(actual, expected) < 5e-2  # errors of z and of y, each about 2e-2 at worst


def test_a_weight_shared_with_a_later_layer_keeps_its_gradient_under_autocast():
    """The solve runs without a graph and must not leave weights that were cast there in autocast's cache."""
    layer = nn.Linear(8, 8)
    deq = DEQ(lambda z, x: torch.tanh(0.3 * layer(z) + x))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        z = deq(normal(4, 8, seed=1, dtype=torch.float32)).detach()
        out = layer(z)
    out.float().sum().backward()
    torch.testing.assert_close(layer.weight.grad, z.sum(0).expand(8, 8), rtol=2e-2, atol=2e-2)


# --- torch.compile ---------------------------------------------------------------------------------------------------


def check_compiled(deq, expected, x, cell):
    z = deq(x)
    assert relative_error([z], [expected(x)]) < 1e-12
    inputs = [x, *cell.parameters()]
    grads = torch.autograd.grad(loss_of(z), inputs)
    assert relative_error(grads, gradients(lambda: expected(x), inputs)) < 1e-10


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


# Inductor needs a C++ compiler and several seconds, and warns about its own deprecated parts.
INDUCTOR = pytest.param("inductor", marks=[pytest.mark.slow, pytest.mark.filterwarnings("ignore")])
BACKENDS = ["eager", "aot_eager", INDUCTOR]


@pytest.mark.parametrize("backend", BACKENDS)
@compiles
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_cell_gives_the_same_value_and_gradient(backend):
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    check_compiled(solve_tightly(torch.compile(cell, backend=backend)), solve_tightly(cell), x, cell)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@compiles
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_deq_gives_the_same_value_and_gradient(backend):
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    check_compiled(torch.compile(solve_tightly(cell), backend=backend), solve_tightly(cell), x, cell)


@compiles
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_model_around_a_deq_gives_the_same_value_and_gradient():
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    model = nn.Sequential(nn.Linear(4, 4).double(), solve_tightly(cell), nn.Linear(4, 4).double())
    inputs = [x, *model.parameters()]
    compiled = torch.compile(model, backend="aot_eager")
    actual = gradients(lambda: compiled(x), inputs)
    assert relative_error(actual, gradients(lambda: model(x), inputs)) < 1e-10


class BindingCell(nn.Module):
    """tanh(z W + u), with the product of the input done once per solve."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(0.3 * normal(4, 4, seed=1))

    def bind(self, x):
        u = x @ self.weight.T
        return (lambda z, u: torch.tanh(z @ self.weight + u)), (u,)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("make", [TanhCell, BindingCell])
@compiles
@pytest.mark.usefixtures("fresh_compiler")
def test_compile_gives_the_same_value_and_gradient(make, backend):
    cell, x = make(), normal(3, 4, seed=5).requires_grad_()
    check_compiled(solve_tightly(cell, compile={"backend": backend}), solve_tightly(cell), x, cell)


@compiles
@pytest.mark.usefixtures("fresh_compiler")
def test_with_compile_no_size_of_the_batch_is_compiled_but_the_first():
    """Samples that are hard to a different degree would leave one after the other."""
    graphs, inputs = [], RatedCell.batch(0.0, 0.2, 0.5, 0.8)

    def backend(graph, _):
        graphs.append(graph)
        return graph

    deq = DEQ(RatedCell(), tol=TIGHT, max_steps=400, compile={"backend": backend, "dynamic": False})
    z, solution = deq(*inputs, return_solution=True)
    assert len(solution.num_evals.unique()) > 2
    assert relative_error([z], [solve_tightly(RatedCell())(*inputs)]) < 1e-11
    z.square().sum().backward()
    assert solution.backward is not None and len(solution.backward.num_evals.unique()) > 2
    assert len(graphs) <= 2  # the solve, and what carries the gradient


def test_compile_keeps_the_names_of_the_weights_and_the_method_of_modules():
    cell = TanhCell()
    deq = DEQ(cell, compile=True)
    assert deq.state_dict().keys() == DEQ(cell).state_dict().keys()
    assert callable(deq.compile)


@pytest.mark.parametrize("how", ["inductor", None, 1])
def test_compile_says_what_it_takes(how):
    with pytest.raises(ValueError, match="compile must be True, False or a dict"):
        DEQ(TanhCell(), compile=how)


# --- activation checkpointing ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_a_checkpointed_deq_gives_the_same_gradient(use_reentrant):
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    grads = []
    for run in (lambda x: checkpoint(solve_tightly(cell), x, use_reentrant=use_reentrant), solve_tightly(cell)):
        for tensor in (x, *cell.parameters()):
            tensor.grad = None
        loss_of(run(x)).backward()
        grads.append([tensor.grad for tensor in (x, *cell.parameters())])
    assert relative_error(grads[0], grads[1]) < 1e-12


def test_saved_tensor_hooks_are_respected():
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    with torch.autograd.graph.save_on_cpu():
        actual = gradients(lambda: solve_tightly(cell, EXACT)(x), [x])
    assert relative_error(actual, gradients(lambda: solve_tightly(cell, EXACT)(x), [x])) == 0
