"""DEQ as an nn.Module: calls, graphs, settings, errors, copies."""

import copy
import pickle
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn

from adjoint.cells import (
    EXACT,
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
from deqkit import DEQ, NonFiniteError, NotConvergedError, Status, Tolerance
from deqkit.adjoint import Implicit, OneStep, Phantom, ReuseForward, Reversible, Unrolled
from deqkit.solve import Anderson, Broyden, Fallback, FixedPointIteration, NewtonKrylov

# B samples, N numbers in a state

RULES = {
    "implicit": {"adjoint": Implicit()},
    "one-step": {"adjoint": OneStep()},
    "phantom": {"adjoint": Phantom()},
    "unrolled": {"adjoint": Unrolled(steps=10)},
    "checkpointed": {"adjoint": Unrolled(steps=10, checkpoint=True)},
    "reversible": {"adjoint": Reversible()},
    "reuse-forward": {"adjoint": ReuseForward(), "solver": Broyden()},
}
rules = pytest.mark.parametrize("rule", RULES.values(), ids=RULES.keys())


# --- one graph, several passes ---------------------------------------------------------------------------------------


@rules
def test_several_calls_before_one_backward(rule):
    """Each call keeps its own linearisation: the gradient of the sum is the sum of the gradients."""
    cell = TanhCell()
    deq = DEQ(cell, **rule)
    a, b = normal(3, 4, seed=5), normal(2, 4, seed=6)
    together = torch.autograd.grad(loss_of(deq(a)) + 2 * loss_of(deq(b)), cell.weight)[0]
    alone = [torch.autograd.grad(loss_of(deq(x)), cell.weight)[0] for x in (a, b)]
    assert relative_error([together], [alone[0] + 2 * alone[1]]) < 1e-12


@rules
def test_one_call_fed_into_the_next(rule):
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    deq = DEQ(cell, **rule)
    (chained,) = torch.autograd.grad(loss_of(deq(deq(x))), x)
    middle = deq(x)
    cut = middle.detach().requires_grad_()
    (v,) = torch.autograd.grad(loss_of(deq(cut)), cut)
    assert relative_error([chained], torch.autograd.grad(middle, x, v)) < 1e-12


@rules
def test_two_backwards_through_a_retained_graph_agree(rule):
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    loss = loss_of(DEQ(cell, **rule)(x))
    inputs = [x, *cell.parameters()]
    first = torch.autograd.grad(loss, inputs, retain_graph=True)
    second = torch.autograd.grad(loss, inputs, retain_graph=True)
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


@rules
def test_a_second_backward_without_a_retained_graph_raises_the_usual_error(rule):
    loss = loss_of(DEQ(TanhCell(), **rule)(normal(3, 4, seed=5)))
    loss.backward()
    with pytest.raises(RuntimeError, match="backward through the graph a second time"):
        loss.backward()


def test_two_losses_on_one_equilibrium():
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    z = solve_tightly(cell)(x)
    z.sum().backward(retain_graph=True)
    z.square().sum().backward()
    assert x.grad is not None
    (expected,) = torch.autograd.grad((lambda z: z.sum() + z.square().sum())(solve_tightly(cell)(x)), x)
    assert relative_error([x.grad], [expected]) < 1e-10


def test_an_equilibrium_inside_another():
    """The pair (inner, outer) is also one equilibrium of both states, which gives the value another way."""
    weight, x = matrix(3, norm=0.6, seed=0).requires_grad_(), normal(2, 3, seed=5).requires_grad_()
    inner = solve_tightly(lambda h, z: torch.tanh(h @ weight.mT + z))

    def solve(weight, x):
        inner = solve_tightly(lambda h, z: torch.tanh(h @ weight.mT + z))
        return solve_tightly(lambda z, x: torch.tanh(0.5 * inner(z) + x))(x)

    def joint(state, x):
        h, z = state
        return torch.tanh(h @ weight.mT + z), torch.tanh(0.5 * h + x)

    z = solve(weight, x)
    start = torch.zeros_like(x)
    h_joint, z_joint = solve_tightly(joint)(x, z0=(start, start))
    assert relative_error([z, inner(z)], [z_joint, h_joint]) < 1e-9
    nested = torch.autograd.grad(loss_of(z), [weight, x])
    assert relative_error(nested, torch.autograd.grad(loss_of(z_joint), [weight, x])) < 1e-9
    assert torch.autograd.gradcheck(solve, (weight, x))


@pytest.mark.parametrize("name", [name for name in RULES if name not in ("unrolled", "checkpointed")])
def test_the_result_may_be_changed_in_place(name):
    """As that of most layers: nn.ReLU(inplace=True) may follow. Unrolled returns what tanh saved, which torch minds."""
    cell, x, z0 = TanhCell(), normal(3, 4, seed=5).requires_grad_(), normal(3, 4, seed=6)
    before = z0.clone()
    deq = DEQ(cell, **RULES[name])
    expected = gradients(lambda: deq(x, z0=z0).relu(), [x, cell.weight])
    actual = gradients(lambda: nn.ReLU(inplace=True)(deq(x, z0=z0)), [x, cell.weight])
    assert relative_error(actual, expected) < 1e-12
    assert torch.equal(z0, before)


@pytest.mark.parametrize("name", [name for name in RULES if name not in ("unrolled", "checkpointed")])
def test_parts_of_the_result_may_be_changed_in_place(name):
    weight, x = normal(4, 4, seed=4).requires_grad_(), normal(3, 4, seed=5).requires_grad_()
    start = (torch.zeros(3, 4, dtype=x.dtype), torch.zeros(3, 2, 1, dtype=x.dtype))

    def f(z, x):
        wide, narrow = z
        return torch.tanh(0.3 * narrow.flatten(1).repeat(1, 2) @ weight + x), 0.3 * wide[:, :2].unsqueeze(2)

    def combined(relu):
        wide, narrow = DEQ(f, **RULES[name])(x, z0=start)
        return relu(wide) + 2 * narrow.flatten(1).repeat(1, 2) + relu(narrow).sum()

    expected = gradients(lambda: combined(torch.relu), [weight, x])

    def in_place():
        wide, narrow = DEQ(f, **RULES[name])(x, z0=start)
        before = 2 * narrow.flatten(1).repeat(1, 2)
        return nn.ReLU(inplace=True)(wide) + before + nn.ReLU(inplace=True)(narrow).sum()

    assert relative_error(gradients(in_place, [weight, x]), expected) < 1e-12


@pytest.mark.parametrize("grad", [True, False])
def test_the_result_shares_no_memory_with_the_arguments(grad):
    x, z0 = normal(3, 4, seed=5), normal(3, 4, seed=6)
    with torch.set_grad_enabled(grad):
        unmoved = DEQ(TanhCell())(x, z0=z0, max_steps=1)
        constant = DEQ(lambda z, x: x)(x)
    assert unmoved.data_ptr() != z0.data_ptr()
    assert constant.data_ptr() != x.data_ptr()


# --- values ----------------------------------------------------------------------------------------------------------


@rules
@pytest.mark.parametrize("rtol", [1e-1, 1e-6])
def test_training_and_evaluation_return_the_same_bits(rule, rtol):
    deq, x = DEQ(TanhCell(), tol=Tolerance(rtol=rtol), **rule), normal(3, 4, seed=5)
    trained = deq.train()(x)
    with torch.no_grad():
        evaluated = deq.eval()(x)
    assert torch.equal(trained, evaluated)
    with torch.inference_mode():
        assert torch.equal(deq(x), trained)


def test_running_out_of_steps_does_not_raise_but_is_told():
    z, solution = DEQ(TanhCell(), max_steps=3, tol=TIGHT)(normal(3, 4, seed=5), return_solution=True)
    assert solution.sample_status == (Status.MAX_STEPS,) * 3
    assert bool((solution.residual > 1e-12).all())
    assert torch.equal(z, solution.z)


def test_an_empty_batch_passes_through_both_ways():
    cell = TanhCell()
    x = torch.zeros(0, 4, dtype=torch.float64, requires_grad=True)
    z = DEQ(cell)(x)
    z.sum().backward()
    assert z.shape == (0, 4) and x.grad is not None
    assert cell.weight.grad is not None and not cell.weight.grad.any()


def test_zero_tolerance_spends_the_budget_and_returns_the_best_point():
    """What the documentation of Tolerance promises; a bound of zero must not hide that the residual falls."""
    cell, x = TanhCell(), normal(3, 4, seed=5)
    z, solution = DEQ(cell, tol=Tolerance(rtol=0.0), max_steps=15)(x, return_solution=True)
    assert int(solution.num_evals.max()) == 15
    assert bool(((cell(z, x) - z).norm(dim=1) < 1e-4).all())


# --- settings --------------------------------------------------------------------------------------------------------


def test_overrides_hold_for_one_call_only():
    cell, x = TanhCell(norm=0.9), normal(3, 4, seed=5)
    deq = DEQ(cell, tol=Tolerance(rtol=1e-4), max_steps=60)
    before = deq(x, return_solution=True)[1]
    start = deq(x).detach()

    _, warm = deq(x, z0=start, return_solution=True)
    assert warm.num_evals.tolist() == [1, 1, 1]
    _, loose = deq(x, tol=Tolerance(rtol=1e-1), return_solution=True)
    assert float(loose.residual.min()) > 1e-4 and int(loose.num_evals.max()) < int(before.num_evals.max())
    _, short = deq(x, max_steps=3, return_solution=True)
    assert short.num_evals.tolist() == [3, 3, 3]
    _, plain = deq(x, solver=FixedPointIteration(), return_solution=True)
    assert int(plain.num_evals.sum()) > int(before.num_evals.sum())
    unrolled = deq(x, adjoint=Unrolled(steps=2))
    assert torch.equal(unrolled, cell(cell(torch.zeros_like(x), x), x))
    one_step = torch.autograd.grad(loss_of(deq(x, adjoint=OneStep())), cell.weight)[0]

    after = deq(x, return_solution=True)[1]
    assert torch.equal(after.num_evals, before.num_evals) and torch.equal(after.z, before.z)
    implicit = torch.autograd.grad(loss_of(deq(x)), cell.weight)[0]
    assert not torch.allclose(implicit, one_step, rtol=1e-2)


def test_the_trace_is_recorded_on_request():
    deq, x = DEQ(TanhCell()), normal(3, 4, seed=5)
    assert deq(x, return_solution=True)[1].trace is None
    _, solution = deq(x, return_solution=True, trace=True)
    assert [len(t) for t in solution.trace] == solution.num_evals.tolist()


@pytest.mark.parametrize("when", ["built", "called"])
@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("adjoint", "implicit"),
        ("adjoint", Implicit),
        ("solver", "anderson"),
        ("solver", Anderson),
        ("tol", 1e-3),
        ("max_steps", 0),
    ],
    ids=str,
)
def test_wrong_settings_are_refused_by_name(name, value, when):
    with pytest.raises(ValueError, match=name):
        if when == "built":
            DEQ(TanhCell(), **{name: value})
        else:
            DEQ(TanhCell())(normal(3, 4, seed=5), **{name: value})


