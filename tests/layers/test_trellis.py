"""TrellisCell against loops over taps, F.conv1d, and the LSTM that it becomes when only the last tap back is used."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from deqkit import DEQ, Tolerance
from deqkit.layers import TrellisCell, TrellisConfig, TrellisMemory
from layers import naive
from layers.naive import fill, normal

# B samples, T positions, D input width, H state width, S positions of history

INPUT, HIDDEN, OUTPUT = 3, 2, 3
STATE = HIDDEN + OUTPUT
TIGHT = Tolerance(rtol=1e-13, patience=200)
KERNELS = [(1, 1), (1, 3), (2, 1), (2, 2), (3, 1), (3, 2), (4, 3), (5, 1)]
kernels = pytest.mark.parametrize(("kernel_size", "dilation"), KERNELS)


def make(*, kernel_size: int = 2, dilation: int = 1, scale: float = 0.5, **options: Any) -> TrellisCell:
    config = TrellisConfig(
        input_width=INPUT,
        hidden_width=HIDDEN,
        output_width=OUTPUT,
        kernel_size=kernel_size,
        dilation=dilation,
        **options,
    )
    cell = TrellisCell(config).double()
    fill(cell, seed=0, scale=scale)
    return cell


def state_of(batch: int, length: int, *, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    return normal(batch, length, STATE, seed=seed), normal(batch, length, STATE, seed=seed + 1)


def close(actual: Any, expected: Any, tolerance: float = 1e-10) -> None:
    for a, b in zip(actual, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=tolerance, atol=tolerance)


@kernels
@pytest.mark.parametrize("length", [1, 2, 7])
def test_is_the_sum_over_taps_and_an_lstm_gate(kernel_size, dilation, length):
    """Zeros before the first position; with kernel 5 and a single position the reach is longer than the segment."""
    cell = make(kernel_size=kernel_size, dilation=dilation)
    x, state = normal(2, length, INPUT, seed=1), state_of(2, length, seed=2)
    u = cell.inject(x)
    close([u], [naive.injected(cell, x, x[:, :0])])
    close(cell(state, u), naive.trellis(cell, state, u, (state[0][:, :0], state[1][:, :0])))


@kernels
@pytest.mark.parametrize(("before", "length"), [(9, 1), (2, 3), (5, 6)])
def test_history_stands_in_for_the_positions_before(kernel_size, dilation, before, length):
    """One application after `before` positions that are given to `remember`, here in two goes."""
    cell = make(kernel_size=kernel_size, dilation=dilation)
    past_x, past = normal(2, before, INPUT, seed=3), state_of(2, before, seed=4)
    x, state = normal(2, length, INPUT, seed=5), state_of(2, length, seed=6)
    memory = cell.empty_memory(x)
    for part in (slice(0, 1), slice(1, before)):
        memory = cell.remember(memory, (past[0][:, part], past[1][:, part]), past_x[:, part], x)
    u = cell.inject(x, memory)
    close([u], [naive.injected(cell, x, past_x)])
    close(cell(state, u, memory), naive.trellis(cell, state, u, past))


def conv1d(x_BTD: torch.Tensor, linear: nn.Linear, *, taps: int, dilation: int) -> torch.Tensor:
    weight = linear.weight.view(linear.weight.shape[0], taps, -1).permute(0, 2, 1)
    padded = F.pad(x_BTD.mT, ((taps - 1) * dilation, 0))
    return F.conv1d(padded, weight, linear.bias, dilation=dilation).mT


@kernels
def test_taps_are_those_of_conv1d(kernel_size, dilation):
    """The weight is (outputs, taps, inputs) flattened, oldest tap first; the injection is not dilated."""
    cell = make(kernel_size=kernel_size, dilation=dilation)
    x, state = normal(2, 8, INPUT, seed=1), state_of(2, 8, seed=2)
    u = conv1d(x, cell.injection, taps=kernel_size, dilation=1)
    close([cell.inject(x)], [u])
    i, o, g, f = (conv1d(state[0], cell.conv, taps=kernel_size, dilation=dilation) + u).chunk(4, -1)
    c = f.sigmoid() * F.pad(state[1], (0, 0, 1, 0))[:, :-1] + i.sigmoid() * g.tanh()
    close(cell(state, u), (o.sigmoid() * c.tanh(), c))


def test_the_input_scale_is_a_factor_of_the_input():
    x = normal(2, 5, INPUT, seed=1)
    scaled, plain = make(kernel_size=2, input_scale=3.0), make(kernel_size=2)
    memory = plain.remember(plain.empty_memory(x), state_of(2, 5, seed=2), x, x)
    close([scaled.inject(x, memory)], [plain.inject(3 * x, memory._replace(x_BSD=3 * memory.x_BSD))])
    assert not torch.allclose(scaled.inject(x, memory), plain.inject(x, memory))
    with pytest.raises(ValueError, match="input_scale must be a positive number"):
        make(kernel_size=2, input_scale=-1.0)


def test_with_one_tap_back_the_equilibrium_is_an_lstm():
    """If the convolution sees only h_(t-1) and the injection only x_t, z* = f(z*) is the recurrence of nn.LSTM."""
    cell = make(kernel_size=2)
    with torch.no_grad():
        cell.conv.weight[:, STATE:] = 0
        cell.injection.weight[:, :INPUT] = 0
    lstm: Any = nn.LSTM(INPUT, STATE, batch_first=True).double()
    order = torch.cat(
        [torch.arange(STATE) + STATE * gate for gate in (0, 3, 2, 1)]
    )  # ours i, o, g, f; torch i, f, g, o
    with torch.no_grad():
        lstm.weight_hh_l0.copy_(cell.conv.weight[order, :STATE])
        lstm.weight_ih_l0.copy_(cell.injection.weight[order, INPUT:])
        lstm.bias_hh_l0.copy_(cell.conv.bias[order])
        lstm.bias_ih_l0.copy_(cell.injection.bias[order])
    x = normal(3, 9, INPUT, seed=1)
    h, c = DEQ(cell, tol=TIGHT, max_steps=200)(cell.inject(x))
    expected, (_, last_c) = lstm(x)
    close([h, c[:, -1:]], [expected, last_c.transpose(0, 1)])
    assert torch.equal(cell.output((h, c)), h[..., HIDDEN:])


@settings(max_examples=25, deadline=None, derandomize=True)
@given(
    kernel=st.sampled_from(KERNELS),
    cuts=st.lists(st.integers(1, 11), unique=True, max_size=5).map(sorted),
)
def test_any_cut_into_segments_gives_the_joint_equilibrium(kernel, cuts):
    cell = make(kernel_size=kernel[0], dilation=kernel[1], scale=0.3)
    deq = DEQ(cell, tol=TIGHT, max_steps=400)
    x = normal(2, 12, INPUT, seed=1)
    with torch.no_grad():
        whole = deq(cell.inject(x))
        memory, parts = cell.empty_memory(x), []
        for start, end in zip([0, *cuts], [*cuts, 12], strict=True):
            u = cell.inject(x[:, start:end], memory)
            parts.append(deq(u, memory))
            memory = cell.remember(memory, parts[-1], x[:, start:end], u)
    close([torch.cat(part, 1) for part in zip(*parts, strict=True)], whole, 1e-9)


def test_gradients_are_those_of_finite_differences():
    cell = make(kernel_size=3, dilation=2)
    state, u = state_of(1, 3, seed=1), normal(1, 3, 4 * STATE, seed=3)
    memory = TrellisMemory(normal(1, 4, STATE, seed=4), normal(1, 1, STATE, seed=5), normal(1, 2, INPUT, seed=6))
    names, tensors = zip(*[(n, p) for n, p in cell.named_parameters() if "injection" not in n], strict=True)

    def f(h, c, u, past_h, past_c, *parameters):
        args = ((h, c), u, TrellisMemory(past_h, past_c, memory.x_BSD))
        return torch.func.functional_call(cell, dict(zip(names, parameters, strict=True)), args)

    points = [t.detach().clone().requires_grad_() for t in (*state, u, memory.h_BSH, memory.c_B1H, *tensors)]
    assert torch.autograd.gradcheck(f, points)
    x = normal(1, 3, INPUT, seed=7).requires_grad_()
    assert torch.autograd.gradcheck(
        lambda x, past: cell.inject(x, memory._replace(x_BSD=past)), (x, points[0][:, :2, :3])
    )


@kernels
def test_what_is_remembered_depends_on_the_kernel_alone(kernel_size, dilation):
    cell = make(kernel_size=kernel_size, dilation=dilation)
    x, state = normal(2, 7, INPUT, seed=1), state_of(2, 7, seed=2)
    u, memory = cell.inject(x), cell.empty_memory(x)
    assert [t.shape[1] for t in memory] == [(kernel_size - 1) * dilation, 1, kernel_size - 1]
    assert not any(t.any() for t in memory)
    kept = cell.remember(memory, state, x, u)
    assert all(t.untyped_storage().nbytes() == t.numel() * t.element_size() for t in kept)
    for limit in (1, 50):
        close(cell.remember(memory, state, x, u, limit), kept, 0.0)
    close(cell.remember(kept, state, x, u, 0), memory, 0.0)
