"""Token embeddings: one table, or one a frequency class with narrower rows for rarer words."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deqkit.layers.checks import check_whole
from deqkit.layers.dropout import keep_mask

# B samples, T positions, N tokens, D width, V vocabulary


@dataclass(frozen=True, kw_only=True, slots=True)
class VocabularyConfig:
    """How tokens are embedded and predicted. Ids are ordered by frequency when there are cutoffs."""

    size: int
    """Number of tokens."""
    embedding_width: int
    """Width of the embedding of the most frequent class."""
    cutoffs: tuple[int, ...] = ()
    """Where each frequency class but the first begins; empty for one class, that is a plain softmax."""
    div_val: int = 1
    """Each class has rows narrower by this factor than the class before, and projections to the model's width."""
    tie_weights: bool = True
    """The softmax uses the tables of the embedding, and its projections but the first."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "cutoffs", tuple(self.cutoffs))
        check_whole(1, size=self.size, embedding_width=self.embedding_width, div_val=self.div_val)
        edges = (0, *self.cutoffs, self.size)
        if any(a >= b for a, b in zip(edges, edges[1:], strict=False)):
            raise ValueError(f"cutoffs must rise between 0 and the vocabulary size {self.size}, got {self.cutoffs}")
        if self.div_val > 1 and not self.cutoffs:
            raise ValueError(f"div_val={self.div_val} needs cutoffs")
        if self.embedding_width // self.div_val ** len(self.cutoffs) < 1:
            raise ValueError(
                f"embedding_width {self.embedding_width} leaves nothing for the last of {len(self.cutoffs) + 1} "
                f"classes with div_val {self.div_val}"
            )

    @property
    def classes(self) -> tuple[tuple[int, int], ...]:
        """First token of every class, and the first one after it."""
        edges = (0, *self.cutoffs, self.size)
        return tuple(zip(edges, edges[1:], strict=False))

    @property
    def widths(self) -> tuple[int, ...]:
        """Row width of every class."""
        return tuple(self.embedding_width // self.div_val**i for i in range(len(self.classes)))

    @property
    def table_shapes(self) -> tuple[tuple[int, int], ...]:
        """One table for all classes when their rows are equally wide."""
        if self.div_val == 1:
            return ((self.size, self.embedding_width),)
        return tuple((end - start, w) for (start, end), w in zip(self.classes, self.widths, strict=True))

    def needs_projection(self, width: int) -> bool:
        return self.div_val > 1 or self.embedding_width != width


class Embedding(nn.Module):
    """Token ids to vectors of the model's width, times `scale`.

    Dropout takes whole rows of the tables: a word is dropped wherever it occurs in the batch.
    """

    def __init__(
        self, vocabulary: VocabularyConfig, width: int, *, scale: float = 1.0, dropout: float = 0.0, std: float = 0.05
    ) -> None:
        super().__init__()
        self.vocabulary, self.width, self.scale, self.dropout = vocabulary, width, scale, dropout
        self.tables = nn.ParameterList(torch.randn(shape) * std for shape in vocabulary.table_shapes)
        self.projections = nn.ParameterList()
        if vocabulary.needs_projection(width):
            self.projections.extend(torch.randn(width, table.shape[1]) * std for table in self.tables)

    def forward(self, tokens_BT: Tensor) -> Tensor:
        if len(self.tables) == 1:
            x = self._look_up(0, tokens_BT)
        else:
            flat_N = tokens_BT.flatten()
            if bool(((flat_N < 0) | (flat_N >= self.vocabulary.size)).any()):
                raise IndexError(f"token ids must be at least 0 and below {self.vocabulary.size}")
            x = self.tables[0].new_empty(flat_N.numel(), self.width)
            for i, (start, end) in enumerate(self.vocabulary.classes):
                index = torch.nonzero((flat_N >= start) & (flat_N < end)).flatten()
                x = x.index_copy(0, index, self._look_up(i, flat_N[index] - start))
            x = x.view(*tokens_BT.shape, self.width)
        return x * self.scale if self.scale != 1 else x

    def _look_up(self, i: int, tokens: Tensor) -> Tensor:
        table = self.tables[i]
        x = F.embedding(tokens, table)
        if self.training and self.dropout:
            x = x * F.embedding(tokens, keep_mask(table, (table.shape[0], 1), self.dropout))
        return F.linear(x, self.projections[i]) if len(self.projections) else x
