"""What one training step of a model holds at its peak, and what for; what a pass without gradients holds."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deqkit.analysis.abstract import abstract_tensors
from deqkit.analysis.memory import MemoryMeter
from deqkit.layers import VocabularyConfig
from deqkit.model import ModelConfig, SequenceModel
from deqkit.solve import Tolerance

# B samples, T positions, D width

_Forward = tuple[Any, Tensor, Tensor | None]
"""What a forward pass leaves alive, and from where the backward pass begins, in which direction."""
_FOREVER = Tolerance(rtol=0.0)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingMemory:
    """Bytes held at the moment of a training step when most is held. The parts add up to `peak`."""

    parameters: int
    gradients: int
    """Gradients of parameters that exist at that moment."""
    activations: int
    """What the graph keeps from the forward to the backward pass, inputs and outputs."""
    solver: int
    """The rest: states and pairs of the solvers, and temporaries of single operations."""

    @property
    def peak(self) -> int:
        return self.parameters + self.gradients + self.activations + self.solver


def training_memory(
    config: ModelConfig, *, batch: int, length: int, body_only: bool = False, abstract: bool = True, bf16: bool = False
) -> TrainingMemory:
    """The peak of one forward and backward pass that runs every solve to its step limit, memory filled.

    Args:
        body_only: leave out embedding and softmax, as the paper does.
        abstract: run without numbers, which needs no memory and little time. False measures the real thing.
        bf16: run the model in bfloat16, under autocast.
    """
    config = replace(config, tol=_FOREVER, adjoint=_to_the_limit(config.adjoint))
    counts = _class_counts(config.vocabulary, batch * length)
    context: AbstractContextManager[Any] = abstract_tensors(nonzeros=counts) if abstract else nullcontext()
    with context:
        model = _small_vocabulary(config) if body_only else SequenceModel(config)
        model.train()
        owners: nn.Module = nn.ModuleList(model.cells) if body_only else model
        parameters = list(owners.parameters())
        run = _body(model, batch, length) if body_only else _whole(model, batch, length, abstract=abstract)
        meter = _PeakMeter()
        with meter:
            with torch.autocast("cpu", torch.bfloat16, enabled=bf16):
                kept, result, direction = run()
            result.backward(direction)
        del kept, result, direction
        return meter.report(parameters)


@torch.no_grad()
def inference_memory(config: ModelConfig, *, batch: int, length: int) -> int:
    """The bytes at the peak of a pass of the body without gradients, solves to their limit, memory filled."""
    config = replace(config, eval_tol=_FOREVER)
    with abstract_tensors():
        model = _small_vocabulary(config).eval()
        run = _body(model, batch, length)
        meter = MemoryMeter()
        with meter:
            run()
        return meter.peak_bytes + sum(p.numel() * p.element_size() for p in nn.ModuleList(model.cells).parameters())


def _to_the_limit(adjoint: Any) -> Any:
    return replace(adjoint, tol=_FOREVER) if hasattr(adjoint, "tol") else adjoint


def _small_vocabulary(config: ModelConfig) -> SequenceModel:
    """The model with a vocabulary that takes no room: only its body will be run."""
    vocabulary = VocabularyConfig(
        size=2, embedding_width=config.vocabulary.embedding_width, tie_weights=config.vocabulary.tie_weights
    )
    return SequenceModel(replace(config, vocabulary=vocabulary))


def _body(model: SequenceModel, batch: int, length: int) -> Callable[[], _Forward]:
    x_BTD = torch.randn(batch, length, model.embedding.width, requires_grad=True)
    memory = _full_memory(model, x_BTD)
    direction = torch.randn(batch, length, model.cells[-1].output_width)

    def run() -> _Forward:
        output = model.run_body(x_BTD, memory)
        return output, output.hidden, direction

    return run


def _whole(model: SequenceModel, batch: int, length: int, *, abstract: bool) -> Callable[[], _Forward]:
    tokens, targets = (_tokens(model, batch, length, abstract=abstract) for _ in range(2))
    memory = _full_memory(model, torch.empty(batch, 1, model.embedding.width))

    def run() -> _Forward:
        output = model(tokens, targets, memory)
        assert output.loss is not None
        return output, output.loss, None

    return run


def _tokens(model: SequenceModel, batch: int, length: int, *, abstract: bool) -> Tensor:
    """Tokens of which each class of the vocabulary has as many as Zipf's law says."""
    if abstract:
        return torch.empty(batch, length, dtype=torch.int64)
    vocabulary = model.config.vocabulary
    counts = _shares(vocabulary, batch * length)
    parts = [torch.randint(a, b, (n,)) for (a, b), n in zip(vocabulary.classes, counts, strict=True)]
    return torch.cat(parts)[torch.randperm(batch * length)].view(batch, length)


