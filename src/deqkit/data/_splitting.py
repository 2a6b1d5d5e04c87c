"""Train, valid and test by position in files laid end to end, without breaking a line or a character."""

from __future__ import annotations

from collections.abc import Sequence

from deqkit.data._error import DataError
from deqkit.data._reading import Span

_ENOUGH = 100  # bytes of a part for which a line is broken rather than the text refused as too short
_WINDOW = 1 << 16  # bytes in which a line's end is looked for; text without one is cut between two characters


def split_points(spans: Sequence[Span], *, valid_share: float, test_share: float) -> list[int]:
    """Where train, valid and test begin, and where test ends: four positions in the files laid end to end.

    The first `1 - valid_share - test_share` of the bytes are train, then comes valid, then test. Each limit is moved
    on to the next start of a line.

    Raises:
        DataError: The text is too short for three parts.
    """
    total = sum(span.stop - span.start for span in spans)
    limits = [total * (1 - valid_share - test_share), total * (1 - test_share)]
    points = [0, *(next_line(spans, round(limit)) for limit in limits), total]
    if sorted(set(points)) != points and total * min(valid_share, test_share) >= _ENOUGH:
        # Lines so long that two limits fall into one.
        points = [0, *(_next_character(spans, round(limit)) for limit in limits), total]
    if sorted(set(points)) != points:
        raise DataError(f"{total:,} bytes of text are too short to split into train, valid and test; give more text")
    return points


def next_line(spans: Sequence[Span], position: int) -> int:
    """The first start of a line at or after a position; of a character, if the next line's end is far away."""
    total = sum(span.stop - span.start for span in spans)
    if position <= 0 or position >= total:
        return min(max(position, 0), total)
    window = b"".join(_read(span) for span in between(spans, position - 1, min(position + _WINDOW, total)))
    found = window.find(b"\n")
    return position + found if found >= 0 else _next_character(spans, position)


def _next_character(spans: Sequence[Span], position: int) -> int:
    total = sum(span.stop - span.start for span in spans)
    window = b"".join(_read(span) for span in between(spans, position, min(position + 4, total)))
    # A byte 10xxxxxx continues a character.
    return position + next(i for i, byte in enumerate([*window, 0]) if byte & 0xC0 != 0x80)


def between(spans: Sequence[Span], start: int, stop: int) -> list[Span]:
    """The part of files laid end to end that goes from one position to another."""
    parts, begin = [], 0
    for span in spans:
        end = begin + span.stop - span.start
        low, high = max(start, begin), min(stop, end)
        if low < high:
            parts.append(Span(path=span.path, start=span.start + low - begin, stop=span.start + high - begin))
        begin = end
    return parts


def _read(span: Span) -> bytes:
    with span.path.open("rb") as file:
        file.seek(span.start)
        return file.read(span.stop - span.start)
