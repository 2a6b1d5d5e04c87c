"""Attention with the relative positions of Transformer-XL, split into what depends on the state and what does not."""

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


@dataclass(frozen=True, slots=True)
class RelativePositions:
    """The positional part of the scores, (q_i + v) . r_(i-j) / sqrt(E), up to the product with q.

    Queries come with the content bias u already added, so the constant part is (v - u) . r.
    """

    keys_HEK: Tensor
    """r for the distances K-1 .. -1, scaled by 1 / sqrt(E): (H, E, K+1)."""
    constant_H1K: Tensor
    blocked_TK: Tensor
    """True where a query may not look: at later positions, and beyond the local window."""

    @classmethod
    def of(
        cls, codes_KD: Tensor, content: Tensor, position: Tensor, *, num_queries: int, local_size: int
    ) -> RelativePositions:
        """From projected codes (K+1, H E) and the two biases (H, E)."""
        num_heads, head_width = content.shape
        keys = codes_KD.view(-1, num_heads, head_width).permute(1, 2, 0) * head_width**-0.5
        constant = (position - content).unsqueeze(1) @ keys
        num_keys = codes_KD.shape[0] - 1
        query = torch.arange(num_keys - num_queries, num_keys, device=codes_KD.device).unsqueeze(1)
        distance = query - torch.arange(num_keys, device=codes_KD.device)
        blocked = distance < 0
        if local_size:
            blocked = blocked | (distance >= local_size)
        return cls(keys, constant, blocked)

    def bias(self, q_HBTE: Tensor) -> Tensor:
        """What is added to the scores of every query and key, -inf where it may not look: (H, B, T, K)."""
        heads, batch, length, width = q_HBTE.shape
        num_keys = self.blocked_TK.shape[1]
        by_distance = torch.baddbmm(self.constant_H1K, q_HBTE.reshape(heads, batch * length, width), self.keys_HEK)
        # Row i of the table by distance starts T-1-i entries to the right of row i of the table by key. Reading the
        # rows of length K+1 one after the other as rows of length K moves each by one more than the row before.
        flat = by_distance.view(heads, batch, length * (num_keys + 1))[..., length - 1 : length - 1 + length * num_keys]
        return flat.view(heads, batch, length, num_keys).masked_fill(self.blocked_TK, -math.inf)


def attend(q_HBTE: Tensor, k_HBKE: Tensor, v_HBKE: Tensor, bias_HBTK: Tensor, keep_HBTK: Tensor | None) -> Tensor:
    """softmax(q k' / sqrt(E) + bias) v, by torch's fused kernels unless probabilities are to be dropped."""
    if keep_HBTK is None:
        return F.scaled_dot_product_attention(q_HBTE, k_HBKE, v_HBKE, attn_mask=bias_HBTK)
    scores = torch.matmul(q_HBTE * q_HBTE.shape[-1] ** -0.5, k_HBKE.transpose(-1, -2)).add_(bias_HBTK)
    return (torch.softmax(scores, -1) * keep_HBTK) @ v_HBKE
