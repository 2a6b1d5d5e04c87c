"""The memory column of the paper's tables: peak training memory of its models and of their counterparts in layers."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

from deqkit.analysis.results import results_header
from deqkit.analysis.training_memory import training_memory
from deqkit.model import ModelConfig
from deqkit.model.paper import PAPER_MODELS

# equilibrium model, counterpart, checkpointing of the counterpart, and the paper's figures in GB for the two
COMPARISONS: tuple[tuple[str, str, bool, float | None, float | None], ...] = (
    ("trellis-ptb", "trellis-ptb-tied-60", False, 1.2, 8.5),
    ("trellis-ptb", "trellis-ptb-tied-60", True, 1.2, None),
    ("trellis-wt103", "trellis-wt103-tied-70", False, 3.3, 24.7),
    ("trellis-wt103", "trellis-wt103-tied-70", True, 3.3, 5.2),
    ("transformer-small", "transformer-small-untied-4", False, 1.1, 4.8),
    ("transformer-small", "transformer-small-untied-4", True, 1.1, None),
    ("transformer-small", "transformer-small-tied-16", False, 1.1, 6.8),
    ("transformer-small", "transformer-small-tied-16", True, 1.1, None),
    ("transformer-medium", "transformer-medium-untied-16", False, 2.7, 8.5),
    ("transformer-medium", "transformer-medium-untied-16", True, 2.7, None),
    ("transformer-adaptive", "transformer-adaptive-untied-18", False, 3.7, 9.0),
    ("transformer-adaptive", "transformer-adaptive-untied-18", True, 3.7, None),
)
GROUPS = (1, 2, 4, 8)
"""Layers between two checkpoints that are tried."""
MAX_SHARE_OF_60_LAYERS, MAX_CHANGE_BY_STEPS = 0.10, 0.02

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryBenchConfig:
    """Settings of `deqkit bench memory`."""

    batch: int = 15
    """Samples, as in the paper."""
    length: int = 150
    """Positions, as in the paper."""
    max_steps: int = 30
    """Evaluations of every forward and backward solve."""
    step_limits: tuple[int, int] = (10, 100)
    """Two limits between which memory should not change."""
    real: bool = False
    """Compute with numbers. The models with layers need up to 11 GB of memory, and everything takes long."""

    def __post_init__(self) -> None:
        for name in ("batch", "length", "max_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")


def run_memory_bench(config: MemoryBenchConfig, *, on_progress: OnProgress) -> dict[str, Any]:
    """Measure every model of `COMPARISONS`, and what the step limit changes."""
    jobs = _jobs(config)
    measured: dict[str, dict[str, int]] = {}
    for done, (name, model) in enumerate(jobs.items()):
        on_progress(name, done, len(jobs))
        memory = training_memory(
            model, batch=config.batch, length=config.length, body_only=True, abstract=not config.real
        )
        measured[name] = {**asdict(memory), "peak": memory.peak}
    for layers in dict.fromkeys(row[1] for row in COMPARISONS if row[2]):
        tried = [f"{_name(layers, True)} {every}" for every in GROUPS if f"{_name(layers, True)} {every}" in measured]
        measured[_name(layers, True)] = min((measured.pop(name) for name in tried), key=lambda held: held["peak"])
    comparisons = [_compare(measured, *row) for row in COMPARISONS]
    return {
        **results_header(benchmark="bench memory", seed=0, config=config),
        "bytes": measured,
        "comparisons": comparisons,
        "summary": _summary(measured, comparisons, config.step_limits),
    }


def _jobs(config: MemoryBenchConfig) -> dict[str, ModelConfig]:
    jobs: dict[str, ModelConfig] = {}
    for equilibrium, layers, checkpointing, *_ in COMPARISONS:
        jobs[equilibrium] = _with_limit(PAPER_MODELS[equilibrium](), config.max_steps)
        if checkpointing:
            jobs |= {f"{_name(layers, True)} {every}": model for every, model in checkpointed(PAPER_MODELS[layers]())}
        else:
            jobs[layers] = PAPER_MODELS[layers]()
    for limit in config.step_limits:
        jobs[f"trellis-ptb, {limit} steps"] = _with_limit(PAPER_MODELS["trellis-ptb"](), limit)
        jobs[f"transformer-small, {limit} steps"] = _with_limit(PAPER_MODELS["transformer-small"](), limit)
    return jobs


def checkpointed(model: ModelConfig) -> Iterator[tuple[int, ModelConfig]]:
    """The stack with checkpoints between groups of layers, by their size: the one that needs least counts."""
    for every in GROUPS:
        if every < int(model.depth):
            yield every, replace(model, checkpoint=True, checkpoint_every=every)


def _with_limit(model: ModelConfig, max_steps: int) -> ModelConfig:
    adjoint: Any = model.adjoint
    return replace(model, max_steps=max_steps, adjoint=replace(adjoint, max_steps=max_steps))


def _name(layers: str, checkpointing: bool) -> str:
    return f"{layers}, checkpointing" if checkpointing else layers


def _compare(
    measured: dict[str, dict[str, int]],
    equilibrium: str,
    layers: str,
    checkpointing: bool,
    paper_equilibrium: float | None,
    paper_layers: float | None,
) -> dict[str, Any]:
    """One row. The bar is the paper's ratio where it has one; checkpointing needs only to be beaten."""
    other = _name(layers, checkpointing)
    ratio = measured[equilibrium]["peak"] / measured[other]["peak"]
    paper = paper_equilibrium / paper_layers if paper_equilibrium and paper_layers else None
    bar = min(1.0, paper) if paper is not None else 1.0
    return {
        "equilibrium": equilibrium,
        "layers": other,
        "ratio": ratio,
        "paper_gb": [paper_equilibrium, paper_layers],
        "paper_ratio": paper,
        "bar": bar,
        "holds": ratio <= bar,
    }


def _summary(
    measured: dict[str, dict[str, int]], comparisons: list[dict[str, Any]], step_limits: tuple[int, int]
) -> list[dict[str, Any]]:
    rows = [{"name": f"{c['equilibrium']} / {c['layers']}", "value": c["ratio"], "bar": c["bar"]} for c in comparisons]
    share = measured["trellis-ptb"]["peak"] / measured["trellis-ptb-tied-60"]["peak"]
    rows.append({"name": "share of the 60-layer TrellisNet", "value": share, "bar": MAX_SHARE_OF_60_LAYERS})
    for model in ("trellis-ptb", "transformer-small"):
        few, many = (measured[f"{model}, {limit} steps"]["peak"] for limit in step_limits)
        name = f"{model}: change from {step_limits[0]} to {step_limits[1]} steps"
        rows.append({"name": name, "value": abs(many / few - 1), "bar": MAX_CHANGE_BY_STEPS})
    return [{**row, "holds": row["value"] <= row["bar"]} for row in rows]
