"""Folders that appear complete or not at all, and files that know their hash."""

from __future__ import annotations

import contextlib
import errno
import hashlib
import os
import secrets
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from deqkit.data._error import DataError

MANIFEST_NAME = "manifest.json"
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


def sha256_of(path: Path) -> str:
    """The hash of a file's content, read in blocks."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def ids_dtype(vocab_size: int) -> np.dtype:
    """Two bytes an id where the vocabulary fits, otherwise four; little-endian on every machine."""
    return np.dtype("<u2" if vocab_size <= 1 << 16 else "<u4")


class IdsWriter:
    """Writes ids to a file, one array after the other, and keeps their number and hash."""

    def __init__(self, path: Path, *, dtype: np.dtype) -> None:
        self.path = path
        self._dtype = dtype
        self._file = path.open("wb")
        self._hash = hashlib.sha256()
        self.num_tokens = 0

    def write(self, ids: np.ndarray) -> None:
        block = np.ascontiguousarray(ids, dtype=self._dtype)
        self._hash.update(block.data)
        self._file.write(block.data)
        self.num_tokens += block.size

    @property
    def sha256(self) -> str:
        return self._hash.hexdigest()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._file.close()


@contextlib.contextmanager
def staged_folder(out: Path, *, overwrite: bool) -> Iterator[Path]:
    """Give a temporary folder to fill; it becomes `out` if the block ends well and vanishes if not.

    Args:
        out: The folder to make. A folder that has files in it is refused.
        overwrite: Replace a corpus that is there, once the new one is complete.

    Raises:
        DataError: `out` is in the way.
    """
    out = out.resolve()
    _check_target(out, overwrite=overwrite)
    # In the nearest folder that exists, hence on the same disk as a rule, so that the last step is a rename.
    anchor = next(parent for parent in out.parents if parent.is_dir())
    staging = anchor / f".{out.name}.{secrets.token_hex(4)}.tmp"
    retired = staging.with_suffix(".old")
    try:
        staging.mkdir()
        yield staging
        _install(staging, out, retired=retired)
    except OSError as error:
        if error.errno in DISK_FULL:
            raise OSError(error.errno, f"no space left for {out}; nothing was written") from error
        raise
    finally:
        shutil.rmtree(staging, ignore_errors=True)
        if out.exists():
            shutil.rmtree(retired, ignore_errors=True)


def _check_target(out: Path, *, overwrite: bool) -> None:
    if not out.exists():
        return
    if not out.is_dir():
        raise DataError(f"{out} is a file; name a folder to write the corpus to")
    if not any(out.iterdir()):
        return
    if not overwrite:
        raise DataError(f"{out} is not empty; choose another folder, or replace the corpus in it with --overwrite")
    if not (out / MANIFEST_NAME).is_file():
        raise DataError(f"{out} holds files but no corpus ({MANIFEST_NAME}), so it is not replaced; remove it yourself")


def _install(staging: Path, out: Path, *, retired: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    if not out.exists():
        os.rename(staging, out)
        return
    try:
        os.rename(out, retired)
        os.rename(staging, out)
    except BaseException:
        if retired.exists() and not out.exists():
            os.rename(retired, out)
        raise
