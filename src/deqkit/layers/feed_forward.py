"""The two-layer feed-forward, without ever holding its hidden layer.

The hidden layer is the largest tensor of the paper's transformers (48,000 wide). It is computed for some positions at
a time, and all that is kept of it for the backward pass is which units were positive, a byte each. A product with the
Jacobian then costs what it always costs; the gradient of the weights, needed once per backward pass, computes the
hidden layer a second time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

# B samples, T positions, D width, W hidden width

MAX_HIDDEN = 2**21  # numbers of the hidden layer that are held at once


class FeedForward(NamedTuple):
    """y = relu((x U' + b) m) V' + c, where m is a dropout mask of the hidden layer, or nothing."""

    expand_WD: Tensor
    expand_bias_W: Tensor
    contract_DW: Tensor
    contract_bias_D: Tensor

    def __call__(self, x_BTD: Tensor, mask_B1W: Tensor | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return torch.cat([self.contract(self.hidden(x, mask_B1W)) for (x,) in self.parts(x_BTD)], 1)
        # Two nodes, so that a product with the Jacobian does not compute gradients of the weights: the second has the
        # value zero and leads to the weights alone.
        y_BTD = _ToInput.apply(x_BTD, mask_B1W, *self)
        return y_BTD + _ToWeights.apply((x_BTD, mask_B1W), *self)  # pyright: ignore[reportOperatorIssue]

    def parts(self, *tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
        """Some positions at a time; all of them if the result must be one differentiable expression."""
        batch, length = tensors[0].shape[:2]
        count = max(1, MAX_HIDDEN // max(1, batch * self.expand_bias_W.numel()))
        return zip(*(t.split(length if torch.is_grad_enabled() else count, 1) for t in tensors), strict=True)

    def hidden(self, x: Tensor, mask: Tensor | None) -> Tensor:
        hidden = F.linear(x, self.expand_WD, self.expand_bias_W)
        return torch.relu_(hidden if mask is None else hidden * mask)

    def contract(self, hidden: Tensor) -> Tensor:
        return F.linear(hidden, self.contract_DW, self.contract_bias_D)

    def back_to_hidden(self, grad: Tensor, positive: Tensor, mask: Tensor | None) -> Tensor:
        """The gradient before the ReLU."""
        back = grad @ self.contract_DW
        if torch.is_grad_enabled():
            return back * positive if mask is None else back * positive * mask
        back.mul_(positive)
        return back if mask is None else back.mul_(mask)


def _autocast(x: Tensor) -> Callable[[], torch.autocast]:
    """The setting of the forward pass, for the backward pass, which autograd runs without."""
    device = x.device.type
    enabled, dtype = torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
    return partial(torch.autocast, device, dtype=dtype, enabled=enabled, cache_enabled=False)


class _ToInput(torch.autograd.Function):
    """The value, and its derivative by x."""

    @staticmethod
    def forward(ctx: Any, x_BTD: Tensor, mask: Tensor | None, *weights: Tensor) -> Tensor:
        forward = FeedForward(*weights)
        positive, out = [], []
        for (x,) in forward.parts(x_BTD):
            hidden = forward.hidden(x, mask)
            positive.append(hidden > 0)
            out.append(forward.contract(hidden))
            del hidden  # before the next part is computed
        ctx.autocast = _autocast(x_BTD)
        ctx.save_for_backward(mask, *weights, *positive)
        return torch.cat(out, 1)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        mask, *rest = ctx.saved_tensors
        forward, positive = FeedForward(*rest[:4]), rest[4:]
        pieces = zip(grads[0].split([p.shape[1] for p in positive], 1), positive, strict=True)
        with ctx.autocast():
            parts = [forward.back_to_hidden(g, p, mask) @ forward.expand_WD for g, p in pieces]
        return torch.cat(parts, 1), None, None, None, None, None


class _ToWeights(torch.autograd.Function):
    """Zero, with the derivatives of the feed-forward by its weights."""

    @staticmethod
    def forward(ctx: Any, inputs: tuple[Tensor, Tensor | None], *weights: Tensor) -> Tensor:
        # x is kept, with its graph, without being an input: its derivative would be asked for in every product.
        ctx.save_for_backward(*inputs, *weights)
        ctx.autocast = _autocast(inputs[0])
        return inputs[0].new_zeros(1).expand(*inputs[0].shape[:2], weights[2].shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_BTD, mask, *weights = ctx.saved_tensors
        forward = FeedForward(*weights)
        expand, contract = _WeightGradient(), _WeightGradient()
        with ctx.autocast():
            for x, grad in forward.parts(x_BTD, grads[0]):
                hidden = forward.hidden(x, mask)
                contract.add(grad, hidden)
                expand.add(forward.back_to_hidden(grad, hidden > 0, mask), x)
                del hidden
        return None, expand.weight, expand.bias, contract.weight, contract.bias


class _WeightGradient:
    """Gradients of weight and bias of a linear map, added up over parts without temporaries of the weight's size."""

    weight: Tensor | None = None
    bias: Tensor | None = None

    def add(self, grad: Tensor, x: Tensor) -> None:
        grad_ND, x_ND = grad.flatten(0, 1), x.flatten(0, 1)
        if self.weight is None or self.bias is None:
            self.weight, self.bias = grad_ND.mT @ x_ND, grad_ND.sum(0)
        else:  # never in grad mode, where there is one part
            self.weight.addmm_(grad_ND.mT, x_ND)
            self.bias.add_(grad_ND.sum(0))
