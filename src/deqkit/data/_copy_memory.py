"""The copy memory task of the paper's appendix: remember ten symbols over T blanks, then repeat them.

The sequence has T + 20 positions. Inputs: ten symbols of 1..8, then 0 everywhere except 9 at position T + 10 (counted
from 1), the sign to recall. Targets: 0 at the first T + 10 positions, then the ten symbols. (The TCN repository fills
positions T + 10 to T + 20 with 9; this is the paper's version.)
"""

# N samples, B rows of a batch, S = 10 symbols, T positions = blanks + 20

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any, final

import numpy as np
import torch
from torch import Tensor

from deqkit.data._batches import IGNORED, AbstractBatches, Batch, rows_of_rank
from deqkit.data._error import DataError
from deqkit.data._manifest import SPLITS

NUM_SYMBOLS = 10
DELIMITER = 9
COPY_VOCAB_SIZE = 10
"""Blank, eight symbols, delimiter."""


def copy_memory(num_samples: int, T: int, generator: torch.Generator | int) -> tuple[Tensor, Tensor]:
    """Draw samples of the copy memory task.

    Args:
        num_samples: How many.
        T: Blanks between symbols and recall, at least 1.
        generator: What draws the symbols, or the seed of one.

    Returns:
        Inputs and targets, int64, both of shape (num_samples, T + 20).
    """
    return _sequences(_draw(num_samples, generator), T)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyGrowth:
    """Short sequences first, which cost little and tell the symbols apart soon; then T grows by one factor a step.

    While it grows nothing is recalled. Once it rests, a hundred steps are enough, where training at that T from the
    start takes many hundreds or fails.
    """

    first_T: int
    """Blanks to begin with."""
    steps: int
    """Batches of that length, and as many again in which T grows."""

    def __post_init__(self) -> None:
        if self.first_T < 1 or self.steps < 1:
            raise ValueError(f"first_T and steps must be at least 1, got {self.first_T} and {self.steps}")

    def T_at(self, index: int, last_T: int) -> int:
        """Blanks of batch number `index`, the first being 0."""
        grown = min(1.0, max(0.0, index / self.steps - 1))
        return round(self.first_T * (last_T / self.first_T) ** grown)


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyMemory:
    """The task as a dataset: samples that depend on the sizes and one seed alone."""

    T: int = 400
    """Blanks between symbols and recall."""
    num_train: int = 20_000
    """Training samples, as in the paper."""
    num_valid: int = 2_000
    """Samples for choosing a model, drawn apart from those for testing; the paper names none."""
    num_test: int = 2_000
    """Test samples, as in the paper."""
    seed: int = 0
    """The three splits have seeds of their own that follow from this one."""

    def __post_init__(self) -> None:
        if self.T < 1:
            raise ValueError(f"T must be at least 1, got {self.T}")
        if self.seed < 0:
            raise ValueError(f"seed must be at least 0, got {self.seed}")
        if min(self.num_train, self.num_valid, self.num_test) < 1:
            raise ValueError(f"every split needs at least one sample, got {self}")

    def split(self, name: str) -> tuple[Tensor, Tensor]:
        """Inputs and targets of "train", "valid" or "test"."""
        return _sequences(self._symbols(name), self.T)

    def batches(
        self, *, batch: int = 32, growth: CopyGrowth | None = None, rank: int = 0, world_size: int = 1
    ) -> CopyBatches:
        """Endless shuffled batches of the training samples, the first of them shorter if `growth` says so."""
        return CopyBatches(self, batch=batch, growth=growth, rank=rank, world_size=world_size)

    def evaluation(self, name: str, *, batch: int, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """One pass over a split in order; rows that are missing in the last batch have targets -100."""
        rows = rows_of_rank(batch, rank=rank, world_size=world_size)
        symbols_NS = self._symbols(name)
        for start in range(0, len(symbols_NS), batch):
            tokens_BT, targets_BT = _sequences(symbols_NS[start : start + batch], self.T)
            padding = (0, 0, 0, batch - len(tokens_BT))
            tokens_BT = torch.nn.functional.pad(tokens_BT, padding)
            targets_BT = torch.nn.functional.pad(targets_BT, padding, value=IGNORED)
            yield Batch(tokens_BT[rows.start : rows.stop], targets_BT[rows.start : rows.stop], new_context=True)

    def _symbols(self, name: str) -> Tensor:
        sizes = dict(zip(SPLITS, (self.num_train, self.num_valid, self.num_test), strict=True))
        if name not in sizes:
            raise ValueError(f"split must be one of {', '.join(SPLITS)}, got {name!r}")
        return _draw(sizes[name], _derived_seed(self.seed, SPLITS.index(name)))


@final
class CopyBatches(AbstractBatches):
    """Training batches of copy memory, in a new order each epoch, which the seed and the epoch alone decide.

    Samples that do not fill a last batch are left out of that epoch. Only the symbols are kept in memory.

    Raises:
        DataError: There are fewer samples than rows in a batch.
    """

    def __init__(
        self, data: CopyMemory, *, batch: int, growth: CopyGrowth | None = None, rank: int = 0, world_size: int = 1
    ) -> None:
        super().__init__(batch=batch, rank=rank, world_size=world_size)
        if data.num_train < batch:
            raise DataError(f"batch {batch} needs at least as many samples, but num_train is {data.num_train}")
        self._data, self._growth = data, growth
        self._symbols_NS = data._symbols("train")
        self._order: tuple[int, Tensor] | None = None

    @property
    def _epoch_end(self) -> int:
        return self._data.num_train // self.batch * self.batch

    @property
    def _step(self) -> int:
        return self.batch

    @property
    def _identity(self) -> dict[str, Any]:
        data = self._data
        identity = {"batch": self.batch, "T": data.T, "num_train": data.num_train, "seed": data.seed}
        return identity if self._growth is None else {**identity, "growth": asdict(self._growth)}

    def _read(self, epoch: int, offset: int) -> Batch:
        if self._order is None or self._order[0] != epoch:
            generator = torch.Generator().manual_seed(_derived_seed(self._data.seed, len(SPLITS), epoch))
            self._order = epoch, torch.randperm(self._data.num_train, generator=generator)
        chosen = self._order[1][offset + self.rows.start : offset + self.rows.stop]
        return Batch(*_sequences(self._symbols_NS[chosen], self._T(epoch, offset)), new_context=True)

    def _T(self, epoch: int, offset: int) -> int:
        if self._growth is None:
            return self._data.T
        return self._growth.T_at((epoch * self._epoch_end + offset) // self.batch, self._data.T)


def _draw(num_samples: int, generator: torch.Generator | int) -> Tensor:
    if num_samples < 1:
        raise ValueError(f"num_samples must be at least 1, got {num_samples}")
    if isinstance(generator, int):
        generator = torch.Generator().manual_seed(generator)
    return torch.randint(1, DELIMITER, (num_samples, NUM_SYMBOLS), generator=generator)


def _sequences(symbols_BS: Tensor, blanks: int) -> tuple[Tensor, Tensor]:
    if blanks < 1:
        raise ValueError(f"T must be at least 1, got {blanks}")
    inputs_BT = symbols_BS.new_zeros(len(symbols_BS), blanks + 2 * NUM_SYMBOLS)
    targets_BT = inputs_BT.clone()
    inputs_BT[:, :NUM_SYMBOLS] = symbols_BS
    inputs_BT[:, blanks + NUM_SYMBOLS - 1] = DELIMITER
    targets_BT[:, -NUM_SYMBOLS:] = symbols_BS
    return inputs_BT, targets_BT


def _derived_seed(seed: int, *key: int) -> int:
    """A seed of its own for each use, unrelated to its neighbours; 63 bits, which torch takes on every device."""
    state = np.random.SeedSequence(seed, spawn_key=key).generate_state(1, np.uint64)
    return int(state[0]) >> 1
