"""What goes in: structures and batches that must work, and mistakes that must be named before the first step."""

import collections
import dataclasses
import types

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from deqkit.solve import Anderson, Broyden, FixedPointIteration, NewtonKrylov, Status, Tolerance, fixed_point
from problems import causal_mixing, dict_state, normal

# B samples, T positions, D width, N numbers in a state


class Calls:
    """f that counts how often it is called."""

    def __init__(self, f):
        self.f, self.count = f, 0

    def __call__(self, z, *args):
        self.count += 1
        return self.f(z, *args)


WRONG = {
    "shape": (lambda z: z[:, :2], r"shape.*\(2, 3\).*\(2, 2\)"),
    "transposed": (lambda z: z.mT, r"shape.*\(2, 3\).*\(3, 2\)"),
    "batch": (lambda z: z[:1], r"shape.*\(2, 3\).*\(1, 3\)"),
    "scalar": (lambda z: z.sum(), "shape"),
    "dtype": (lambda z: z.double(), "float32.*float64"),
    "integers": (lambda z: z.long(), "float32.*int64"),
    "device": (lambda z: torch.zeros_like(z, device="meta"), "cpu to meta"),
    "tuple": (lambda z: (z, z), r"structure.*tensor.*\(tensor, tensor\)"),
    "dict": (lambda z: {"z": z}, "structure.*'z'"),
    "none": (lambda z: None, "NoneType"),
    "number": (lambda z: 1.0, "float"),
}


@pytest.mark.parametrize("mistake", WRONG)
def test_wrong_results_of_f_are_named_before_the_first_step(mistake):
    wrong, message = WRONG[mistake]
    f = Calls(wrong)
    with pytest.raises(ValueError, match=message):
        fixed_point(f, torch.zeros(2, 3))
    assert f.count == 1


def test_wrong_structure_inside_a_dict_or_tuple():
    z0 = {"h": torch.zeros(2, 3), "c": torch.zeros(2, 3)}
    with pytest.raises(ValueError, match="structure"):
        fixed_point(lambda z: {"h": z["h"]}, z0)
    with pytest.raises(ValueError, match="structure"):
        fixed_point(lambda z: {"h": z["h"], "cell": z["c"]}, z0)
    with pytest.raises(ValueError, match=r"shape.*\(2, 3\).*\(2, 4\)"):
        fixed_point(lambda z: (z[1], z[0]), (torch.zeros(2, 3), torch.zeros(2, 4)))


@pytest.mark.parametrize(
    ("z0", "message"),
    [
        (torch.zeros(3, dtype=torch.int64), "floating point"),
        (torch.zeros(3, dtype=torch.complex64), "floating point"),
        (torch.tensor(1.0), "batch"),
        ((torch.zeros(2, 3), torch.zeros(3, 3)), "batch size"),
        ((torch.zeros(2, 3), torch.zeros(2, 3).double()), "dtype"),
        ((), "no tensors"),
        ("zeros", "str"),
        ((torch.zeros(2), None), "NoneType"),
    ],
    ids=["int", "complex", "scalar", "batches", "dtypes", "empty", "string", "none"],
)
def test_wrong_starts(z0, message):
    with pytest.raises(ValueError, match=message):
        fixed_point(lambda z: z, z0)


def test_prefix_needs_positions():
    for z0 in (torch.zeros(2), (torch.zeros(2, 3, 4), torch.zeros(2, 5))):
        with pytest.raises(ValueError, match="positions"):
            fixed_point(lambda z: z, z0, solver=Anderson(group="prefix"))


@pytest.mark.parametrize("wrong", [torch.zeros(3, 2), torch.tensor(0.5), torch.zeros(5)], ids=["rows", "scalar", "row"])
def test_args_must_be_batch_first(wrong):
    for args in ((wrong,), (torch.zeros(2, 1), {"w": [wrong]})):
        with pytest.raises(ValueError, match="batch size 2 .*close over"):
            fixed_point(lambda z, *args: z, torch.zeros(2, 3), args)
    with pytest.raises(ValueError, match="args must be a tuple"):
        fixed_point(lambda z, x: z, torch.zeros(2, 3), torch.zeros(2, 3))  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("option", ["max_steps", "check_every"])
