"""What one segment leaves to the next, and what a text that is being written keeps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

# B samples, M positions of memory, T positions of the segment, D width, H heads, E width of a head, C columns of a
# cache, K of them seen


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


@dataclass(slots=True)
class KeyCache:
    """Keys and values of the positions before a segment, projected: what one layer needs to go on with a text.

    It stands in for a memory while no gradient is recorded. `begin` makes room for a segment, every evaluation of the
    cell writes the segment's keys and values behind those of the past, in place, and `advance` keeps what was written
    last. With a window a query sees so many positions, its own included, and older ones are let go.
    """

    keys_HBCE: Tensor
    values_HBCE: Tensor
    window: int | None = None
    length: int = 0
    """Columns in use."""
    padding_B: Tensor | None = None
    """Columns before the first position of a sample that is shorter than others; None if all are equally long."""
    num_seen: int = 0
    """Earlier columns that the segment sees."""
    hidden_B1K: Tensor | None = None
    """True where those belong to no position of the sample."""
    table: Any = None
    """Positional terms for one query, the same at every step."""

    @classmethod
    def empty(cls, like: Tensor, *, num_heads: int, head_width: int, window: int | None) -> KeyCache:
        """For the samples of `like`, batch first; `begin` will find the room."""
        none = like.new_empty(num_heads, like.shape[0], 0, head_width)
        return cls(none, none, window)

    @property
    def capacity(self) -> int:
        return self.keys_HBCE.shape[2]

    def begin(self, count: int) -> int:
        """Prepare for a segment of `count` positions; returns how many keys it sees, itself included."""
        assert not torch.is_grad_enabled(), "keys are written in place: decode without gradients"
        if self.length + count > self.capacity:
            self._make_room(count)
        self.num_seen = self.length if self.window is None else min(self.length, self.window - 1)
        self.hidden_B1K = None
        if self.padding_B is not None:
            columns_K = torch.arange(self.length - self.num_seen, self.length + count, device=self.padding_B.device)
            self.hidden_B1K = (columns_K < self.padding_B.unsqueeze(1)).unsqueeze(1)
        return self.num_seen + count

    def write(self, keys_HBTE: Tensor, values_HBTE: Tensor) -> tuple[Tensor, Tensor]:
        """Keys and values of past and segment; those of the segment are overwritten by the next call."""
        start, end = self.length - self.num_seen, self.length + keys_HBTE.shape[2]
        self.keys_HBCE[:, :, self.length : end] = keys_HBTE
        self.values_HBCE[:, :, self.length : end] = values_HBTE
        return self.keys_HBCE[:, :, start:end], self.values_HBCE[:, :, start:end]

    def advance(self, count: int) -> None:
        """The last `count` positions written are past from now on."""
        self.length += count

    def select(self, index: Tensor) -> KeyCache:
        """The samples `index` alone."""
        padding_B = None if self.padding_B is None else self.padding_B.index_select(0, index)
        parts = (part.index_select(1, index) for part in (self.keys_HBCE, self.values_HBCE))
        return replace(self, **dict(zip(("keys_HBCE", "values_HBCE"), parts, strict=True)), padding_B=padding_B)

    @classmethod
    def join(cls, caches: Sequence[KeyCache]) -> KeyCache:
        """One batch of texts of different lengths that end in the same column."""
        length = max(cache.length for cache in caches)
        heads, _, _, width = caches[0].keys_HBCE.shape

        def aligned(part: Tensor, used: int) -> Tensor:
            room = part.new_zeros(heads, part.shape[1], length, width)  # zeros: what is hidden must still be finite
            room[:, :, length - used :] = part[:, :, :used]
            return room

        padding = [torch.full(c.keys_HBCE.shape[1:2], length - c.length, device=c.keys_HBCE.device) for c in caches]
        return cls(
            torch.cat([aligned(cache.keys_HBCE, cache.length) for cache in caches], 1),
            torch.cat([aligned(cache.values_HBCE, cache.length) for cache in caches], 1),
            caches[0].window,
            length,
            torch.cat(padding) if any(cache.length < length for cache in caches) else None,
        )

    def _make_room(self, count: int) -> None:
        """Twice what is needed, so that moving costs a constant number of copies a position."""
        kept = self.length if self.window is None else min(self.length, self.window - 1)
        dropped = self.length - kept

        def moved(part: Tensor) -> Tensor:
            room = part.new_empty(*part.shape[:2], 2 * (kept + count), part.shape[3])
            room[:, :, :kept] = part[:, :, dropped : self.length]
            return room

        self.keys_HBCE, self.values_HBCE, self.length = moved(self.keys_HBCE), moved(self.values_HBCE), kept
        if self.padding_B is not None:
            self.padding_B = (self.padding_B - dropped).clamp(min=0)
            if not bool(self.padding_B.any()):
                self.padding_B = None


def join_samples(memories: Sequence[Any]) -> Any:
    """Memories or caches of one layer as those of one batch."""
    first = memories[0]
    if isinstance(first, KeyCache):
        return KeyCache.join(memories)
    return type(first)(*(torch.cat(parts) for parts in zip(*memories, strict=True)))


def select_samples(memory: Any, index: Tensor) -> Any:
    """The memory or cache of the samples `index` alone."""
    if isinstance(memory, KeyCache):
        return memory.select(index)
    return type(memory)(*(part.index_select(0, index) for part in memory))
