"""Checkpoints: folders of safetensors and JSON that exist complete or not at all."""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import safetensors
import safetensors.torch
from torch import Tensor

from deqkit.data._files import sha256_of
from deqkit.model.weights import WeightsError, read_tensors

_NAME = re.compile(r"step-(\d{8})")
_PARTIAL = ".partial-"
_HASHES = "sha256.json"


class CheckpointError(ValueError):
    """A checkpoint that is missing, damaged or of another run."""


class CheckpointWriter:
    """Writes one checkpoint: files first, under another name, and then the name.

    With several processes each adds its own files between `begin` and `commit`, which the first one calls.
    """

    def __init__(self, folder: Path, step: int) -> None:
        self.final = folder / f"step-{step:08d}"
        self.partial = folder / f"{_PARTIAL}{self.final.name}"

    def begin(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)
        self.partial.mkdir(parents=True)

    def add_tensors(self, name: str, tensors: Mapping[str, Tensor]) -> None:
        path = self.partial / name
        try:
            safetensors.torch.save_file({key: t.detach().cpu().contiguous() for key, t in tensors.items()}, path)
        except safetensors.SafetensorError as error:  # a full disk, which it does not report as an OSError
            raise OSError(f"{path} could not be written: {error}") from error
        _sync(path)

    def add_json(self, name: str, record: Mapping[str, Any]) -> None:
        path = self.partial / name
        path.write_text(json.dumps(record, indent=1, allow_nan=False), encoding="utf-8")
        _sync(path)

    def commit(self) -> Path:
        self.add_json(_HASHES, {path.name: sha256_of(path) for path in sorted(self.partial.iterdir())})
        if self.final.exists():  # the same step of the same run, written before an interruption
            _remove(self.final)
        _sync(self.partial)
        os.rename(self.partial, self.final)
        _sync(self.final.parent)
        return self.final

    def abandon(self) -> None:
        shutil.rmtree(self.partial, ignore_errors=True)


def list_checkpoints(folder: Path) -> list[tuple[int, Path]]:
    """Complete checkpoints with their steps, in order."""
    found = [(int(match[1]), path) for path in folder.glob("step-*") if (match := _NAME.fullmatch(path.name))]
    return sorted(found)


def find_checkpoint(folder: Path, which: str | int = "latest") -> Path:
    """A checkpoint: "latest", "best", or that of a step."""
    found = dict(list_checkpoints(folder))
    if not found:
        raise CheckpointError(f"{folder} has no checkpoint: the run ended before the first was written")
    if which == "latest":
        return found[max(found)]
    step = read_state(found[max(found)])["best_step"] if which == "best" else which
    if step not in found:
        steps = ", ".join(map(str, found))
        raise CheckpointError(f"{folder} has no checkpoint {which!r}; there are those of steps {steps}")
    return found[step]


def read_state(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint records besides tensors."""
    return read_json(checkpoint, "state.json")


def read_json(checkpoint: Path, name: str) -> dict[str, Any]:
    path = checkpoint / name
    try:
        _require_unchanged(checkpoint, name)
        record = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, json.JSONDecodeError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path} cannot be read ({error}); remove {checkpoint} to use the one before") from error
    if not isinstance(record, dict):
        raise CheckpointError(f"{path} does not hold an object; remove {checkpoint} to use the one before")
    return record


def read_checkpoint_tensors(checkpoint: Path, name: str) -> dict[str, Tensor]:
    try:
        tensors = read_tensors(checkpoint / name)
    except WeightsError as error:
        raise CheckpointError(f"{error}; remove {checkpoint} to use the one before") from error
    _require_unchanged(checkpoint, name)
    return tensors


def _require_unchanged(checkpoint: Path, name: str) -> None:
    """Compare a file with the hash it was written with; checkpoints of earlier versions have none."""
    hashes = {} if name == _HASHES or not (checkpoint / _HASHES).exists() else read_json(checkpoint, _HASHES)
    if name in hashes and (checkpoint / name).exists() and sha256_of(checkpoint / name) != hashes[name]:
        raise CheckpointError(
            f"{checkpoint / name} was changed since it was written; remove {checkpoint} to use the one before"
        )


def prune(folder: Path, *, keep: int, best_step: int | None) -> None:
    """Remove all but the latest and the best, and what interrupted writes left."""
    for partial in folder.glob(f"{_PARTIAL}*"):
        shutil.rmtree(partial, ignore_errors=True)
    for step, path in list_checkpoints(folder)[:-keep]:
        if step != best_step:
            _remove(path)


def flatten(tree: Any, prefix: str = "") -> tuple[dict[str, Tensor], Any]:
    """Split a tree of dicts, lists, tensors and plain values into named tensors and the rest."""
    if isinstance(tree, Tensor):
        return {prefix: tree}, {"tensor": prefix}
    if isinstance(tree, Mapping):
        parts = {str(key): flatten(value, f"{prefix}.{key}") for key, value in tree.items()}
        tensors = {name: t for found, _ in parts.values() for name, t in found.items()}
        return tensors, {"dict": {key: rest for key, (_, rest) in parts.items()}}
    if isinstance(tree, list | tuple):
        items = [flatten(value, f"{prefix}.{i}") for i, value in enumerate(tree)]
        return {name: t for found, _ in items for name, t in found.items()}, {"list": [rest for _, rest in items]}
    return {}, {"value": tree}


def unflatten(tensors: Mapping[str, Tensor], rest: Any) -> Any:
    """The tree that `flatten` split; keys are strings and sequences lists."""
    ((kind, content),) = rest.items()
    if kind == "tensor":
        return tensors[content]
    if kind == "dict":
        return {key: unflatten(tensors, value) for key, value in content.items()}
    if kind == "list":
        return [unflatten(tensors, value) for value in content]
    return content


def _remove(checkpoint: Path) -> None:
    """Take the name away first: whatever stops the removal, no half of a checkpoint passes for a whole."""
    doomed = checkpoint.with_name(f"{_PARTIAL}old-{checkpoint.name}")
    shutil.rmtree(doomed, ignore_errors=True)
    os.rename(checkpoint, doomed)
    shutil.rmtree(doomed)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
