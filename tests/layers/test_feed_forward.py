"""The feed-forward that never holds its hidden layer, against the same three lines of torch."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from deqkit.layers import feed_forward
from deqkit.layers.feed_forward import FeedForward
from layers.naive import normal

# B samples, T positions, D width, W hidden width

BATCH, LENGTH, WIDTH, HIDDEN = 2, 7, 4, 9
masks = pytest.mark.parametrize("masked", [False, True], ids=["plain", "masked"])
sizes = pytest.mark.parametrize("held", [1, BATCH * HIDDEN * 3, 2**21], ids=["one-by-one", "threes", "whole"])


def plain(x: Tensor, mask: Tensor | None, expand: Tensor, bias: Tensor, contract: Tensor, out_bias: Tensor) -> Tensor:
    hidden = F.relu(F.linear(x, expand, bias))
    return F.linear(hidden if mask is None else hidden * mask, contract, out_bias)


def inputs(*, masked: bool, dtype: torch.dtype = torch.float64) -> tuple[Any, Any, list[Tensor]]:
    x = normal(BATCH, LENGTH, WIDTH, seed=1, dtype=dtype).requires_grad_()
    mask = (normal(BATCH, 1, HIDDEN, seed=2, dtype=dtype) > 0).to(dtype) * 2 if masked else None
    shapes = ((HIDDEN, WIDTH), (HIDDEN,), (WIDTH, HIDDEN), (WIDTH,))
    weights = [normal(*shape, seed=3 + i, dtype=dtype).requires_grad_() for i, shape in enumerate(shapes)]
    return x, mask, weights


@masks
@sizes
def test_value_and_gradients(masked, held, monkeypatch):
    monkeypatch.setattr(feed_forward, "MAX_HIDDEN", held)
    x, mask, weights = inputs(masked=masked)
    weight = normal(BATCH, LENGTH, WIDTH, seed=20)
    value, expected = FeedForward(*weights)(x, mask), plain(x, mask, *weights)
    torch.testing.assert_close(value, expected, rtol=1e-12, atol=1e-12)
    grads = [torch.autograd.grad((y * weight).sum(), [x, *weights]) for y in (value, expected)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-12, atol=1e-12)
    with torch.no_grad():
        torch.testing.assert_close(FeedForward(*weights)(x, mask), expected, rtol=1e-12, atol=1e-12)


@masks
@sizes
def test_finite_differences_of_first_and_second_order(masked, held, monkeypatch):
    monkeypatch.setattr(feed_forward, "MAX_HIDDEN", held)
    x, mask, weights = inputs(masked=masked)
    x = x.detach()[:1, :3].requires_grad_()
    mask = None if mask is None else mask[:1]
    run = lambda x, *weights: FeedForward(*weights)(x, mask)  # noqa: E731
    assert torch.autograd.gradcheck(run, (x, *weights))
    assert torch.autograd.gradgradcheck(run, (x, *weights))


@pytest.mark.parametrize("wanted", [0, 1, 2, 3, 4])
def test_any_single_input_may_need_the_gradient(wanted):
    x, _, weights = inputs(masked=False)
    given = [t.detach().requires_grad_(i == wanted) for i, t in enumerate((x, *weights))]
    value = FeedForward(*given[1:])(given[0])
    expected = plain(given[0], None, *given[1:])  # pyright: ignore
    torch.testing.assert_close(
        torch.autograd.grad(value.sin().sum(), given[wanted]), torch.autograd.grad(expected.sin().sum(), given[wanted])
    )


def test_frozen_weights_and_inputs_need_none():
    x, _, weights = inputs(masked=False)
    assert not FeedForward(*(w.detach() for w in weights))(x.detach()).requires_grad


def test_only_a_byte_a_hidden_unit_is_kept(monkeypatch):
    monkeypatch.setattr(feed_forward, "MAX_HIDDEN", 64)
    x, _, weights = inputs(masked=False)
    places = zip(weights[:3], (0, 0, 1), strict=True)
    wide: Any = [*(w.repeat_interleave(50, dim).detach().requires_grad_() for w, dim in places), weights[3]]
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor):
        FeedForward(*wide)(x)
    own = sum(w.untyped_storage().nbytes() for w in (*wide, x))
    units = BATCH * LENGTH * HIDDEN * 50
    assert sum(kept.values()) - own <= 1.1 * units


def test_a_product_with_the_jacobian_computes_no_gradient_of_the_weights(monkeypatch):
    """Dozens of these make a backward solve; the weights' gradients are wanted once."""
    x, _, weights = inputs(masked=False)
    value = FeedForward(*weights)(x)
    calls = []
    monkeypatch.setattr(feed_forward._WeightGradient, "add", lambda *_: calls.append(1))
    torch.autograd.grad(value.sum(), x, retain_graph=True)
    assert calls == []


@masks
@pytest.mark.parametrize("backward_inside", [False, True])
@pytest.mark.usefixtures("without_onednn")
def test_under_autocast_it_is_what_torch_makes_of_the_three_lines(masked, backward_inside):
    x, mask, weights = inputs(masked=masked, dtype=torch.float32)
    results = []
    for run in (lambda: FeedForward(*weights)(x, mask), lambda: plain(x, mask, *weights)):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            value = run()
            if backward_inside:
                grads = torch.autograd.grad(value.float().square().sum(), [x, *weights])
        if not backward_inside:
            grads = torch.autograd.grad(value.float().square().sum(), [x, *weights])
        results.append((value.float(), *grads))  # pyright: ignore
    assert all(g.dtype == torch.float32 for g in results[0])
    for actual, expected in zip(*results, strict=True):
        assert (actual - expected).norm() < 2e-2 * expected.norm()
