"""A corpus: a vocabulary and the ids of train, valid and test, memory-mapped from a folder or held in memory."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import final

import numpy as np
from tokenizers import Tokenizer

from deqkit.data._error import DataError, VocabularyMismatchError
from deqkit.data._files import MANIFEST_NAME, sha256_of, staged_folder
from deqkit.data._manifest import TOKENIZER_NAME, FileRecord, Manifest, data_hash, read_manifest
from deqkit.data._reading import Meter, OnProgress, no_progress, read_blocks, whole
from deqkit.data._words import WordEncoder, join_words


@final
class Corpus:
    """Text as ids, with the vocabulary that says what they mean. Made by `open_corpus` or `embedded_corpus`.

    Attributes:
        manifest: Counts, hashes and options.
        vocabulary: The tokenizer, of the `tokenizers` library.
        folder: Where the files are; None for a corpus in memory.
    """

    def __init__(
        self,
        manifest: Manifest,
        *,
        vocabulary: Tokenizer,
        splits: Mapping[str, np.ndarray],
        folder: Path | None = None,
    ) -> None:
        self.manifest = manifest
        self.vocabulary = vocabulary
        self.folder = folder
        self._splits = dict(splits)

    @property
    def vocab_size(self) -> int:
        """How many different ids there can be."""
        return self.manifest.vocab_size

    @property
    def fingerprint(self) -> str:
        """Hash of the vocabulary, to be stored with a model: see `check_vocabulary`."""
        return self.manifest.fingerprint

    @property
    def data_hash(self) -> str:
        """Hash of the vocabulary and all ids, to be stored with a run."""
        return data_hash(self.fingerprint, self.manifest.splits)

    def is_made_from(self, text: Path) -> bool:
        """Whether this file, as it is now, is what the corpus was prepared from."""
        return [source.sha256 for source in self.manifest.sources] == [sha256_of(text)]

    def split(self, name: str) -> np.ndarray:
        """The ids of "train", "valid" or "test": one dimension, read-only, memory-mapped when from a folder."""
        if name not in self._splits:
            there = f"there are {', '.join(self._splits)}" if self._splits else "it is a vocabulary without text"
            raise DataError(f"there is no split {name!r}; {there}")
        return self._splits[name]

    def encode(self, text: str) -> list[int]:
        """The ids of a text. At word level a line's end is `<eos>`, and none is added after the last line.

        Raises:
            DataError: A word is not in the vocabulary, which has no `<unk>`; names the word and the line.
        """
        if self.manifest.level == "bytes":
            return list(text.encode("utf-8"))
        if self.manifest.level == "bpe":
            return self.vocabulary.encode(text).ids
        unified = text.replace("\r\n", "\n").replace("\r", "\n")
        encoder = WordEncoder(self._ids_of_words, dtype=np.dtype(np.int64))
        return encoder.encode(unified.lower() if self.manifest.lowercase else unified, source="the text").tolist()

    def decode(self, ids: Iterable[int]) -> str:
        """The text of some ids. Bytes that are no UTF-8, as in a character cut in two, become U+FFFD.

        Raises:
            DataError: An id is not in the vocabulary.
        """
        plain = [int(index) for index in ids]
        if plain and not 0 <= min(plain) <= max(plain) < self.vocab_size:
            raise DataError(f"ids go from 0 to {self.vocab_size - 1}, got {min(plain)} to {max(plain)}")
        if self.manifest.level == "bytes":
            return bytes(plain).decode("utf-8", errors="replace")
        if self.manifest.level == "bpe":
            return self.vocabulary.decode(plain, skip_special_tokens=False)
        return join_words(self._words[index] for index in plain)

    def save_vocabulary(self, folder: Path) -> None:
        """Write a corpus without text: all that it takes to encode and decode. The folder is complete or not there.

        Raises:
            DataError: The folder has files in it.
        """
        with staged_folder(folder, overwrite=False) as staging:
            path = staging / TOKENIZER_NAME
            path.write_text(self.vocabulary.to_str(), encoding="utf-8")
            record = FileRecord(name=TOKENIZER_NAME, num_bytes=path.stat().st_size, sha256=sha256_of(path))
            manifest = dataclasses.replace(self.manifest, vocabulary=record, splits={}, sources=(), notes=())
            (staging / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")

    def verify(self, on_progress: OnProgress = no_progress) -> None:
        """Compare the hash of every file with the manifest; opening compares sizes only.

        Raises:
            DataError: A file was changed.
        """
        if self.folder is None:
            return
        for record in self.manifest.splits.values():
            path, digest = self.folder / record.name, hashlib.sha256()
            meter = Meter(on_progress, description=f"checking {record.name}", num_total=path.stat().st_size)
            for block in read_blocks([whole(path)], meter):
                digest.update(block)
            if digest.hexdigest() != record.sha256:
                raise DataError(f"{path} was changed since it was made; prepare the corpus again")

    @functools.cached_property
    def _ids_of_words(self) -> dict[str, int]:
        return self.vocabulary.get_vocab()

    @functools.cached_property
    def _words(self) -> list[str]:
        return sorted(self._ids_of_words, key=self._ids_of_words.__getitem__)


def open_corpus(folder: str | Path) -> Corpus:
    """Open a corpus that `deqkit data prepare` made.

    The size of every file and the hash of the vocabulary are compared with the manifest; `Corpus.verify` compares the
    hashes of the ids too.

    Raises:
        DataError: There is no corpus, or a file is missing, cut short or changed.
    """
    folder = Path(folder)
    manifest = read_manifest(folder)
    splits = {
        name: _map_ids(folder / record.name, num_tokens=record.num_tokens, dtype=np.dtype(manifest.dtype))
        for name, record in manifest.splits.items()
    }
    vocabulary = _read_vocabulary(folder, manifest.vocabulary)
    if vocabulary.get_vocab_size() != manifest.vocab_size:
        raise DataError(f"{folder}: the vocabulary has {vocabulary.get_vocab_size()} tokens, not {manifest.vocab_size}")
    return Corpus(manifest, vocabulary=vocabulary, splits=splits, folder=folder)


def check_vocabulary(corpus: Corpus, expected_fingerprint: str) -> None:
    """Refuse a corpus whose ids mean something else than those a model was trained with.

    Args:
        corpus: What is to be fed to the model.
        expected_fingerprint: `Corpus.fingerprint` of the training corpus, from the checkpoint.

    Raises:
        VocabularyMismatchError: The vocabularies differ.
    """
    if corpus.fingerprint != expected_fingerprint:
        where = corpus.folder or f"the {corpus.manifest.dataset} corpus"
        raise VocabularyMismatchError(
            f"the vocabulary of {where} (fingerprint {corpus.fingerprint[:12]}) is not the one the model was trained "
            f"with ({expected_fingerprint[:12]}); prepare the corpus with the same dataset and options"
        )


def _map_ids(path: Path, *, num_tokens: int, dtype: np.dtype) -> np.ndarray:
    _check_size(path, num_tokens * dtype.itemsize)
    return np.memmap(path, dtype=dtype, mode="r") if num_tokens else np.zeros(0, dtype=dtype)


def _read_vocabulary(folder: Path, record: FileRecord | None) -> Tokenizer:
    if record is None:
        raise DataError(f"{folder}: the manifest names no vocabulary; prepare the corpus again")
    path = folder / record.name
    _check_size(path, record.num_bytes)
    if sha256_of(path) != record.sha256:  # small, so always compared: a changed vocabulary changes what ids mean
        raise DataError(f"{path} was changed since it was made; prepare the corpus again")
    return Tokenizer.from_file(str(path))


def _check_size(path: Path, expected: int) -> None:
    if not path.is_file():
        raise DataError(f"{path} is missing; prepare the corpus again")
    size = path.stat().st_size
    if size != expected:
        change = "cut short" if size < expected else "changed"
        raise DataError(f"{path} was {change}: {size:,} bytes instead of {expected:,}; prepare the corpus again")
