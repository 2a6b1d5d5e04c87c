"""How commands look on a terminal: tables, and progress on long work."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable
from typing import Any, TypeVar

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

TABLE_WIDTH = 120
STYLE: dict[str, Any] = {
    "box": SIMPLE_HEAD,
    "collapse_padding": True,
    "pad_edge": False,
    "title_justify": "left",
    "caption_justify": "left",
    "title_style": "bold",
}

T = TypeVar("T")
OnProgress = Callable[[str, int, int], None]


def with_progress(work: Callable[[OnProgress], T]) -> T:
    """Do work that reports what it does, with a bar on a terminal, or a line now and then in a log."""
    console = Console(stderr=True)
    if not console.is_terminal:
        return work(_ProgressLines())
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as progress:
        task = progress.add_task("starting", total=None)

        def show(description: str, num_done: int, num_steps: int) -> None:
            progress.update(task, description=description, completed=num_done, total=num_steps)

        return work(show)


class _ProgressLines:
    """Prints the first step of a cell, and then a line every half minute."""

    def __init__(self) -> None:
        self._last = -math.inf

    def __call__(self, description: str, num_done: int, num_steps: int) -> None:
        now = time.monotonic()
        if num_done == 0 or now - self._last > 30:
            self._last = now
            print(f"deqkit: {description} ({num_done}/{num_steps})", file=sys.stderr)
