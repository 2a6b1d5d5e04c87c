"""What one segment leaves to the next."""

from __future__ import annotations

import torch
from torch import Tensor

# B samples, M positions of memory, T positions of the segment, D width


def last_positions(memory_BMD: Tensor, segment_BTD: Tensor, count: int | None) -> Tensor:
    """The last `count` positions of memory and segment together, or all of them, in storage of their own."""
    num_old = memory_BMD.shape[1] if count is None else max(0, count - segment_BTD.shape[1])
    start = 0 if count is None else max(0, segment_BTD.shape[1] - count)
    old = memory_BMD[:, max(0, memory_BMD.shape[1] - num_old) :]
    return torch.cat([old, segment_BTD[:, start:]], 1)
