"""Memory and time of a step."""

from __future__ import annotations

import statistics

from deqkit.analysis.training_memory import TrainingMemory
from deqkit.report.chart import Bar, Bars, Chart, noisy
from deqkit.report.frame import bars_figure, chart_figure
from deqkit.report.history import History
from deqkit.report.markup import Html, element, missing, section
from deqkit.report.measure import Measured, Missing, StepMemory
from deqkit.report.sections.overview import seconds_per_step
from deqkit.report.words import MIB, count, duration, plural, share, size, times

PARTS = ("solver", "activations", "gradients", "parameters")
PART_NAMES = ("solver and temporaries", "activations", "gradients", "parameters")


def cost_section(measured: Measured, *, key: str, level: int) -> Html:
    memory = measured.memory
    if isinstance(memory, Missing):
        first = missing(f"The memory of a step could not be counted: {memory.reason}.")
    else:
        first = _memory_figure(memory, measured.history, key)
    figures = element("div", first, _time_figure(measured.history, key), class_="figures")
    return section("Memory and time", figures, level=level, id_=f"{key}-cost")


def memory_bar(text: str, memory: TrainingMemory) -> Bar:
    return Bar(text=text, parts=[getattr(memory, part) for part in PARTS], total=size(memory.peak))


def _memory_figure(memory: StepMemory, history: History, key: str) -> Html:
    bars = [memory_bar("this run", memory.own)]
    if memory.counterpart is not None:
        name = "at its equilibrium" if memory.depth is None else f"as {plural(memory.depth, 'tied layer')}"
        bars.append(memory_bar(f"the same cell {name}", memory.counterpart))
    chart = Bars(bars=bars, labels=PART_NAMES)
    caption = memory_caption(memory, history)
    return bars_figure(chart, name=f"{key}-memory", title="Memory of a training step", caption=caption)


def memory_caption(memory: StepMemory, history: History) -> str:
    own = memory.own
    shape = f"{plural(memory.batch, 'sequence')} of {plural(memory.length, 'position')}"
    text = f"A step with {shape} holds {size(own.peak)} of tensors at its peak, {share(own.activations / own.peak)} "
    text += "of it for the backward pass"
    if memory.counterpart is not None:
        layers = f"as {plural(memory.depth or 0, 'tied layer')}, as many as a solve takes evaluations,"
        other = "solved to its equilibrium" if memory.depth is None else layers
        text += f"; {other} the same cell would hold {size(memory.counterpart.peak)}, "
        text += f"{times(memory.counterpart.peak / own.peak)} that"
    process = [f" The whole process had at most {size(record['memory_mib'] * MIB)}." for record in history.steps[-1:]]
    return f"{text}.{''.join(process)}"


def _time_figure(history: History, key: str) -> Html:
    if not history.steps:
        return missing("No training is recorded here, so there is no time of a step.")
    steps, seconds = history.series("seconds")
    chart = Chart(
        series=noisy(steps, seconds, label="smoothed", colour=0, outliers=True),
        x="step",
        y="seconds per step",
        from_zero=True,
        phases=history.phases,
    )
    return chart_figure(chart, name=f"{key}-time", title="Time of a step", caption=time_caption(history))


def time_caption(history: History) -> str:
    shallow = [record["seconds"] for record in history.steps if record["shallow"]]
    speed = statistics.median(record["tokens_per_second"] for record in history.deep_steps)
    deep = f"{duration(seconds_per_step(history) or 0)}, {count(speed)} tokens a second"
    if shallow and len(shallow) < len(history.steps):
        text = f"A step took {duration(statistics.median(shallow))} in the shallow phase and {deep} after it"
    else:
        text = f"A step took {deep}"
    return f"{text} (medians); steps and validations took {duration(history.seconds)} in all."
