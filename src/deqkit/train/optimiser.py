"""The optimiser and its learning rate through training."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from deqkit.train.config import OptimiserConfig


def make_optimiser(config: OptimiserConfig, parameters: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    """The optimiser of a training, fused: one pass over weights and moments instead of ten, which a large vocabulary
    makes felt. A checkpoint of an optimiser that was not goes on as it was."""
    parameters = list(parameters)
    # The fused kernels of CPUs take weights and gradients for contiguous, and are wrong without a word if they are not.
    fused = all(parameter.is_contiguous() for parameter in parameters)
    if config.name == "sgd":
        return torch.optim.SGD(parameters, lr=config.lr, weight_decay=config.weight_decay, fused=fused)
    kind = torch.optim.AdamW if config.name == "adamw" else torch.optim.Adam
    return kind(parameters, lr=config.lr, betas=config.betas, weight_decay=config.weight_decay, fused=fused)


def set_lr(optimiser: Any, lr: float) -> None:
    for group in optimiser.param_groups:
        group["lr"] = lr
