"""The corpus that needs no file: the English documentation in the running Python's standard library.

It is made of the topics of Python's `help()` (`pydoc_data.topics`) and of docstrings, which are read from source files
with `ast`: nothing is imported but the topics, which are plain strings. The text is the same wherever the version of
Python is the same.
"""

from __future__ import annotations

import ast
import hashlib
import random
import sysconfig
import warnings
from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np

from deqkit.data._error import DataError
from deqkit.data._files import ids_dtype
from deqkit.data._manifest import SPLITS, Level, Manifest, SplitRecord, vocabulary_fingerprint
from deqkit.data._prepare import DEFAULT_SHARE, software_versions
from deqkit.data._reading import cut_at_pretokens
from deqkit.data._subwords import byte_tokenizer, encode_bpe, learn_bpe
from deqkit.data.corpus import Corpus

NUM_CHARACTERS = 1_000_000
"""About as many characters are taken."""
_TOO_FEW = 200_000  # less than half of the topics alone: this Python came without its documentation
_PASSAGE = 2_000  # characters of a passage, at least: paragraphs stay with their neighbours
_DUPLICATE = 40  # characters from which a paragraph that was seen before is left out; shorter ones repeat by nature

# Modules written in Python, with good docstrings, and part of every distribution of Python 3.11 and later.
_MODULES = """
    abc argparse ast asyncio base64 bisect calendar codecs collections concurrent configparser contextlib copy csv
    dataclasses datetime decimal difflib doctest enum filecmp fnmatch fractions functools glob graphlib gzip heapq
    hmac html http inspect io ipaddress json logging operator os pathlib pdb pickle pkgutil platform posixpath pprint
    queue random re reprlib sched secrets selectors shelve shlex shutil smtplib socket socketserver ssl statistics
    string subprocess tarfile tempfile textwrap threading timeit tokenize traceback typing unittest urllib uuid
    warnings weakref zipfile
""".split()


def embedded_text() -> str:
    """About a million characters of English about Python; the same for the same version of Python.

    Raises:
        DataError: This Python came without its documentation.
    """
    paragraphs = _without_duplicates([*_topics(), *_docstrings()])
    passages = list(_passages(paragraphs))
    # Shuffled, so that parts of the text by position are alike: its beginning would be topics and its end docstrings.
    random.Random(0).shuffle(passages)
    text = "\n\n".join(passages)[:NUM_CHARACTERS]
    if len(text) < _TOO_FEW:
        raise DataError(
            "this Python came without documentation (pydoc_data, *.py); give text with `deqkit data prepare text`"
        )
    return text


def embedded_corpus(
    *,
    level: Level = "bpe",
    vocab_size: int = 2048,
    valid_share: float = DEFAULT_SHARE,
    test_share: float = DEFAULT_SHARE,
) -> Corpus:
    """The embedded text as a corpus in memory; takes a few seconds and writes nothing.

    Args:
        level: "bpe" or "bytes".
        vocab_size: Size of the BPE vocabulary.
        valid_share: Part of the text, after train and before test, that is for validation.
        test_share: Part of the text, at its end, that is for testing.
    """
    if level not in ("bpe", "bytes"):
        raise ValueError(f'level must be "bpe" or "bytes", got {level!r}')
    if not (valid_share > 0 and test_share > 0 and valid_share + test_share < 1):
        raise ValueError(f"shares must be above 0 and below 1 together, got {valid_share} and {test_share}")
    text = embedded_text()
    limits = [0, *(text.index("\n", round(len(text) * (1 - s))) + 1 for s in (valid_share + test_share, test_share))]
    parts = {name: text[start:stop] for name, start, stop in zip(SPLITS, limits, [*limits[1:], len(text)], strict=True)}
    return _in_memory(parts, level=level, vocab_size=vocab_size)


def _topics() -> Iterator[str]:
    try:
        from pydoc_data.topics import topics
    except ImportError:  # left out by some distributions
        return
    for name in sorted(topics):
        yield topics[name]


def _docstrings() -> Iterator[str]:
    library = Path(sysconfig.get_path("stdlib"))
    for module in _MODULES:
        for path in _source_files(library, module):
            yield from _docstrings_of(path, ".".join(path.relative_to(library).with_suffix("").parts))


def _source_files(library: Path, module: str) -> list[Path]:
    if (library / module).is_dir():
        return sorted(path for path in (library / module).rglob("*.py") if "test" not in path.parent.name)
    path = library / f"{module}.py"
    return [path] if path.is_file() else []


def _docstrings_of(path: Path, module: str) -> Iterator[str]:
    """The docstrings of a file in order, each under the name of what it is about."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an escape in somebody's string is no concern of ours
        tree = ast.parse(path.read_bytes())
    pending: list[tuple[str, ast.AST]] = [(module.removesuffix(".__init__"), tree)]
    while pending:
        name, node = pending.pop()
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            if documentation := ast.get_docstring(node):
                yield f"{name}\n\n{documentation}"
            inner = [child for child in node.body if hasattr(child, "name")]
            pending.extend((f"{name}.{getattr(child, 'name', '')}", child) for child in reversed(inner))


def _without_duplicates(documents: Iterable[str]) -> Iterator[str]:
    """The paragraphs of the documents; topics share many, and what was trained on must not be tested on."""
    seen: set[str] = set()
    for document in documents:
        for paragraph in document.replace("\t", "    ").split("\n\n"):
            paragraph = paragraph.strip("\n")
            if not paragraph.strip() or (len(paragraph) >= _DUPLICATE and paragraph in seen):
                continue
            seen.add(paragraph)
            yield paragraph


def _passages(paragraphs: Iterable[str]) -> Iterator[str]:
    passage: list[str] = []
    for paragraph in paragraphs:
        passage.append(paragraph)
        if sum(map(len, passage)) >= _PASSAGE:
            yield "\n\n".join(passage)
            passage = []
    if passage:
        yield "\n\n".join(passage)


def _in_memory(parts: dict[str, str], *, level: Level, vocab_size: int) -> Corpus:
    if level == "bytes":
        tokenizer = byte_tokenizer()
    else:
        tokenizer = learn_bpe(cut_at_pretokens(_blocks(parts["train"])), vocab_size=vocab_size)
    dtype = ids_dtype(tokenizer.get_vocab_size())
    splits, records = {}, {}
    for name, text in parts.items():
        if level == "bytes":
            ids = np.frombuffer(text.encode(), dtype=np.uint8).astype(dtype)
        else:
            ids = np.concatenate(list(encode_bpe(tokenizer, cut_at_pretokens(_blocks(text)), dtype=dtype)))
        ids.flags.writeable = False
        splits[name] = ids
        records[name] = SplitRecord(
            name=name,
            num_tokens=len(ids),
            num_text_bytes=len(text.encode()),
            num_unknown=0,
            sha256=hashlib.sha256(ids.tobytes()).hexdigest(),
        )
    manifest = Manifest(
        dataset="embedded",
        level=level,
        lowercase=False,
        dtype=dtype.str,
        vocab_size=tokenizer.get_vocab_size(),
        fingerprint=vocabulary_fingerprint(tokenizer, level=level, lowercase=False),
        vocabulary=None,
        splits=records,
        made_with=software_versions(),
    )
    return Corpus(manifest, vocabulary=tokenizer, splits=splits)


def _blocks(text: str) -> Iterator[str]:
    return (text[start : start + (1 << 16)] for start in range(0, len(text), 1 << 16))
