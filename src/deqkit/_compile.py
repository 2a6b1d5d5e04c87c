"""`torch.compile` for a function that solves evaluate, and whose graph a backward solve goes through many times."""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch

Compile = bool | Mapping[str, Any]
"""Whether to compile; or with which arguments of `torch.compile`."""

RECOMPILE_LIMIT = 32
"""A model's cell is compiled with and without gradients, with a state that needs one and one that does not, in
training and in evaluation, each with an empty memory and a full one; torch gives up at eight."""


def never_compiled(f: Callable[..., Any]) -> Callable[..., Any]:
    """`torch.compiler.disable`, which imports torch's compiler, but only once somebody else has: that takes as long as
    the import of torch itself."""
    disabled: list[Callable[..., Any]] = []

    @functools.wraps(f)
    def call(*args: Any, **kwargs: Any) -> Any:
        if "torch._dynamo" not in sys.modules:  # nothing is compiled
            return f(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(f))
        return disabled[0](*args, **kwargs)

    return call


def compiled(f: Callable[..., Any], how: Compile) -> Callable[..., Any]:
    """f compiled, or f itself with `how=False`."""
    if how is False:
        return f
    allow_products()
    return torch.compile(f, **({} if how is True else how))


def allow_products() -> None:
    """Let a compiled graph be used more than once: for all of torch, which has no such setting for one function."""
    from torch._dynamo import config as dynamo  # not at the top: it takes a second
    from torch._functorch import config as functorch

    functorch.donated_buffer = False
    dynamo.recompile_limit = max(dynamo.recompile_limit, RECOMPILE_LIMIT)


def check_compile(how: Any) -> None:
    """Raise a ValueError unless it says whether or how to compile."""
    if not isinstance(how, bool | Mapping):
        raise ValueError(f"compile must be True, False or a dict of arguments of torch.compile, got {how!r}")
