"""The configuration, to be opened part by part, and where the run comes from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from deqkit.report.history import History
from deqkit.report.markup import Html, element, folded, join, section
from deqkit.report.measure import Measured
from deqkit.train.config import to_plain


def configuration_section(measured: Measured, *, key: str, level: int) -> Html:
    groups = [folded(title, _list(values)) for title, values in _groups("Training", to_plain(measured.history.config))]
    groups.append(folded("Origin", _list(_origin(measured.history))))
    return section("Configuration", element("div", *groups, class_="folds"), level=level, id_=f"{key}-configuration")


def _groups(title: str, plain: dict[str, Any]) -> Iterator[tuple[str, dict[str, Any]]]:
    """The plain values of a configuration, then those of each configuration inside it."""
    yield title, {key: value for key, value in plain.items() if not isinstance(value, dict) and key != "kind"}
    for key, value in plain.items():
        if isinstance(value, dict):
            name = key.capitalize()
            kind = str(value.get("kind", "")).removesuffix("Config")
            yield from _groups(name if kind.lower().startswith(key[:5]) else f"{name}: {kind.lower()}", value)


def _origin(history: History) -> dict[str, Any]:
    origin = {key: value for key, value in history.header.items() if key != "config"}
    return {"folder": history.folder.path, **origin}


def _list(values: dict[str, Any]) -> Html:
    rows = (element("div", element("dt", key), element("dd", _shown(value))) for key, value in values.items())
    return element("dl", join(rows), class_="fields")


def _shown(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, list):
        return ", ".join(map(_shown, value)) or "none"
    if value is None or value == "":
        return "none"
    return f"{value:,}" if isinstance(value, int) else str(value)
