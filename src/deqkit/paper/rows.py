"""All rows, in the order of the document."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from deqkit._plain import unknown
from deqkit.paper import (
    auxiliary,
    behaviour,
    causality,
    copy_memory,
    devices,
    elsewhere,
    imbalance,
    inverse,
    language,
    memory,
    precision,
    properties,
    rates,
    remarks,
    runtime,
    tasks,
    theorems,
)
from deqkit.paper.claim import Claim


@dataclass(frozen=True, kw_only=True, slots=True)
class Part:
    """Claims that belong together."""

    title: str
    claims: tuple[Claim, ...]


def _of_table(table: str) -> tuple[Claim, ...]:
    return tuple(claim for claim in elsewhere.CLAIMS if claim.row.startswith(f"table-{table}"))


PARTS: tuple[Part, ...] = (
    Part(
        title="Theorems and properties (sections 3 and 4)",
        claims=(*theorems.CLAIMS, *inverse.CLAIMS, *properties.CLAIMS),
    ),
    Part(title="Copy memory (table 1)", claims=copy_memory.CLAIMS),
    Part(title="Language modelling (tables 2 and 3)", claims=(*language.CLAIMS, *causality.CLAIMS, *rates.CLAIMS)),
    Part(title="Training memory (tables 2 and 3)", claims=memory.CLAIMS),
    Part(title="How equilibria behave (section 5.2, appendix D)", claims=(*behaviour.CLAIMS, *precision.CLAIMS)),
    Part(title="Time (table 4)", claims=runtime.CLAIMS),
    Part(
        title="Remarks and training devices (appendix E)",
        claims=(*devices.CLAIMS, *imbalance.CLAIMS, *remarks.CLAIMS, *auxiliary.CLAIMS),
    ),
    Part(title="Tasks (appendix F)", claims=tasks.CLAIMS),
    Part(title="Full size: Penn Treebank (table 2)", claims=_of_table("2")),
    Part(title="Full size: WikiText-103 (table 3)", claims=_of_table("3")),
)
CLAIMS: tuple[Claim, ...] = tuple(claim for part in PARTS for claim in part.claims)


def find(names: Iterable[str]) -> list[Claim]:
    """Rows by name.

    Raises:
        ValueError: there is no such row; names the one that was probably meant.
    """
    by_name = {claim.row: claim for claim in CLAIMS}
    for name in names:
        if name not in by_name:
            raise ValueError(_at_its_place(name) or unknown("row", name, by_name))
    return [by_name[name] for name in names]


PLACE = re.compile(
    r"(table|figure|theorem|appendix|section)[-_ ]?(\d+(?:\.\d+)?|[a-z])[-_ ]?(left|right)?", re.IGNORECASE
)
MAX_NAMED = 6


def _at_its_place(name: str) -> str:
    """What to say to somebody who named a place of the paper (`table-1`, `figure-3-left`) instead of a row."""
    named = PLACE.fullmatch(name)
    if named is None:
        return ""
    kind, number, side = (part and part.lower() for part in named.groups())
    place = f"{kind} {number}" + (f", {side}" if side else "")
    pattern = re.compile(rf"\b{re.escape(place)}\b", re.IGNORECASE)
    found = [claim.row for claim in CLAIMS if pattern.search(claim.where)]
    if not found:
        return ""
    told = ", ".join(found[:MAX_NAMED]) + (f" and {len(found) - MAX_NAMED} more" if len(found) > MAX_NAMED else "")
    listed = "; see `deqkit paper --list`" if len(found) > MAX_NAMED else ""
    return f"unknown row {name!r}; {place} of the paper is checked by {told}{listed}"
