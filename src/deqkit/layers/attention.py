"""Attention with relative positions, split into what depends on the state and what does not.

Positions are those of Transformer-XL, products of queries with codes of the distance, or one learned number for every
head and distance, which costs nothing in the solve.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

# B samples, H heads, T queries, M positions of memory, K = M + T keys, W distances, D width, E width of a head


def sinusoids(num_keys: int, width: int, like: Tensor) -> Tensor:
    """Codes of the distances K-1 down to 0, the sines of all frequencies before the cosines: (K, D)."""
    distance = torch.arange(num_keys - 1, -1, -1, device=like.device, dtype=torch.float64)
    exponent = torch.arange(0, width, 2, device=like.device, dtype=torch.float64) / width
    angle = distance.unsqueeze(1) * torch.exp(-math.log(10_000.0) * exponent)
    return torch.cat([angle.sin(), angle.cos()], 1).to(like.dtype)


def distances(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """How far back each key lies from each query, which are the last positions: (T, K), negative for later keys."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    return query - torch.arange(num_keys, device=device)


def blocked(distance: Tensor, local_size: int) -> Tensor:
    """True where a query may not look: at later positions, and beyond the local window."""
    later = distance < 0
    return later | (distance >= local_size) if local_size else later


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """The positional part of the scores, (q_i + v) . r_(i-j) / sqrt(E), up to the product with q.

    Queries come with the content bias u already added, so the constant part is (v - u) . r. The tables go on to
    negative distances, where the constant is -inf, so that the rows of the last queries reach past the last key.
    """

    keys_HEW: Tensor
    """r for the distances K-1 .. 0, scaled by 1 / sqrt(E), then zeros."""
    constant_H1W: Tensor
    num_keys: int

    @classmethod
    def of(
        cls, codes_KD: Tensor, content: Tensor, position: Tensor, *, num_queries: int, local_size: int
    ) -> RelativePositions:
        """From projected codes (K, H E) and the two biases (H, E)."""
        num_heads, head_width = content.shape
        num_keys, num_later = codes_KD.shape[0], max(block_size(num_queries), 1) - 1
        keys = codes_KD.view(-1, num_heads, head_width).permute(1, 2, 0) * head_width**-0.5
        keys = F.pad(keys, (0, num_later))
        constant = (position - content).unsqueeze(1) @ keys
        distance_W = torch.arange(num_keys - 1, -1 - num_later, -1, device=keys.device)
        return cls(keys, constant.masked_fill(blocked(distance_W, local_size), -math.inf), num_keys)

    def bias(self, q_HBTE: Tensor) -> Tensor:
        """What is added to the scores of every query and key, -inf where it may not look: (H, B, T, K)."""
        heads, batch, length, width = q_HBTE.shape
        columns = self.num_keys + max(length, 1) - 1
        assert columns <= self.keys_HEW.shape[2], f"tables for fewer than {length} queries at once"
        by_distance = torch.baddbmm(
            self.constant_H1W[..., :columns],
            q_HBTE.reshape(heads, batch * length, width),
            self.keys_HEW[..., :columns],
        )
        if length <= 1:
            return by_distance.view(heads, batch, length, columns)
        # Row i of the table by distance starts T-1-i entries to the right of row i of the table by key. Reading the
        # rows one after the other as rows that are shorter by one moves each by one more than the row before.
        # One view in place of two slices: in the backward pass each of those would be a copy.
        shape, rows = (heads, batch, length, self.num_keys), length * columns
        return by_distance.as_strided(shape, (batch * rows, rows, columns - 1, 1), length - 1)

    def add_to(self, scores_HBTK: Tensor, q_HBTE: Tensor) -> Tensor:
        """The same, added in place."""
        return scores_HBTK.add_(self.bias(q_HBTE))

    def of_queries(self, start: int, stop: int, num_queries: int) -> RelativePositions:
        """For some of the queries, and the keys up to the last of them."""
        return self.nearest(self.num_keys - num_queries + stop)

    def nearest(self, num_keys: int) -> RelativePositions:
        """For the keys that are nearest to the last query."""
        start = self.num_keys - num_keys
        return RelativePositions(self.keys_HEW[..., start:], self.constant_H1W[..., start:], num_keys)


