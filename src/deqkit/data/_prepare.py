"""`deqkit data prepare`: raw files to a folder with a vocabulary, memory-mapped ids and a manifest."""

from __future__ import annotations

import importlib.metadata
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import tokenizers

from deqkit.data._building import Built, build_enwik8, build_text, build_words
from deqkit.data._datasets import DATASETS, Dataset, DatasetName, differences, find_split_files, find_text_files
from deqkit.data._error import DataError
from deqkit.data._files import MANIFEST_NAME, ids_dtype, sha256_of, staged_folder
from deqkit.data._manifest import TOKENIZER_NAME, FileRecord, Manifest, vocabulary_fingerprint
from deqkit.data._reading import OnProgress, no_progress
from deqkit.data.corpus import Corpus, open_corpus
from deqkit.data.download import fetch

DEFAULT_VOCAB_SIZE = 8192
DEFAULT_SHARE = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class PrepareConfig:
    """What to prepare, and how."""

    dataset: DatasetName
    """Which corpus; "text" is any text of the user's own."""
    out: Path
    """The folder to make."""
    source: Path | None = None
    """Raw files: the folder with train, valid and test (ptb, wikitext), the file (enwik8), a file or folder (text)."""
    download: bool = False
    """Fetch the raw files from the Hugging Face hub instead."""
    overwrite: bool = False
    """Replace a corpus that is there, once the new one is complete."""
    word_counts: Path | None = None
    """File of `word count` lines that gives the vocabulary of a wikitext corpus, whatever of its text is there."""
    tokens: Literal["bpe", "bytes"] | None = None
    """What a token of "text" is; BPE if left out."""
    vocab_size: int | None = None
    """Size of a BPE vocabulary; 8192 if left out."""
    vocabulary: Path | None = None
    """A corpus or a run whose vocabulary "text" is to be encoded with, instead of one of its own."""
    valid_share: float | None = None
    """Part of "text", after train and before test, that is for validation; 0.05 if left out."""
    test_share: float | None = None
    """Part of "text", at its end, that is for testing; 0.05 if left out."""

    def __post_init__(self) -> None:
        if self.dataset not in DATASETS:
            raise ValueError(f"dataset must be one of {', '.join(DATASETS)}, got {self.dataset!r}")
        if (self.source is None) != self.download:
            raise ValueError("give either the raw files with --from or --download")
        if self.download and DATASETS[self.dataset].hub is None:
            raise ValueError(f"{self.dataset} has no public source to download; give the files with --from")
        self._check_which_options_apply()
        self._check_values()

    def _check_which_options_apply(self) -> None:
        of_text = ("tokens", "vocab_size", "vocabulary", "valid_share", "test_share")
        given = [name for name in of_text if getattr(self, name) is not None]
        if given and self.dataset != "text":
            raise ValueError(f"{_options(given)} is for text only, not for {self.dataset}")
        if self.word_counts is not None and not self.dataset.startswith("wikitext"):
            raise ValueError(f"--word-counts is for wikitext only, not for {self.dataset}")
        if self.vocab_size is not None and self.tokens == "bytes":
            raise ValueError("--vocab-size is for BPE; bytes have a vocabulary of 256")
        if self.vocabulary is not None and (self.tokens is not None or self.vocab_size is not None):
            raise ValueError("--vocabulary says what a token is: leave out --tokens and --vocab-size")

    def _check_values(self) -> None:
        shares = [DEFAULT_SHARE if share is None else share for share in (self.valid_share, self.test_share)]
        if not all(share > 0 for share in shares) or sum(shares) >= 1:
            raise ValueError(f"shares of valid and test must be above 0 and below 1 together, got {shares}")
        if self.vocab_size is not None and self.vocab_size < 256:
            raise ValueError(f"vocab_size must be at least 256, the number of bytes, got {self.vocab_size}")


def _options(names: list[str]) -> str:
    return ", ".join("--" + name.replace("_", "-") for name in names)


