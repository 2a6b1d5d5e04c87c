"""`deqkit paper`."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import dataclass, fields
from itertools import pairwise
from pathlib import Path
from typing import Annotated

import tyro
from rich.console import Console
from rich.table import Table

from deqkit.cli._command import Command
from deqkit.cli._terminal import STYLE, TABLE_WIDTH
from deqkit.paper.claim import Claim
from deqkit.paper.document import write
from deqkit.paper.rows import CLAIMS, PARTS, find
from deqkit.paper.run import (
    QUICK_FILE,
    Result,
    check,
    check_of,
    read_best,
    read_measured,
    save_full,
    save_quick,
    told_elsewhere,
    verdict,
)
from deqkit.paper.workshop import Workshop


@dataclass(frozen=True, kw_only=True)
class Paper(Command):
    """The paper's claims, checked: every table, figure, theorem and remark is a row."""

    rows: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="ROW")] = ()
    """Rows to check; all if left out."""
    full: bool = False
    """At full length; for rows that are named."""
    list: bool = False
    """Say what rows there are, and run nothing."""
    document: bool = False
    """Write docs/paper.md and its figures from the results, and run nothing."""
    runs: Path = Path("runs/paper")
    """Where models are kept that checks have trained; what is there is used again."""
    data: Path | None = None
    """A folder with the prepared corpora ptb, wikitext-2 and wikitext-103; data if left out."""
    seeds: tuple[int, ...] | None = None
    """Train these seeds only; a comparison reports them and those that it finds, other rows the first of them."""
    reuse: bool = False
    """In comparisons, do not train what a result in --out has measured with the same configuration, seed and data."""
    out: Path = Path("results")
    """Where results are."""
    docs: Path = Path("docs")
    """Where the document is."""
    json: bool = False
    """Print the results to stdout as JSON."""

    @classmethod
    def default(cls, words: list[str]) -> tuple[Command | None, list[str]]:
        """Rows to the front, wherever they stand: to tyro the row in `--seeds 7 theorem-1` is a seed."""
        flags = {f"--{field.name}" for field in fields(cls) if field.type == "bool"} | {"-h", "--help"}
        rows: list[str] = []
        options: list[str] = []
        waiting = ""  # the option that the next word may be a value of
        for word in words:
            if word.startswith("-"):
                waiting = "" if word in flags or "=" in word else word
            elif waiting == "--seeds" and options[-1] != waiting and not word[:1].isdigit():
                waiting = ""
            if waiting == "--seeds" and word not in (waiting, "None") and not word.isdigit():
                raise ValueError(f"--seeds takes whole numbers, got {word!r}")
            is_row = not word.startswith("-") and not waiting
            (rows if is_row else options).append(word)
            if word != waiting and waiting != "--seeds":
                waiting = ""
        if options[-1:] == ["--seeds"] or any(a == "--seeds" and b.startswith("-") for a, b in pairwise(options)):
            raise ValueError("--seeds takes whole numbers: name one or more, or leave it out")
        return None, [*rows, *options]

    def run(self) -> int:
        claims = find(self.rows)
        if self.list:
            return self._list(claims or CLAIMS)
        if self.document:
            for path in write(self.out, self.docs):
                print(path)
            return 0
        if self.full and not claims:
            raise ValueError("--full takes hours a row: name the rows, see `deqkit paper --list`")
        return self._check(claims)

    def _check(self, named: list[Claim]) -> int:
        claims = named or list(CLAIMS)
        for claim in claims:
            check_of(claim, full=self.full)  # a mistake is told before the first one takes hours
        reusable = read_measured(self.out) if self.reuse else {}
        workshop = Workshop(runs=self.runs, data=self.data, seeds=self.seeds, reusable=reusable, tell=_Progress())
        results: dict[str, Result] = {}
        for claim in claims:
            try:
                results[claim.row] = check(claim, workshop, full=self.full, named=bool(named))
            except (ValueError, OSError) as error:  # it lacks something; the others may not
                if self.debug:
                    raise
                print(f"deqkit: {claim.row} cannot be measured: {' '.join(str(error).split())}", file=sys.stderr)
                continue
            if not self.json:
                _print_result(claim, results[claim.row])
            # At once: a row may have taken hours.
            if not self.full:
                save_quick(self.out, results)
                continue
            saved = save_full(self.out, results[claim.row])
            if not self.json:
                print(f"  {saved}")
        status = 0 if len(results) == len(claims) else 1
        if self.json:
            print(json.dumps(results))
        elif results:
            self._sum_up([claim for claim in claims if claim.row in results], results)
        return status

    def _sum_up(self, claims: list[Claim], results: dict[str, Result]) -> None:
        console = _console()
        console.print(_table(claims, results))
        console.print(_count(results), highlight=False)
        if not self.full:
            console.print(f"Written to {self.out / QUICK_FILE}", highlight=False, soft_wrap=True)

    def _list(self, claims: list[Claim] | tuple[Claim, ...]) -> int:
        if self.json:
            names = ("row", "where", "claim", "paper", "full_time", "elsewhere", "source")
            print(json.dumps([{name: getattr(claim, name) for name in names} for claim in claims]))
            return 0
        best = read_best(self.out)
        console = _console()
        for part in PARTS:
            table = Table(title=part.title, **STYLE)
            table.add_column("row", no_wrap=True)
            table.add_column("where")
            table.add_column("claim")
            table.add_column("at full length")
            table.add_column("last verdict")
            chosen = [claim for claim in part.claims if claim in claims]
            for claim in chosen:
                last = verdict(best[claim.row]) if claim.row in best else "-"
                full = claim.full_time or "yes" if claim.full else "-" if claim.is_checked else "elsewhere"
                table.add_row(claim.row, claim.where, claim.claim, full, last)
            if chosen:
                console.print(table)
        return 0


