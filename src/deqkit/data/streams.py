"""A corpus as parallel streams, cut into segments that follow one another, so that memory can be carried across.

With N tokens and B streams there are N - 1 predictions: token i + 1 from the tokens up to i. Training gives stream b
the `n = (N - 1) // B` predictions from `b * n` on, and leaves out the fewer than B at the end. Evaluation leaves out
none: the first `(N - 1) % B` streams have one prediction more, and the others are padded by one position with target
-100. With `trim=True` both do as `LMOrderedIterator` of the original code: `N // B` tokens a stream, whose last token
is only a target and whose first token only an input, so that B - 1 predictions between streams are lost as well.
"""

# N tokens, B streams, T positions of a segment, n predictions of a stream

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, final

import numpy as np
import torch

from deqkit.data._batches import IGNORED, AbstractBatches, Batch, rows_of_rank
from deqkit.data._error import DataError


@final
class Streams(AbstractBatches):
    """Training batches: every stream in order, from its start to its end, in every epoch again.

    The last segment of an epoch may be shorter than `length`. The first of an epoch has `new_context` set.

    Args:
        ids: The tokens, one dimension; a memory map is read piece by piece.
        batch: Streams side by side, over all processes.
        length: Positions of a segment.
        rank: Number of this process.
        world_size: How many processes share the batch.
        trim: Cut as the original code does.

    Raises:
        DataError: There are fewer tokens than one full batch needs.
    """

    def __init__(
        self,
        ids: np.ndarray,
        *,
        batch: int = 32,
        length: int = 64,
        rank: int = 0,
        world_size: int = 1,
        trim: bool = False,
    ) -> None:
        super().__init__(batch=batch, rank=rank, world_size=world_size)
        _check(ids, length)
        self.length, self.trim = length, trim
        self._ids = ids
        self._per_stream = len(ids) // batch - 1 if trim else (len(ids) - 1) // batch
        if self._per_stream < length:
            needed = batch * (length + 1) if trim else batch * length + 1
            raise DataError(
                f"batch {batch} x length {length} needs at least {needed:,} tokens, but there are {len(ids):,}; "
                "lower batch or length, or give more text"
            )

    @property
    def _epoch_end(self) -> int:
        return self._per_stream

    @property
    def _step(self) -> int:
        return self.length

    @property
    def _identity(self) -> dict[str, Any]:
        # The length may change: an offset counts tokens, and a segment begins wherever the last one ended.
        return {"batch": self.batch, "num_tokens": len(self._ids), "trim": self.trim}

    def _read(self, epoch: int, offset: int) -> Batch:
        distance = self._per_stream + (1 if self.trim else 0)
        size = min(self.length, self._per_stream - offset) + 1
        starts = [row * distance + offset for row in self.rows]
        rows = np.stack([self._ids[start : start + size] for start in starts])
        ids_BT = torch.from_numpy(rows.astype(np.int64))
        return Batch(ids_BT[:, :-1], ids_BT[:, 1:], new_context=offset == 0)


@final
class EvaluationPass:
    """One pass over all tokens, in parallel streams: every prediction exactly once.

    Stream 0 starts without context, as every stream does: with `batch=1` each token is predicted from all before it.
    All processes get the same number of batches of the same shape. Only the first batch has `new_context` set.

    Args:
        ids: The tokens, one dimension.
        batch: Streams side by side, over all processes.
        length: Positions of a segment; the last may be shorter.
        rank: Number of this process.
        world_size: How many processes share the batch.
        trim: Leave out what the original code does, for numbers to compare with it; no padding then.

    Attributes:
        num_predictions: Targets other than -100 over all processes: N - 1, unless trimmed.
    """

    def __init__(
        self, ids: np.ndarray, *, batch: int, length: int, rank: int = 0, world_size: int = 1, trim: bool = False
    ) -> None:
        _check(ids, length)
        num_tokens = len(ids)
        if num_tokens < (2 * batch if trim else 2):
            raise DataError(f"{num_tokens} tokens leave nothing to predict in {batch} streams; give more text")
        self._ids, self._length = ids, length
        self._rows = rows_of_rank(batch, rank=rank, world_size=world_size)
        if trim:
            size = num_tokens // batch
            limits = [(row * size, (row + 1) * size - 1) for row in range(batch)]
        else:
            share, rest = divmod(num_tokens - 1, batch)
            starts = [row * share + min(row, rest) for row in range(batch + 1)]
            limits = list(zip(starts[:-1], starts[1:], strict=True))
        self._limits = limits
        self._longest = max(stop - start for start, stop in limits)
        self.num_predictions = sum(stop - start for start, stop in limits)

    def __len__(self) -> int:
        return -(-self._longest // self._length)

    def __iter__(self) -> Iterator[Batch]:
        for offset in range(0, self._longest, self._length):
            size = min(self._length, self._longest - offset)
            tokens_BT = np.zeros((len(self._rows), size), dtype=np.int64)
            targets_BT = np.full((len(self._rows), size), IGNORED, dtype=np.int64)
            for place, row in enumerate(self._rows):
                start, stop = self._limits[row]
                ids = self._ids[start + offset : min(start + offset + size, stop) + 1]
                count = max(len(ids) - 1, 0)
                tokens_BT[place, :count] = ids[:count]
                targets_BT[place, :count] = ids[1 : count + 1]
            yield Batch(torch.from_numpy(tokens_BT), torch.from_numpy(targets_BT), new_context=offset == 0)


def _check(ids: np.ndarray, length: int) -> None:
    if ids.ndim != 1:
        raise ValueError(f"ids must have one dimension, got shape {ids.shape}")
    if length < 1:
        raise ValueError(f"length must be at least 1, got {length}")