@pytest.mark.parametrize("name", ["unrolled", "reversible"])
@pytest.mark.parametrize("setting", ["trace", "compact"])
def test_settings_hold_for_rules_that_iterate_by_themselves_or_are_refused(name, setting):
    """A trace asked for is recorded, and an f that closes over its batch is not cut down with compact=False."""
    cell = RatedCell()
    x, rate = RatedCell.batch(0.0, 0.5, 0.9)
    try:
        if setting == "trace":
            assert DEQ(cell, **RULES[name])(x, rate, trace=True, return_solution=True)[1].trace is not None
        else:
            DEQ(lambda z, _: cell(z, x, rate), compact=False, **RULES[name])(x)
    except ValueError as error:
        assert setting in str(error)


@pytest.mark.parametrize(("name", "value"), [("solver", "anderson"), ("solver", Anderson), ("tol", 1e-3)], ids=str)
def test_wrong_settings_of_an_adjoint_are_refused_by_name(name, value):
    with pytest.raises(ValueError, match=name):
        Implicit(**{name: value})


@pytest.mark.parametrize("name", ["f_tol", "stop_mode", "tolerance"])
def test_unknown_settings_are_refused(name):
    setting: dict[str, Any] = {name: 1e-3}
    with pytest.raises(TypeError, match=name):
        DEQ(TanhCell(), **setting)
    with pytest.raises(TypeError, match=name):
        DEQ(TanhCell())(normal(3, 4, seed=5), **setting)


