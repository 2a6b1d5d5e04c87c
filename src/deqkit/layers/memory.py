"""What one segment leaves to the next."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

# B samples, M positions of memory, T positions of the segment, D width


def last_positions(memory_BMD: Tensor, segment_BTD: Tensor, count: int | None) -> Tensor:
    """The last `count` positions of memory and segment together, or all of them, in storage of their own."""
    num_old = memory_BMD.shape[1] if count is None else max(0, count - segment_BTD.shape[1])
    start = 0 if count is None else max(0, segment_BTD.shape[1] - count)
    old = memory_BMD[:, max(0, memory_BMD.shape[1] - num_old) :]
    return torch.cat([old, segment_BTD[:, start:]], 1)


def check_memory(memory: Any, empty: tuple[Any, ...]) -> None:
    """Raise a ValueError unless `memory` is of the kind and widths of `empty`, the memories before the first position.

    Where that has no positions a memory may have any number of them, but the same for all its parts.
    """
    kinds = [type(entry) for entry in empty]
    if not isinstance(memory, tuple) or [type(entry) for entry in memory] != kinds:
        expected = ", ".join(kind.__name__ for kind in kinds)
        got = (
            ", ".join(type(entry).__name__ for entry in memory) if isinstance(memory, tuple) else type(memory).__name__
        )
        raise ValueError(f"memory must be the `memory` of an earlier output of this model: ({expected}), got ({got})")
    for kept, none in zip(memory, empty, strict=True):
        free = none[0].shape[1] == 0 and kept[0].ndim == 3
        for part, like in zip(kept, none, strict=True):
            expected = (like.shape[0], kept[0].shape[1] if free else like.shape[1], like.shape[2])
            if tuple(part.shape) != expected:
                raise ValueError(f"memory does not fit model and batch: expected {expected}, got {tuple(part.shape)}")
