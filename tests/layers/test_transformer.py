"""TransformerCell against loops over the formulas, closed forms and finite differences."""

from typing import Any

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

from deqkit.layers import TransformerCell, TransformerConfig, TransformerMemory, attention
from layers import naive
from layers.naive import fill, normal

# B samples, T positions, M positions of memory, D width, G = 3 H E

WIDTH = 6
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one-head": {"num_heads": 1},
    "narrow-heads": {"num_heads": 2, "head_width": 2},
    "wide-heads": {"num_heads": 2, "head_width": 5},
    "heads-of-one": {"num_heads": 6},
    "local": {"local_size": 2},
    "only-itself": {"local_size": 1},
    "window-beyond-all": {"local_size": 50},
    "learned": {"positions": "learned", "num_distances": 20},
    "learned-few": {"positions": "learned", "num_distances": 3},
    "learned-local": {"positions": "learned", "num_distances": 2, "local_size": 3},
}
cases = pytest.mark.parametrize("options", CASES.values(), ids=CASES.keys())
norms = pytest.mark.parametrize("pre_norm", [False, True], ids=["post", "pre"])


def make(*, seed: int = 0, scale: float = 0.5, **options: Any) -> TransformerCell:
    config = TransformerConfig(**{"width": WIDTH, "num_heads": 3, "hidden_width": 7, **options})
    cell = TransformerCell(config).double()
    fill(cell, seed=seed, scale=scale)
    return cell


def inputs(cell: TransformerCell, *, batch: int = 2, length: int = 4, past: int = 0) -> tuple[Any, Any, Any]:
    """A state, an injection and a memory that no cell has made."""
    num_gates = 3 * cell.config.attention_width
    z_BTD, u_BTG = normal(batch, length, WIDTH, seed=1), normal(batch, length, num_gates, seed=2)
    return z_BTD, u_BTG, TransformerMemory(normal(batch, past, WIDTH, seed=3), normal(batch, past, num_gates, seed=4))


@cases
@norms
@pytest.mark.parametrize(("length", "past"), [(4, 0), (4, 3), (3, 7), (1, 0), (1, 5)])
def test_is_the_attention_of_transformer_xl(options, pre_norm, length, past):
    cell = make(pre_norm=pre_norm, **options)
    z, u, memory = inputs(cell, length=length, past=past)
    expected = naive.transformer(cell, z, u, memory)
    torch.testing.assert_close(cell(z, u, memory), expected, rtol=1e-10, atol=1e-10)
    with torch.no_grad():  # another kernel
        torch.testing.assert_close(cell(z, u, memory), expected, rtol=1e-10, atol=1e-10)


@pytest.fixture
def short_blocks(monkeypatch):
    """Blocks of two queries."""
    monkeypatch.setattr(attention, "BLOCK", 2)
    monkeypatch.setattr(attention, "MIN_BLOCKS", 1)


@cases
@norms
@pytest.mark.parametrize(("length", "past"), [(4, 0), (5, 3), (4, 7)])
@pytest.mark.usefixtures("short_blocks")
def test_blocks_of_queries_are_the_same_attention(options, pre_norm, length, past):
    test_is_the_attention_of_transformer_xl(options, pre_norm, length, past)


@pytest.mark.parametrize("options", [{}, {"positions": "learned"}, {"local_size": 2}], ids=str)
@pytest.mark.parametrize("attention_dropout", [0.0, 0.5])
def test_blocks_of_queries_have_the_same_gradients(options, attention_dropout, monkeypatch):
    """Long enough for blocks of the size in use, the last of them shorter."""
    cell = make(attention_dropout=attention_dropout, **options)
    z, u, memory = inputs(cell, length=3 * attention.BLOCK + 5, past=3)
    noise = cell.sample_noise(u)
    weights = normal(*z.shape, seed=5)

    def run() -> tuple[torch.Tensor, ...]:
        output = cell(z.requires_grad_(), u.requires_grad_(), memory, noise)
        return output, *torch.autograd.grad(output, (z, u, cell.content_bias, cell.qkv.weight), weights)

    in_blocks = run()
    monkeypatch.setattr(attention, "MIN_BLOCKS", 1000)
    for ours, at_once in zip(in_blocks, run(), strict=True):
        torch.testing.assert_close(ours, at_once, rtol=1e-10, atol=1e-10)


