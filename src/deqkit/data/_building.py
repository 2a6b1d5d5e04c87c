"""From raw files to a vocabulary and files of ids, one function a kind of token."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from deqkit.data import _words
from deqkit.data._datasets import ENWIK8_SPLIT, Dataset
from deqkit.data._error import DataError
from deqkit.data._files import IdsWriter, ids_dtype, sha256_of
from deqkit.data._manifest import SPLITS, FileRecord, Level, SplitRecord
from deqkit.data._reading import Meter, OnProgress, Span, cut_at_pretokens, read_blocks, read_text, whole
from deqkit.data._splitting import between, next_line, split_points
from deqkit.data._subwords import byte_tokenizer, encode_bpe, learn_bpe

VOCABULARY_SAMPLE = 16 << 20
"""Bytes at the start of train that a BPE vocabulary is learned from: some seconds, and bounded memory."""


@dataclass(kw_only=True, slots=True)
class Built:
    """What a kind of token made of the raw files."""

    level: Level
    tokenizer: Tokenizer
    lowercase: bool = False
    splits: dict[str, SplitRecord] = field(default_factory=dict)
    sources: list[FileRecord] = field(default_factory=list)
    options: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


def source_record(path: Path, name: str | None = None) -> FileRecord:
    """A raw file as the manifest names it; the folder it was in is left out, it says nothing to others."""
    return FileRecord(name=name or path.name, num_bytes=path.stat().st_size, sha256=sha256_of(path))


def build_words(
    dataset: Dataset, files: Mapping[str, Path], into: Path, *, word_counts: Path | None, on_progress: OnProgress
) -> Built:
    """Word level: `<eos>` for every line's end, ids by falling count."""
    for path in files.values():
        whole(path)
    counts = _count(dataset, files, word_counts, on_progress)
    words = _words.order_words(counts)
    if len(words) == 1:
        raise DataError(f"{files['train']} has no words in it")
    tokenizer = _words.word_tokenizer(words, lowercase=dataset.lowercase)
    built = Built(level="words", tokenizer=tokenizer, lowercase=dataset.lowercase)
    ids_of_words = {word: index for index, word in enumerate(words)}
    for split, path in files.items():
        encoder = _words.WordEncoder(ids_of_words, dtype=ids_dtype(len(words)))
        meter = Meter(on_progress, description=f"encoding {split}", num_total=path.stat().st_size)
        pieces = _words.read_lines(path, meter, lowercase=dataset.lowercase)
        arrays = (encoder.encode(piece, source=str(path)) for piece in pieces)
        written = _write(into, split, arrays, dtype=ids_dtype(len(words)))
        built.splits[split] = _record(written, num_text_bytes=path.stat().st_size, num_unknown=encoder.num_unknown)
        if encoder.num_unknown:
            of_all = f"{encoder.num_unknown:,} of {written.num_tokens:,} tokens"
            built.notes.append(f"{split}: {of_all} are words outside the vocabulary and became <unk>")
        built.sources.append(source_record(path))
    if word_counts is not None:
        built.options["word_counts"] = {"name": word_counts.name, "sha256": sha256_of(word_counts)}
    return built


def build_enwik8(path: Path, into: Path, *, on_progress: OnProgress) -> Built:
    """Bytes, in the usual split of 90, 5 and 5 million."""
    span = whole(path)
    total = sum(ENWIK8_SPLIT.values())
    if span.stop != total:
        raise DataError(
            f"enwik8 has {total:,} bytes, {path} has {span.stop:,}; "
            "for other files: deqkit data prepare text --tokens bytes"
        )
    points = [0, ENWIK8_SPLIT["train"], total - ENWIK8_SPLIT["test"], total]
    return _build_bytes([span], points, into, on_progress=on_progress, check_text=False)


def build_text(
    paths: Sequence[Path],
    into: Path,
    *,
    tokens: str,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    valid_share: float,
    test_share: float,
    on_progress: OnProgress,
) -> Built:
    """BPE or bytes of files laid end to end, split by position."""
    spans = [whole(path) for path in paths]
    points = split_points(spans, valid_share=valid_share, test_share=test_share)
    if tokens == "bytes":
        built = _build_bytes(spans, points, into, on_progress=on_progress, check_text=True)
    else:
        built = _build_bpe(spans, points, into, tokenizer=tokenizer, vocab_size=vocab_size, on_progress=on_progress)
    built.options |= {"valid_share": valid_share, "test_share": test_share}
    return built


