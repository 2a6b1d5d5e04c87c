"""Calls of torch: which is the same as another, and what it gave."""

from __future__ import annotations

import dataclasses
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

from deqkit.solve._packing import tensors_in

PLAIN = (int, complex, bool, str, type(None), type(...))
PLAIN += (torch.dtype, torch.device, torch.layout, torch.memory_format)
"""Arguments that are what they look like: two of them are the same if they are equal."""
LONGEST = 200
"""Numbers and names that identify a call, at most: arguments may be long lists."""


@dataclasses.dataclass(kw_only=True, slots=True)
class Kept:
    """The result of a call. Its inputs are held too: another tensor could otherwise take on the identity of one."""

    output: Any
    results: list[Tensor]
    inputs: list[Tensor]
    place: int
    """Among the calls of an evaluation that were noted."""
    seconds: float = 0.0
    """What the call took when it was tried."""
    again: Any = None
    """What it gave then, until the end of that evaluation."""
    versions: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        self.versions = versions_of(self.results)

    def is_unchanged(self) -> bool:
        return versions_of(self.results) == self.versions and not any(t.requires_grad for t in self.results)

    def stood_the_trial(self) -> bool:
        """Whether it gave the same again, and is still that after an evaluation that was given it."""
        again, self.again = self.again, None
        return again is not None and self.is_same_as(again)

    def is_same_as(self, output: Any) -> bool:
        others = output if isinstance(output, tuple) else (output,)
        return len(others) == len(self.results) and all(
            a.shape == b.shape and a.stride() == b.stride() and a.dtype == b.dtype and torch.equal(_bits(a), _bits(b))
            for a, b in zip(self.results, others, strict=True)
        )


def _bits(tensor: Tensor) -> Tensor:
    """Tells 0 from -0, and takes nan for nan."""
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def identity(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, ...] | None:
    """The function, its tensors and their versions, and what else tells a call from others; None where that is not
    known of one of its arguments."""
    tensors = tensors_in((args, kwargs))
    if not all(has_version(tensor) for tensor in tensors):
        return None
    parts: list[Any] = [func, versions_of(tensors)]
    for name, value in (*enumerate(args), *kwargs.items()):
        parts.append(name)
        if not _describe(value, parts):
            return None
    for tensor in tensors[:1]:
        device = tensor.device.type
        if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
            parts.append(torch.get_autocast_dtype(device))
    return tuple(parts)


def has_version(value: Any) -> bool:
    """Whether changes in place can be told, and values compared."""
    return (
        type(value) in (Tensor, nn.Parameter)
        and not torch._C._functorch.is_functorch_wrapped_tensor(value)  # pyright: ignore[reportAttributeAccessIssue]
        and not value.is_inference()
        and value.layout is torch.strided
        and not (value.is_nested or value.is_quantized or value.is_meta or value.is_conj() or value.is_neg())
    )


def storages(tensors: list[Tensor]) -> dict[int, int]:
    """The bytes of their memory, by its identity."""
    return {memory._cdata: memory.nbytes() for memory in (tensor.untyped_storage() for tensor in tensors)}


def random_state(device: torch.device) -> Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def versions_of(tensors: list[Tensor]) -> tuple[int, ...]:
    return tuple(number for tensor in tensors for number in (id(tensor), tensor._version))


def _describe(value: Any, parts: list[Any]) -> bool:
    """Append what identifies a value; False if nothing does. Tensors are identified elsewhere."""
    kind = type(value)
    if len(parts) > LONGEST:
        return False
    if isinstance(value, Tensor):
        parts.append(Tensor)
    elif kind is float:
        parts += (float, value.hex())  # tells 0.0 from -0.0
    elif kind in PLAIN:
        parts += (kind, value)  # 1 and True are equal, but not the same argument
    elif kind is slice:
        parts.append(slice)
        return all(_describe(part, parts) for part in (value.start, value.stop, value.step))
    elif isinstance(value, tuple | list):
        parts += (kind, len(value))
        return all(_describe(part, parts) for part in value)
    else:
        return False
    return True


def results_have_more_than_values() -> bool:
    """A graph, which serves one backward pass (in an f that differentiates), tangents, or a level of torch.func."""
    level = torch._C._functorch.maybe_current_level()  # pyright: ignore[reportAttributeAccessIssue]
    return torch.is_grad_enabled() or level is not None or forward_ad._current_level >= 0
