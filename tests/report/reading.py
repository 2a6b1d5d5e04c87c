"""Reading a page as a browser would: elements in a tree, and their text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from html.parser import HTMLParser

VOID = {"meta", "br", "hr"}


@dataclass(kw_only=True)
class Element:
    tag: str
    attributes: dict[str, str | None]
    children: list[Element | str] = field(default_factory=list)

    @property
    def text(self) -> str:
        """All text inside, with white space as it is."""
        return "".join(child if isinstance(child, str) else child.text for child in self.children)

    def walk(self) -> Iterator[Element]:
        yield self
        for child in self.children:
            if isinstance(child, Element):
                yield from child.walk()

    def all(self, tag: str, *, class_: str | None = None) -> list[Element]:
        found = [element for element in self.walk() if element.tag == tag]
        return [e for e in found if class_ is None or class_ in (e.attributes.get("class") or "").split()]

    def one(self, tag: str, **attributes: str) -> Element:
        (found,) = [e for e in self.all(tag) if all(e.attributes.get(k) == v for k, v in attributes.items())]
        return found


class _Reader(HTMLParser):
    """Refuses what browsers would repair: every element must be closed by its own end."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.root = Element(tag="", attributes={})
        self._open = [self.root]

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len(attrs) == len(dict(attrs)), f"an attribute twice in <{tag}>"
        element = Element(tag=tag, attributes=dict(attrs))
        self._open[-1].children.append(element)
        if tag not in VOID:
            self._open.append(element)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self._open[-1].children.append(Element(tag=tag, attributes=dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open[-1].tag == tag, f"</{tag}> ends <{self._open[-1].tag}>"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        self._open[-1].children.append(data)


def read_text(text: str) -> Element:
    reader = _Reader()
    reader.feed(text)
    reader.close()
    assert reader._open == [reader.root], f"not closed: {[element.tag for element in reader._open]}"
    return reader.root


def tiles(page: Element) -> dict[str, tuple[str, str]]:
    """The figures at the head of a run: name to value and note."""
    found = {}
    for tile in (child for box in page.all("dl", class_="tiles") for child in box.all("div")):
        value, note = tile.one("dd").children
        assert isinstance(value, str) and isinstance(note, Element)
        found[tile.one("dt").text] = (value, note.text)
    return found


def captions(page: Element) -> dict[str, str]:
    """Title of every figure to its caption."""
    return {figure.all("p", class_="title")[0].text: figure.one("figcaption").text for figure in page.all("figure")}


def rows(table: Element) -> list[list[str]]:
    return [[cell.text for cell in row.children if isinstance(cell, Element)] for row in table.all("tr")]