def _shares(vocabulary: VocabularyConfig, num_tokens: int) -> list[int]:
    """Tokens of each class if the r-th word has a share of 1 / r."""
    edges = [round(num_tokens * math.log1p(end) / math.log1p(vocabulary.size)) for _, end in vocabulary.classes]
    return [b - a for a, b in zip([0, *edges], edges, strict=False)]


def _class_counts(vocabulary: VocabularyConfig, num_tokens: int) -> Iterator[int]:
    """What `torch.nonzero` finds: every class in the embedding if it has several tables, then those of the softmax."""
    counts = _shares(vocabulary, num_tokens)
    yield from counts if len(vocabulary.table_shapes) > 1 else ()
    yield from counts[1:]


def _full_memory(model: SequenceModel, x_BTD: Tensor) -> tuple[Any, ...]:
    """What the segment before would have left."""
    memory = []
    for cell in model.cells:
        empty = cell.empty_memory(x_BTD)
        length = model.config.mem_len if hasattr(empty, "z_BMD") else None
        shapes = [(t.shape[0], t.shape[1] if length is None else length, t.shape[2]) for t in empty]
        memory.append(type(empty)(*(x_BTD.new_zeros(shape) for shape in shapes)))
    return tuple(memory)


class _PeakMeter(MemoryMeter):
    """A meter that remembers which storages were alive at the peak, and whether they belong to the graph."""

    def __init__(self) -> None:
        super().__init__()
        # Addresses are used again, so every storage has a number; the second entry: made while a graph was recorded.
        self._made: dict[int, tuple[int, bool]] = {}
        self._at_peak: dict[int, tuple[int, bool]] = {}
        self._noted = 0
        self._numbers = itertools.count()

    def _track(self, storage: torch.UntypedStorage, *, num_bytes: int | None) -> Any:
        self._made[storage._cdata] = (next(self._numbers), torch.is_grad_enabled())
        return super()._track(storage, num_bytes=num_bytes)

    def _record(self, storage: torch.UntypedStorage) -> None:
        super()._record(storage)
        if self._peak_bytes > self._noted * 1.001:  # not at every byte: a look at all storages takes time
            self._noted = self._peak_bytes
            alive = ((self._made[key], tracked.num_bytes) for key, tracked in self._tracked.items())
            self._at_peak = {number: (size, in_graph) for (number, in_graph), size in alive if size}

    def report(self, parameters: list[nn.Parameter]) -> TrainingMemory:
        gradients = {self._made[p.grad.untyped_storage()._cdata][0] for p in parameters if p.grad is not None}
        held_for = {"gradients": 0, "activations": 0}
        for number, (size, in_graph) in self._at_peak.items():
            if number in gradients:
                held_for["gradients"] += size
            elif in_graph:
                held_for["activations"] += size
        return TrainingMemory(
            parameters=sum(p.numel() * p.element_size() for p in parameters),
            solver=self._peak_bytes - sum(held_for.values()),
            **held_for,
        )