def _count(
    dataset: Dataset, files: Mapping[str, Path], word_counts: Path | None, on_progress: OnProgress
) -> Counter[str]:
    if word_counts is not None:
        return _words.read_word_counts(word_counts, num_words=dataset.num_words)
    counts: Counter[str] = Counter()
    for split in dataset.counted_splits:
        path = files[split]
        meter = Meter(on_progress, description=f"counting words of {split}", num_total=path.stat().st_size)
        _words.count_words(_words.read_lines(path, meter, lowercase=dataset.lowercase), counts)
    return counts


def _build_bytes(
    spans: Sequence[Span], points: Sequence[int], into: Path, *, on_progress: OnProgress, check_text: bool
) -> Built:
    built = Built(level="bytes", tokenizer=byte_tokenizer())
    histogram = np.zeros(256, dtype=np.int64)
    for split, part in _parts(spans, points):
        meter = Meter(on_progress, description=f"encoding {split}", num_total=_size(part))
        blocks = _checked(part, meter) if check_text else read_blocks(part, meter)
        arrays = (np.frombuffer(block, dtype=np.uint8) for block in blocks)
        written = _write(into, split, _tallied(arrays, histogram), dtype=ids_dtype(256))
        built.splits[split] = _record(written, num_text_bytes=_size(part))
    built.sources = [source_record(span.path) for span in spans]
    built.options = {"tokens": "bytes", "num_byte_values": int(np.count_nonzero(histogram))}
    return built


def _build_bpe(
    spans: Sequence[Span],
    points: Sequence[int],
    into: Path,
    *,
    tokenizer: Tokenizer | None,
    vocab_size: int,
    on_progress: OnProgress,
) -> Built:
    options: dict[str, Any] = {"tokens": "bpe", "vocabulary": "given"}
    if tokenizer is None:
        sample = between(spans, 0, min(points[1], next_line(spans, VOCABULARY_SAMPLE)))
        meter = Meter(on_progress, description="learning the vocabulary", num_total=_size(sample))
        tokenizer = learn_bpe(cut_at_pretokens(read_text(sample, meter)), vocab_size=vocab_size)
        options = {"tokens": "bpe", "vocab_size": vocab_size, "vocabulary_sample": VOCABULARY_SAMPLE}
    built = Built(level="bpe", tokenizer=tokenizer, options=options)
    dtype = ids_dtype(tokenizer.get_vocab_size())
    for split, part in _parts(spans, points):
        meter = Meter(on_progress, description=f"encoding {split}", num_total=_size(part))
        arrays = encode_bpe(tokenizer, cut_at_pretokens(read_text(part, meter)), dtype=dtype)
        built.splits[split] = _record(_write(into, split, arrays, dtype=dtype), num_text_bytes=_size(part))
    built.sources = [source_record(span.path) for span in spans]
    return built


def _parts(spans: Sequence[Span], points: Sequence[int]) -> Iterator[tuple[str, list[Span]]]:
    for split, start, stop in zip(SPLITS, points[:-1], points[1:], strict=True):
        yield split, between(spans, start, stop)


def _size(spans: Iterable[Span]) -> int:
    return sum(span.stop - span.start for span in spans)


def _checked(spans: Sequence[Span], meter: Meter) -> Iterator[bytes]:
    return (text.encode() for text in read_text(spans, meter))


def _tallied(arrays: Iterable[np.ndarray], histogram: np.ndarray) -> Iterator[np.ndarray]:
    for values in arrays:
        histogram += np.bincount(values, minlength=len(histogram))
        yield values


def _write(into: Path, split: str, arrays: Iterable[np.ndarray], *, dtype: np.dtype) -> IdsWriter:
    with IdsWriter(into / f"{split}.bin", dtype=dtype) as writer:
        for ids in arrays:
            writer.write(ids)
    return writer


def _record(written: IdsWriter, *, num_text_bytes: int, num_unknown: int = 0) -> SplitRecord:
    return SplitRecord(
        name=written.path.name,
        num_tokens=written.num_tokens,
        num_text_bytes=num_text_bytes,
        num_unknown=num_unknown,
        sha256=written.sha256,
    )
