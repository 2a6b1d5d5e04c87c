"""Running a model without numbers: shapes, dtypes and storages only, so that sizes no machine here could hold run."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

_READ, _EQUAL, _NONZERO = (
    torch.ops.aten._local_scalar_dense.default,
    torch.ops.aten.equal.default,
    torch.ops.aten.nonzero.default,
)


@contextmanager
def abstract_tensors(*, nonzeros: Iterable[int] = ()) -> Iterator[None]:
    """Inside, tensors have no values. Where code asks for one, the answer is that nothing unusual happened.

    A solve then runs to its step limit: no sample converges, stalls or becomes nan. oneDNN's LSTM is left aside for
    torch's own: it hides what it holds (about half as much again) from runs without numbers.

    Args:
        nonzeros: How many entries successive calls of `torch.nonzero` find.
    """
    # None: as it is; setting allow_tf32, to whatever, makes torch warn
    unfused: Any = torch.backends.mkldnn.flags(enabled=False, deterministic=None, allow_tf32=None)  # pyright: ignore
    with unfused, FakeTensorMode(), _Usual(nonzeros):
        yield


class _Usual(TorchDispatchMode):
    def __init__(self, nonzeros: Iterable[int]) -> None:
        super().__init__()
        self._nonzeros = iter(nonzeros)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _READ:
            dtype = args[0].dtype
            return False if dtype is torch.bool else 1.0 if dtype.is_floating_point else 0
        if func is _EQUAL:
            return True
        if func is _NONZERO:
            return torch.empty(next(self._nonzeros), args[0].ndim, dtype=torch.int64, device=args[0].device)
        return func(*args, **(kwargs or {}))
