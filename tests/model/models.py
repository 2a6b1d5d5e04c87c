"""Small models in float64 whose cells contract, and the settings under which results are exact."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor

from deqkit import Tolerance
from deqkit.adjoint import Implicit
from deqkit.layers import TransformerConfig, TrellisConfig, VocabularyConfig
from deqkit.model import ModelConfig, ModelOutput, SequenceModel
from deqkit.solve import GMRES

# B samples, T positions, D width

SIZE, WIDTH = 13, 8
TIGHT = Tolerance(rtol=1e-12, patience=200)
EXACT: dict[str, Any] = {
    "tol": TIGHT,
    "max_steps": 400,
    "eval_tol": TIGHT,
    "eval_max_steps": 400,
    "adjoint": Implicit(solver=GMRES(), tol=TIGHT, max_steps=200),
}
CELLS: dict[str, TransformerConfig | TrellisConfig] = {
    "post": TransformerConfig(width=WIDTH, num_heads=2, hidden_width=16, init_std=None),
    "pre": TransformerConfig(width=WIDTH, num_heads=2, head_width=3, hidden_width=16, init_std=None, pre_norm=True),
    "local": TransformerConfig(width=WIDTH, num_heads=2, hidden_width=16, init_std=None, local_size=3),
    "trellis": TrellisConfig(input_width=WIDTH, hidden_width=3, output_width=WIDTH, init_std=None),
    "dilated": TrellisConfig(
        input_width=WIDTH, hidden_width=3, output_width=WIDTH, init_std=None, kernel_size=3, dilation=2
    ),
}
BOTH = ("post", "trellis")
"""One of each family, where the kind does not matter."""


def make(kind: str = "post", *, cell: dict[str, Any] | None = None, seed: int = 1, **options: Any) -> SequenceModel:
    """A model that starts out contractive: embeddings of size one steer LN away from where it is steep."""
    torch.manual_seed(seed)
    vocabulary = options.pop("vocabulary", VocabularyConfig(size=SIZE, embedding_width=WIDTH))
    config = ModelConfig(
        vocabulary=vocabulary,
        cell=dataclasses.replace(CELLS[kind], **(cell or {})),
        **{**EXACT, "mem_len": 1000, **options},
    )
    model = SequenceModel(config).double()
    with torch.no_grad():
        for table in model.embedding.tables:
            table.div_(0.05 if getattr(config.cell, "init_std", None) else model.embedding.width**-0.5)
        for name, parameter in model.named_parameters():
            if name.endswith(("bias", "biases.0")):
                parameter.copy_(0.1 * torch.randn(parameter.shape, dtype=torch.float64))
    return model


def reconfigured(model: SequenceModel, **changes: Any) -> SequenceModel:
    """Another model with the same weights."""
    other = SequenceModel(dataclasses.replace(model.config, **changes)).double()
    other.load_state_dict(model.state_dict())
    return other.train(model.training)


def tokens(batch: int = 3, length: int = 11, *, seed: int = 5, size: int = SIZE) -> Tensor:
    return torch.randint(size, (batch, length), generator=torch.Generator().manual_seed(seed))


def first(state: Any) -> Tensor:
    return state if isinstance(state, Tensor) else state[0]


def flat(state: Any) -> Tensor:
    """A state (or several segments of one) as one tensor (B, T, N)."""
    return state if isinstance(state, Tensor) else torch.cat(state, 2)


def in_segments(
    model: SequenceModel, tokens_BT: Tensor, targets_BT: Tensor, cuts: list[int], memory: Any = None
) -> list[ModelOutput]:
    outputs = []
    for start, end in zip([0, *cuts], [*cuts, tokens_BT.shape[1]], strict=True):
        outputs.append(model(tokens_BT[:, start:end], targets_BT[:, start:end], memory))
        memory = outputs[-1].memory
    return outputs


def gradients(model: SequenceModel, loss: Tensor) -> dict[str, Tensor]:
    names, parameters = zip(*[(n, p) for n, p in model.named_parameters() if p.numel()], strict=True)
    grads = torch.autograd.grad(loss, parameters, materialize_grads=True, allow_unused=True)
    return dict(zip(names, grads, strict=True))


def assert_same_gradients(actual: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float = 1e-8) -> None:
    assert actual.keys() == expected.keys()
    for name, grad in expected.items():
        error = float((actual[name] - grad).norm())
        assert error <= tolerance * max(1e-3, float(grad.norm())), f"{name}: {error:.2e} of {float(grad.norm()):.2e}"
    assert sum(float(grad.norm()) > 1e-6 for grad in expected.values()) >= len(expected) - 1  # not zero against zero