def test_the_representation_names_every_choice():
    text = repr(DEQ(TanhCell(), solver=Anderson(memory=3), max_steps=17, adjoint=OneStep()))
    assert "Anderson(memory=3" in text and "max_steps=17" in text and "OneStep()" in text and "TanhCell" in text


# --- cells -----------------------------------------------------------------------------------------------------------


class TokenCell(nn.Module):
    """Integer inputs: the start cannot be guessed from them. What does not depend on z is done once per solve."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(10, 4).double()
        self.weight = nn.Parameter(matrix(4, norm=0.6, seed=0))
        self.num_bound = 0

    def initial_state(self, tokens):
        return torch.ones(*tokens.shape, 4, dtype=torch.float64)

    def bind(self, tokens):
        self.num_bound += 1
        normalised = 0.5 * self.weight / torch.linalg.matrix_norm(self.weight, 2)
        return (lambda z, x: torch.tanh(z @ normalised.mT + x)), (self.embed(tokens),)


@pytest.mark.parametrize("name", ["implicit", "phantom", "unrolled", "checkpointed", "reversible", "reuse-forward"])
def test_a_cell_with_its_own_start_and_preparation(name):
    cell, tokens = TokenCell(), torch.tensor([[1, 2, 3], [4, 5, 1]])
    f, args = cell.bind(tokens)
    z = cell.initial_state(tokens)
    for _ in range(60):
        z = f(z, *args)
    inputs = list(cell.parameters())
    expected = torch.autograd.grad(loss_of(z), inputs)
    settings = RULES[name] | {"tol": Tolerance(rtol=1e-7), "max_steps": 60}
    exact = {"implicit": EXACT, "phantom": Phantom(steps=40), "reuse-forward": ReuseForward(refine=60, tol=TIGHT)}
    adjoint = exact.get(name, Unrolled(steps=60, checkpoint=name == "checkpointed"))
    settings["adjoint"] = Reversible() if name == "reversible" else adjoint
    cell.num_bound = 0
    actual = DEQ(cell, **settings)(tokens)
    assert cell.num_bound == 1
    assert relative_error([actual], [z]) < 1e-6
    assert relative_error(torch.autograd.grad(loss_of(actual), inputs), expected) < 1e-5


def test_a_start_of_the_cell_is_used_and_an_explicit_one_comes_first():
    tokens = torch.tensor([[1, 2, 3]])
    deq = DEQ(TokenCell(), tol=Tolerance(rtol=1.0), max_steps=1)
    assert torch.equal(deq(tokens), torch.ones(1, 3, 4, dtype=torch.float64))
    z0 = normal(1, 3, 4, seed=0)
    assert torch.equal(deq(tokens, z0=z0), z0)


def test_a_missing_start_is_explained():
    with pytest.raises(ValueError, match=r"pass z0.*initial_state"):
        DEQ(lambda z: 0.5 * z)()
    with pytest.raises(ValueError, match=r"pass z0.*floating-point"):
        DEQ(lambda z, x: z)(torch.tensor([[1, 2]]))


@rules
def test_an_f_that_draws_random_numbers_is_refused(rule):
    cell = TanhCell()
    deq = DEQ(lambda z, x: nn.functional.dropout(cell(z, x), 0.5), **rule)
    with pytest.raises(ValueError, match="not one fixed function"):
        deq(normal(3, 4, seed=5))


@rules
def test_a_forward_nan_names_the_deq_and_the_sample(rule):
    def cell(z, x):
        return torch.where(x > 90, float("nan"), torch.tanh(0.5 * z + x))

    x = normal(3, 4, seed=5)
    x[1] = 99
    deq = DEQ(cell, **rule)
    with pytest.raises(NonFiniteError, match=r"forward solve of DEQ\(function\).*sample 1 ") as raised:
        deq(x)
    assert isinstance(raised.value, NotConvergedError)
    assert deq.verdicts[Status.NONFINITE] == 1


# --- copies ----------------------------------------------------------------------------------------------------------

CHOICES = [
    {"solver": Anderson(memory=3), "adjoint": Implicit(solver=Broyden())},
    {"solver": Fallback(Anderson(), NewtonKrylov()), "adjoint": OneStep()},
    {"adjoint": Reversible(damping=0.4)},
    {"adjoint": Unrolled(steps=12, checkpoint=True)},
    {"solver": Broyden(), "adjoint": ReuseForward(refine=3)},
]


@pytest.mark.parametrize("settings", CHOICES, ids=str)
@pytest.mark.parametrize(
    "duplicate", [copy.deepcopy, lambda deq: pickle.loads(pickle.dumps(deq))], ids=["copy", "pickle"]
)
def test_copies_behave_the_same_and_are_independent(duplicate, settings):
    deq, x = DEQ(TanhCell(), **settings), normal(3, 4, seed=5)
    loss_of(deq(x)).backward()  # state left on the module by a pass would be copied with it, or break the copy
    twin = duplicate(deq)
    assert repr(twin) == repr(deq) and twin.verdicts == deq.verdicts
    assert torch.equal(twin(x), deq(x))
    with torch.no_grad():
        twin.cell.weight.zero_()
    assert bool(deq.cell.weight.any())


def test_state_dict_holds_the_cell_and_nothing_else():
    deq, other, x = DEQ(TanhCell(seed=0)), DEQ(TanhCell(seed=7), adjoint=OneStep()), normal(3, 4, seed=5)
    deq(x).sum().backward()
    assert list(deq.state_dict()) == ["cell.weight", "cell.bias"]
    assert not torch.equal(deq(x), other(x))
    other.load_state_dict(deq.state_dict())
    assert torch.equal(deq(x), other(x))


class BatchNormCell(nn.Module):
    """Samples depend on each other."""

    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(6, 6), nn.BatchNorm1d(6)

    def forward(self, z, x):
        return 0.5 * torch.tanh(self.norm(self.linear(z) + x))


@pytest.mark.parametrize(
    "rule",
    [{"adjoint": Implicit()}, {"adjoint": ReuseForward(refine=20), "solver": Broyden()}],
    ids=["implicit", "reuse"],
)
def test_without_compaction_samples_stay_in_both_solves(rule):
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)) * torch.linspace(0, 2, 16).unsqueeze(1)
    for seed in range(10):
        torch.manual_seed(seed)
        DEQ(BatchNormCell(), compact=False, **rule)(x).square().sum().backward()


def test_an_initial_state_that_is_no_method_is_an_error_that_says_so():
    cell = TanhCell()
    cell.initial_state = nn.Parameter(torch.zeros(4, dtype=torch.float64))
    with pytest.raises(ValueError, match="initial_state of a cell is a method"):
        DEQ(cell)(normal(3, 4, seed=5))


def test_a_start_of_the_wrong_shape_that_nobody_chose_is_explained():
    for adjoint in (Implicit(), Unrolled(steps=2)):
        deq = DEQ(Mapping(4, 6), adjoint=adjoint)
        with pytest.raises(RuntimeError, match="shape") as raised:
            deq(normal(3, 4, seed=1))
        assert "zeros in the shape of the first argument, (3, 4)" in raised.value.__notes__[0]
        assert deq(normal(3, 4, seed=1), z0=normal(3, 6, seed=2)).shape == (3, 6)
        with pytest.raises(RuntimeError) as raised:
            deq(normal(3, 4, seed=1), z0=normal(3, 5, seed=2))
        assert not hasattr(raised.value, "__notes__")  # it was chosen


class Mapping(nn.Module):
    """A state of another width than the input."""

    def __init__(self, num_inputs, width):
        super().__init__()
        self.inner = nn.Linear(width, width).double()
        self.outer = nn.Linear(num_inputs, width).double()

    def forward(self, z, x):
        return torch.tanh(0.1 * self.inner(z) + self.outer(x))


def test_a_bind_that_returns_something_else_is_an_error_that_says_what_it_should():
    class Forgetful(Mapping):
        def bind(self, x):
            return self.forward

    with pytest.raises(ValueError, match=r"bind of a cell returns \(f, args\).*got method"):
        DEQ(Forgetful(4, 4))(normal(3, 4, seed=1))


def test_verdicts_and_solutions_print_briefly():
    deq = DEQ(lambda z, x: 0.5 * z + x)
    _, solution = deq(torch.ones(2, 3), return_solution=True)
    assert repr(deq.verdicts) == "Counter({Status.CONVERGED: 2})"
    assert repr(solution) == f"Solution({solution.describe()})" and "tensor" not in repr(solution)


def test_samples_that_depend_on_each_other_are_named_as_a_cause():
    x = torch.randn(16, 6, generator=torch.Generator().manual_seed(0)) * torch.linspace(0, 2, 16).unsqueeze(1)
    torch.manual_seed(1)
    with pytest.raises(ValueError, match="batch norm in training mode.*one sample"):
        DEQ(BatchNormCell())(x)


def test_repr_tells_what_is_not_usual():
    assert "compact=False" not in repr(DEQ(TanhCell())) and "compile" not in repr(DEQ(TanhCell()))
    assert "compact=False, compile=True" in repr(DEQ(TanhCell(), compile=True))


def test_importing_deqkit_leaves_the_compiler_of_torch_alone():
    """It takes as long to import as torch itself; `torch.compiler.disable` as a decorator would load it."""
    code = "import sys, deqkit, deqkit.cli; sys.exit('torch._dynamo' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