@dataclass(frozen=True, slots=True)
class LearnedDistances:
    """One number for every head and distance, the last one for all distances beyond."""

    bias_H1TK: Tensor

    @classmethod
    def of(cls, table_HN: Tensor, *, num_queries: int, num_keys: int, local_size: int) -> LearnedDistances:
        distance_TK = distances(num_queries, num_keys, table_HN.device)
        bias_HTK = table_HN[:, distance_TK.clamp(0, table_HN.shape[1] - 1)]
        return cls(bias_HTK.masked_fill(blocked(distance_TK, local_size), -math.inf).unsqueeze(1))

    def bias(self, q_HBTE: Tensor) -> Tensor:
        """The same for all samples: (H, 1, T, K)."""
        return self.bias_H1TK.to(q_HBTE.dtype)

    def add_to(self, scores_HBTK: Tensor, q_HBTE: Tensor) -> Tensor:
        return scores_HBTK.add_(self.bias_H1TK)

    @property
    def num_keys(self) -> int:
        return self.bias_H1TK.shape[3]

    def of_queries(self, start: int, stop: int, num_queries: int) -> LearnedDistances:
        """For some of the queries, and the keys up to the last of them."""
        return LearnedDistances(self.bias_H1TK[:, :, start:stop, : self.num_keys - num_queries + stop])

    def nearest(self, num_keys: int) -> LearnedDistances:
        """The same for one query and the keys nearest to it."""
        return LearnedDistances(self.bias_H1TK[:, :, -1:, self.num_keys - num_keys :])


Positions = RelativePositions | LearnedDistances


@dataclass(frozen=True, slots=True)
class Padded:
    """Positions of texts of different lengths side by side: keys before a text's first position are hidden."""

    positions: Positions
    hidden_B1K: Tensor

    def bias(self, q_HBTE: Tensor) -> Tensor:
        return torch.where(self.hidden_B1K, -math.inf, self.positions.bias(q_HBTE))

    def add_to(self, scores_HBTK: Tensor, q_HBTE: Tensor) -> Tensor:
        return self.positions.add_to(scores_HBTK, q_HBTE).masked_fill_(self.hidden_B1K, -math.inf)

    def of_queries(self, start: int, stop: int, num_queries: int) -> Padded:
        last = self.hidden_B1K.shape[2] - num_queries + stop
        return Padded(self.positions.of_queries(start, stop, num_queries), self.hidden_B1K[..., :last])


BLOCK, MIN_BLOCKS = 64, 2
"""Queries that are attended to at once, in segments of at least so many blocks: keys behind the last of them are left
out, and scores stay in the cache. It takes a third of the time and of the memory at 420 positions, a quarter of the
time at 2,048."""


def block_size(num_queries: int) -> int:
    """How many queries are attended to at once."""
    return BLOCK if num_queries >= MIN_BLOCKS * BLOCK else num_queries


def attend(
    q_HBTE: Tensor,
    k_HBKE: Tensor,
    v_HBKE: Tensor,
    positions: Positions | Padded,
    keep_HBTK: Tensor | None,
) -> Tensor:
    """softmax(q k' / sqrt(E) + positions) v, block by block of queries."""
    num_queries, num_keys = q_HBTE.shape[2], k_HBKE.shape[2]
    size = block_size(num_queries)
    if size == num_queries:
        return _attend_at_once(q_HBTE, k_HBKE, v_HBKE, positions, keep_HBTK)
    # Once for all blocks: a product with a slice of heads that do not lie one after the other copies, and keeps, it.
    k_HBKE, v_HBKE = k_HBKE.contiguous(), v_HBKE.contiguous()
    parts = []
    for start in range(0, num_queries, size):
        stop = min(start + size, num_queries)
        last = num_keys - num_queries + stop
        keep = None if keep_HBTK is None else keep_HBTK[..., start:stop, :last]
        of_block = positions.of_queries(start, stop, num_queries)
        parts.append(
            _attend_at_once(q_HBTE[:, :, start:stop], k_HBKE[:, :, :last], v_HBKE[:, :, :last], of_block, keep)
        )
    return torch.cat(parts, 2)


def _attend_at_once(
    q_HBTE: Tensor, k_HBKE: Tensor, v_HBKE: Tensor, positions: Positions | Padded, keep_HBTK: Tensor | None
) -> Tensor:
    """By torch's fused kernel where no gradient is wanted, as in all steps of a solve. Where one is, that kernel takes
    many passes over a bias that needs a gradient, and step by step is quicker."""
    if keep_HBTK is None and not (torch.is_grad_enabled() and q_HBTE.requires_grad):
        return F.scaled_dot_product_attention(q_HBTE, k_HBKE, v_HBKE, attn_mask=positions.bias(q_HBTE))
    scores = torch.matmul(q_HBTE * q_HBTE.shape[-1] ** -0.5, k_HBKE.transpose(-1, -2))
    probabilities = torch.softmax(positions.add_to(scores, q_HBTE), -1)
    return (probabilities if keep_HBTK is None else probabilities * keep_HBTK) @ v_HBKE
