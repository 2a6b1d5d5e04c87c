"""The output distribution: plain, or hierarchical by frequency class (adaptive softmax, split softmax)."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from deqkit.layers.embedding import Embedding, VocabularyConfig

# N tokens, D width, V vocabulary, C logits of one class

MAX_LOGITS = 2**25  # logits held at once; more are computed in parts, and again in the backward pass


class _Class(NamedTuple):
    """What gives the logits of one class of tokens."""

    projection: Tensor | None
    table_CD: Tensor
    bias_C: Tensor

    def logits(self, hidden_ND: Tensor) -> Tensor:
        if self.projection is not None:
            hidden_ND = hidden_ND @ self.projection
        return F.linear(hidden_ND, self.table_CD, self.bias_C)


class Softmax(nn.Module):
    """Log-probabilities of tokens. With cutoffs, p(word) = p(class) p(word | class):

    the first class is predicted together with one entry for each of the others, whose words have a softmax of their
    own. With `div_val=1` this is TrellisNet's split softmax, otherwise Transformer-XL's adaptive softmax.
    """

    def __init__(
        self, vocabulary: VocabularyConfig, width: int, *, embedding: Embedding | None = None, std: float = 0.05
    ) -> None:
        """
        Args:
            width: width of the hidden vectors.
            embedding: the embedding whose tables, and projections but the first, are shared; None to share nothing.
        """
        super().__init__()
        self.vocabulary = vocabulary
        num_tails = len(vocabulary.cutoffs)
        shapes = vocabulary.table_shapes
        self.tables = nn.ParameterList(embedding.tables if embedding else (torch.randn(s) * std for s in shapes))
        self.biases = nn.ParameterList(torch.zeros(rows) for rows, _ in shapes)
        self.projections = nn.ParameterList()
        if vocabulary.needs_projection(width):
            self.projections.append(torch.randn(width, vocabulary.embedding_width) * std)
            for i in range(1, num_tails + 1):
                source = 0 if vocabulary.div_val == 1 else i
                tied = embedding.projections[source] if embedding else torch.randn(width, vocabulary.widths[i]) * std
                self.projections.append(tied)
        if num_tails:  # a parameter without entries gets no gradient, which DistributedDataParallel takes for a fault
            self.class_table = nn.Parameter(torch.randn(num_tails, vocabulary.embedding_width) * std)
            self.class_bias = nn.Parameter(torch.zeros(num_tails))

    def nll(self, hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        """Negative log-likelihood of every token, in token order; 0 where the target is negative (padding)."""
        hidden_ND, targets_N = hidden_BTD.flatten(0, -2), targets_BT.flatten()
        classes = list(self._classes())
        first_end = self.vocabulary.classes[0][1]
        head_N = targets_N.clamp(min=-1)
        for i, (start, end) in enumerate(self.vocabulary.classes[1:]):
            head_N = torch.where((targets_N >= start) & (targets_N < end), first_end + i, head_N)
        nll_N = _nll(classes[0], hidden_ND, head_N)
        for tail, (start, end) in zip(classes[1:], self.vocabulary.classes[1:], strict=True):
            index = torch.nonzero((targets_N >= start) & (targets_N < end)).flatten()
            # Also without any, so that every parameter has a gradient: DistributedDataParallel waits for all of them.
            nll_N = nll_N.index_add(0, index, _nll(tail, hidden_ND[index], targets_N[index] - start))
        return nll_N.view(targets_BT.shape)

    def log_probs(self, hidden_BTD: Tensor) -> Tensor:
        """The whole distribution, (B, T, V)."""
        first, *tails = self._classes()
        head = torch.log_softmax(first.logits(hidden_BTD), -1)
        size = self.vocabulary.classes[0][1]
        parts = [head[..., :size]]
        for i, tail in enumerate(tails):
            parts.append(head[..., size + i, None] + torch.log_softmax(tail.logits(hidden_BTD), -1))
        return torch.cat(parts, -1)

    def _classes(self) -> Iterator[_Class]:
        projections = list(self.projections) or [None] * len(self.vocabulary.classes)
        tables, biases = list(self.tables), list(self.biases)
        if len(tables) < len(self.vocabulary.classes):
            # One table for all: the gradient of a slice is as large as the whole, a split has one for all its parts.
            sizes = [end - start for start, end in self.vocabulary.classes]
            tables, biases = tables[0].split(sizes), biases[0].split(sizes)
        for i, (projection, table, bias) in enumerate(zip(projections, tables, biases, strict=True)):
            if i == 0 and self.vocabulary.cutoffs:
                table, bias = torch.cat([table, self.class_table]), torch.cat([bias, self.class_bias])
            yield _Class(projection, table, bias)


def _nll(part: _Class, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
    """Cross entropy without ever holding more than `MAX_LOGITS` logits."""
    num_rows = max(1, MAX_LOGITS // part.bias_C.numel())
    if hidden_ND.shape[0] <= num_rows:
        return _cross_entropy(part, hidden_ND, targets_N)
    pieces = zip(hidden_ND.split(num_rows), targets_N.split(num_rows), strict=True)
    return torch.cat([checkpoint(_cross_entropy, part, h, t, use_reentrant=False) for h, t in pieces])  # pyright: ignore


def _cross_entropy(part: _Class, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
    return F.cross_entropy(part.logits(hidden_ND), targets_N, reduction="none", ignore_index=-1)
