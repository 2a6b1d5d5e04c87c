"""States of any structure as one tensor (B, P, N), and batches of anything cut down to some of their samples."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

# B samples, P groups of positions, N numbers in a group, L positions


@dataclasses.dataclass(frozen=True)
class Packing:
    """How the tensors of one state structure lie side by side in a work tensor (B, P, N)."""

    structure: Any
    """The caller's state with every tensor replaced by its place in the list of tensors."""
    shapes: tuple[torch.Size, ...]
    dtype: torch.dtype
    device: torch.device
    num_groups: int
    """P: the number of positions for causal solvers, else 1."""

    @classmethod
    def of(cls, state: Any, *, causal: bool) -> Packing:
        tensors: list[Tensor] = []
        structure = _index_tensors(state, tensors)
        if not tensors:
            raise ValueError(f"the state has no tensors: {state!r}")
        first = tensors[0]
        for t in tensors:
            if not t.is_floating_point():
                instead = "solve for torch.view_as_real(z)" if t.is_complex() else "start from z0.float()"
                raise ValueError(f"the state must be real and floating point, got {t.dtype}; {instead}")
            if t.ndim < 1 or t.shape[0] != first.shape[0] or t.dtype != first.dtype or t.device != first.device:
                raise ValueError(
                    "all tensors of a state need the same batch size (axis 0), dtype and device, got "
                    + ", ".join(_summary(u) for u in tensors)
                )
        num_groups = 1
        if causal:
            if any(t.ndim < 2 or t.shape[1] != first.shape[1] for t in tensors):
                raise ValueError(
                    'group="prefix" needs states of shape (batch, positions, ...), got '
                    + ", ".join(str(tuple(t.shape)) for t in tensors)
                )
            num_groups = first.shape[1]
        return cls(structure, tuple(t.shape for t in tensors), first.dtype, first.device, num_groups)

    @property
    def batch_size(self) -> int:
        return self.shapes[0][0]

    @property
    def num_tokens(self) -> int:
        return self.shapes[0][1] if len(self.shapes[0]) > 1 else 1

    @property
    def work_dtype(self) -> torch.dtype:
        """Half-precision states are mixed and measured in float32; f still sees (and is judged at) the half state."""
        return torch.float32 if self.dtype.itemsize < 4 else self.dtype

    @property
    def _widths(self) -> list[int]:
        return [shape[1:].numel() // max(self.num_groups, 1) for shape in self.shapes]

    def pack(self, state: Any) -> Tensor:
        """One tensor (B, P, N) in the work dtype; a view of a single-tensor state wherever possible."""
        tensors: list[Tensor] = []
        _index_tensors(state, tensors)
        rows = [t.reshape(t.shape[0], self.num_groups, width) for t, width in zip(tensors, self._widths, strict=True)]
        row = rows[0] if len(rows) == 1 else torch.cat(rows, dim=2)
        return row.to(self.work_dtype)

    def unpack(self, packed_BPN: Tensor, *, give_away: bool = False) -> Any:
        """The inverse of `pack`, for any number of samples.

        Parts of what is given away, to which nobody else will refer, may be changed in place with gradients.
        """
        num_samples = packed_BPN.shape[0]
        row = packed_BPN.to(self.dtype)
        split = torch.unsafe_split_with_sizes if give_away else torch.split
        parts = [row] if len(self.shapes) == 1 else split(row, self._widths, dim=2)
        tensors = [p.reshape(num_samples, *s[1:]) for p, s in zip(parts, self.shapes, strict=True)]
        return _fill(self.structure, tensors)

    def check_output(self, output: Any, num_samples: int, *, autocast: bool) -> None:
        """Raise a ValueError that tells how f's result differs from its argument, if it does."""
        tensors: list[Tensor] = []
        structure = _index_tensors(output, tensors)
        if structure != self.structure:
            raise ValueError(
                f"f must return the structure of its state, {_describe(self.structure)}, got {_describe(structure)}"
            )
        for t, shape in zip(tensors, self.shapes, strict=True):
            expected = (num_samples, *shape[1:])
            if tuple(t.shape) != expected:
                raise ValueError(f"f must keep the shape of its state: expected {expected}, got {tuple(t.shape)}")
            if t.device != self.device:
                raise ValueError(f"f moved the state from {self.device} to {t.device}")
            if t.dtype != self.dtype and not (autocast and t.is_floating_point()):
                raise ValueError(
                    f"f turned the state from {self.dtype} into {t.dtype}; start from a z0 of the dtype f computes in"
                )


def map_tensors(function: Callable[[Tensor], Tensor], tree: Any) -> Any:
    """`tree` with every tensor replaced by `function` of it."""
    if isinstance(tree, Tensor):
        return function(tree)
    if isinstance(tree, Mapping):
        return _with_items(tree, {key: map_tensors(function, value) for key, value in tree.items()})
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return type(tree)(*(map_tensors(function, value) for value in tree))
    if isinstance(tree, tuple | list):
        return type(tree)(map_tensors(function, value) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return _with_fields(tree, {f: map_tensors(function, getattr(tree, f.name)) for f in dataclasses.fields(tree)})
    return tree


def _with_items(mapping: Mapping[Any, Any], items: dict[Any, Any]) -> Mapping[Any, Any]:
    """A mapping of the same type, which f may rely on (attributes for keys, ...), with other values."""
    if type(mapping) is dict or not isinstance(mapping, MutableMapping):
        return items
    other = copy.copy(mapping)
    for key, value in items.items():
        other[key] = value
    return other


def _with_fields(data: Any, fields: dict[dataclasses.Field[Any], Any]) -> Any:
    """A dataclass with other values in its fields, those too that its constructor does not take."""
    other = dataclasses.replace(data, **{field.name: value for field, value in fields.items() if field.init})
    for field, value in fields.items():
        if not field.init:
            object.__setattr__(other, field.name, value)
    return other


def select(tree: Any, index: Tensor) -> Any:
    """`tree` with every tensor cut down to the samples `index` (axis 0)."""
    return map_tensors(lambda t: t.index_select(0, index), tree)


OWNED = {"owned": True}
"""Metadata of a dataclass field whose tensor nobody else refers to, as a solver's memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Borrowed:
    """A part of a solver's state that is needed after the solve: whatever it is marked as, it is left as it is."""

    value: Any


def cut(tree: Any, index: Tensor) -> Any:
    """`select` for a tree that is not needed whole any more: fields marked as `OWNED` are cut in place.

    They may be most of what a solve holds, and hardly anything moves if `index` comes from `rows_left`.
    """
    if type(tree) is tuple:
        return tuple(cut(value, index) for value in tree)
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type | Borrowed):
        parts = {
            field.name: (_cut_in_place if "owned" in field.metadata else cut)(getattr(tree, field.name), index)
            for field in dataclasses.fields(tree)
        }
        return dataclasses.replace(tree, **parts)
    return select(tree, index)


def rows_left(done_B: Tensor, num_left: int) -> Tensor:
    """The rows that are not done, each in its place if there is room; those behind fill the others' places."""
    index = torch.arange(num_left, device=done_B.device)
    index[done_B[:num_left]] = num_left + torch.nonzero(~done_B[num_left:]).flatten()
    return index


def _cut_in_place(tensor: Tensor, index: Tensor) -> Tensor:
    moved = torch.nonzero(index != torch.arange(index.numel(), device=index.device)).flatten()
    tensor[moved] = tensor.index_select(0, index[moved])
    return tensor[: index.numel()]


def tensors_in(tree: Any) -> list[Tensor]:
    """Every tensor of a tuple, list, dict or dataclass, in order."""
    if isinstance(tree, Tensor):
        return [tree]
    if isinstance(tree, Mapping):
        return [t for value in tree.values() for t in tensors_in(value)]
    if isinstance(tree, tuple | list):
        return [t for value in tree for t in tensors_in(value)]
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        return [t for field in dataclasses.fields(tree) for t in tensors_in(getattr(tree, field.name))]
    return []


def check_batch_first(args: tuple[Any, ...], batch_size: int) -> None:
    for t in tensors_in(args):
        if t.ndim < 1 or t.shape[0] != batch_size:
            raise ValueError(
                f"tensors in args belong to samples and need the batch size {batch_size} of z0 on axis 0, got shape "
                f"{tuple(t.shape)}; let f close over tensors that all samples share"
            )


def _index_tensors(tree: Any, found: list[Tensor]) -> Any:
    if isinstance(tree, Tensor):
        found.append(tree)
        return len(found) - 1
    if isinstance(tree, Mapping):  # by sorted key: f may return its dict in another order
        places = {key: _index_tensors(tree[key], found) for key in sorted(tree, key=str)}
        return {key: places[key] for key in tree}
    if type(tree) is tuple:
        return tuple(_index_tensors(value, found) for value in tree)
    remedy = "; convert it with tuple()" if isinstance(tree, list | tuple) else ""
    raise ValueError(f"a state is a tensor or a plain tuple or dict of tensors, got {type(tree).__name__}{remedy}")


def _fill(structure: Any, tensors: list[Tensor]) -> Any:
    if isinstance(structure, int):
        return tensors[structure]
    if isinstance(structure, dict):
        return {key: _fill(value, tensors) for key, value in structure.items()}
    return tuple(_fill(value, tensors) for value in structure)


def _describe(structure: Any) -> str:
    if isinstance(structure, int):
        return "tensor"
    if isinstance(structure, dict):
        return "{" + ", ".join(f"{key!r}: {_describe(value)}" for key, value in structure.items()) + "}"
    return "(" + ", ".join(_describe(value) for value in structure) + ")"


def _summary(t: Tensor) -> str:
    return f"{tuple(t.shape)} {t.dtype} on {t.device}"
