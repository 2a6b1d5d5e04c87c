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

    @property
    def total(self) -> int:
        return self.embedding + self.rest


def num_parameters(model: SequenceModel) -> ParameterCount:
    """Count the parameters of a model, embedding and softmax apart from the rest as in the paper's tables."""
    vocabulary = nn.ModuleList([model.embedding, model.softmax])
    embedding = sum(p.numel() for p in vocabulary.parameters())
    return ParameterCount(embedding=embedding, rest=sum(p.numel() for p in model.parameters()) - embedding)