def prepare(config: PrepareConfig, *, on_progress: OnProgress = no_progress) -> Corpus:
    """Make a corpus folder from raw files: complete, or not at all.

    Args:
        config: What to prepare.
        on_progress: Told what is being done, how many bytes of it are done, and how many there are.

    Returns:
        The corpus, opened.

    Raises:
        DataError: The raw files cannot be used, or the folder is in the way.
        OSError: The folder could not be written, for want of space for one.
    """
    dataset = DATASETS[config.dataset]
    if config.source is not None and config.source.resolve().is_relative_to(config.out.resolve()):
        raise DataError(f"{config.source} is inside {config.out}, which is to be written; choose another folder")
    with staged_folder(config.out, overwrite=config.overwrite) as staging:
        raw = staging / "raw"
        fetched: list[FileRecord] = []
        if config.download:
            raw.mkdir()
            fetched = fetch(dataset, raw, on_progress=on_progress)
        built = _build(config, dataset, config.source or raw, staging, on_progress)
        if config.download:
            shutil.rmtree(raw)
            built.sources = fetched
        _finish(config, dataset, built, staging)
    return open_corpus(config.out)


def _build(config: PrepareConfig, dataset: Dataset, source: Path, into: Path, on_progress: OnProgress) -> Built:
    if config.dataset == "enwik8":
        path = source / "enwik8" if source.is_dir() else source
        return build_enwik8(path, into, on_progress=on_progress)
    if config.dataset == "text":
        tokenizer = None if config.vocabulary is None else _given_vocabulary(config.vocabulary)
        return build_text(
            find_text_files(source, apart_from=config.out),
            into,
            tokens=config.tokens or "bpe",
            tokenizer=tokenizer,
            vocab_size=config.vocab_size or DEFAULT_VOCAB_SIZE,
            valid_share=config.valid_share or DEFAULT_SHARE,
            test_share=config.test_share or DEFAULT_SHARE,
            on_progress=on_progress,
        )
    files = find_split_files(source)
    return build_words(dataset, files, into, word_counts=config.word_counts, on_progress=on_progress)


def _given_vocabulary(folder: Path) -> tokenizers.Tokenizer:
    """That of a corpus, or of a run, which has a corpus without text in it."""
    inside = folder / "vocabulary"
    if (folder / "config.json").exists() and not inside.is_dir():
        raise DataError(f"{folder} is a run without a vocabulary: pass the folder of the data it was trained on")
    corpus = open_corpus(inside if inside.is_dir() else folder)
    if corpus.manifest.level != "bpe":
        instead = "--tokens bytes" if corpus.manifest.level == "bytes" else f"its own name, {corpus.manifest.dataset}"
        raise DataError(f"the tokens of {folder} are {corpus.manifest.level}, not BPE: prepare with {instead}")
    return corpus.vocabulary


def _finish(config: PrepareConfig, dataset: Dataset, built: Built, into: Path) -> None:
    """Compare with what is published, and write the vocabulary and the manifest."""
    vocab_size = built.tokenizer.get_vocab_size()
    found = differences(dataset, vocab_size=vocab_size, splits=built.splits)
    if found and config.download:
        raise DataError(f"what was downloaded is not {config.dataset} as published: {'; '.join(found)}")
    if found:
        built.notes.append(f"this is not {config.dataset} as published: {'; '.join(found)}")
    path = into / TOKENIZER_NAME
    path.write_text(built.tokenizer.to_str(), encoding="utf-8")
    manifest = Manifest(
        dataset=config.dataset,
        level=built.level,
        lowercase=built.lowercase,
        dtype=ids_dtype(vocab_size).str,
        vocab_size=vocab_size,
        fingerprint=vocabulary_fingerprint(built.tokenizer, level=built.level, lowercase=built.lowercase),
        vocabulary=FileRecord(name=TOKENIZER_NAME, num_bytes=path.stat().st_size, sha256=sha256_of(path)),
        splits=built.splits,
        sources=tuple(built.sources),
        options=built.options,
        notes=tuple(built.notes),
        as_published=not found if dataset.num_tokens else None,
        made_with=software_versions(),
    )
    (into / MANIFEST_NAME).write_text(manifest.to_json(), encoding="utf-8")


def software_versions() -> dict[str, str]:
    """The versions that a vocabulary may depend on."""
    return {"deqkit": importlib.metadata.version("deqkit"), "tokenizers": tokenizers.__version__}
