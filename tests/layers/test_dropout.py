"""Dropout: masks drawn once per solve, on the right axis, with the mean kept, and only where it was asked for."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from deqkit import DEQ, Tolerance
from deqkit.layers import TransformerCell, TransformerConfig, TransformerMemory, TrellisCell, TrellisConfig
from layers import naive
from layers.naive import fill, normal

# B samples, T positions, D width, H heads or state width

TIGHT = Tolerance(rtol=1e-12, patience=200)


def transformer(*, scale: float = 0.5, **options: Any) -> TransformerCell:
    config = TransformerConfig(**{"width": 6, "num_heads": 2, "hidden_width": 7, **options})
    cell = TransformerCell(config).double()
    fill(cell, seed=0, scale=scale)
    return cell


def trellis(**options: Any) -> TrellisCell:
    config = TrellisConfig(**{"input_width": 3, "hidden_width": 2, "output_width": 3, "kernel_size": 3, **options})
    cell = TrellisCell(config).double()
    fill(cell, seed=0, scale=0.3)
    return cell


ALL_TRANSFORMER = {"dropout": 0.5, "hidden_dropout": 0.3, "attention_dropout": 0.4}
ALL_TRELLIS = {"hidden_dropout": 0.5, "weight_dropout": 0.4}


def scaled(mask: Tensor, rate: float) -> Tensor:
    """What a mask multiplies with, whatever its dtype."""
    return (mask != 0).double() / (1 - rate)


# --- masks -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rate", [0.1, 0.5, 0.9])
def test_variational_masks_are_per_sample_and_channel_and_keep_the_mean(rate):
    cell = transformer(width=50, hidden_width=60, dropout=rate, hidden_dropout=rate)
    masks = cell.sample_noise(torch.zeros(200, 3, 50, dtype=torch.float64))
    for mask, width in ((masks.attention_out, 50), (masks.hidden, 60), (masks.feed_forward_out, 50)):
        assert mask is not None and mask.shape == (200, 1, width)  # the same at all positions
        kept = mask != 0
        torch.testing.assert_close(mask[kept], torch.full_like(mask[kept], 1 / (1 - rate)), rtol=1e-6, atol=0.0)
        deviation = math.sqrt(rate / (1 - rate) / mask.numel())
        assert abs(mask.mean().item() - 1) < 5 * deviation
        assert kept.any(0).all() and not kept.all(0).any()  # every channel: some samples keep it, some do not
        assert kept.any(2).double().mean() > 0.9 and kept.all(2).double().mean() < 0.1
    assert not torch.equal(masks.attention_out, masks.feed_forward_out)  # pyright: ignore


@pytest.mark.parametrize("pre_norm", [False, True], ids=["post", "pre"])
def test_masks_act_where_the_formula_says(pre_norm):
    cell = transformer(pre_norm=pre_norm, dropout=0.5, hidden_dropout=0.3)
    z, u = normal(3, 4, 6, seed=1), normal(3, 4, 18, seed=2)
    noise = cell.sample_noise(u)
    named = {name: mask[:, 0] for name, mask in noise._asdict().items() if mask is not None and mask.ndim == 3}
    assert sorted(named) == ["attention_out", "feed_forward_out", "hidden"]
    torch.testing.assert_close(cell(z, u, None, noise), naive.transformer(cell, z, u, **named), rtol=1e-6, atol=1e-6)
    assert not torch.allclose(cell(z, u, None, noise), cell.eval()(z, u), rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize("past", [0, 3])
def test_attention_dropout_takes_single_probabilities(past):
    """Not renormalised, one mask entry for every sample, head, query and key, memory included."""
    cell = transformer(attention_dropout=0.4)
    z, u = normal(2, 4, 6, seed=1), normal(2, 4, 18, seed=2)
    memory = TransformerMemory(normal(2, past, 6, seed=3), normal(2, past, 18, seed=4))
    f, args = cell.bind(u, memory)
    (keep,) = [a for a in args if isinstance(a, Tensor) and a.ndim == 4]
    assert keep.shape == (2, 2, 4, 4 + past)
    expected = naive.transformer(cell, z, u, memory, keep=scaled(keep, 0.4))
    torch.testing.assert_close(f(z, *args), expected, rtol=1e-6, atol=1e-6)


def test_attention_that_drops_nothing_is_the_fused_one():
    """A rate too small to ever drop takes the path that multiplies probabilities, a rate of zero torch's kernel."""
    cell, plain = transformer(attention_dropout=1e-12), transformer()
    z, u = normal(2, 4, 6, seed=1), normal(2, 4, 18, seed=2)
    memory = TransformerMemory(normal(2, 3, 6, seed=3), normal(2, 3, 18, seed=4))
    torch.testing.assert_close(cell(z, u, memory), plain(z, u, memory), rtol=1e-10, atol=1e-10)
    assert torch.equal(cell.eval()(z, u, memory), plain(z, u, memory))


# --- when ------------------------------------------------------------------------------------------------------------


def sample(cell: Any) -> tuple[Any, Tensor]:
    """A state and an injection for either cell."""
    x = normal(2, 5, cell.config.width if isinstance(cell, TransformerCell) else 3, seed=1)
    u = cell.inject(x).detach()
    shape = (2, 5, cell.config.width) if isinstance(cell, TransformerCell) else (2, 5, cell.config.state_width)
    state = normal(*shape, seed=7)
    return state if isinstance(cell, TransformerCell) else (state, state), u


CELLS = {
    "transformer": lambda **rates: transformer(scale=0.2, **{**ALL_TRANSFORMER, **rates}),
    "trellis": lambda **rates: trellis(**{**ALL_TRELLIS, **rates}),
}
cells = pytest.mark.parametrize("make", CELLS.values(), ids=CELLS.keys())


