"""Word level: the vocabulary rule of Transformer-XL, which the original DEQ code uses (REFERENCE.md 1.8).

A line is its words between white space, then `<eos>`, blank lines too. `<eos>` has id 0; the other words follow by
falling count, equal counts in the order in which they first appear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, Tokenizer, models, normalizers, pre_tokenizers

from deqkit.data._error import DataError
from deqkit.data._reading import Meter, cut_at_words, read_text, whole

EOS, UNK = "<eos>", "<unk>"


def read_lines(path: Path, meter: Meter, *, lowercase: bool) -> Iterator[str]:
    """The text of a file in pieces that break no word; the last line is ended if it was not."""
    last = "\n"
    for piece in cut_at_words(read_text([whole(path)], meter, universal_newlines=True)):
        last = piece[-1]
        yield piece.lower() if lowercase else piece
    if last != "\n":
        yield "\n"


def split_words(text: str) -> list[str]:
    """The words of a text, with `<eos>` for every line's end."""
    return text.replace("\n", f" {EOS} ").split()


def count_words(pieces: Iterable[str], counts: Counter[str]) -> None:
    """Add the words of a text to `counts`; line ends do not count."""
    for piece in pieces:
        counts.update(piece.split())


def order_words(counts: Counter[str]) -> list[str]:
    """The vocabulary, the position of a word being its id."""
    return [EOS, *(word for word, _ in counts.most_common() if word != EOS)]


def read_word_counts(path: Path, *, num_words: int | None) -> Counter[str]:
    """Read a file of `word count` lines, by falling count (fairseq's `dict.txt`).

    Words counted 0 are padding and are left out. A file without `<unk>`, as fairseq writes it, gets it with the count
    that is missing to `num_words`.

    Args:
        path: The file.
        num_words: How many words the corpus has in all, `<unk>` included, if that is known.
    """
    counts: Counter[str] = Counter()
    meter = Meter(lambda *_: None, description="", num_total=0)
    lines = "".join(read_text([whole(path)], meter, universal_newlines=True)).split("\n")
    for number, line in enumerate(lines, start=1):
        word, _, count = line.rpartition(" ")
        if not line:
            continue
        if not word or not count.isdecimal() or word in counts:
            raise DataError(f"{path}, line {number}: expected a new word and its count, got {line!r}")
        counts[word] = int(count)
    counts = +counts
    if UNK not in counts and num_words is not None:
        missing = num_words - counts.total()
        if missing < 0:
            raise DataError(f"{path} counts {counts.total():,} words, but the corpus has {num_words:,}")
        counts[UNK] = missing
    return counts


class WordEncoder:
    """Words to ids; unknown words become `<unk>` and are counted, or are an error if there is no `<unk>`."""

    def __init__(self, ids_of_words: Mapping[str, int], *, dtype: np.dtype) -> None:
        self._table = _Table(ids_of_words)
        self._dtype = dtype
        self._unk = ids_of_words.get(UNK)
        self._line = 1
        self.num_unknown = 0

    def encode(self, text: str, *, source: str) -> np.ndarray:
        """The ids of a piece of text; pieces are given in order.

        Raises:
            DataError: A word is not in the vocabulary, which has no `<unk>`; names the word and the line.
        """
        words = split_words(text)
        ids = np.fromiter(map(self._table.__getitem__, words), dtype=np.int64, count=len(words))
        unknown = ids < 0
        if num_unknown := int(unknown.sum()):
            if self._unk is None:
                raise DataError(self._complaint(words, int(unknown.argmax()), source))
            self.num_unknown += num_unknown
            ids[unknown] = self._unk
        self._line += text.count("\n")
        return ids.astype(self._dtype)

    def _complaint(self, words: Sequence[str], index: int, source: str) -> str:
        line = self._line + words[:index].count(EOS)
        return (
            f"{source}, line {line}: {words[index]!r} is not in the vocabulary, and there is no {UNK} to stand for it"
        )


class _Table(dict[str, int]):
    def __missing__(self, word: str) -> int:
        return -1


def word_tokenizer(words: Sequence[str], *, lowercase: bool) -> Tokenizer:
    """The vocabulary as a tokenizer that gives the same ids as `WordEncoder`."""
    vocab = {word: index for index, word in enumerate(words)}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token=UNK))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(Regex(r"\r\n?|\n"), f" {EOS} ")]
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Lowercase()] if lowercase else steps)
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return tokenizer


def join_words(words: Iterable[str]) -> str:
    """Text from words: a space between two words, a line's end for `<eos>`."""
    lines: list[list[str]] = [[]]
    for word in words:
        if word == EOS:
            lines.append([])
        else:
            lines[-1].append(word)
    return "\n".join(" ".join(line) for line in lines)
