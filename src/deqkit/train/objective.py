"""The loss of a training step, and what is added to it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from deqkit.analysis import jacobian_penalty, spectral_penalty
from deqkit.model import ModelOutput
from deqkit.train.config import RegulariserConfig

START_WEIGHT = 0.1
"""Of the error of a learned start, so that it is small beside the loss; Adam does not see it."""


class Objective(nn.Module):
    """A model together with its training loss: one module, so that its whole forward pass is wrapped and shared."""

    def __init__(self, model: nn.Module, config: RegulariserConfig) -> None:
        super().__init__()
        self.model, self.config = model, config

    def forward(
        self, tokens_BT: Tensor, targets_BT: Tensor, memory: Any, *, penalise: bool, **settings: Any
    ) -> tuple[Tensor, dict[str, Tensor], ModelOutput]:
        """The objective, the parts added to the loss by name, and the model's output."""
        if self.config.auxiliary:
            settings["layers_every"] = self.config.auxiliary_every
        output: ModelOutput = self.model(tokens_BT, targets_BT, memory, **settings)
        assert output.loss is not None
        added = self._added(output, penalise=penalise)
        return torch.stack([output.loss, *added.values()]).sum(), added, output

    def _added(self, output: ModelOutput, *, penalise: bool) -> dict[str, Tensor]:
        config, hidden_BTD = self.config, output.hidden
        added: dict[str, Tensor] = {}
        if config.activation:
            added["activation"] = config.activation * hidden_BTD.square().mean()
        if config.temporal and hidden_BTD.shape[1] > 1:
            added["temporal"] = config.temporal * hidden_BTD.diff(dim=1).square().mean()
        if output.layer_losses:  # a shallow start may have too few layers
            added["auxiliary"] = config.auxiliary * torch.stack(output.layer_losses).mean()
        if output.start_error is not None:
            added["start"] = START_WEIGHT * output.start_error
        if penalise:
            for name, weight, penalty in (
                ("jacobian", config.jacobian, jacobian_penalty),
                ("spectral", config.spectral, spectral_penalty),
            ):
                if weight:
                    added[name] = weight * _mean_over_solves(output, penalty)
        return added


def _mean_over_solves(output: ModelOutput, penalty: Any) -> Tensor:
    """The penalty at every solve's equilibrium, which is held fixed."""
    values = []
    for equation in output.equations:
        f, args = equation.bind()
        values.append(penalty(f, equation.z, args))
    return torch.stack(values).mean()
