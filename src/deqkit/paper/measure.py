"""Everything that a comparison reports about one trained model, and about several of them side by side."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from deqkit.analysis.results import told_commit
from deqkit.analysis.training_memory import training_memory
from deqkit.model import ModelConfig, num_parameters
from deqkit.paper.memory import QUICK_STEPS
from deqkit.paper.workshop import Workshop, training_hash
from deqkit.report import words
from deqkit.report.chart import typical
from deqkit.report.measure import step_shape
from deqkit.train.config import TrainConfig
from deqkit.train.evaluate import measure_leak
from deqkit.train.load import LoadedRun
from deqkit.train.tasks import TextTask

MIB = 2**20
COLUMNS = (
    "model",
    "parameters",
    "seeds",
    "test perplexity",
    "validation",
    "epochs",
    "minutes",
    "training, µs a token (median at full depth)",
    "inference, µs a token",
    "evaluations / products",
    "training memory, MiB",
    "leak",
)


@dataclass(frozen=True, kw_only=True)
class Contender:
    """A model of a comparison."""

    label: str
    config: Callable[[Workshop], TrainConfig]
    seeds: tuple[int, ...] | None = None
    """None for the workshop's first."""
    paper: float | None = None
    """The paper's figure for what it corresponds to."""

    def configs(self, workshop: Workshop) -> Iterator[TrainConfig]:
        """The trainings that are to be reported, one for every seed."""
        return workshop.seeds_of(self.config(workshop), self.seeds or (workshop.first_seed,))


def measure(workshop: Workshop, config: TrainConfig) -> dict[str, Any]:
    """One model, trained unless it is there: size, quality, time, memory, solver steps and causality."""
    before = workshop.measured_before(config)
    if before is not None:
        workshop.tell(f"{config.recipe}-seed-{config.seed}: as measured before, trained at commit {before['commit']}")
        return {**before, **_memory(config)}  # which needs no trained weights
    run = workshop.trained(config)
    key = ("measure", run.folder.path.name)
    if key not in workshop.kept:
        workshop.kept[key] = _measure(workshop, run)
    return workshop.kept[key]


def _measure(workshop: Workshop, run: LoadedRun) -> dict[str, Any]:
    config, task = run.config, run.task()
    test = workshop.tested(run)
    count = num_parameters(run.model)
    return {
        "recipe": config.recipe,
        "seed": config.seed,
        "training_hash": training_hash(config),
        "commit": run.folder.read().get("commit"),
        "parameters": count.total,
        "parameters_outside_embedding": count.rest,
        "headline": task.headline,
        "test": test,
        "valid": _validation(workshop, run),
        "best_step": run.step,
        **_training(workshop, run),
        "inference_us_per_token": 1e6 * test["seconds"] / test["num_tokens"],
        **_memory(config),
        "leak": measure_leak(run.model, task, "test"),
    }


def shallow_model(config: TrainConfig) -> ModelConfig:
    """What a training steps with before its equilibrium; a learned start, if it has one, waits."""
    return replace(config.model, depth=config.devices.warmup_depth, start="zeros")


def _memory(config: TrainConfig) -> dict[str, float]:
    """The peak of the training, and that of its last stage: the layers of a shallow start may need more than the
    equilibrium that follows."""
    batch, length = step_shape(config)
    stages = [config.model]
    if config.devices.warmup_steps:
        stages.append(shallow_model(config))
    options: dict[str, Any] = {"batch": batch, "length": length, "bf16": config.precision == "bf16"}
    peaks = [training_memory(_few_steps(model), **options).peak / MIB for model in stages]
    return {"training_memory_mib": max(peaks), "last_stage_memory_mib": peaks[0]}


def _few_steps(model: ModelConfig) -> ModelConfig:
    """Solves with limits from which on memory does not grow: counting storages takes longer than computing."""
    adjoint: Any = model.adjoint
    if hasattr(adjoint, "max_steps"):
        adjoint = replace(adjoint, max_steps=min(adjoint.max_steps, QUICK_STEPS))
    return replace(model, max_steps=min(model.max_steps, QUICK_STEPS), adjoint=adjoint)


