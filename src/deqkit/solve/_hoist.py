"""What f computes without its state: once in a solve instead of in every evaluation."""

from __future__ import annotations

import collections
import enum
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakIdKeyDictionary

from deqkit.solve._calls import (
    Kept,
    has_version,
    identity,
    random_state,
    results_have_more_than_values,
    storages,
    versions_of,
)
from deqkit.solve._packing import tensors_in

LEAST_SECONDS = 5e-4
"""What an evaluation must take, or it is not worth watching."""
SECONDS_TO_NOTE = 40e-6
"""About what it takes to note a call and to try it. All together may take a quarter of an evaluation: an f of many
small calls is not worth watching either."""
SECONDS_PER_CALL, SECONDS_PER_HIT = 10e-6, 20e-6
"""The same for calls that are watched later, and for those left out: what does not save twice that does not pay."""
MOST_BYTES = 4
"""What is kept may be so many times as large as the state and what it was computed from; while it is tried, twice."""
LEFT_ALONE = {"batch_norm", "instance_norm"}  # they change running means, which torch does not count
LEFT_ALONE |= {"empty", "empty_like", "new_empty", "empty_strided", "new_empty_strided"}  # they compute nothing
"""Functions whose results are not kept."""
NOT_LOOKED_AT = {"tensor", "as_tensor", "asarray"}
"""Nor are those of these, whose arguments are lists that may be long."""


class _Phase(enum.Enum):
    TIMING = "f is evaluated as it is, to see whether it takes long enough"
    NOTING = "calls that are given nothing made from the state are noted, with their results"
    TRYING = "they are made all the same, and results that have changed are forgotten"
    USING = "they are left out"
    OFF = "there is nothing to leave out"


