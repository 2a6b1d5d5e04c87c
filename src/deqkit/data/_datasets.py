"""The corpora that `deqkit data prepare` knows: how they are cut, what they must contain, where the public copy is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from deqkit.data._error import DataError
from deqkit.data._manifest import SPLITS, Level, SplitRecord

DatasetName = Literal["ptb", "wikitext-2", "wikitext-103", "enwik8", "text"]

ENWIK8_SPLIT = {"train": 90_000_000, "valid": 5_000_000, "test": 5_000_000}


@dataclass(frozen=True, kw_only=True, slots=True)
class HubCopy:
    """The copy of a corpus on the Hugging Face hub: Parquet files with one column of text."""

    repo: str
    """Dataset repository."""
    files: dict[str, tuple[str, ...]]
    """Files of each split, or of "all" when the corpus is one file."""
    column: str = "text"
    """The column that holds the text."""
    revision: str = "main"
    """Branch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Dataset:
    """A corpus with a name."""

    level: Level
    """What a token is."""
    lowercase: bool = False
    """Lower-case the words."""
    counted_splits: tuple[str, ...] = ("train",)
    """The splits whose words make the vocabulary."""
    num_tokens: Mapping[str, int] = field(default_factory=dict)
    """Tokens of each split as published; empty if any text will do."""
    vocab_size: int | None = None
    """Published size of the vocabulary."""
    num_words: int | None = None
    """Published number of words in train, without line ends."""
    ids_sha256: Mapping[str, str] = field(default_factory=dict)
    """Hashes of the files of ids made from the published text, where we could make them."""
    hub: HubCopy | None = None
    """The public copy."""


def _wikitext(config: str, *, num_train_files: int) -> HubCopy:
    train = tuple(f"{config}/train-{i:05}-of-{num_train_files:05}.parquet" for i in range(num_train_files))
    rest = {
        split: (f"{config}/{name}-00000-of-00001.parquet",)
        for split, name in (("valid", "validation"), ("test", "test"))
    }
    return HubCopy(repo="Salesforce/wikitext", files={"train": train, **rest})


# The hub converts datasets made by a script to Parquet, on a branch of this name.
_CONVERTED = "refs/convert/parquet"
_PTB_FILES = {
    split: (f"penn_treebank/{name}/0000.parquet",)
    for split, name in zip(SPLITS, ("train", "validation", "test"), strict=True)
}

DATASETS: dict[DatasetName, Dataset] = {
    "ptb": Dataset(
        level="words",
        lowercase=True,
        counted_splits=SPLITS,
        num_tokens={"train": 929_589, "valid": 73_760, "test": 82_430},
        vocab_size=10_000,
        ids_sha256={
            "train": "d5c8f72e8907d1c237ffa7b1b7348cf0ab5aabfb95028ca2c8b86f79233bb3ad",
            "valid": "f439092741d722d91f596b8bc72af417d2dbaaafe445cf4397e9b913cf6b0fd4",
            "test": "1c18518f6734cdcae614ecfb55a11368baaccf8ceaf0e9f28341c067b5573081",
        },
        hub=HubCopy(repo="ptb-text-only/ptb_text_only", files=_PTB_FILES, column="sentence", revision=_CONVERTED),
    ),
    "wikitext-2": Dataset(
        level="words",
        num_tokens={"train": 2_088_628, "valid": 217_646, "test": 245_569},
        vocab_size=33_278,
        ids_sha256={
            "train": "c9340289a553c5ca80419e1e2383cfe38f1a039c278d0c982b389f5de465994c",
            "valid": "0f559bbc00bf328c47ed840359a3468d8c086b2cefa6947ec3e55e7132361d44",
            "test": "165d5683495e1daaf078371b3c828616dea06bc27d1786860b67a64ae7bc915c",
        },
        hub=_wikitext("wikitext-2-v1", num_train_files=1),
    ),
    "wikitext-103": Dataset(
        level="words",
        num_tokens={"train": 103_227_021, "valid": 217_646, "test": 245_569},
        vocab_size=267_735,
        num_words=101_425_671,
        hub=_wikitext("wikitext-103-v1", num_train_files=2),
    ),
    "enwik8": Dataset(
        level="bytes",
        num_tokens=ENWIK8_SPLIT,
        vocab_size=256,
        ids_sha256={
            "train": "c4538cde4e10dc897e853fb069358c4dc0a1a0041486772566d1a52d468c363b",
            "valid": "8bdcdebb57ffae2529c515e992155bc022fff120685d7d0cf33822fa246d43ee",
            "test": "59fb83fa8e8f79ee9f948b367030d14378fb465f56b62e1bcb4ea75c852e25be",
        },
        hub=HubCopy(repo="LTCB/enwik8", files={"all": ("enwik8-raw/train/0000.parquet",)}, revision=_CONVERTED),
    ),
    "text": Dataset(level="bpe"),
}


