"""A check of a claim as a result: what was found, when, where and how long it took."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

from deqkit.analysis.results import results_header, write_results
from deqkit.paper.claim import Check, Claim, unmeasured
from deqkit.paper.workshop import Workshop
from deqkit.train.loop import TrainingError

QUICK_FILE = "paper_quick.json"
FULL_FOLDER = "paper"
Result = dict[str, Any]


def check(claim: Claim, workshop: Workshop, *, full: bool, named: bool = False) -> Result:
    """Run one check. A training that fails is its outcome.

    So is what it lacks (data, a file), unless somebody asked for this row: `named`.

    Raises:
        ValueError: there is no such check of this claim, or it lacks something.
        OSError: a file that it needs cannot be read.
    """
    work = check_of(claim, full=full)
    workshop.used.clear()
    began = time.perf_counter()
    try:
        outcome = work(workshop)
    except TrainingError as error:
        outcome = unmeasured(" ".join(str(error).split()))
    except (ValueError, OSError) as error:
        if named:
            raise
        outcome = unmeasured(" ".join(str(error).split()))
    return {
        **results_header(benchmark=f"paper {claim.row}", seed=workshop.first_seed, config={"full": full}),
        "row": claim.row,
        "full": full,
        "seconds": time.perf_counter() - began,
        "trainings": dict(workshop.used),
        **outcome.plain(),
    }


def check_of(claim: Claim, *, full: bool) -> Check:
    """What is to be run.

    Raises:
        ValueError: there is no such check of this claim; says what there is.
    """
    work = claim.full if full else claim.quick
    if work is not None:
        return work
    if not claim.is_checked:
        raise ValueError(f"{claim.row} is not measured here; elsewhere: {told_elsewhere(claim)}")
    raise ValueError(f"{claim.row} has no longer version: run `deqkit paper {claim.row}`")


def told_elsewhere(claim: Claim) -> str:
    """What would measure a claim that no check does: commands as code, prose as prose."""
    return ", then ".join(f"`{command}`" for command in claim.elsewhere) or claim.source


def save_full(folder: Path, result: Result) -> str:
    """One file a row: full lengths are run one by one. Tells what became of it."""
    path = folder / FULL_FOLDER / f"{result['row']}.json"
    if _is_loss(read_full(folder).get(result["row"]), result):
        return f"{path} keeps what was measured before"
    return f"written to {write_results(path, result)}"


def save_quick(folder: Path, results: dict[str, Result]) -> None:
    """All quick rows in one file; rows that were not run now stay as they are, with their own date and commit."""
    before = read_quick(folder)
    new = {row: result for row, result in results.items() if not _is_loss(before.get(row), result)}
    write_results(folder / QUICK_FILE, {"benchmark": "paper", "rows": {**before, **new}})


def _is_loss(before: Result | None, now: Result) -> bool:
    """A row that lacks its data, or a training that is under way, is no reason to forget an earlier measurement."""
    return verdict(now) == "not measured" and verdict(before) != "not measured"


def read_quick(folder: Path) -> dict[str, Result]:
    path = folder / QUICK_FILE
    return json.loads(path.read_text(encoding="utf-8"))["rows"] if path.exists() else {}


def read_full(folder: Path) -> dict[str, Result]:
    files = sorted((folder / FULL_FOLDER).glob("*.json"))
    results = (json.loads(path.read_text(encoding="utf-8")) for path in files)
    return {result["row"]: result for result in results}


def read_measured(folder: Path) -> dict[str, dict[str, Any]]:
    """Every model that a row has compared at full length, by its `training_hash`; of several the one measured last."""
    results = sorted(read_full(folder).values(), key=lambda result: result["date"])
    found = [one for result in results for one in result["numbers"].get("found", ())]
    runs = [run for one in found if isinstance(one, dict) for run in one.get("runs", ())]
    return {run["training_hash"]: run for run in runs if "training_hash" in run}


def read_best(folder: Path) -> dict[str, Result]:
    """Of every row the full version where it was measured, else the quick one."""
    full = {row: result for row, result in read_full(folder).items() if result["measured"] != "not measured"}
    return {**read_quick(folder), **full}


def verdict(result: Result | None) -> str:
    """In words; what was measured in part may be open."""
    if result is None or result["measured"].startswith("not measured"):
        return "not measured"
    return {True: "holds", False: "does not hold", None: "open"}[result["holds"]]
