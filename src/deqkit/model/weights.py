"""A model's weights in a safetensors file: every tensor once, and nothing that could be executed."""

from __future__ import annotations

from pathlib import Path

import safetensors
import safetensors.torch
from torch import Tensor, nn


class WeightsError(ValueError):
    """A file of tensors that cannot be read or does not fit."""


def weights_of(model: nn.Module) -> dict[str, Tensor]:
    """Parameters and buffers under their first name: tensors that modules share occur once."""
    named = [*model.named_parameters(), *model.named_buffers()]
    saved = model.state_dict().keys()
    return {name: tensor.detach().contiguous() for name, tensor in named if name in saved}


def load_weights(model: nn.Module, weights: dict[str, Tensor], *, source: str) -> None:
    """Put weights that `weights_of` gave into a model of the same configuration.

    Raises:
        WeightsError: a name or shape that does not fit.
    """
    expected = weights_of(model)
    for name in sorted(set(expected) ^ set(weights)):
        problem = "missing" if name in expected else "not part of this model"
        raise WeightsError(f"{source}: tensor {name} is {problem}")
    for name, tensor in weights.items():
        if tensor.shape != expected[name].shape:
            shapes = f"{tuple(tensor.shape)}, the model's {tuple(expected[name].shape)}"
            raise WeightsError(f"{source}: tensor {name} has shape {shapes}")
    model.load_state_dict(weights, strict=False)


def read_tensors(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file."""
    try:
        return safetensors.torch.load_file(path)
    except FileNotFoundError:
        raise WeightsError(f"{path} does not exist") from None
    except safetensors.SafetensorError as error:
        raise WeightsError(f"{path} is damaged or was cut short ({error}); use another checkpoint") from error