@pytest.mark.parametrize("value", [0, -1, None])
def test_wrong_limits(option, value):
    with pytest.raises(ValueError, match=f"{option} must be a whole number of at least 1, got {value}"):
        fixed_point(lambda z: z, torch.zeros(2, 3), **{option: value})


def test_args_of_any_structure_follow_their_samples():
    x = {"gain": torch.tensor([0.1, 0.9, 0.5]), "name": "not a tensor", "bias": [torch.ones(3, 4), 2.0]}

    def f(z, x, scale):
        assert len(z) == len(x["gain"]) == len(x["bias"][0])
        return x["gain"].unsqueeze(1) * z + scale * x["bias"][0] * x["bias"][1]

    solution = fixed_point(f, torch.zeros(3, 4), (x, 0.5), solver=FixedPointIteration(), max_steps=200)
    assert solution.num_evals.unique().numel() == 3
    torch.testing.assert_close(solution.z, (1 / (1 - x["gain"])).unsqueeze(1).expand(3, 4), rtol=1e-2, atol=0)


class Attributes(collections.OrderedDict):
    """Keys are attributes too, as in the outputs of many libraries."""

    def __getattr__(self, key):
        try:
            return self[key]
        except KeyError:
            raise AttributeError(key) from None


@dataclasses.dataclass
class Derived:
    b: torch.Tensor
    half: torch.Tensor = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.half = self.b / 2


@pytest.mark.parametrize(
    ("make", "read"),
    [
        (lambda b: Attributes(b=b), lambda arg: arg.b),
        (lambda b: collections.UserDict(b=b), lambda arg: arg.data["b"]),
        (lambda b: collections.defaultdict(list, b=b), lambda arg: arg["b"] + sum(arg["missing"])),
        (lambda b: types.MappingProxyType({"b": b}), lambda arg: arg["b"]),
        (Derived, lambda arg: 2 * arg.half),
    ],
    ids=["attributes", "UserDict", "defaultdict", "mappingproxy", "dataclass"],
)
def test_args_keep_their_type_when_samples_leave(make, read):
    b = torch.tensor([[0.01], [3.0], [1.0]])
    arg = make(b)
    solution = fixed_point(lambda z, arg: 0.9 * torch.sin(z) + read(arg), torch.zeros_like(b), (arg,))
    plain = fixed_point(lambda z, b: 0.9 * torch.sin(z) + b, torch.zeros_like(b), (b,))
    assert len(set(plain.num_evals.tolist())) > 1  # or none would leave
    assert torch.equal(solution.z, plain.z)
    assert torch.equal(read(arg), b)  # and the caller's own is whole


def test_a_dict_may_come_back_in_another_order():
    problem = dict_state(torch.float64)
    assert list(problem.f(problem.z0, *problem.args)) == ["c", "h"] and list(problem.z0) == ["h", "c"]
    solution = fixed_point(problem.f, problem.z0, problem.args, tol=Tolerance(rtol=1e-11))
    assert list(solution.z) == ["h", "c"]
    torch.testing.assert_close(solution.z, problem.z_star)


def test_no_gradient_is_recorded_and_nothing_is_written():
    w = torch.full((3, 3), 0.1, requires_grad=True)
    z0, x = torch.zeros(2, 3, requires_grad=True), torch.ones(2, 3, requires_grad=True)
    solution = fixed_point(lambda z, x: z @ w + x, z0, (x,))
    assert not solution.z.requires_grad and not solution.residual.requires_grad
    assert torch.equal(z0, torch.zeros(2, 3)) and torch.equal(x, torch.ones(2, 3))