class Hoist(TorchFunctionMode):
    """Evaluates f again and again, and what does not depend on its state only at first.

    A call of torch is left out if it is the same as one in the second evaluation: the same function, the very same
    tensors, unchanged since (torch counts changes in place), the same numbers. The third evaluation makes these calls
    once more, to see that they give the same, bit by bit, and how long they take. So f gives what it would give
    otherwise; what it changes behind torch's back (through `.data`, NumPy or another process) is found out then.
    """

    def __init__(self) -> None:
        super().__init__()
        self._phase = _Phase.TIMING
        self._seconds = float("inf")  # that an evaluation takes, where a clock tells
        self._kept: dict[tuple[Any, ...], Kept] = {}
        self._functions: set[Any] = set()
        self._known: set[int] = set()  # tensors that calls which are kept are given
        self._noted: list[Any] = []  # the functions of an evaluation, in order
        self._trusted: tuple[list[Any], set[int]] | None = None  # the same when they were tried, and which may be kept
        self._num_calls = 0
        self._roots: dict[int, int] = {}  # bytes of the state and of what kept tensors were computed from
        self._made: set[int] = set()
        self._bytes = 0
        self._times: collections.Counter[tuple[Any, ...]] = collections.Counter()  # the same calls in one evaluation
        self._moving = WeakIdKeyDictionary()  # tensors made from the state, while calls are noted
        self._is_in_the_way = False

    def evaluate(self, f: Callable[..., Any], state: Any, args: tuple[Any, ...]) -> Any:
        """f(state, *args)."""
        if self._phase is _Phase.OFF or torch.is_inference_mode_enabled():  # there tensors do not count changes
            return f(state, *args)
        if self._phase is _Phase.TIMING:
            return self._time(f, state, args)
        self._times.clear()
        self._num_calls = 0
        if self._phase is _Phase.NOTING:
            self.mark_as_moving(state)
            self._roots = storages(tensors_in(state))
        with _working(self), self:
            output = f(state, *args)
        if self._is_in_the_way:
            self.turn_off()
            return f(state, *args)
        self._go_on()
        return output

    def _time(self, f: Callable[..., Any], state: Any, args: tuple[Any, ...]) -> Any:
        began = time.perf_counter()
        output = f(state, *args)
        on_cpu = all(tensor.device.type == "cpu" for tensor in tensors_in(state))
        if on_cpu:
            self._seconds = time.perf_counter() - began
        if self._seconds < LEAST_SECONDS:
            self.turn_off()
        else:
            self._phase = _Phase.NOTING
        return output

    def begin_again(self) -> None:
        """For other arguments of the same f, as when samples have left: what was tried need not be tried again."""
        if self._phase not in (_Phase.OFF, _Phase.TIMING):
            self._phase, self._bytes = _Phase.NOTING, 0
            for notes in (self._kept, self._made, self._noted):
                notes.clear()

    def turn_off(self) -> None:
        self._phase = _Phase.OFF
        self._kept.clear()
        self._moving.clear()

    def mark_as_moving(self, tree: Any) -> None:
        """Tell that these tensors were made from the state."""
        if self._phase is _Phase.NOTING:
            for tensor in tensors_in(tree):
                self._moving[tensor] = None

    def _go_on(self) -> None:
        if self._phase is _Phase.NOTING:
            self._moving.clear()
            known = self._trusted is not None and self._trusted[0] == self._noted
            self._phase = _Phase.USING if known else _Phase.TRYING
        elif self._phase is _Phase.TRYING:
            tried = [kept for kept in self._kept.values() if kept.stood_the_trial()]
            self._trusted = (list(self._noted), {kept.place for kept in tried} if self._pays(tried) else set())
            self._phase = _Phase.USING
        else:
            return
        if self._phase is _Phase.USING:
            assert self._trusted is not None
            self._kept = {key: kept for key, kept in self._kept.items() if kept.place in self._trusted[1]}
        self._functions = {key[0] for key in self._kept}
        self._known = {id(tensor) for kept in self._kept.values() for tensor in kept.inputs}
        if not self._kept:
            self.turn_off()

    def _pays(self, tried: list[Kept]) -> bool:
        if self._seconds == float("inf"):  # a clock here does not tell what another device saves
            return True
        saved = sum(kept.seconds for kept in tried)
        return saved > 2 * (SECONDS_PER_CALL * self._num_calls + SECONDS_PER_HIT * len(tried))

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        kwargs = {} if kwargs is None else kwargs
        if torch.compiler.is_compiling():  # first, or the compiler would look at all that follows
            return func(*args, **kwargs)
        if _now.hoist is not self or self._phase is _Phase.OFF:
            return func(*args, **kwargs)
        self._num_calls += 1
        if self._phase is _Phase.NOTING:
            return self._note(func, args, kwargs)
        if func not in self._functions or results_have_more_than_values():
            return func(*args, **kwargs)
        if args and isinstance(args[0], Tensor) and id(args[0]) not in self._known:  # the usual case, told quickly
            return func(*args, **kwargs)
        kept = self._find(self._key(func, args, kwargs))
        if kept is None:
            return func(*args, **kwargs)
        return self._try(kept, func, args, kwargs) if self._phase is _Phase.TRYING else kept.output

    def _try(self, kept: Kept, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        device = kept.results[0].device
        before, began = random_state(device), time.perf_counter()
        output = func(*args, **kwargs)
        seconds = time.perf_counter() - began
        if not torch.equal(
            before, random_state(device)
        ):  # the same numbers again, but others depend on their being drawn
            self.turn_off()
        elif kept.is_same_as(output):
            kept.seconds, kept.again = seconds, output
            return kept.output
        return output

    def _note(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if func is F.multi_head_attention_forward and kwargs.get("training") is False:
            self._is_in_the_way = True  # a mode like this one keeps torch from its fast way
        if self._num_calls * SECONDS_TO_NOTE > self._seconds / 4 or "c10d" in getattr(func, "_qualified_op_name", ""):
            self.turn_off()  # other processes may decide otherwise, and wait for this one
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in NOT_LOOKED_AT:
            return func(*args, **kwargs)
        tensors = tensors_in((args, kwargs))
        if any(tensor in self._moving for tensor in tensors):
            output = func(*args, **kwargs)
            self.mark_as_moving(output)
            return output
        alone = name in LEFT_ALONE or results_have_more_than_values()
        key = None if alone else self._key(func, args, kwargs)
        output = func(*args, **kwargs)
        results = [output] if isinstance(output, Tensor) else list(output) if isinstance(output, tuple) else []
        if key is None or not results or not all(has_version(result) for result in results):
            return output
        is_new = not {id(result) for result in results} & {id(tensor) for tensor in tensors}
        if is_new and key[1] == versions_of(tensors):  # nothing was changed in place
            self._keep(key, Kept(output=output, results=results, inputs=tensors, place=len(self._noted)))
        self._noted.append(func)
        return output

    def _keep(self, key: tuple[Any, ...], kept: Kept) -> None:
        self._roots |= storages([tensor for tensor in kept.inputs if id(tensor) not in self._made])
        self._made |= {id(result) for result in kept.results}
        self._bytes += sum(storages([result for result in kept.results if result._base is None]).values())
        self._kept[key] = kept
        if self._bytes > MOST_BYTES * sum(self._roots.values()):
            self.turn_off()

    def _key(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
        """What tells a call from others; None where that cannot be known.

        The same call a second time in one evaluation is another one: each has a result of its own, which f may change.
        """
        if (call := identity(func, args, kwargs)) is None:
            return None
        self._times[call] += 1
        return (*call, self._times[call])

    def _find(self, key: tuple[Any, ...] | None) -> Kept | None:
        kept = None if key is None else self._kept.get(key)
        return kept if kept is not None and kept.is_unchanged() else None


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


@contextmanager
def own_solve() -> Iterator[Callable[[Any], None]]:
    """A context for a solve, whose operations are none of f of the equilibrium it may be inside of.

    It yields a function to be called with the result.
    """
    outer = _now.hoist
    with _working(None):
        yield lambda result: None if outer is None else outer.mark_as_moving(result)


def can_hoist(f: Any) -> bool:
    """Whether f may be watched: not if `torch.compile` made it or a part of it, nor if that would keep torch from its
    fast way through attention."""
    parts = list(f.modules()) if isinstance(f, nn.Module) else [f]
    if any(isinstance(part, nn.MultiheadAttention) and not part.training for part in parts):
        return False
    if "torch._dynamo" not in sys.modules:
        return True
    return not any(
        hasattr(part, "dynamo_ctx")
        or hasattr(part, "_torchdynamo_orig_callable")
        or getattr(part, "_compiled_call_impl", None) is not None
        for part in parts
    )