@pytest.mark.parametrize("num_heads", [1, 2, 4])
def test_learned_distances_begin_with_a_head_at_each_of_the_nearest_and_one_that_sees_all(num_heads):
    config = TransformerConfig(width=8, num_heads=num_heads, hidden_width=8, positions="learned", num_distances=9)
    bias_HN = TransformerCell(config).distance_bias
    assert bias_HN is not None and bias_HN.shape == (num_heads, 9)
    seen_HN = bias_HN.detach().softmax(1)
    assert seen_HN[:-1].argmax(1).tolist() == list(range(num_heads - 1)) and (seen_HN[:-1].amax(1) > 0.9).all()
    assert seen_HN[-1].max() < 0.14 and (seen_HN[-1].diff() < 0).all()  # 0.11 if all were alike


@pytest.mark.parametrize("options", [{"positions": "absolute"}, {"positions": "learned", "num_distances": 0}])
def test_positions_that_are_not_understood(options):
    with pytest.raises(ValueError, match="positions|num_distances"):
        TransformerConfig(width=8, num_heads=4, hidden_width=8, **options)


@pytest.mark.parametrize("options", [{}, {"positions": "learned"}], ids=str)
@pytest.mark.parametrize("past", [0, 3])
def test_no_positions_give_none(options, past):
    cell = make(**options)
    z, u, memory = inputs(cell, length=0, past=past)
    assert cell(z, u, memory).shape == (2, 0, WIDTH)


@cases
@norms
def test_no_memory_and_an_empty_one_are_the_same(options, pre_norm):
    cell = make(pre_norm=pre_norm, **options)
    z, u, memory = inputs(cell)
    assert torch.equal(cell(z, u), cell(z, u, memory))
    assert torch.equal(cell(z, u), cell(z, u, cell.empty_memory(z)))


def test_the_injection_is_a_linear_map_into_queries_keys_and_values():
    cell = make()
    x_BTD = normal(2, 4, WIDTH, seed=5)
    assert cell.injection is not None
    expected = torch.einsum("gd,btd->btg", cell.injection.weight, x_BTD) + cell.injection.bias
    torch.testing.assert_close(cell.inject(x_BTD), expected, rtol=1e-12, atol=1e-12)
    uninjected = make(inject=False)
    assert not uninjected.inject(x_BTD).any() and uninjected.inject(x_BTD).shape == (2, 4, 18)