def _validation(workshop: Workshop, run: LoadedRun) -> dict[str, Any]:
    """What training found at the step whose weights were kept."""
    return next(record for record in workshop.metrics(run, "valid") if record["step"] == run.step)


def _training(workshop: Workshop, run: LoadedRun) -> dict[str, Any]:
    """Length, time and solver steps of a training, from what it wrote."""
    records, config, task = workshop.metrics(run), run.config, run.task()
    batch, length = step_shape(config)
    batch *= config.optimiser.accumulate
    num_tokens, seconds = len(records) * batch * length, sum(record["seconds"] for record in records)
    solved = [record for record in records if "evals" in record]
    late = solved or [record for record in records if not record["shallow"]]
    return {
        "steps": len(records),
        "epochs": num_tokens / len(task.corpus.split("train")) if isinstance(task, TextTask) else None,
        "minutes": seconds / 60,
        "validation_minutes": sum(record["seconds"] for record in workshop.metrics(run, "valid")) / 60,
        "training_us_per_token": 1e6 * seconds / num_tokens,
        "late_tokens_per_second": statistics.median(record["tokens_per_second"] for record in late),
        "evaluations": typical([record["evals"] for record in solved]) if solved else None,
        "products": typical([record["backward_evals"] for record in solved]) if solved else None,
        "process_memory_mib": records[-1]["memory_mib"],
    }


def compare(workshop: Workshop, contenders: Sequence[Contender]) -> list[dict[str, Any]]:
    """Measure every contender with its seeds; those of which no seed may be trained, and none is there, are left out.

    Raises:
        ValueError: fewer than two are left to compare, or they have no seed in common.
    """
    found = []
    for contender in contenders:
        runs = [measure(workshop, config) for config in contender.configs(workshop)]
        if runs:
            found.append({"label": contender.label, "paper": contender.paper, "runs": runs, **_over_seeds(runs)})
    if len(found) < 2 or found[0]["label"] != contenders[0].label:
        names = ", ".join(contender.label for contender in contenders)
        raise ValueError(f"--seeds {workshop.seeds} leaves too little of {names} to compare: allow more seeds")
    for other in found[1:]:
        if not set(other["seeds"]) & set(found[0]["seeds"]):
            raise ValueError(f"{found[0]['label']} and {other['label']} have no seed in common: allow more seeds")
    return found


def verdict_of(
    holds: bool | None, contenders: Sequence[Contender], found: Sequence[dict[str, Any]]
) -> tuple[bool | None, str]:
    """What can be said when some contenders are missing: that a claim fails, but not that it holds."""
    labels = [one["label"] for one in found]
    missing = [contender.label for contender in contenders if contender.label not in labels]
    if not missing:
        return holds, ""
    return (False if holds is False else None), f" Not trained: {', '.join(missing)}."


def _over_seeds(runs: Sequence[dict[str, Any]]) -> dict[str, Any]:
    tests = [run["test"][run["headline"]] for run in runs]
    return {
        "seeds": [run["seed"] for run in runs],
        "test": statistics.fmean(tests),
        "lowest": min(tests),
        "highest": max(tests),
    }


def ratios(one: dict[str, Any], other: dict[str, Any]) -> list[float]:
    """The first one's figure as a multiple of the other's, for every seed that both have: the same seed is the same
    data, and for layers and an equilibrium of one cell the same shallow start."""
    figures = [{run["seed"]: run["test"][run["headline"]] for run in model["runs"]} for model in (one, other)]
    return [figures[0][seed] / figures[1][seed] for seed in figures[0] if seed in figures[1]]


def relative(one: dict[str, Any], other: dict[str, Any]) -> float:
    """Their geometric mean: a seed with a high perplexity does not outweigh the others."""
    return statistics.geometric_mean(ratios(one, other))


def spread(found: dict[str, Any], form: str = ".1f") -> str:
    """The mean over seeds, with the lowest and the highest."""
    if len(found["seeds"]) == 1:
        return f"{found['test']:{form}}"
    return f"{found['test']:{form}} ({found['lowest']:{form}} to {found['highest']:{form}})"


