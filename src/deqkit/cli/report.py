"""`deqkit report`."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from deqkit.cli._command import Command
from deqkit.cli._terminal import with_progress


@dataclass(frozen=True, kw_only=True)
class Report(Command):
    """One HTML page about a run, or about several side by side."""

    runs: Annotated[tuple[Path, ...], tyro.conf.Positional]
    """Run folders."""
    out: Path | None = None
    """The page; RUN/report.html if left out, or report.html here when there are several runs."""

    def run(self) -> int:
        from deqkit.report import write_report  # torch and matplotlib, which --help does without

        if not self.runs:
            raise ValueError("name at least one run: deqkit report RUN")
        out = self.out or (self.runs[0] / "report.html" if len(self.runs) == 1 else Path("report.html"))
        path = with_progress(lambda show: write_report(self.runs, out, on_progress=show))
        print(f"Report written to {path}")
        return 0
