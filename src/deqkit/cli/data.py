"""`deqkit data ...`: raw text to a corpus folder, and what is in one."""

from __future__ import annotations

import dataclasses
import json
import math
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import tyro
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TransferSpeedColumn
from rich.table import Table

from deqkit.cli._command import Command
from deqkit.data import Corpus, PrepareConfig, open_corpus, prepare

TABLE_WIDTH = 120
SECONDS_BETWEEN_LINES = 10.0

Report = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True)
class DataPrepare(Command):
    """Turn raw text into a folder with a vocabulary, memory-mapped ids and a manifest."""

    dataset: Annotated[Literal["ptb", "wikitext-2", "wikitext-103", "enwik8", "text"], tyro.conf.Positional]
    """Which corpus; `text` is any text of your own."""
    out: Path
    """The folder to make."""
    source: Annotated[Path | None, tyro.conf.arg(name="from")] = None
    """Raw files: a folder with train, valid and test files, the file enwik8, or for text any file or folder."""
    download: bool = False
    """Fetch the raw files from the Hugging Face hub (or the one that HF_ENDPOINT names) instead of --from."""
    overwrite: bool = False
    """Replace a corpus that is in the folder, once the new one is complete."""
    word_counts: Path | None = None
    """wikitext: take the vocabulary from a file of `word count` lines (fairseq's dict.txt), not from the text."""
    tokens: Literal["bpe", "bytes"] | None = None
    """text: what a token is [default: bpe]."""
    vocab_size: int | None = None
    """text: size of the BPE vocabulary [default: 8192]."""
    vocabulary: Path | None = None
    """text: a corpus or a run whose BPE vocabulary to use, instead of learning one."""
    valid_share: float | None = None
    """text: part of the bytes, after train and before test, that is for validation [default: 0.05]."""
    test_share: float | None = None
    """text: part of the bytes, at the end, that is for testing [default: 0.05]."""
    json: bool = False
    """Print the manifest as JSON instead of a table."""

    def __post_init__(self) -> None:
        self._config()  # contradictory options are found before any work begins

    def run(self) -> int:
        with _progress() as report:
            corpus = prepare(self._config(), on_progress=report)
        _show(corpus, as_json=self.json)
        if not self.json:
            print(f"Corpus written to {self.out}")
        return 0

    def _config(self) -> PrepareConfig:
        names = [field.name for field in dataclasses.fields(PrepareConfig)]
        return PrepareConfig(**{name: getattr(self, name) for name in names})


@dataclass(frozen=True, kw_only=True)
class DataInfo(Command):
    """Tell what is in a corpus folder."""

    folder: Annotated[Path, tyro.conf.Positional]
    """A folder that `deqkit data prepare` made."""
    verify: bool = False
    """Compare the hash of every file with the manifest, not only its size."""
    json: bool = False
    """Print the manifest as JSON instead of a table."""

    def run(self) -> int:
        corpus = open_corpus(self.folder)
        if self.verify:
            with _progress() as report:
                corpus.verify(report)
        _show(corpus, as_json=self.json)
        if self.verify and not self.json:
            print("Every file has the hash it was made with.")
        return 0


def _show(corpus: Corpus, *, as_json: bool) -> None:
    manifest = corpus.manifest
    if as_json:
        print(json.dumps({**dataclasses.asdict(manifest), "data_hash": corpus.data_hash}, indent=1))
        return
    console = Console(width=None if sys.stdout.isatty() else TABLE_WIDTH, highlight=False, markup=False)
    unit = {"words": "words", "bytes": "bytes", "bpe": "byte-level BPE"}[manifest.level]
    published = {True: ", as published", False: ", not as published", None: ""}[manifest.as_published]
    console.print(f"{manifest.dataset}{published}: {unit}, vocabulary {manifest.vocab_size:,}", soft_wrap=True)
    console.print(_split_table(corpus))
    for note in manifest.notes:
        console.print(f"Note: {note}", soft_wrap=True)
    for name, value in manifest.options.items():
        console.print(f"{name.replace('_', ' ')}: {value}", soft_wrap=True)
    console.print(f"vocabulary fingerprint {manifest.fingerprint}", soft_wrap=True)


def _split_table(corpus: Corpus) -> Table:
    table = Table(box=SIMPLE_HEAD, pad_edge=False, collapse_padding=True)
    table.add_column("split", no_wrap=True)
    for name in ("tokens", "bytes of text", "bytes a token", "unknown words"):
        table.add_column(name, justify="right", no_wrap=True)
    for name, split in corpus.manifest.splits.items():
        ratio = f"{split.num_text_bytes / split.num_tokens:.2f}" if split.num_tokens else "-"
        table.add_row(name, f"{split.num_tokens:,}", f"{split.num_text_bytes:,}", ratio, f"{split.num_unknown:,}")
    return table


@contextmanager
def _progress() -> Iterator[Report]:
    """A bar on a terminal, or a line now and then in a log."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield _ProgressLines()
        return
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        yield _ProgressBar(progress)


class _ProgressBar:
    """One bar, which starts again with every new task, so that the speed is that of the task."""

    def __init__(self, progress: Progress) -> None:
        self._progress = progress
        self._task: Any = None
        self._description = ""

    def __call__(self, description: str, num_done: int, num_total: int) -> None:
        if self._task is None or description != self._description:
            if self._task is not None:
                self._progress.remove_task(self._task)
            self._task = self._progress.add_task(description, total=num_total)
            self._description = description
        self._progress.update(self._task, completed=num_done, total=num_total)


class _ProgressLines:
    """Prints the start of a task, and then a line every few seconds."""

    def __init__(self) -> None:
        self._description, self._last = "", -math.inf

    def __call__(self, description: str, num_done: int, num_total: int) -> None:
        now = time.monotonic()
        if description != self._description or now - self._last > SECONDS_BETWEEN_LINES:
            self._description, self._last = description, now
            share = f" ({num_done / num_total:.0%})" if num_done and num_total else ""
            print(f"deqkit: {description}{share}", file=sys.stderr)
