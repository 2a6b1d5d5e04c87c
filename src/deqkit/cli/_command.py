"""What every command is."""

from __future__ import annotations

import abc
from dataclasses import dataclass
from typing import ClassVar


@dataclass(frozen=True, kw_only=True)
class Command(abc.ABC):
    """A command of the command line: its options are the fields, its work is `run`."""

    subject: ClassVar[str] = ""
    """What is written before the options, as the usage line has it."""

    debug: bool = False
    """Show the traceback of an error."""

    @classmethod
    def default(cls, words: list[str]) -> tuple[Command | None, list[str]]:
        """What the options start from, and the words that are left to be read as options."""
        return None, words

    def remark(self) -> str:
        """What help should say about the defaults it shows."""
        return ""

    @abc.abstractmethod
    def run(self) -> int:
        """Do the work, print what came of it, and return the exit status.

        Raises:
            ValueError: The user's mistake, in one line.
            OSError: A file could not be read or written.
        """