def table(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """The comparison as a table of text."""
    return {"columns": list(COLUMNS), "rows": [_row(one) for one in found]}


def _row(one: dict[str, Any]) -> list[str]:
    runs = one["runs"]

    def mean(name: str, form: str = ".0f") -> str:
        values = [run[name] for run in runs if run[name] is not None]
        return f"{statistics.fmean(values):{form}}" if values else "-"

    solves = "-" if runs[0]["evaluations"] is None else f"{mean('evaluations', '.1f')} / {mean('products', '.1f')}"
    validation = statistics.fmean(run["valid"][run["headline"]] for run in runs)
    return [
        one["label"],
        f"{runs[0]['parameters']:,}",
        ", ".join(map(str, one["seeds"])),
        spread(one),
        f"{validation:.1f}",
        mean("epochs", ".1f"),
        mean("minutes"),
        f"{mean('training_us_per_token')} ({_late(runs):.0f})",
        mean("inference_us_per_token"),
        solves,
        _memory_cell(runs[0]),
        f"{max(run['leak'] for run in runs):.1g}",
    ]


def _late(runs: Sequence[dict[str, Any]]) -> float:
    """Microseconds a token at steps in which the network has its full depth: the median of each run."""
    return statistics.fmean(1e6 / run["late_tokens_per_second"] for run in runs)


def _memory_cell(run: dict[str, Any]) -> str:
    peak, last = round(run["training_memory_mib"]), round(run["last_stage_memory_mib"])
    return f"{peak}" if peak == last else f"{peak} ({last} after the shallow start)"


def listed(found: Sequence[dict[str, Any]], form: str = ".1f") -> str:
    """The figures of all: over seeds if they have the same ones, else every seed by itself."""
    if all(one["seeds"] == found[0]["seeds"] for one in found):
        return ", ".join(f"{one['label']} {spread(one, form)}" for one in found)
    parts = []
    for one in found:
        figures = words.listed([f"{run['test'][run['headline']]:{form}}" for run in one["runs"]])
        seeds = words.listed([str(seed) for seed in one["seeds"]])
        parts.append(f"{one['label']} {figures} (seed{'s' * (len(one['seeds']) > 1)} {seeds})")
    return ", ".join(parts)


def bars(found: Sequence[dict[str, Any]], *, y: str, **options: Any) -> dict[str, Any]:
    """The comparison as a bar figure: the mean over the seeds that all have, and every seed as a point."""
    common = set.intersection(*(set(one["seeds"]) for one in found))
    return {
        "kind": "bars",
        "y": y,
        **options,
        "bars": [
            {
                "label": one["label"],
                "value": statistics.fmean(run["test"][run["headline"]] for run in one["runs"] if run["seed"] in common),
                "points": [run["test"][run["headline"]] for run in one["runs"]],
            }
            for one in found
        ],
    }


def told_rates(workshop: Workshop, contenders: Sequence[Contender]) -> str:
    rates = ", ".join(f"{one.label} {one.config(workshop).optimiser.lr:g}" for one in contenders)
    return f" Learning rates: {rates}."


def told_shallow(workshop: Workshop, contenders: Sequence[Contender]) -> str:
    """How many steps of which models were taken with a few layers; empty if none were."""
    starts: dict[str, list[str]] = {}
    for contender in contenders:
        config = contender.config(workshop)
        devices = config.devices
        if devices.warmup_steps:
            start = f"{devices.warmup_steps:,} of {config.steps:,} steps with {devices.warmup_depth} tied layers"
            starts.setdefault(start, []).append(contender.label)
    return "".join(f" The first {start}: {words.listed(labels)}." for start, labels in starts.items())


def told_commits(found: Sequence[dict[str, Any]]) -> str:
    """Said when the models of a comparison were not trained by one version of the code; empty if they were."""
    commits = sorted({told_commit(run["commit"]) for one in found for run in one["runs"]})
    if len(commits) < 2:
        return ""
    return f" Trained at {', '.join(commits)}: their times are not of one version of the code."


def describe_runs(found: Sequence[dict[str, Any]]) -> str:
    """Steps, sizes and seeds, for the scale of an outcome."""
    return "; ".join(
        f"{one['label']}: {one['runs'][0]['parameters']:,} parameters, {one['runs'][0]['steps']:,} steps, "
        f"{len(one['seeds'])} seed{'s' * (len(one['seeds']) > 1)}"
        for one in found
    )