def differences(dataset: Dataset, *, vocab_size: int, splits: Mapping[str, SplitRecord]) -> list[str]:
    """What of a prepared corpus is not as published, one phrase each."""
    found = []
    if dataset.vocab_size not in (None, vocab_size):
        found.append(f"vocabulary {vocab_size:,} instead of {dataset.vocab_size:,}")
    for name, expected in dataset.num_tokens.items():
        if splits[name].num_tokens != expected:
            found.append(f"{name} {splits[name].num_tokens:,} tokens instead of {expected:,}")
    if not found:
        changed = [name for name, digest in dataset.ids_sha256.items() if splits[name].sha256 != digest]
        found.extend(f"{name} has other tokens" for name in changed)
    return found


_SPLIT_NAMES = {"train": "train", "valid": "valid|validation|val|dev", "test": "test"}


def find_split_files(folder: Path) -> dict[str, Path]:
    """The files of train, valid and test in a folder, by their usual names.

    Such as `train.txt`, `ptb.train.txt`, `wiki.train.tokens`, `train-prefix.txt`; `valid` may be `validation`, `val`
    or `dev`.

    Raises:
        DataError: A file is missing, or there is more than one choice.
    """
    if not folder.is_dir():
        what = "is a file" if folder.exists() else "does not exist"
        raise DataError(f"{folder} {what}; --from takes the folder with the train, valid and test files")
    return {split: _find_one(folder, split, names) for split, names in _SPLIT_NAMES.items()}


def _find_one(folder: Path, split: str, names: str) -> Path:
    pattern = re.compile(rf"((ptb|wiki)[._-])?({names})(-prefix)?(\.(txt|tokens|raw))*")
    found = sorted(path for path in folder.iterdir() if path.is_file() and pattern.fullmatch(path.name))
    if not found:
        raise DataError(f"{folder} has no {split} file (such as {split}.txt or wiki.{split}.tokens)")
    if len(found) > 1:
        raise DataError(f"{folder} has several {split} files: {', '.join(path.name for path in found)}; keep one")
    return found[0]


def find_text_files(source: Path, *, apart_from: Path) -> list[Path]:
    """A file, or every file in a folder and its sub-folders, in order of their paths.

    Hidden files, empty files and what is in the folder `apart_from` are left out.
    """
    if not source.exists():
        raise DataError(f"{source} does not exist; --from takes a text file or a folder of text files")
    if source.is_file():
        return [source]
    found = sorted(path for path in source.rglob("*") if path.is_file() and not _is_hidden(path, source))
    outside = apart_from.resolve()
    found = [path for path in found if path.stat().st_size and not path.resolve().is_relative_to(outside)]
    if not found:
        raise DataError(f"{source} has no text in it")
    return found


def _is_hidden(path: Path, folder: Path) -> bool:
    return any(part.startswith(".") for part in path.relative_to(folder).parts)
