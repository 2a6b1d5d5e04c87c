"""The head of a run: what it is, and the figures that matter."""

from __future__ import annotations

import statistics
from pathlib import Path

from deqkit.layers import ConvolutionConfig, RecurrentConfig, TransformerConfig, TrellisConfig
from deqkit.report.history import History
from deqkit.report.markup import Html, element, join, paragraph
from deqkit.report.measure import Measured, Missing
from deqkit.report.words import count, duration, figure, number, plural, short_count, size
from deqkit.train.config import DataConfig, TrainConfig


def overview(measured: Measured) -> Html:
    """A sentence and the tiles."""
    tiles = element("dl", *(_tile(*parts) for parts in _tiles(measured)), class_="tiles")
    return join([paragraph(summary(measured.history), class_="lead"), tiles])


def summary(history: History) -> str:
    """The run in a sentence."""
    config = history.config
    if not history.steps:
        return f"{describe_model(config)}. No training is recorded here."
    progress = plural(history.num_steps, "step")
    if not history.is_finished:
        progress = f"{history.num_steps:,} of {plural(config.steps, 'step')} so far"
    begun = " after a shallow start" if config.devices.warmup_steps else ""
    if history.is_shallow(history.num_steps):
        begun = f", all of them with only {plural(config.devices.warmup_depth, 'layer')},"
    return f"{describe_model(config)}, trained for {progress}{begun} on {describe_data(config.data)}."


def describe_model(config: TrainConfig) -> str:
    match config.model.cell:
        case TransformerConfig() as cell:
            kind = f"A transformer cell of width {cell.width} with {plural(cell.num_heads, 'head')}"
        case TrellisConfig() as cell:
            kind = f"A trellis cell with {plural(cell.hidden_width, 'hidden unit')}"
        case RecurrentConfig() as cell:
            name = "An LSTM" if cell.unit == "lstm" else "A GRU"
            kind = f"{name} with {plural(cell.hidden_width, 'hidden unit')}"
        case ConvolutionConfig() as cell:
            kind = f"A TCN with {plural(cell.hidden_width, 'channel')}"
    return f"{kind}, {describe_depth(config)}"


def describe_depth(config: TrainConfig) -> str:
    depth = config.model.depth
    if depth == "equilibrium":
        return "solved to its equilibrium"
    if config.model.is_baseline:
        return f"in {describe_layers(config)}"
    return f"as {plural(int(depth), 'tied layer' if config.model.tied else 'untied layer')}"


def describe_layers(config: TrainConfig) -> str:
    """Layers of a network without an equilibrium; of a TCN its levels."""
    match config.model.cell:
        case RecurrentConfig() as cell:
            return plural(cell.num_layers, "layer")
        case ConvolutionConfig() as cell:
            return plural(cell.num_levels, "level")
    return plural(int(config.model.depth), "layer")


def describe_data(data: DataConfig) -> str:
    if data.source == "embedded":
        return "the documentation of Python's standard library"
    if data.source == "copy-memory":
        return f"copy memory over {plural(data.copy_T, 'blank')}"
    return Path(data.source).name


def _tile(name: str, value: str, note: str) -> Html:
    return element("div", element("dt", name), element("dd", value, element("small", note)))


def _tiles(measured: Measured) -> list[tuple[str, str, str]]:
    return [*_quality(measured.history), *_costs(measured)]


def _quality(history: History) -> list[tuple[str, str, str]]:
    name, best = history.headline, history.best
    if best is None:
        tiles = [(f"Validation {name}", "none yet", "not evaluated so far")]
    else:
        shallow = ", shallow" if history.best_is_shallow else ""
        tiles = [(f"Validation {name}", figure(best[name]), f"best, at step {best['step']:,}{shallow}")]
    test = history.evaluation("test")
    if test is not None and name in test.figures:
        part = "" if test.is_complete else ", a part"
        tokens = f"over {count(test.figures['num_tokens'])} tokens" if "num_tokens" in test.figures else "as evaluated"
        tiles.append((f"Test {name}", figure(test.figures[name]), f"{tokens}{part}"))
    return tiles


def _costs(measured: Measured) -> list[tuple[str, str, str]]:
    history = measured.history
    parameters = measured.parameters
    tiles = [("Parameters", short_count(parameters.total), f"{short_count(parameters.rest)} outside the vocabulary")]
    memory = measured.memory
    if not isinstance(memory, Missing):
        shape = f"{memory.batch} × {memory.length} tokens"
        tiles.append(("Memory of a step", size(memory.own.peak), f"peak, {shape}"))
    seconds = seconds_per_step(history)
    if seconds is not None:
        tiles.append(("Time of a step", duration(seconds), f"median; {duration(history.seconds)} in all"))
    tiles.append(_depth(history))
    return tiles


def _depth(history: History) -> tuple[str, str, str]:
    evals = evals_per_solve(history)
    if not history.is_equilibrium:
        depth, unit = describe_layers(history.config).split()
        return "Depth", depth, f"{unit}; nothing is solved"
    if evals is None:
        return "Evaluations a solve", "none yet", "not validated at its equilibrium"
    return "Evaluations a solve", number(evals), "of the cell, in the last validation"


def seconds_per_step(history: History) -> float | None:
    """The median over the steps after the shallow phase; None without steps."""
    return statistics.median(record["seconds"] for record in history.deep_steps) if history.steps else None


def evals_per_solve(history: History) -> float | None:
    """Mean evaluations of the cell in the last validation that solved; None if none did."""
    return next((record["evals"] for record in reversed(history.validations) if "evals" in record), None)
