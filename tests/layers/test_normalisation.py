"""Weight norm, spectral norm and initialisation: the weights in use are the ones meant, computed once per solve."""

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn

from deqkit import DEQ, Tolerance
from deqkit.adjoint import Implicit
from deqkit.layers import TransformerCell, TransformerConfig, TrellisCell, TrellisConfig
from layers.naive import normal

# B samples, T positions, D width

KINDS = ("transformer", "trellis")
kinds = pytest.mark.parametrize("kind", KINDS)
normalisations = pytest.mark.parametrize("normalise", ["none", "weight", "spectral"])
TIGHT = Tolerance(rtol=1e-10, patience=200)
LINEARS = {"transformer": ("qkv", "position", "project", "expand", "contract"), "trellis": ("conv", "injection")}


def make(kind: str, *, width: int = 8, seed: int = 0, **options: Any) -> Any:
    torch.manual_seed(seed)
    options = {"init_std": None, **options}
    if kind == "transformer":
        return TransformerCell(TransformerConfig(width=width, num_heads=2, hidden_width=2 * width, **options))
    config = TrellisConfig(input_width=width, hidden_width=width // 2, output_width=width, kernel_size=2, **options)
    return TrellisCell(config)


def weights(cell: Any, kind: str) -> dict[str, torch.Tensor]:
    return {name: getattr(cell, name).weight.detach() for name in LINEARS[kind]}


def value(cell: Any, x: torch.Tensor) -> torch.Tensor:
    z = DEQ(cell, tol=TIGHT, max_steps=400)(cell.inject(x))
    return z if isinstance(z, torch.Tensor) else z[0]


# --- the weights in use ----------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("normalise", ["none", "weight"])
@pytest.mark.parametrize("std", [0.05, 0.3])
def test_weights_in_use_start_at_the_standard_deviation_asked_for(kind, normalise, std):
    """The original's weight norm never saw its initialisation (REFERENCE.md 2.6)."""
    cell = make(kind, width=64, normalise=normalise, init_std=std)
    drawn = {**weights(cell, kind), "injection": cell.injection.weight.detach()}
    for name, weight in drawn.items():
        deviation = std / (2 * weight.numel()) ** 0.5  # of an estimate of the standard deviation
        assert abs(weight.std().item() - std) < 5 * deviation, name
        assert abs(weight.mean().item()) < 5 * std / weight.numel() ** 0.5, name
        # Normal, not uniform: beyond three standard deviations lie 0.27 % of the values.
        assert 1e-3 < (weight.abs() > 3 * std).double().mean().item() < 5e-3, name
    assert all(not p.any() for name, p in cell.named_parameters() if name.endswith(".bias"))
    if kind == "transformer":
        for bias in (cell.content_bias, cell.position_bias):
            assert 0.5 * std < bias.std().item() < 1.5 * std
        assert not torch.equal(cell.content_bias, cell.position_bias)


@kinds
def test_without_a_standard_deviation_weights_scale_with_their_inputs(kind):
    gains = {"qkv": 0.1, "contract": 0.3}  # layers/transformer.py: where they act on the state
    for width in (32, 96):
        for name, weight in weights(make(kind, width=width), kind).items():
            expected = gains.get(name, 1.0) * weight.shape[1] ** -0.5
            assert abs(weight.std().item() - expected) < 5 * expected / (2 * weight.numel()) ** 0.5, name


@kinds
def test_normalisation_changes_neither_the_weights_at_the_start_nor_what_is_drawn_next(kind):
    plain, after_plain = weights(make(kind), kind), torch.rand(3)
    normalised, after_normalised = weights(make(kind, normalise="weight"), kind), torch.rand(3)
    spectral, after_spectral = weights(make(kind, normalise="spectral"), kind), torch.rand(3)
    assert torch.equal(after_plain, after_normalised) and torch.equal(after_plain, after_spectral)
    for name, weight in plain.items():
        torch.testing.assert_close(normalised[name], weight, rtol=1e-6, atol=1e-7)
        factor = (spectral[name] / weight).mean()
        torch.testing.assert_close(spectral[name], factor * weight, rtol=1e-5, atol=1e-6)


@kinds
def test_weight_norm_has_a_length_per_output(kind):
    cell = make(kind, normalise="weight").double()
    with torch.no_grad():
        for parameter in cell.parameters():
            parameter.normal_(std=0.5)
    for name in LINEARS[kind]:
        linear = getattr(cell, name)
        length, direction = linear.parametrizations.weight.original0, linear.parametrizations.weight.original1
        expected = length.view(-1, 1) * direction / direction.norm(dim=1, keepdim=True)
        torch.testing.assert_close(linear.weight, expected, rtol=1e-12, atol=1e-12)
    names = [name for name, _ in cell.injection.named_parameters()]
    assert ("weight" in names) == (kind == "transformer")  # the transformer's injection has no normalisation


@kinds
def test_spectral_norm_divides_by_the_largest_singular_value(kind):
    cell = make(kind, normalise="spectral").double().train()
    for name in LINEARS[kind]:
        linear = getattr(cell, name)
        for _ in range(200):  # each reading in training mode is one step of the power iteration
            weight = linear.weight
        assert abs(torch.linalg.matrix_norm(weight.detach(), 2).item() - 1) < 1e-6  # pyright: ignore


# --- once per solve --------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("normalise", ["weight", "spectral"])
def test_normalised_weights_are_computed_once_per_solve(kind, normalise):
    cell = make(kind, normalise=normalise).double()
    counts = dict.fromkeys(LINEARS[kind], 0)
    for name in counts:

        def count(*_: Any, name: str = name) -> None:
            counts[name] += 1

        getattr(cell, name).parametrizations.weight[0].register_forward_hook(count)
    deq = DEQ(cell, tol=TIGHT, max_steps=400, adjoint=Implicit(tol=TIGHT, max_steps=400))
    z, solution = deq(cell.inject(normal(3, 5, 8, seed=1)), return_solution=True)
    (z if isinstance(z, torch.Tensor) else z[0]).square().sum().backward()
    assert int(solution.num_evals.max()) > 5 and int(solution.backward.num_evals.max()) > 5
    assert set(counts.values()) == {1}, counts
    assert all(p.grad is not None for p in cell.parameters())


# --- copies ----------------------------------------------------------------------------------------------------------


@kinds
@normalisations
def test_a_deep_copy_has_the_same_values_and_parameters_of_its_own(kind, normalise):
    cell = make(kind, normalise=normalise).double().eval()
    x = normal(2, 5, 8, seed=1)
    before = value(cell, x)
    twin = copy.deepcopy(cell)
    assert torch.equal(value(twin, x), before)
    value(twin, x).square().sum().backward()
    assert all(p.grad is None for p in cell.parameters()) and all(p.grad is not None for p in twin.parameters())
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, dtype=torch.float64))
    assert torch.equal(value(cell, x), before) and not torch.allclose(value(twin, x), before, atol=1e-3)


