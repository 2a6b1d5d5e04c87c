"""How many parameters a model has, and where."""

from __future__ import annotations

from dataclasses import dataclass

from torch import nn

from deqkit.model.sequence import SequenceModel


@dataclass(frozen=True, kw_only=True, slots=True)
class ParameterCount:
    """Parameters, each counted once however many modules share it."""

    embedding: int
    """In the embedding and the softmax."""
    rest: int
    """In the cells, injections included."""
    start: int = 0
    """In a learned start, which the solver has and the function that is computed has not."""

    @property
    def total(self) -> int:
        return self.embedding + self.rest + self.start


def num_parameters(model: SequenceModel) -> ParameterCount:
    """Count the parameters of a model, embedding and softmax apart from the rest as in the paper's tables."""
    vocabulary = nn.ModuleList([model.embedding, model.softmax])
    embedding = sum(p.numel() for p in vocabulary.parameters())
    start = 0 if model.start is None else sum(p.numel() for p in model.start.parameters())
    rest = sum(p.numel() for p in model.parameters()) - embedding - start
    return ParameterCount(embedding=embedding, rest=rest, start=start)
