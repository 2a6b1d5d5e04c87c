"""Dropout noise, drawn before a solve and then held fixed: during one solve f is one function."""

from __future__ import annotations

import torch
from torch import Tensor


def keep_mask(like: Tensor, shape: tuple[int, ...], rate: float) -> Tensor:
    """Zeros with probability `rate`, and 1 / (1 - rate) elsewhere, so that the mean stays."""
    keep = torch.rand(shape, device=like.device, dtype=torch.float32) >= rate
    return keep.to(like.dtype).div_(1 - rate)


def variational_mask(like_BTD: Tensor, width: int, rate: float, *, training: bool) -> Tensor | None:
    """One mask a sample and channel, the same at all positions; None when nothing is dropped."""
    if not training or rate == 0:
        return None
    return keep_mask(like_BTD, (like_BTD.shape[0], 1, width), rate)


def dropped(x: Tensor, mask: Tensor | None) -> Tensor:
    return x if mask is None else x * mask