def test_the_result_does_not_share_memory_with_the_start():
    z0 = torch.full((2, 3), 2.0)
    solution = fixed_point(lambda z: 0.5 * z + 1, z0)
    solution.z.add_(1)
    assert torch.equal(z0, torch.full((2, 3), 2.0))


def test_per_token_is_the_paper_s_tolerance():
    """eps = sqrt(T) * 1e-5 on the norm over a sample; halving residuals show which step is the first below it."""
    for length in (1, 4, 100):
        z0_BTD = torch.ones(1, length, 1).double()
        solution = fixed_point(
            lambda z: 0.5 * z,
            z0_BTD,
            solver=FixedPointIteration(),
            tol=Tolerance(rtol=0.0, atol=1e-5, per_token=True),
            trace=True,
        )
        # ||f(z) - z|| = sqrt(T) 2^-k at evaluation k = 1, 2, ...: 2^-17 is the first below 1e-5.
        assert solution.num_evals.item() == 17
        assert solution.residual_norm.item() <= length**0.5 * 1e-5 < 2 * solution.residual_norm.item()
    whole = fixed_point(
        lambda z: 0.5 * z, z0_BTD, solver=FixedPointIteration(), tol=Tolerance(rtol=0.0, atol=1e-5), max_steps=60
    )
    assert whole.num_evals.item() == 20  # 10 * 2^-k <= 1e-5
    assert Tolerance(atol=1e-5, per_token=True).resolved(100) == Tolerance(atol=1e-5 * 10)


def test_atol_adds_to_rtol():
    solution = fixed_point(
        lambda z: 0.5 * z + 1,
        torch.zeros(1, 1).double(),
        solver=FixedPointIteration(),
        tol=Tolerance(rtol=0.1, atol=0.1),
    )
    # z = 2 - 2^(1-k), residual 2^-k against 0.1 + 0.1 f(z): the first k with 2^-k <= 0.1 + 0.1 (2 - 2^-k) is 2.
    assert solution.z.item() == 1.5 and solution.residual_norm.item() == 0.25


# --- changes in place, closures over the batch ---


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "f",
    [lambda z, x: z.mul_(0.5).add_(x), lambda z, x: F.relu(z, inplace=True) * 0.5 + x - 1],
    ids=["mul_", "relu"],
)
def test_a_state_changed_in_place_is_detected(f, mode):
    with mode(), pytest.raises(ValueError, match="in place.*inplace=True"):
        fixed_point(f, -torch.ones(3, 4), (torch.ones(3, 4),))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.enable_grad, torch.inference_mode])
def test_an_argument_changed_in_place_is_detected(mode):
    def f(z, x):
        x += 0.5 * z
        return torch.tanh(x)

    with mode(), pytest.raises(ValueError, match="its arguments.* in place"):
        fixed_point(f, torch.ones(3, 4), (torch.ones(3, 4),))


@pytest.mark.parametrize("solver", [FixedPointIteration(), Anderson(), Broyden(), NewtonKrylov()], ids=repr)
def test_a_buffer_that_is_written_and_returned_again_is_detected(solver):
    """z may be what f returned before: then f(z) would be written over z, and every residual be 0."""
    weight, x = 0.2 * normal(1, 4, 4), normal(2, 3, 4)
    buffer = torch.empty_like(x)
    with pytest.raises(ValueError, match="what it returned before in place"):
        fixed_point(lambda z, x: torch.add(z @ weight, x, out=buffer), torch.zeros_like(x), (x,), solver=solver)


def test_in_place_on_something_else_is_fine():
    x = torch.ones(3, 4)
    assert fixed_point(lambda z, x: (0.5 * z).add_(x), torch.zeros(3, 4), (x,)).status is Status.CONVERGED
    with torch.inference_mode():
        assert fixed_point(lambda z, x: (0.5 * z).add_(x), torch.zeros(3, 4), (x,)).status is Status.CONVERGED


HARDER = torch.tensor([[0.0], [0.3], [0.9]])


