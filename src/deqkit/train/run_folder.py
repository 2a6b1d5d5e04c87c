"""A run is a folder: config.json, metrics.jsonl, checkpoints/, events for TensorBoard, report.html."""

from __future__ import annotations

import fcntl
import json
import os
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import deqkit
from deqkit.analysis.results import git_commit, write_results
from deqkit.train.config import TrainConfig, from_plain, to_plain

_CONFIG = "config.json"


class RunError(ValueError):
    """A run folder that cannot be used, in one line with the remedy."""


class RunFolder:
    """Where things are in a run, and its configuration."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)

    @property
    def checkpoints(self) -> Path:
        return self.path / "checkpoints"

    @property
    def metrics(self) -> Path:
        return self.path / "metrics.jsonl"

    @property
    def vocabulary(self) -> Path:
        """A corpus without text: what encodes and decodes for the model, wherever the run is taken."""
        return self.path / "vocabulary"

    @property
    def events(self) -> Path:
        return self.path / "events"

    def create(self, config: TrainConfig, *, data_hash: str) -> None:
        """Start a new run here.

        Raises:
            RunError: there is something already.
            ValueError: the configuration could not be read back.
        """
        self.require_free()
        plain = to_plain(config)
        _require_readable(plain)
        record = {
            "deqkit": deqkit.__version__,
            "torch": torch.__version__,
            "commit": git_commit(),
            "data_sha256": data_hash,
            "config": plain,
        }
        write_results(self.path / _CONFIG, record)  # from this moment on there is a run, which can be resumed
        self.checkpoints.mkdir(exist_ok=True)

    def require_free(self) -> None:
        """Raise a RunError if there is something here already."""
        if self.path.exists() and not self.path.is_dir():
            raise RunError(f"{self.path} is a file: pass another --out")
        if (self.path / _CONFIG).exists():
            again = shlex.quote(str(self.path))
            raise RunError(f"{self.path} exists already: pass --resume {again} to continue it, or another --out")
        if self.path.exists() and any(self._content()):
            raise RunError(f"{self.path} has files in it that are not of a run: pass another --out")

    def _content(self) -> Iterator[Path]:
        """What is in the folder, apart from what a kill in the middle of `create` leaves."""
        return (path for path in self.path.iterdir() if not path.name.startswith(f".{_CONFIG}."))

    def read(self) -> dict[str, Any]:
        """What `config.json` records."""
        path = self.path / _CONFIG
        try:
            record = json.loads(path.read_text(encoding="utf-8"))
        except (FileNotFoundError, NotADirectoryError):
            raise RunError(f"{self.path} is not a run: it has no config.json") from None
        except (json.JSONDecodeError, UnicodeDecodeError) as error:
            raise RunError(f"{path} is damaged: {error}") from error
        if not isinstance(record, dict) or "config" not in record:
            raise RunError(f"{path} does not hold the configuration of a run")
        return record

    def config(self) -> TrainConfig:
        try:
            return from_plain(self.read()["config"])
        except RunError:
            raise
        except ValueError as error:
            raise RunError(f"{self.path / _CONFIG}: {error}") from error


def _require_readable(plain: Any) -> None:
    """Or a training to its end could be neither resumed nor loaded."""
    try:
        again = to_plain(from_plain(json.loads(json.dumps(plain))))
    except (TypeError, ValueError) as error:
        raise ValueError(f"this configuration cannot be kept in a file: {error}") from error
    if again != json.loads(json.dumps(plain)):
        raise ValueError(f"this configuration would be read back as another one: {again} instead of {plain}")


class MetricsFile:
    """One JSON object a line, and the lock of the run. Cut back when a run is resumed, so that no line occurs twice."""

    def __init__(self, path: Path) -> None:
        self._path, self._is_new = path, not path.exists()
        self._file = path.open("a", encoding="utf-8")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)  # until the file is closed, or the process ends
        except BlockingIOError:
            self._file.close()
            raise RunError(f"{path.parent} is being trained by another process: wait for it, or stop it") from None

    def cut(self, size: int) -> None:
        """Go on after so many bytes.

        Raises:
            RunError: there are fewer.
        """
        if self._path.stat().st_size < size:
            if self._is_new:
                self._path.unlink()
            raise RunError(
                f"{self._path} is missing or shorter than when the latest checkpoint was written: put it back, or "
                "remove that checkpoint to go on from the one before"
            )
        os.truncate(self._path, size)

    def write(self, record: dict[str, Any]) -> None:
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()

    def synced_size(self) -> int:
        """The size of the file, all of which is on disk."""
        os.fsync(self._file.fileno())
        return os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        self._file.close()


def read_metrics(path: Path) -> Iterator[dict[str, Any]]:
    """The records of a metrics file; a last line that a kill cut short is left out."""
    if not path.exists():
        return
    with path.open(encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if line.endswith("\n"):
                try:
                    yield json.loads(line)
                except json.JSONDecodeError as error:
                    raise RunError(f"line {number} of {path} is damaged ({error}): put the file back") from error
