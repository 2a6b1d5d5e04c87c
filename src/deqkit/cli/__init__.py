"""The command line: `deqkit COMMAND [options]`, one thin module a command.

A command is a frozen dataclass with a `run` method, named in `COMMANDS` and imported only when it is called, so that
`deqkit --help` is quick. tyro turns its fields into options.
"""

from __future__ import annotations

import contextlib
import difflib
import functools
import importlib
import importlib.metadata
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import tyro

from deqkit.cli._command import Command

OK, FAILED, MISUSED = 0, 1, 2
"""Exit statuses: done; could not be done; not understood."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Entry:
    module: str
    name: str
    help: str


COMMANDS: dict[tuple[str, ...], _Entry] = {
    ("bench", "solvers"): _Entry(
        module="deqkit.cli.bench",
        name="BenchSolvers",
        help="measure deqkit and torchdeq side by side: evaluations, products, accuracy, time, memory",
    ),
    ("bench", "memory"): _Entry(
        module="deqkit.cli.memory",
        name="BenchMemory",
        help="peak training memory of the paper's models and of their layer-by-layer counterparts",
    ),
    ("bench", "generate"): _Entry(
        module="deqkit.cli.generate",
        name="BenchGenerate",
        help="tokens per second with the past cached, by solving again, and of layers with a cache",
    ),
    ("bench", "runtime"): _Entry(
        module="deqkit.cli.runtime",
        name="BenchRuntime",
        help="where the time of a model's steps goes, and its ratio to stacks of the same cell",
    ),
    ("bench", "length"): _Entry(
        module="deqkit.cli.length",
        name="BenchLength",
        help="how time and memory of a model grow with the length of its sequences",
    ),
    ("plan",): _Entry(
        module="deqkit.cli.memory",
        name="Plan",
        help="what a training step of a model will need, before any machine is rented",
    ),
    ("train",): _Entry(
        module="deqkit.cli.train",
        name="Train",
        help="train a recipe on its data or your text, or go on with a run",
    ),
    ("eval",): _Entry(
        module="deqkit.cli.eval", name="Eval", help="perplexity of a run, with its causality leak; sweeps of the solve"
    ),
    ("generate",): _Entry(
        module="deqkit.cli.generate", name="Generate", help="go on from a text with a run's model, token by token"
    ),
    ("import",): _Entry(
        module="deqkit.cli.import_", name="Import", help="make a run of a checkpoint of the original authors' code"
    ),
    ("recipes",): _Entry(module="deqkit.cli.train", name="Recipes", help="list the recipes with sizes and times"),
    ("data", "prepare"): _Entry(
        module="deqkit.cli.data",
        name="DataPrepare",
        help="turn raw text into a vocabulary and memory-mapped ids",
    ),
    ("data", "info"): _Entry(
        module="deqkit.cli.data",
        name="DataInfo",
        help="tell what is in a folder that `data prepare` made",
    ),
    ("report",): _Entry(
        module="deqkit.cli.report",
        name="Report",
        help="write a page about a run, or about several side by side",
    ),
    ("paper",): _Entry(
        module="deqkit.cli.paper",
        name="Paper",
        help="check the paper's claims, one by one: quick versions of all, or a row at full length",
    ),
}


class UsageError(ValueError):
    """The command line was not understood."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        argv: The words after `deqkit`; those the process was started with if left out.

    Returns:
        The exit status: 0, 1 when the command failed, 2 when it was not understood.
    """
    words = list(sys.argv[1:] if argv is None else argv)
    debug = "--debug" in words  # known before the options are: a mistake in them may be what is looked for
    try:
        with _logging_to_stderr():
            status = _answer(words)
            sys.stdout.flush()  # or a reader that has left would be noticed too late
            return status
    except UsageError as error:
        if debug:
            raise
        return _complain(error, MISUSED)
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK
    except (ValueError, OSError) as error:  # what the library raises for a user's mistake; a bug keeps its traceback
        if debug:
            raise
        return _complain(error, FAILED)
    except KeyboardInterrupt as error:
        return _complain(str(error) or "interrupted", 130)


def _answer(words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print(_overview())
        return OK if words else MISUSED
    if words == ["--version"]:
        print(f"deqkit {importlib.metadata.version('deqkit')}")
        return OK
    return _parse(words).run()


def _parse(words: list[str]) -> Command:
    path, options = _find_command(words)
    entry = COMMANDS[path]
    command_type: type[Command] = getattr(importlib.import_module(entry.module), entry.name)
    prog = f"deqkit {' '.join(path)}"
    complaints = io.StringIO()
    try:
        default, options = command_type.default(options)
        read = functools.partial(
            tyro.cli,
            command_type,
            prog=f"{prog} {command_type.subject}".rstrip(),
            description=entry.help if default is None else f"{entry.help}{default.remark()}",
            default=tyro.MISSING_NONPROP if default is None else default,
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.AvoidSubcommands),
            registry=importlib.import_module("deqkit.cli._config").registry(),
        )
        with contextlib.redirect_stderr(complaints):
            command, unknown = read(args=options, return_unknown_args=True)
    except SystemExit as exit_:
        if not exit_.code:  # --help
            raise
        raise UsageError(f"{_first_message(complaints.getvalue())} (see {prog} --help)") from None
    except ValueError as error:  # a config that refuses its values
        raise UsageError(f"{error} (see {prog} --help)") from error
    if unknown:
        raise UsageError(f"unknown option {unknown[0]}{_meant(unknown[0], read)} (see {prog} --help)")
    return command


def _meant(option: str, read: Callable[..., object]) -> str:
    """The option that was probably meant, from the command's own help."""
    text = io.StringIO()
    with contextlib.suppress(SystemExit), contextlib.redirect_stdout(text):
        read(args=["--help"])
    known = set(re.findall(r"--[a-z][a-z0-9_.-]*", text.getvalue()))
    close = difflib.get_close_matches(option, known, n=1)
    return f"; did you mean {close[0]}?" if close else ""


