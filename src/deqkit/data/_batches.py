"""What every source of training batches is: endless, in epochs, with a position that a checkpoint keeps."""

# B rows of a batch (sequences side by side), T positions

from __future__ import annotations

import abc
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

from torch import Tensor

from deqkit.data._error import DataError

IGNORED = -100
"""Target of padding: `torch.nn.functional.cross_entropy` leaves it out."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences side by side, and what is to be predicted at each position."""

    tokens_BT: Tensor
    """Inputs, int64."""
    targets_BT: Tensor
    """What comes next, int64; -100 where there is nothing to predict."""
    new_context: bool
    """The rows do not continue those of the batch before: forget the memory of earlier segments."""


class AbstractBatches(abc.ABC):
    """Endless batches: `next(batches)`, and `state_dict()` to continue exactly there another time.

    Of a global batch of B rows, process `rank` of `world_size` gets rows `rank * B / world_size` up to
    `(rank + 1) * B / world_size`, so that all processes together see what one would. The position does not depend on
    `rank` or `world_size`, which may change when a run is resumed.

    Args:
        batch: Rows of the global batch.
        rank: Number of this process.
        world_size: How many processes there are.
    """

    def __init__(self, *, batch: int, rank: int, world_size: int) -> None:
        self.batch = batch
        self.rows = rows_of_rank(batch, rank=rank, world_size=world_size)
        self._epoch, self._offset = 0, 0

    @property
    @abc.abstractmethod
    def _epoch_end(self) -> int:
        """The offset at which an epoch ends."""

    @property
    @abc.abstractmethod
    def _step(self) -> int:
        """How far the offset moves with a batch."""

    @property
    @abc.abstractmethod
    def _identity(self) -> dict[str, Any]:
        """What must be the same for a position to mean the same."""

    @abc.abstractmethod
    def _read(self, epoch: int, offset: int) -> Batch:
        """The batch at a position."""

    @property
    def epoch(self) -> int:
        """How many epochs are complete."""
        return self._epoch

    @property
    def num_batches(self) -> int:
        """Batches in an epoch."""
        return -(-self._epoch_end // self._step)

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        found = self._read(self._epoch, self._offset)
        self._offset += self._step
        if self._offset >= self._epoch_end:
            self._epoch, self._offset = self._epoch + 1, 0
        return found

    def state_dict(self) -> dict[str, Any]:
        """The position: plain values, a few dozen bytes."""
        return {"epoch": self._epoch, "offset": self._offset, **self._identity}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go to a position that `state_dict` told.

        Raises:
            DataError: It is a position in other data or with another batch.
        """
        expected = {"epoch", "offset", *self._identity}
        if set(state) != expected:
            raise DataError(f"a position has {', '.join(sorted(expected))}; got {', '.join(sorted(state))}")
        for name, value in self._identity.items():
            if state[name] != value:
                raise DataError(f"the position was saved with {name} {state[name]}, but here {name} is {value}")
        epoch, offset = state["epoch"], state["offset"]
        if epoch < 0 or not 0 <= offset < self._epoch_end:
            raise DataError(f"there is no position {offset} in epoch {epoch}: an epoch ends at {self._epoch_end}")
        self._epoch, self._offset = epoch, offset


def rows_of_rank(batch: int, *, rank: int, world_size: int) -> range:
    """The rows of a global batch that a process gets.

    Raises:
        ValueError: The rows cannot be shared out evenly, or there is no such process.
    """
    if batch < 1 or world_size < 1 or batch % world_size:
        raise ValueError(f"batch must be a positive multiple of world_size, got batch {batch}, world_size {world_size}")
    if not 0 <= rank < world_size:
        raise ValueError(f"rank must be at least 0 and below world_size {world_size}, got {rank}")
    share = batch // world_size
    return range(rank * share, (rank + 1) * share)
