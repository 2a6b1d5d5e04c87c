"""The public copies of the corpora, fetched through `huggingface_hub` and turned into plain text files."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from deqkit.data._datasets import Dataset, HubCopy
from deqkit.data._error import DataError
from deqkit.data._files import DISK_FULL, sha256_of
from deqkit.data._manifest import FileRecord
from deqkit.data._reading import OnProgress

_SHA256 = re.compile(r"[0-9a-f]{64}")


def fetch(dataset: Dataset, into: Path, *, on_progress: OnProgress) -> list[FileRecord]:
    """Fetch the raw files of a corpus, from the hub that HF_ENDPOINT names or huggingface.co.

    The hub client keeps what it fetched in its own cache (HF_HOME), so a second call does not fetch again.

    Args:
        dataset: The corpus; it has a copy on the hub.
        into: An existing folder, which gets `train.txt`, `valid.txt` and `test.txt`, or the one file `enwik8`.
        on_progress: Told of every file.

    Returns:
        The files as they are on the hub, with their hashes.

    Raises:
        DataError: A file could not be fetched, or is not what the hub says it is.
    """
    assert dataset.hub is not None, "only called for corpora with a public copy"
    records = []
    for split, names in dataset.hub.files.items():
        target = into / ("enwik8" if split == "all" else f"{split}.txt")
        for name in names:
            path = _fetch_file(dataset.hub, name, on_progress)
            records.append(_checked_record(dataset.hub, name, path))
            _append_text(path, dataset.hub.column, target, as_lines=split != "all")
    return records


def _fetch_file(hub: HubCopy, name: str, on_progress: OnProgress) -> Path:
    try:
        from huggingface_hub import errors, hf_hub_download
    except ImportError:
        raise DataError('--download needs huggingface_hub and pyarrow: pip install "deqkit[hf]"') from None
    endpoint = os.environ.get("HF_ENDPOINT") or None  # read now: the hub client reads it only when first imported
    try:
        fetched = hf_hub_download(
            hub.repo,
            name,
            repo_type="dataset",
            revision=hub.revision,
            endpoint=endpoint,
            token=False,  # the copies are public, so nobody's token is sent
            tqdm_class=_bar_class(lambda done, total: on_progress(f"fetching {name}", done, total)),
        )
    except (OSError, ValueError, RuntimeError, getattr(errors, "HTTPError", OSError)) as error:
        # The last is what the HTTP library of newer clients raises; that of older ones raises OSErrors.
        if isinstance(error, OSError) and error.errno in DISK_FULL:
            raise
        where = endpoint or "https://huggingface.co"
        raise DataError(
            f"could not fetch {name} of {hub.repo} from {where} ({_reason(error)}); "
            "try again, or give files with --from"
        ) from error
    return Path(fetched)


def _reason(error: BaseException) -> str:
    """The first line of what was wrong in the first place."""
    while error.__cause__ is not None:
        error = error.__cause__
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _bar_class(report: Callable[[int, int], None]) -> type:
    """A tqdm bar that shows nothing and reports bytes done and in all."""
    from tqdm import tqdm

    class SilentBar(tqdm):
        def __init__(self, *args: Any, **kwargs: Any) -> None:
            self._done, self._size = kwargs.get("initial") or 0, kwargs.get("total") or 0
            super().__init__(*args, **{**kwargs, "disable": True})

        def update(self, n: float | None = 1) -> bool | None:
            self._done += int(n or 0)
            report(self._done, self._size)
            return super().update(n)

    return SilentBar


def _checked_record(hub: HubCopy, name: str, path: Path) -> FileRecord:
    """The file's record, after comparing its hash with the hub's.

    The client names a file in its cache by the hub's tag, which is the sha256 of a large file; its commit is the
    folder above the file's path in the repository.
    """
    digest, tag = sha256_of(path), path.resolve().name
    if _SHA256.fullmatch(tag) and tag != digest:
        raise DataError(f"{path.resolve()} has sha256 {digest}, not {tag}: a damaged download; delete it and try again")
    commit = path.parents[name.count("/")].name
    return FileRecord(name=f"{hub.repo}@{commit}/{name}", num_bytes=path.stat().st_size, sha256=digest)


def _append_text(path: Path, column: str, target: Path, *, as_lines: bool) -> None:
    """Add the texts in a column of a Parquet file to a text file, each as a line or as they are."""
    with target.open("a", encoding="utf-8", newline="") as file:
        for texts in _read_column(path, column):
            file.writelines(text.rstrip("\n") + "\n" if as_lines else text for text in texts)


def _read_column(path: Path, column: str) -> Iterator[list[str]]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError:
        raise DataError('--download needs huggingface_hub and pyarrow: pip install "deqkit[hf]"') from None
    try:
        for batch in parquet.ParquetFile(path).iter_batches(batch_size=4096, columns=[column]):
            yield batch.column(0).to_pylist()
    except (pyarrow.ArrowException, IndexError) as error:
        raise DataError(f"{path} is no Parquet file with a column {column!r} ({error})") from None
