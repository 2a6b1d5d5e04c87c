"""What f computes without its state: once in a solve instead of in every evaluation."""

from __future__ import annotations

import dataclasses
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from deqkit.solve._packing import tensors_in

PLAIN = (int, float, complex, bool, str, type(None), type(...))
PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Arguments that are what they look like: two of them are the same if they are equal."""


class Hoist(TorchFunctionMode):
    """Evaluates f again and again, and what does not depend on its state once.

    The first evaluation notes every call of torch that is given nothing made from the state and does nothing but
    compute: no random numbers, no changes in place. Later ones take its result from there if the call is the same:
    the same function, the very same tensors, unchanged since (torch counts changes in place), and the same numbers.
    So an f of any kind gives what it would give otherwise, to the last bit.
    """

    def __init__(self) -> None:
        super().__init__()
        self._num_evals = 0
        self._kept: dict[tuple[Any, ...], _Kept] = {}
        self._functions: set[Any] = set()
        self._moving = WeakIdKeyDictionary()  # tensors made from the state, in the first evaluation

    def evaluate(self, f: Callable[..., Any], state: Any, args: tuple[Any, ...]) -> Any:
        """f(state, *args)."""
        # Nothing was found; or tensors do not count their changes.
        if (self._num_evals > 1 and not self._kept) or torch.is_inference_mode_enabled():
            return f(state, *args)
        self._mark_as_moving(state if self._num_evals == 0 else ())
        with _working(self), self:
            output = f(state, *args)
        self._num_evals += 1
        if self._num_evals == 2:
            self._kept = {key: kept for key, kept in self._kept.items() if kept.was_used}
        if self._num_evals <= 2:
            self._functions = {key[0] for key in self._kept}
            self._moving.clear()
        return output

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        # With gradients on, a result has a graph, which serves one backward pass only (an f that differentiates).
        if _now.hoist is not self or torch.is_grad_enabled() or torch.compiler.is_compiling():
            return func(*args, **kwargs)
        if self._num_evals == 0:
            return self._note(func, args, kwargs)
        if func not in self._functions:
            return func(*args, **kwargs)
        kept = self._find(_key(func, args, kwargs))
        return func(*args, **kwargs) if kept is None else kept.output

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if any(tensor in self._moving for tensor in tensors_in((args, kwargs))):
            output = func(*args, **kwargs)
            self._mark_as_moving(output)
            return output
        key = _key(func, args, kwargs)
        if key is None:
            return func(*args, **kwargs)
        if (kept := self._find(key)) is not None:
            return kept.output
        with _Watch() as watch:
            output = func(*args, **kwargs)
        tensors = [output] if isinstance(output, Tensor) else list(output) if type(output) is tuple else []
        if watch.only_computed and tensors and all(isinstance(t, Tensor) and not t.is_inference() for t in tensors):
            versions = tuple(t._version for t in tensors)
            self._kept[key] = _Kept(output=output, tensors=tensors, versions=versions, inputs=(args, kwargs))
        return output

    def _find(self, key: tuple[Any, ...] | None) -> _Kept | None:
        kept = None if key is None else self._kept.get(key)
        if kept is None or any(t._version != was for t, was in zip(kept.tensors, kept.versions, strict=True)):
            return None
        kept.was_used = True
        return kept

    def _mark_as_moving(self, tree: Any) -> None:
        for tensor in tensors_in(tree):
            self._moving[tensor] = None


@dataclasses.dataclass(kw_only=True, slots=True)
class _Kept:
    """The result of a call. Its inputs are held too: another tensor could otherwise take on the identity of one."""

    output: Any
    tensors: list[Tensor]
    versions: tuple[int, ...]
    inputs: Any
    was_used: bool = False


def _key(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """What tells a call from others; None where that is not known of one of its arguments."""
    parts: list[Any] = [func]
    if not all(_describe(value, parts) for value in args):
        return None
    for name, value in kwargs.items():
        parts.append(name)
        if not _describe(value, parts):
            return None
    for tensor in tensors_in((args, kwargs))[:1]:
        device = tensor.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            parts.append(torch.get_autocast_dtype(device))
    return tuple(parts)


def _describe(value: Any, parts: list[Any]) -> bool:
    """Append what identifies a value; False if nothing does."""
    kind = type(value)
    if isinstance(value, Tensor):
        if value.is_inference():
            return False
        parts += (id(value), value._version)
    elif kind in PLAIN:
        parts += (kind, value)  # 1, 1.0 and True are equal, but not the same argument
    elif kind is slice:
        parts.append(slice)
        return all(_describe(part, parts) for part in (value.start, value.stop, value.step))
    elif isinstance(value, tuple | list):
        parts += (kind, len(value))
        return all(_describe(part, parts) for part in value)
    else:
        return False
    return True


class _Watch(TorchDispatchMode):
    """Whether what torch does is to compute new values, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self._computes: set[bool] = set()

    @property
    def only_computed(self) -> bool:
        return self._computes == {True}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        random = torch.Tag.nondeterministic_seeded in func.tags
        self._computes.add(func.namespace == "aten" and not func._schema.is_mutable and not random)
        return func(*args, **({} if kwargs is None else kwargs))


class _Now(threading.local):
    hoist: Hoist | None = None
    """The one whose f is being evaluated in this thread; an equilibrium inside another has its own."""


_now = _Now()


@contextmanager
def _working(hoist: Hoist | None) -> Iterator[None]:
    before, _now.hoist = _now.hoist, hoist
    try:
        yield
    finally:
        _now.hoist = before


def own_solve() -> Any:
    """A context for a solve, whose operations are none of f of the equilibrium it may be inside of."""
    return _working(None)


def is_compiled(f: Any) -> bool:
    """Whether `torch.compile` has made f or a part of it: compiled code is left as it is."""
    if "torch._dynamo" not in sys.modules:
        return False
    parts = f.modules() if isinstance(f, nn.Module) else [f]
    return any(
        hasattr(part, "dynamo_ctx")
        or hasattr(part, "_torchdynamo_orig_callable")
        or getattr(part, "_compiled_call_impl", None) is not None
        for part in parts
    )