@norms
def test_a_memory_of_the_first_half_gives_the_second_half(pre_norm):
    """One application over a sequence, cut anywhere: the memory is nothing but the earlier positions."""
    cell = make(pre_norm=pre_norm)
    z, u, _ = inputs(cell, length=6)
    whole = cell(z, u)
    for cut in range(1, 6):
        part = cell(z[:, cut:], u[:, cut:], TransformerMemory(z[:, :cut], u[:, :cut]))
        torch.testing.assert_close(part, whole[:, cut:], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("past", [0, 3])
def test_remember_keeps_the_end_of_memory_and_segment(past):
    cell = make()
    z, u, memory = inputs(cell, length=4, past=past)
    whole = torch.cat([memory.z_BMD, z], 1), torch.cat([memory.u_BMG, u], 1)
    for limit in (None, 0, 1, 4, 5, past + 4, 100):
        kept = cell.remember(memory, z, z, u, limit)
        assert isinstance(kept, TransformerMemory)
        start = 0 if limit is None else max(0, past + 4 - limit)
        assert torch.equal(kept.z_BMD, whole[0][:, start:]) and torch.equal(kept.u_BMG, whole[1][:, start:])
        for part in kept:  # not a window on a longer tensor, which would stay in memory with it
            assert part.untyped_storage().nbytes() == part.numel() * part.element_size()


def test_distances_beyond_a_thousand_are_seen():
    """The original cuts the context at 1000 without saying so (REFERENCE.md 2.1)."""
    cell = make(num_heads=1)
    z, u, memory = inputs(cell, batch=1, length=1, past=1100)
    changed = TransformerMemory(memory.z_BMD.clone(), memory.u_BMG)
    changed.z_BMD[:, 0] += 1
    assert not torch.equal(cell(z, u, memory), cell(z, u, changed))


@norms
@pytest.mark.parametrize("options", [{}, {"local_size": 2, "head_width": 3, "num_heads": 2}], ids=["plain", "local"])
def test_gradients_are_those_of_finite_differences(options, pre_norm):
    cell = make(pre_norm=pre_norm, **options)
    z, u, memory = inputs(cell, batch=1, length=3, past=2)
    names, tensors = zip(*[(n, p) for n, p in cell.named_parameters() if "injection" not in n], strict=True)

    def f(z, u, past_z, past_u, *parameters):
        args = (z, u, TransformerMemory(past_z, past_u))
        return torch.func.functional_call(cell, dict(zip(names, parameters, strict=True)), args)

    points = [t.detach().clone().requires_grad_() for t in (z, u, *memory, *tensors)]
    assert torch.autograd.gradcheck(f, points)
    assert torch.autograd.gradgradcheck(lambda z, u: f(z, u, *memory, *tensors), points[:2])


@pytest.mark.usefixtures("short_blocks")
def test_gradients_of_blocks_are_those_of_finite_differences():
    test_gradients_are_those_of_finite_differences({}, False)


def storages_of_scores(cell: TransformerCell, *, past: int = 0) -> int:
    """How many tensors of at least (B, H, T, K) numbers one application keeps for its backward pass."""
    batch, length = 3, 16
    z, u, memory = inputs(cell, batch=batch, length=length, past=past)
    f, args = cell.bind(u, memory)
    threshold = batch * cell.config.num_heads * length * (length + past)
    kept: dict[int, int] = {}

    def pack(tensor):
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes() // tensor.element_size()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        output = f(z.requires_grad_(), *args)
    assert output.requires_grad
    return sum(size >= threshold for size in kept.values())


@pytest.mark.parametrize("past", [0, 20])
def test_one_tensor_of_the_size_of_the_scores_is_kept_at_most(past):
    cell = make(num_heads=6, hidden_width=4)
    assert storages_of_scores(cell, past=past) <= 1


def test_attention_dropout_keeps_no_more_than_its_mask_probabilities_and_their_product():
    assert storages_of_scores(make(num_heads=6, hidden_width=4, attention_dropout=0.5)) <= 3


def test_positions_are_codes_of_the_distance_alone():
    """Shifting memory and segment together changes nothing: no position has a code of its own."""
    cell = make()
    z, u, memory = inputs(cell, length=3, past=4)
    far = torch.full((2, 2, WIDTH), 0.3, dtype=torch.float64), torch.zeros(2, 2, 18, dtype=torch.float64)
    local = make(local_size=3)
    longer = TransformerMemory(*(torch.cat([a, b], 1) for a, b in zip(far, memory, strict=True)))
    assert torch.allclose(local(z, u, memory), local(z, u, longer), rtol=1e-12, atol=1e-12)
    assert not torch.allclose(cell(z, u, memory), cell(z, u, longer), rtol=1e-3, atol=1e-3)


def test_a_query_with_one_key_takes_its_value():
    """T = 1 without memory: the softmax is 1, so attention is the value whatever queries and keys are."""
    cell = make(pre_norm=True)
    z, u, _ = inputs(cell, length=1)
    with torch.no_grad():
        cell.contract.weight.zero_()
        cell.contract.bias.zero_()
    v = (naive.layer_norm(z[0, 0]) @ cell.qkv.weight.mT + u[0, 0])[12:]
    expected = naive.layer_norm(z[0, 0] + cell.project.weight @ v + cell.project.bias)
    torch.testing.assert_close(cell(z, u)[0, 0], expected, rtol=1e-12, atol=1e-12)
