"""Result files: what every benchmark records beside its numbers, and how the file is written.

A figure is worth something only with the machine, the seed, the commit and the configuration it came from
(DESIGN.md, "Numbers"); `results_header` collects them and `write_results` writes the file in one step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import platform
import subprocess
import tempfile
from collections.abc import Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch


def results_header(*, benchmark: str, seed: int, config: Any) -> dict[str, Any]:
    """The fields that say where the numbers come from.

    Args:
        benchmark: The name of the command that measured, such as "bench solvers".
        seed: The seed of all randomness of the measurement.
        config: The complete configuration: a dataclass or a mapping.
    """
    return {
        "benchmark": benchmark,
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine_info(),
        "commit": git_commit(),
        "seed": seed,
        "config": dict(config) if isinstance(config, Mapping) else dataclasses.asdict(config),
    }


def machine_info() -> dict[str, Any]:
    """Processor, cores, devices and the versions of Python and torch."""
    return {
        "cpu": _cpu_model(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
        "gpu": torch.cuda.get_device_name() if torch.cuda.is_available() else None,
        "system": platform.platform(),
        "python": platform.python_version(),
        "torch": torch.__version__,
    }


def git_commit() -> str | None:
    """The commit this copy of deqkit was run from, with "+changes" when files differ, or None outside a repository."""
    folder = Path(__file__).parent
    commit = _git(folder, "rev-parse", "HEAD")
    if commit is None:
        return None
    # Result files are written by the run itself, so they do not make the code a different one.
    changes = _git(folder, "status", "--porcelain", "--untracked-files=no", "--", ":/", ":(exclude,top)results")
    return f"{commit}+changes" if changes else commit


def told_commit(commit: str | None) -> str:
    """As a reader can look it up, and whether that is all there was to the code."""
    if commit is None:
        return "no commit"
    return f"commit {commit[:10]}{' with changes' * commit.endswith('+changes')}"


def write_results(path: str | Path, payload: Mapping[str, Any]) -> Path:
    """Write a results file so that a reader finds the old one or the new one, never half of it.

    Args:
        path: Where to write; missing folders are made.
        payload: Plain values only. NaN and infinity are refused: a failed measurement is None, with a reason.

    Returns:
        The path written.
    """
    path = Path(path)
    text = json.dumps(payload, indent=1, allow_nan=False, default=_plain) + "\n"
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private, results are for everyone
        os.replace(temporary, path)
    except OSError:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path


def _plain(value: Any) -> Any:
    if isinstance(value, Path):
        return str(value)
    raise TypeError(f"results hold plain values, got {type(value).__name__}: {value!r}")


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return platform.processor() or platform.machine()
    models = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return models[0] if models else platform.machine()


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):  # no git, no repository, or no commit yet
        return None
    return done.stdout.strip()
