"""The optimiser and its learning rate through training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deqkit.train.config import OptimiserConfig


def make_optimiser(config: OptimiserConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """Fused: one pass over the weights and moments instead of ten, which a large vocabulary makes felt."""
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=True)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=True)


def set_lr(optimiser: Any, lr: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = lr
