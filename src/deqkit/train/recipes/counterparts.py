"""The same training with another network: a cell in layers, or something to compare with."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch

from deqkit.layers import ConvolutionConfig, RecurrentConfig, TransformerConfig
from deqkit.model import ModelConfig, SequenceModel, num_parameters
from deqkit.train.config import DeviceConfig, TrainConfig


def layers(config: TrainConfig, depth: int, *, tied: bool) -> TrainConfig:
    """The counterpart of a recipe with layers: the same training, no devices for an equilibrium."""
    cell: Any = config.model.cell
    if not tied and isinstance(cell, TransformerConfig):
        cell = replace(cell, inject=False)
    model = replace(_run_at_once(config.model), depth=depth, tied=tied, cell=cell)
    return replace(
        config,
        recipe=f"{config.recipe}-{'tied' if tied else 'untied'}-{depth}",
        model=model,
        devices=DeviceConfig(
            warmup_depth=config.devices.warmup_depth, warmup_steps=config.devices.warmup_steps if tied else 0
        ),
        regulariser=replace(config.regulariser, jacobian=0.0, spectral=0.0),
    )


def baseline(config: TrainConfig, cell: RecurrentConfig | ConvolutionConfig, name: str, **changes: Any) -> TrainConfig:
    """A recipe with a network to compare with in the place of its model: the same data and evaluation, no devices."""
    vocabulary = replace(config.model.vocabulary, embedding_width=cell.input_width)
    model = replace(_run_at_once(config.model), vocabulary=vocabulary, cell=cell, depth=1)
    regulariser = replace(config.regulariser, jacobian=0.0, spectral=0.0)
    return replace(config, recipe=name, model=model, devices=DeviceConfig(), regulariser=regulariser, **changes)


def _run_at_once(model: ModelConfig) -> ModelConfig:
    """Without what only a solve has."""
    return replace(model, subsequences=1, subsequence_length=None, start="zeros")


def num_cell_parameters(model: ModelConfig) -> int:
    """Parameters outside embedding and softmax."""
    with torch.device("meta"):
        return num_parameters(SequenceModel(model)).rest
