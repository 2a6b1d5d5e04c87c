"""Reading text in blocks: checked to be text, cut where no word or pre-token is broken, bounded in memory."""

from __future__ import annotations

import codecs
import io
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from deqkit.data._error import DataError

BLOCK = 1 << 17
"""Bytes read at once. The tokenizer buffers 256 pieces of this size while it learns: 32 MiB."""
LONGEST_WORD = 1 << 20
"""Characters; more without a space is not words."""
LONGEST_RUN = 4 << 20
"""Characters without a space, after which BPE text is cut anywhere: memory stays bounded, decoding stays exact."""

OnProgress = Callable[[str, int, int], None]
"""Told what is being done, how many bytes of it are done, and how many there are."""


def no_progress(description: str, num_done: int, num_total: int) -> None:
    """Tell nobody."""


class Meter:
    """Adds up the bytes of one task and tells `on_progress`."""

    def __init__(self, on_progress: OnProgress, *, description: str, num_total: int) -> None:
        self._tell, self._description, self._total = on_progress, description, num_total
        self._done = 0
        self.add(0)

    def add(self, num_bytes: int) -> None:
        self._done += num_bytes
        self._tell(self._description, self._done, self._total)


@dataclass(frozen=True, kw_only=True, slots=True)
class Span:
    """Some bytes of a file: from `start` up to `stop`."""

    path: Path
    start: int
    stop: int


def whole(path: Path) -> Span:
    """All of a file that must exist and not be empty."""
    if path.is_dir():
        raise DataError(f"{path} is a folder; a file is needed")
    if not path.is_file():
        raise DataError(f"{path} does not exist; check the path, or use --download")
    size = path.stat().st_size
    if size == 0:
        raise DataError(f"{path} is empty")
    return Span(path=path, start=0, stop=size)


def read_blocks(spans: Sequence[Span], meter: Meter) -> Iterator[bytes]:
    """The bytes of the spans, in order."""
    for span in spans:
        with span.path.open("rb") as file:
            file.seek(span.start)
            left = span.stop - span.start
            while left:
                block = file.read(min(BLOCK, left))
                if not block:
                    raise DataError(f"{span.path} became shorter while it was read")
                left -= len(block)
                meter.add(len(block))
                yield block


def read_text(spans: Sequence[Span], meter: Meter, *, universal_newlines: bool = False) -> Iterator[str]:
    """The text of the spans, in order.

    Args:
        spans: What to read; a character does not reach from one span into the next.
        meter: Told of every block.
        universal_newlines: Turn CRLF and CR into LF, as Python does for text files.

    Raises:
        DataError: Not UTF-8, or binary; names the file and the byte.
    """
    for span in spans:
        # A mark of the byte order at the start of a file is no part of its text.
        utf8 = codecs.getincrementaldecoder("utf-8" if span.start else "utf-8-sig")()
        decoder = io.IncrementalNewlineDecoder(utf8, translate=True) if universal_newlines else utf8
        position = span.start
        for block in read_blocks([span], meter):
            position += len(block)
            yield _decode(decoder.decode, block, span.path, position)
        yield _decode(decoder.decode, b"", span.path, position, final=True)


def _decode(decode: Callable[[bytes, bool], str], block: bytes, path: Path, end: int, *, final: bool = False) -> str:
    if b"\0" in block:
        where = end - len(block) + block.index(b"\0")
        raise DataError(f"{path} is binary or UTF-16, not UTF-8 text: byte {where} is zero")
    try:
        return decode(block, final)
    except UnicodeDecodeError as error:
        # The decoder keeps the first bytes of a character that the block before cut in two.
        where = end - len(error.object) + error.start
        raise DataError(
            f"{path} is not UTF-8 at byte {where} ({error.reason}); convert it, with iconv for one"
        ) from None


def cut_at_words(chunks: Iterable[str]) -> Iterator[str]:
    """The same text, cut after a space or a line's end, so that no word is in two pieces."""
    carry = ""
    for chunk in chunks:
        text = carry + chunk
        cut = max(text.rfind(" "), text.rfind("\n")) + 1
        if not cut and len(text) > LONGEST_WORD:
            raise DataError(
                f"a word of more than {LONGEST_WORD:,} characters; this is not text with spaces between words"
            )
        if cut:
            yield text[:cut]
        carry = text[cut:]
    if carry:
        yield carry


_BEFORE_SPACE = re.compile(r"\S(?=[ \n\t\r])")


def cut_at_pretokens(chunks: Iterable[str]) -> Iterator[str]:
    """The same text, cut between a visible character and a space.

    Byte-level BPE always has a token boundary there, and what follows depends on nothing before it, so the pieces
    give the same tokens as the whole text.
    """
    carry = ""
    for chunk in chunks:
        text = carry + chunk
        cut = _last_boundary(text)
        if not cut and len(text) > LONGEST_RUN:
            cut = len(text)
        if cut:
            yield text[:cut]
        carry = text[cut:]
    if carry:
        yield carry


def _last_boundary(text: str) -> int:
    """Where the last cut is possible; 0 if nowhere."""
    for start in (max(0, len(text) - 4096), 0):  # nearly always found near the end
        cut = 0
        for match in _BEFORE_SPACE.finditer(text, start):
            cut = match.end()
        if cut:
            return cut
    return 0