def first(state: Any) -> Tensor:
    return state if isinstance(state, Tensor) else state[0]


@cells
def test_nothing_is_dropped_in_evaluation(make):
    cell = make()
    state, u = sample(cell)
    undropped = type(cell)(type(cell.config)(**plain_fields(cell.config))).double()
    undropped.load_state_dict(cell.state_dict())
    before = torch.get_rng_state()
    assert torch.equal(first(cell.eval()(state, u)), first(undropped.train()(state, u)))
    assert torch.equal(before, torch.get_rng_state())  # neither evaluation nor rates of zero draw numbers
    assert not torch.equal(first(cell.train()(state, u)), first(undropped(state, u)))


def plain_fields(config: Any) -> dict[str, Any]:
    fields = {name: getattr(config, name) for name in config.__dataclass_fields__}
    return {name: 0.0 if name.endswith("dropout") else value for name, value in fields.items()}


@cells
def test_every_step_of_a_solve_and_its_backward_pass_sees_one_function(make):
    """The equilibrium is a fixed point of the f of those masks, and its gradient that of the unrolled f."""
    cell = make()
    _, u = sample(cell)
    u.requires_grad_()
    torch.manual_seed(3)
    z = first(DEQ(cell, tol=TIGHT, max_steps=400)(u))
    torch.manual_seed(3)
    f, args = cell.bind(u)
    state = cell.initial_state(u)
    for _ in range(400):
        state = f(state, *args)
    torch.testing.assert_close(z, first(state), rtol=1e-9, atol=1e-9)
    weight = normal(*z.shape, seed=9)
    (actual,) = torch.autograd.grad((z * weight).sum(), u)
    (expected,) = torch.autograd.grad((first(state) * weight).sum(), u)
    assert (actual - expected).norm() < 5e-3 * expected.norm()  # the default backward tolerance is 1e-3


@cells
def test_another_solve_draws_other_masks(make):
    cell = make()
    _, u = sample(cell)
    deq = DEQ(cell, tol=TIGHT, max_steps=400)
    assert not torch.allclose(first(deq(u)), first(deq(u)), rtol=1e-2, atol=1e-2)


# --- trellis ---------------------------------------------------------------------------------------------------------


def test_hidden_dropout_takes_channels_of_what_the_convolution_sees():
    """History included, the cell state not."""
    cell = trellis(hidden_dropout=0.5)
    state = normal(3, 4, 5, seed=1), normal(3, 4, 5, seed=2)
    past, past_x = (normal(3, 6, 5, seed=3), normal(3, 6, 5, seed=4)), normal(3, 6, 3, seed=5)
    memory = cell.remember(cell.empty_memory(past_x), past, past_x, past_x)
    u = normal(3, 4, 20, seed=6)
    noise = cell.sample_noise(u)
    assert noise.hidden is not None and noise.hidden.shape == (3, 1, 5) and noise.conv is None
    expected = naive.trellis(cell, state, u, past, hidden=noise.hidden[:, 0])
    for a, b in zip(cell(state, u, memory, noise), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def effective_injection(cell: TrellisCell, noise: Any) -> Tensor:
    """The weight in use, read off its response to unit inputs, (4H, k D)."""
    taps, width = cell.config.kernel_size, cell.config.input_width
    units = torch.eye(taps * width, dtype=torch.float64).view(-1, taps, width)
    return (cell.inject(units, None, noise)[:, -1] - cell.injection.bias).mT


def test_weight_dropout_takes_single_weights_of_taps_that_look_back():
    cell = trellis(input_width=30, hidden_width=20, weight_dropout=0.4)
    noise = cell.sample_noise(torch.zeros(2, 4, 30, dtype=torch.float64))
    ratio = effective_injection(cell, noise) / cell.injection.weight
    back, last = ratio[:, :60], ratio[:, 60:]
    torch.testing.assert_close(last, torch.ones_like(last), rtol=1e-9, atol=1e-9)
    kept = back.abs() > 1e-9
    torch.testing.assert_close(back[kept], torch.full_like(back[kept], 1 / 0.6), rtol=1e-6, atol=0.0)
    assert abs(kept.double().mean().item() - 0.6) < 5 * math.sqrt(0.24 / back.numel())


def test_weight_dropout_of_the_convolution_is_that_of_its_masks():
    cell = trellis(weight_dropout=0.4)
    state, u = (normal(2, 4, 5, seed=1), normal(2, 4, 5, seed=2)), normal(2, 4, 20, seed=3)
    noise = cell.sample_noise(u)
    assert noise.conv is not None
    mask = (noise.conv != 0).double()
    assert mask[:, 10:].all() and 0 < mask[:, :10].mean() < 1
    mask[:, :10] /= 0.6
    expected = naive.trellis(cell, state, u, (state[0][:, :0], state[1][:, :0]), conv=mask)
    for a, b in zip(cell(state, u, None, noise), expected, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-6, atol=1e-6)


def test_a_kernel_of_one_tap_has_no_weights_to_drop():
    cell = trellis(kernel_size=1, weight_dropout=0.9)
    state, u = (normal(2, 4, 5, seed=1), normal(2, 4, 5, seed=2)), normal(2, 4, 20, seed=3)
    trained = cell(state, u)
    for a, b in zip(trained, cell.eval()(state, u), strict=True):
        assert torch.equal(a, b)


def test_injection_without_noise_is_told_apart():
    """`inject` alone draws nothing: the caller passes the noise of the pass, as SequenceModel does."""
    cell = trellis(weight_dropout=0.4)
    x = normal(2, 4, 3, seed=1)
    assert torch.equal(cell.inject(x), cell.eval().inject(x))