def _find_command(words: list[str]) -> tuple[tuple[str, ...], list[str]]:
    for length in range(len(words), 0, -1):
        path = tuple(words[:length])
        if path in COMMANDS:
            return path, words[length:]
    named = tuple(word for word in words[:2] if not word.startswith("-"))
    group = [path for path in COMMANDS if path[:1] == named[:1]]
    known = [" ".join(path) for path in (group or COMMANDS)]
    if len(named) == 1 and group:
        raise UsageError(f"{named[0]} needs a command: {', '.join(known)}")
    close = difflib.get_close_matches(" ".join(named), known, n=1)
    hint = f"did you mean {close[0]!r}?" if close else f"commands: {', '.join(known)}"
    raise UsageError(f"unknown command {' '.join(named)!r}; {hint}")


def _overview() -> str:
    width = max(len(" ".join(path)) for path in COMMANDS)
    lines = [f"  {' '.join(path):{width}}  {entry.help}" for path, entry in COMMANDS.items()]
    return "\n".join(
        [
            "usage: deqkit COMMAND [options]",
            "",
            "Deep equilibrium models in PyTorch.",
            "",
            *lines,
            "",
            "deqkit COMMAND --help lists a command's options; --debug shows the traceback of an error.",
            "deqkit --version tells the version.",
        ]
    )


def _first_message(box: str) -> str:
    """The first paragraph of tyro's error box, as one line."""
    plain = re.sub(r"\x1b\[[0-9;]*m", "", box)
    message: list[str] = []
    for line in plain.splitlines():
        text = line.strip("│╭╮╰╯─ ")
        is_rule = line.strip().startswith(("╭", "╰")) or not text
        if is_rule and message:
            break
        if not is_rule:
            message.append(text)
    return " ".join(message) or "the options were not understood"


def _complain(error: Exception | str, status: int) -> int:
    print(f"deqkit: {' '.join(str(error).split())}", file=sys.stderr)
    return status


@contextlib.contextmanager
def _logging_to_stderr() -> Iterator[None]:
    """Show the library's warnings as lines of the program, while a command runs."""
    logger, handler = logging.getLogger("deqkit"), logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter("deqkit: %(message)s"))
    logger.addHandler(handler)
    try:
        yield
    finally:
        logger.removeHandler(handler)
