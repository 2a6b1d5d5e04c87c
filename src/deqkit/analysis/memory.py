"""How much tensor memory a call needs, counted storage by storage.

The process's resident memory mixes in allocator slack, the interpreter and whatever ran before; this module counts
the bytes of the tensor storages a piece of code creates, from their creation to their release, so the same code
gives the same number on every machine and device.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

T = TypeVar("T")

# These hand on a tensor that was made outside the dispatcher (torch.tensor, from_numpy): their input is new, not old.
_LIFTS = (torch.ops.aten.lift_fresh.default, torch.ops.aten.lift.default)


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryReport(Generic[T]):
    """What one call did to tensor memory; every number excludes storages that existed before the call."""

    peak_bytes: int
    """The most that was alive at once during the call."""
    held_bytes: int
    """What is still alive after the call: its result, and whatever it left in graphs, caches and `.grad`."""
    result: T
    """What the call returned."""


class MemoryMeter(TorchDispatchMode):
    """Counts the bytes of live tensor storages created while the meter is active.

    The meter sees the outputs of every operator, forward and backward, in the thread that enters it (autograd runs
    the backward of CPU tensors in the calling thread, and carries the meter to its device threads). A storage counts
    once however many views it has, from its first sighting until it is freed, even while the meter is not active:

        meter = MemoryMeter()
        with meter:
            loss = model(x)
        held = meter.current_bytes              # what the graph keeps for the backward pass
        meter.reset_peak()
        with meter:
            loss.backward()
        print(held, meter.peak_bytes)

    The meter keeps no tensor alive and changes no result. It does not see scratch memory inside an operator, nor
    what a `torch.compile`d function fuses away. Enter it inside a `FakeTensorMode`, not around it.

    Raises:
        NotImplementedError: An operator returned a sparse tensor, whose storages cannot be counted.
    """

    def __init__(self) -> None:
        super().__init__()
        self._current_bytes = 0
        self._peak_bytes = 0
        # Keyed by the address of the storage, which is its own until the weak reference reports it freed. A storage
        # that was there before the meter has size None: known, so that a view of it does not look like a new one.
        self._tracked: dict[int, _Tracked] = {}

    @property
    def current_bytes(self) -> int:
        """Bytes of the storages created under the meter that are alive now."""
        return self._current_bytes

    @property
    def peak_bytes(self) -> int:
        """The largest `current_bytes` so far, or since `reset_peak`."""
        return self._peak_bytes

    def reset_peak(self) -> None:
        """Start a new peak at what is alive now, to measure the next phase by itself."""
        self._peak_bytes = self._current_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func not in _LIFTS:
            for storage in _storages((args, kwargs)):
                if storage._cdata not in self._tracked:
                    self._track(storage, num_bytes=None)
        outputs = func(*args, **kwargs)
        for storage in _storages(outputs):
            self._record(storage)
        return outputs

    def _record(self, storage: torch.UntypedStorage) -> None:
        tracked = self._tracked.get(storage._cdata)
        if tracked is None:
            tracked = self._track(storage, num_bytes=0)
        if tracked.num_bytes is not None:  # a known storage may have been resized in place
            self._current_bytes += storage.nbytes() - tracked.num_bytes
            tracked.num_bytes = storage.nbytes()
            self._peak_bytes = max(self._peak_bytes, self._current_bytes)

    def _track(self, storage: torch.UntypedStorage, *, num_bytes: int | None) -> _Tracked:
        key = storage._cdata
        # The callback refers to the meter weakly: a finished meter can be freed before the tensors it saw.
        meter = weakref.ref(self)

        def release(_: weakref.ref[torch.UntypedStorage]) -> None:
            self = meter()
            if self is not None:
                self._current_bytes -= self._tracked.pop(key).num_bytes or 0

        self._tracked[key] = tracked = _Tracked(reference=weakref.ref(storage, release), num_bytes=num_bytes)
        return tracked


@dataclass(kw_only=True, slots=True)
class _Tracked:
    reference: weakref.ref[torch.UntypedStorage]
    num_bytes: int | None


def peak_memory(fn: Callable[[], T]) -> MemoryReport[T]:
    """Measure the tensor memory of one call, its peak and what is left of it.

    Args:
        fn: The code to measure, without arguments; close over its inputs, which then count as there before.

    Returns:
        A report with the peak, what is still held after the call, and the call's result.
    """
    meter = MemoryMeter()
    with meter:
        result = fn()
    return MemoryReport(peak_bytes=meter.peak_bytes, held_bytes=meter.current_bytes, result=result)


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(tree):
        if isinstance(leaf, Tensor):
            if leaf.layout is not torch.strided:
                raise NotImplementedError(f"tensor memory is counted for strided tensors only, got {leaf.layout}")
            yield leaf.untyped_storage()