def test_a_closure_over_the_batch_is_explained_when_samples_leave():
    with pytest.raises(RuntimeError, match="size of tensor") as caught:
        fixed_point(lambda z, x: HARDER * torch.tanh(z) + x, torch.zeros(3, 4), (torch.ones(3, 4),), max_steps=100)
    assert "samples had left the batch" in caught.value.__notes__[0] and "compact=False" in caught.value.__notes__[0]


def test_a_closure_that_broadcasts_is_explained_when_one_sample_is_left():
    rates = torch.tensor([[0.0], [0.9]])
    with pytest.raises(ValueError, match="given 1 samples and returned another number.*pass them in args"):
        fixed_point(lambda z, x: rates * torch.tanh(z) + x, torch.zeros(2, 4), (torch.ones(2, 4),), max_steps=100)


def test_an_index_into_samples_that_have_left_is_explained():
    """The nodes of a graph as samples, and its edges as numbers of nodes."""
    source, target = torch.arange(8), (torch.arange(8) + 1) % 8
    x = torch.logspace(-2, 1, 8).unsqueeze(1).expand(8, 3)

    def f(z, x):
        return torch.tanh(0.7 * torch.zeros_like(z).index_add(0, source, z[target]) + x)

    with pytest.raises(IndexError) as raised:
        fixed_point(f, torch.zeros_like(x), (x,), max_steps=100)
    assert "one sample" in raised.value.__notes__[0]


def test_a_complex_state_is_refused_with_what_to_do():
    z0 = torch.zeros(2, 3, dtype=torch.complex64)
    with pytest.raises(ValueError, match="view_as_real"):
        fixed_point(lambda z: 0.5 * z, z0)


# --- one fixed function ---


def dropout_cell(z, x, p=0.5):
    return torch.tanh(F.dropout(0.5 * z, p) + x)


@pytest.mark.parametrize("start", ["zeros", "ones", "tuple of zeros"])
def test_dropout_in_training_mode_is_detected(start):
    """From z0 = 0, the default of DEQ, the first evaluation does not show dropout on z: 0 is dropped to 0."""
    x = torch.ones(4, 50)
    f, z0 = dropout_cell, torch.ones(4, 50) if start == "ones" else torch.zeros(4, 50)
    if start == "tuple of zeros":
        f, z0 = lambda z, x: (dropout_cell(z[1], x), dropout_cell(z[0], x)), (z0, z0)  # noqa: E731
    with pytest.raises(ValueError, match="not one fixed function.*dropout.*mask.*eval"):
        fixed_point(f, z0, (x,), tol=Tolerance(rtol=1e-2), throw=False)


def test_dropout_in_a_module_is_detected_and_eval_is_the_remedy():
    block = nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.3), nn.Tanh())
    with pytest.raises(ValueError, match="eval"):
        fixed_point(block, torch.zeros(2, 8))
    assert fixed_point(block.eval(), torch.zeros(2, 8)).status is Status.CONVERGED


def test_a_mask_drawn_before_the_solve_is_fine():
    x, mask = torch.ones(2, 8), (torch.rand(2, 8) > 0.5).float()
    assert (
        fixed_point(lambda z, x, m: torch.tanh(0.5 * z * m + x), torch.zeros(2, 8), (x, mask)).status
        is Status.CONVERGED
    )


@pytest.mark.parametrize("unused", [lambda z: F.dropout(z, 1e-12), lambda z: z + 0 * torch.rand(())], ids=["p=0", "0*"])
def test_random_numbers_that_change_nothing_are_fine(unused):
    solution = fixed_point(lambda z: 0.5 * unused(z) + 1, torch.zeros(2, 8), tol=Tolerance(rtol=1e-5))
    assert solution.status is Status.CONVERGED


def test_random_numbers_outside_f_are_left_as_they_were():
    problem = causal_mixing(torch.float32)
    before = torch.get_rng_state()
    fixed_point(problem.f, problem.z0, problem.args)
    assert torch.equal(before, torch.get_rng_state())
