"""Raw corpora for the tests: small ones written here, and the real ones where this machine has them."""

import os
import tarfile
from collections import Counter
from pathlib import Path

import pytest

SHARED = Path(os.environ.get("DEQKIT_DATA") or Path(__file__).parents[3] / "shared" / "data")


def shared_file(name: str) -> Path:
    """A file of the development data, or a skip that says where it is looked for."""
    path = SHARED / name
    if not path.is_file():
        pytest.skip(f"{name} is not in {SHARED} (DEQKIT_DATA names another folder)")
    return path


def unpack(name: str, into: Path) -> Path:
    """The folder of raw text of an archive of the development data."""
    with tarfile.open(shared_file(f"{name}.tar.xz")) as archive:
        archive.extractall(into, filter="data")
    return into / name


def write_splits(folder: Path, *, train: str, valid: str, test: str) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in (("train", train), ("valid", valid), ("test", test)):
        (folder / f"{name}.txt").write_bytes(text.encode())
    return folder


def naive_words(path: Path, *, lowercase: bool = False) -> list[list[str]]:
    """The words of each line, the slow and obvious way of the original code."""
    with path.open(encoding="utf-8") as file:
        return [(line.lower() if lowercase else line).strip().split() for line in file]


def naive_vocabulary(paths: list[Path], *, lowercase: bool = False) -> list[str]:
    counts: Counter[str] = Counter()
    for path in paths:
        for words in naive_words(path, lowercase=lowercase):
            counts.update(words)
    return ["<eos>"] + [word for word, _ in counts.most_common() if word != "<eos>"]


def naive_ids(path: Path, vocabulary: list[str], *, lowercase: bool = False) -> list[int]:
    index = {word: i for i, word in enumerate(vocabulary)}
    return [index[word] for line in naive_words(path, lowercase=lowercase) for word in [*line, "<eos>"]]
