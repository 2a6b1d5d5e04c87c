"""Runs that are killed with SIGKILL and resumed until they end: `python nursery.py HOW CONFIG FOLDER`.

The processes that are killed are forked from one that has torch imported already, or each would take seconds to start.

HOW is one of
    random      at random moments
    slow-disk   at random moments, with a disk so slow that most of them fall into the writing of a checkpoint
    each        at the first file operation, in the next life at the second, and so on

Prints one JSON object: how often it killed, and the latest checkpoint after every kill.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.utils.tensorboard  # noqa: F401  (imported once, before the forks)

from deqkit.train.checkpoint import list_checkpoints
from deqkit.train.config import from_plain
from deqkit.train.loop import train
from deqkit.train.run_folder import RunFolder
from train.runs import plain_of, tensors_of

NUM_KILLS = 14
CHANGES = ("fsync", "rename", "replace", "mkdir", "unlink", "rmdir", "truncate")
"""The functions of `os` after each of which the disk looks different."""


def live(config: Any, folder: Path, prepare: Callable[[], None]) -> int:
    """Start or resume a run in a process of its own; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    try:
        prepare()
        result = train(config, RunFolder(folder), resume=(folder / "config.json").exists())
        os._exit(0 if result["finished"] else 1)
    except BaseException as error:
        print(repr(error), file=sys.stderr, flush=True)
        os._exit(2)


def outlives(pid: int, moment: Callable[[], bool]) -> bool:
    """Whether a process ends by itself before the moment has come; if not it is killed then."""
    while not moment():
        if _ended(pid, os.WNOHANG):
            return True
        time.sleep(0.001)
    os.kill(pid, signal.SIGKILL)
    return _ended(pid, 0)


def moment_after(path: Path, num_lines: int, seconds: float) -> Callable[[], bool]:
    """A moment so long after the metrics have so many lines more than now: no matter how fast the machine is."""
    wanted = _num_lines(path) + num_lines
    since: list[float] = []

    def come() -> bool:
        if not since and _num_lines(path) >= wanted:
            since.append(time.monotonic())
        return bool(since) and time.monotonic() - since[0] >= seconds

    return come


def _num_lines(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


def _ended(pid: int, options: int) -> bool:
    """Whether it ended well; False if it runs or was killed."""
    found, status = os.waitpid(pid, options)
    if not found or os.WIFSIGNALED(status):
        return False
    if os.waitstatus_to_exitcode(status) != 0:
        raise SystemExit(f"a run failed with exit code {os.waitstatus_to_exitcode(status)}")
    return True


def slow_down() -> None:
    for name, seconds in (("fsync", 0.02), ("unlink", 0.005)):
        _after(name, lambda seconds=seconds: time.sleep(seconds))


def die_at(number: int) -> None:
    """End this process with its `number`-th change of the disk."""
    left = [number]

    def count() -> None:
        left[0] -= 1
        if not left[0]:
            os.kill(os.getpid(), signal.SIGKILL)

    for name in CHANGES:
        _after(name, count)


def _after(name: str, action: Callable[[], None]) -> None:
    original = getattr(os, name)

    def changed(*args: Any, **kwargs: Any) -> Any:
        result = original(*args, **kwargs)
        action()
        return result

    setattr(os, name, changed)


def check(folder: Path) -> int:
    """Everything that passes for a checkpoint is one; returns the step of the latest."""
    found = list_checkpoints(folder / "checkpoints")
    for step, path in found:
        assert plain_of(path)["state.json"]["step"] == step
        assert len(tensors_of(path)) > 10
    return found[-1][0] if found else 0


def kill_at_random(config: Any, folder: Path, *, slow_disk: bool) -> list[int]:
    chance = random.Random(int(slow_disk))
    steps: list[int] = []
    while True:
        pid = live(config, folder, slow_down if slow_disk else lambda: None)
        moment = moment_after(folder / "metrics.jsonl", chance.randint(0, 4), chance.uniform(0.0, 0.1))
        if outlives(pid, moment if len(steps) < NUM_KILLS else lambda: False):
            return steps
        steps.append(check(folder))


def kill_at_each_change(config: Any, folder: Path) -> list[int]:
    """Twice: from the very beginning, and from where old checkpoints are removed."""
    steps: list[int] = []
    number, again = 1, False
    while not _ended(live(config, folder, lambda number=number: die_at(number)), 0):
        steps.append(check(folder))
        number += 1
        if steps[-1] > config.keep and not again:
            number, again = 1, True
    return steps


def main(how: str, config_path: str, folder: Path) -> None:
    torch.set_num_threads(1)
    config = from_plain(json.loads(Path(config_path).read_text()))
    if how == "each":
        steps = kill_at_each_change(config, folder)
    else:
        steps = kill_at_random(config, folder, slow_disk=how == "slow-disk")
    print(json.dumps({"num_kills": len(steps), "latest": steps}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