@kinds
@normalisations
def test_a_state_dict_restores_every_value(kind, normalise):
    cell, other = (make(kind, normalise=normalise, seed=seed).double().eval() for seed in (0, 1))
    x = normal(2, 5, 8, seed=1)
    assert not torch.allclose(value(cell, x), value(other, x), atol=1e-3)
    assert other.load_state_dict(cell.state_dict()) == nn.modules.module._IncompatibleKeys([], [])
    assert torch.equal(value(cell, x), value(other, x))


@kinds
def test_a_plain_cell_can_be_pickled(kind):
    cell, x = make(kind).double(), normal(2, 5, 8, seed=1)
    assert torch.equal(value(pickle.loads(pickle.dumps(cell)), x), value(cell, x))


@kinds
@pytest.mark.parametrize("normalise", ["weight", "spectral"])
def test_a_normalised_cell_says_that_it_is_saved_by_its_state_dict(kind, normalise):
    """torch pickles no parametrised module; what we can promise is that it says so."""
    with pytest.raises(RuntimeError, match="state_dict"):
        pickle.dumps(make(kind, normalise=normalise))


# --- torch.compile ---------------------------------------------------------------------------------------------------

# Inductor needs a C++ compiler and several seconds, and warns about its own deprecated parts.
INDUCTOR = [pytest.mark.slow, pytest.mark.filterwarnings("ignore")]
# What torch 2.13 says about itself: Dynamo looks at `.grad` of its inputs, and makes instances of autograd functions.
compiles = pytest.mark.filterwarnings(
    "ignore:The .grad attribute of a Tensor:UserWarning", "ignore:.*should not be instantiated:DeprecationWarning"
)


@pytest.fixture
def fresh_compiler():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


COMPILED = [(kind, normalise, "aot_eager") for kind in KINDS for normalise in ("none", "weight", "spectral")]


@compiles
@pytest.mark.parametrize(
    ("kind", "normalise", "backend"),
    [*COMPILED, pytest.param("transformer", "weight", "inductor", marks=INDUCTOR)],
)
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_cell_gives_the_same_value_and_gradient(kind, normalise, backend):
    cell = make(kind, normalise=normalise).double().eval()
    x = normal(2, 5, 8, seed=1)
    u = cell.inject(x).detach().requires_grad_()
    state = cell.initial_state(u)
    results = []
    for run in (cell, torch.compile(cell, backend=backend, fullgraph=True)):
        out = run(run(state, u), u)
        loss = sum((part * normal(*part.shape, seed=3)).sum() for part in (out if isinstance(out, tuple) else (out,)))
        wanted = [p for name, p in cell.named_parameters() if not name.startswith("injection.")]
        results.append((out, torch.autograd.grad(loss, [u, *wanted])))  # pyright: ignore
    torch.testing.assert_close(results[1], results[0], rtol=1e-9, atol=1e-9)


@compiles
@kinds
@pytest.mark.usefixtures("fresh_compiler")
def test_a_compiled_cell_is_compiled_inside_a_deq_too(kind):
    """`DEQ` says "compile the cell instead": the solve must then run what was compiled."""
    cell, graphs = make(kind).double(), []

    def backend(graph, _):
        graphs.append(graph)
        return graph

    u = cell.inject(normal(2, 5, 8, seed=1)).detach()
    expected = DEQ(cell)(u)
    actual = DEQ(torch.compile(cell, backend=backend))(u)
    torch.testing.assert_close(actual, expected)
    assert graphs, "nothing was compiled: DEQ calls `bind` of the cell inside the compiled module"
