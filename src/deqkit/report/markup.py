"""HTML from values: text is escaped unless it was made here."""

from __future__ import annotations

import html
from collections.abc import Iterable, Sequence

VOID = frozenset({"meta", "br", "hr"})


class Html(str):
    """Markup, to be used as it is. Any other string is text."""

    __slots__ = ()


def markup(value: object) -> Html:
    """The value as markup; text is escaped."""
    return value if isinstance(value, Html) else Html(html.escape(str(value)))


def join(children: Iterable[object], separator: str = "") -> Html:
    return Html(separator.join(markup(child) for child in children))


def element(tag: str, /, *children: object, **attributes: object) -> Html:
    """`<tag attribute="value">children</tag>`.

    Args:
        attributes: `class_` for class and `aria_label` for aria-label; None leaves one out, True needs no value.
    """
    written = "".join(_attribute(key, value) for key, value in attributes.items() if value is not None)
    return Html(f"<{tag}{written}>" if tag in VOID else f"<{tag}{written}>{join(children)}</{tag}>")


def _attribute(key: str, value: object) -> str:
    name = key.rstrip("_").replace("_", "-")
    return f" {name}" if value is True else f' {name}="{html.escape(str(value))}"'


def paragraph(*children: object, class_: str | None = None) -> Html:
    return element("p", *children, class_=class_)


def missing(reason: str) -> Html:
    """Where something is not shown, and why."""
    return paragraph(reason, class_="missing")


def table(head: Sequence[object], rows: Iterable[Sequence[object]], *, label: str) -> Html:
    """A table whose first column names the rows. It scrolls in a box of its own if it is wide."""
    first, *others = head
    # a corner without a name is a cell: an empty heading would be read out as one
    corner = element("th", first, scope="col") if first else element("td")
    columns = join([corner, *(element("th", title, scope="col") for title in others)])
    body = join(
        element("tr", element("th", row[0], scope="row"), *(element("td", cell) for cell in row[1:])) for row in rows
    )
    content = element("table", element("thead", element("tr", columns)), element("tbody", body))
    return element("div", content, class_="wide", role="region", aria_label=label, tabindex="0")


def section(title: object, *children: object, level: int, id_: str) -> Html:
    return element("section", element(f"h{level}", title), *children, id_=id_)


def folded(title: object, *children: object, open_: bool = False) -> Html:
    """Something that a reader opens; printing opens it too."""
    return element("details", element("summary", title), *children, open=True if open_ else None)
