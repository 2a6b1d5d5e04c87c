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

# B samples, H heads, T queries, M positions of memory, K = M + T keys, D width, E width of a head


def sinusoids(num_keys: int, width: int, like: Tensor) -> Tensor:
    """Codes of the distances K-1 down to -1, the sines of all frequencies before the cosines: (K+1, D).

    The last distance is never seen; it makes room for the shift in `RelativePositions.bias`.
    """
    distance = torch.arange(num_keys - 1, -2, -1, device=like.device, dtype=torch.float64)
    exponent = torch.arange(0, width, 2, device=like.device, dtype=torch.float64) / width
    angle = distance.unsqueeze(1) * torch.exp(-math.log(10_000.0) * exponent)
    return torch.cat([angle.sin(), angle.cos()], 1).to(like.dtype)


def distances(num_queries: int, num_keys: int, device: torch.device) -> Tensor:
    """How far back each key lies from each query, which are the last positions: (T, K), negative for later keys."""
    query = torch.arange(num_keys - num_queries, num_keys, device=device).unsqueeze(1)
    return query - torch.arange(num_keys, device=device)


def blocked(distance_TK: Tensor, local_size: int) -> Tensor:
    """True where a query may not look: at later positions, and beyond the local window."""
    later = distance_TK < 0
    return later | (distance_TK >= local_size) if local_size else later


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """The positional part of the scores, (q_i + v) . r_(i-j) / sqrt(E), up to the product with q.

    Queries come with the content bias u already added, so the constant part is (v - u) . r.
    """

    keys_HEK: Tensor
    """r for the distances K-1 .. -1, scaled by 1 / sqrt(E): (H, E, K+1)."""
    constant_H1K: Tensor
    blocked_TK: Tensor | None
    """Where a query may not look; None for a single query that sees all keys."""

    @classmethod
    def of(
        cls, codes_KD: Tensor, content: Tensor, position: Tensor, *, num_queries: int, local_size: int
    ) -> RelativePositions:
        """From projected codes (K+1, H E) and the two biases (H, E)."""
        num_heads, head_width = content.shape
        keys = codes_KD.view(-1, num_heads, head_width).permute(1, 2, 0) * head_width**-0.5
        constant = (position - content).unsqueeze(1) @ keys
        distance_TK = distances(num_queries, codes_KD.shape[0] - 1, codes_KD.device)
        return cls(keys, constant, blocked(distance_TK, local_size))

    def bias(self, q_HBTE: Tensor) -> Tensor:
        """What is added to the scores of every query and key, -inf where it may not look: (H, B, T, K)."""
        return self._block(self._by_key(q_HBTE))

    def add_to(self, scores_HBTK: Tensor, q_HBTE: Tensor) -> Tensor:
        """The same, added in place."""
        return self._block(scores_HBTK.add_(self._by_key(q_HBTE)))

    @property
    def num_keys(self) -> int:
        return self.keys_HEK.shape[2] - 1

    def nearest(self, num_keys: int) -> RelativePositions:
        """The same for one query and the keys nearest to it."""
        start = self.num_keys - num_keys
        return RelativePositions(self.keys_HEK[..., start:], self.constant_H1K[..., start:], None)

    def _block(self, scores_HBTK: Tensor) -> Tensor:
        return scores_HBTK if self.blocked_TK is None else scores_HBTK.masked_fill_(self.blocked_TK, -math.inf)

    def _by_key(self, q_HBTE: Tensor) -> Tensor:
        heads, batch, length, width = q_HBTE.shape
        num_keys = self.num_keys
        by_distance = torch.baddbmm(self.constant_H1K, q_HBTE.reshape(heads, batch * length, width), self.keys_HEK)
        # Row i of the table by distance starts T-1-i entries to the right of row i of the table by key. Reading the
        # rows of length K+1 one after the other as rows of length K moves each by one more than the row before.
        flat = by_distance.view(heads, batch, length * (num_keys + 1))[..., length - 1 : length - 1 + length * num_keys]
        return flat.view(heads, batch, length, num_keys)


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


def attend(
    q_HBTE: Tensor,
    k_HBKE: Tensor,
    v_HBKE: Tensor,
    positions: Positions | Padded,
    keep_HBTK: Tensor | None,
) -> Tensor:
    """softmax(q k' / sqrt(E) + positions) v.

    By torch's fused kernel where no gradient is wanted, as in all steps of a solve. Where one is, that kernel takes
    many passes over a bias that needs a gradient, and step by step is quicker.
    """
    if keep_HBTK is None and not (torch.is_grad_enabled() and q_HBTE.requires_grad):
        return F.scaled_dot_product_attention(q_HBTE, k_HBKE, v_HBKE, attn_mask=positions.bias(q_HBTE))
    scores = torch.matmul(q_HBTE * q_HBTE.shape[-1] ** -0.5, k_HBKE.transpose(-1, -2))
    probabilities = torch.softmax(positions.add_to(scores, q_HBTE), -1)
    return (probabilities if keep_HBTK is None else probabilities * keep_HBTK) @ v_HBKE
