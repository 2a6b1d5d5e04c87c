"""How far a long evaluation is, in a file: one that is interrupted goes on where it was."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from deqkit.train.checkpoint import flatten, unflatten

logger = logging.getLogger(__name__)


class Progress:
    """The state of a pass over data, written every so many seconds."""

    def __init__(self, path: Path, key: Mapping[str, Any], *, every: float = 30.0) -> None:
        """
        Args:
            key: what the pass is about, as plain values: the state of another pass is not taken up.
            every: seconds from one writing to the next.
        """
        self._path, self._key, self._every = path, json.dumps(key, sort_keys=True), every
        self._written = self._since = time.monotonic()
        self._seconds_before = 0.0
        self.interruptions = 0
        """How often the pass was taken up again."""

    @property
    def seconds(self) -> float:
        """What the pass has taken, without what was lost and what lay between an interruption and its end."""
        return self._seconds_before + time.monotonic() - self._since

    def load(self) -> tuple[int, Any] | None:
        """How many batches are done, and the state then; None if there is nothing to go on with."""
        if not self._path.exists():
            return None
        try:
            with safe_open(self._path, "pt") as file:
                metadata = file.metadata() or {}
                if metadata.get("key") != self._key:
                    return None
                tensors: dict[str, Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
            found = int(metadata["num_done"]), unflatten(tensors, json.loads(metadata["rest"]))
            self._seconds_before = float(metadata["seconds"])
            self.interruptions = int(metadata["interruptions"]) + 1
            return found
        except (SafetensorError, KeyError, ValueError) as error:
            logger.warning("%s is damaged (%s): the evaluation begins anew", self._path, error)
            return None

    def save(self, num_done: int, state: Any, *, force: bool = False) -> None:
        """Write the state if it is time to; the file is the old one or the new one, never half of it."""
        if not force and time.monotonic() - self._written < self._every:
            return
        tensors, rest = flatten(state, "state")
        metadata = {"key": self._key, "num_done": str(num_done), "rest": json.dumps(rest)}
        metadata |= {"seconds": str(self.seconds), "interruptions": str(self.interruptions)}
        partial = self._path.with_name(f".{self._path.name}.tmp")
        try:
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, partial, metadata)
            os.replace(partial, self._path)
        except (OSError, SafetensorError) as error:
            partial.unlink(missing_ok=True)
            raise OSError(f"{self._path}: how far the evaluation is could not be written: {error}") from error
        self._written = time.monotonic()

    def clear(self) -> None:
        """The pass is complete."""
        self._path.unlink(missing_ok=True)
