"""`manifest.json`: what a corpus folder holds, how it was made, and the hashes that show it is unchanged."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from tokenizers import Tokenizer

from deqkit.data._error import DataError
from deqkit.data._files import MANIFEST_NAME

FORMAT = "deqkit-corpus"
VERSION = 1
TOKENIZER_NAME = "tokenizer.json"
SPLITS = ("train", "valid", "test")

Level = Literal["words", "bytes", "bpe"]


@dataclass(frozen=True, kw_only=True, slots=True)
class FileRecord:
    """A file and its hash."""

    name: str
    """Name inside the folder, or of a source."""
    num_bytes: int
    """Its size."""
    sha256: str
    """Hash of its content."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SplitRecord:
    """One of train, valid, test."""

    name: str
    """File of the ids inside the folder."""
    num_tokens: int
    """How many ids it holds."""
    num_text_bytes: int
    """Bytes of raw text the ids stand for: nats / num_text_bytes / ln 2 are bits per byte."""
    num_unknown: int
    """Words of the text that are not in the vocabulary and became `<unk>`."""
    sha256: str
    """Hash of the file of ids."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Everything about a corpus that is not its ids or its words."""

    dataset: str
    """What it is: ptb, wikitext-2, wikitext-103, enwik8, text or embedded."""
    level: Level
    """What a token is."""
    lowercase: bool
    """Words were lower-cased."""
    dtype: str
    """Of the ids in the files, as numpy writes it: "<u2" or "<u4"."""
    vocab_size: int
    """How many different ids there can be."""
    fingerprint: str
    """Hash of the vocabulary: equal for two corpora exactly when ids mean the same in both."""
    vocabulary: FileRecord | None
    """The tokenizer's file; None for a corpus in memory."""
    splits: dict[str, SplitRecord]
    """The parts, by name."""
    sources: tuple[FileRecord, ...] = ()
    """The raw files."""
    options: dict[str, Any] = field(default_factory=dict)
    """Choices made by the user or by default, among them where the text was split."""
    notes: tuple[str, ...] = ()
    """What the user should know, such as words that were not in the vocabulary."""
    as_published: bool | None = None
    """Whether tokens and vocabulary are those of the published corpus; None where nothing is published."""
    made_with: dict[str, str] = field(default_factory=dict)
    """Versions of the software."""

    def to_json(self) -> str:
        return json.dumps({"format": FORMAT, "version": VERSION, **dataclasses.asdict(self)}, indent=1) + "\n"


def read_manifest(folder: Path) -> Manifest:
    """Read and check the manifest of a corpus folder.

    Raises:
        DataError: There is no corpus, or its manifest is damaged.
    """
    path = folder / MANIFEST_NAME
    if not folder.exists():
        raise DataError(f"{folder} does not exist; name a corpus that `deqkit data prepare` made")
    if folder.is_file():
        raise DataError(f"{folder} is a file, not a corpus; make one of it with `deqkit data prepare`")
    if not path.is_file():
        raise DataError(f"{folder} holds no corpus ({MANIFEST_NAME} is missing); make one with `deqkit data prepare`")
    try:
        values = json.loads(path.read_text(encoding="utf-8"))
        if values.pop("format") != FORMAT or values.pop("version") != VERSION:
            raise DataError(f"{path} is not a corpus of this version of deqkit; prepare the corpus again")
        manifest = _from_values(values)
        np.dtype(manifest.dtype)
    except DataError:
        raise
    except (ValueError, TypeError, KeyError, AttributeError) as error:
        raise DataError(f"{path} is damaged ({error}); prepare the corpus again") from None
    return manifest


def _from_values(values: dict[str, Any]) -> Manifest:
    vocabulary = values.pop("vocabulary")
    return Manifest(
        vocabulary=None if vocabulary is None else FileRecord(**vocabulary),
        splits={name: SplitRecord(**record) for name, record in values.pop("splits").items()},
        sources=tuple(FileRecord(**record) for record in values.pop("sources")),
        notes=tuple(values.pop("notes")),
        **values,
    )


def vocabulary_fingerprint(tokenizer: Tokenizer, *, level: Level, lowercase: bool) -> str:
    """Hash of what ids mean: the tokens in order of their ids, the merges, and how text is cut before.

    Not the hash of the tokenizer's file, whose layout may change with the version of `tokenizers`.
    """
    words = sorted(tokenizer.get_vocab().items(), key=lambda item: item[1])
    merges = json.loads(tokenizer.to_str())["model"].get("merges", []) if level == "bpe" else []
    pairs = [pair if isinstance(pair, str) else " ".join(pair) for pair in merges]  # older versions join them
    meaning = [level, lowercase, words, pairs]
    return hashlib.sha256(json.dumps(meaning).encode()).hexdigest()


def data_hash(fingerprint: str, splits: Mapping[str, SplitRecord], names: Sequence[str] = SPLITS) -> str:
    """One hash of a whole corpus: vocabulary and ids."""
    parts = [fingerprint, *(splits[name].sha256 for name in names if name in splits)]
    return hashlib.sha256(" ".join(parts).encode()).hexdigest()
