"""Optimisers are fused where that is right, and go on as they were where they are resumed."""

import pytest
import torch
from torch import nn

from deqkit.train.config import OptimiserConfig
from deqkit.train.optimiser import make_optimiser


def after_steps(name, weight, *, fused=None):
    parameter = nn.Parameter(weight.clone(memory_format=torch.preserve_format))
    optimiser = make_optimiser(OptimiserConfig(name=name, lr=0.1, weight_decay=0.3), [parameter])
    if fused is not None:
        optimiser.param_groups[0]["fused"] = fused
    for _ in range(3):
        parameter.square().sum().backward()
        optimiser.step()
        optimiser.zero_grad()
    return parameter.detach(), optimiser


@pytest.mark.parametrize("name", ["adam", "adamw", "sgd"])
def test_fused_steps_are_the_same(name):
    weight = torch.randn(6, 4, generator=torch.Generator().manual_seed(0))
    found, optimiser = after_steps(name, weight)
    assert optimiser.param_groups[0]["fused"]
    torch.testing.assert_close(found, after_steps(name, weight, fused=False)[0], rtol=1e-5, atol=1e-6)  # rounding


def test_weights_that_are_not_contiguous_are_not_fused():
    """Torch's fused kernels go through memory, whatever the strides of weight and gradient are."""
    weight = torch.randn(4, 6, generator=torch.Generator().manual_seed(0)).T
    found, optimiser = after_steps("adamw", weight)
    assert not optimiser.param_groups[0]["fused"]
    torch.testing.assert_close(found, after_steps("adamw", weight.contiguous())[0], rtol=1e-5, atol=1e-6)


def test_a_checkpoint_of_an_optimiser_that_was_not_fused_goes_on_like_it():
    weight = torch.ones(3)
    _, old = after_steps("adamw", weight, fused=False)
    _, new = after_steps("adamw", weight)
    new.load_state_dict(old.state_dict())
    assert not new.param_groups[0]["fused"]