class _Progress:
    """A line on stderr now and then."""

    def __init__(self) -> None:
        self._last = float("-inf")

    def __call__(self, line: str) -> None:
        now = time.monotonic()
        if now - self._last > 10:
            self._last = now
            print(f"deqkit: {line}", file=sys.stderr)


def _console() -> Console:
    return Console(width=None if sys.stdout.isatty() else TABLE_WIDTH)


def _print_result(claim: Claim, result: Result) -> None:
    console = _console()
    console.print(
        f"[bold]{claim.row}[/bold] ({claim.where}): {verdict(result)} [{result['seconds']:.0f} s]",
        highlight=False,
        soft_wrap=True,
    )
    console.print(f"  {result['measured']}", highlight=False, soft_wrap=True, markup=False)
    if result["holds"] is not True and result["remark"]:
        console.print(f"  {result['remark']}", highlight=False, soft_wrap=True, markup=False)
    if not claim.is_checked:
        console.print(f"  elsewhere: {told_elsewhere(claim)}", highlight=False, soft_wrap=True, markup=False)


def _table(claims: list[Claim], results: dict[str, Result]) -> Table:
    table = Table(title="the paper, claim by claim", **STYLE)
    table.add_column("row", no_wrap=True)
    for name in ("where", "claim", "paper", "measured", "verdict"):
        table.add_column(name, overflow="fold")
    for claim in claims:
        result = results[claim.row]
        cells = (claim.row, claim.where, claim.claim, claim.paper, result["measured"], verdict(result))
        table.add_row(*cells)
    return table


def _count(results: dict[str, Result]) -> str:
    verdicts = [verdict(result) for result in results.values()]
    minutes = sum(result["seconds"] for result in results.values()) / 60
    return (
        f"{verdicts.count('holds')} hold, {verdicts.count('does not hold')} do not, {verdicts.count('open')} open, "
        f"{verdicts.count('not measured')} not measured; {minutes:.1f} minutes"
    )
