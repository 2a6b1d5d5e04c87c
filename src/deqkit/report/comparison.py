"""Several runs side by side: one table and overlaid curves for all that learned from the same data."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from deqkit.analysis.training_memory import TrainingMemory
from deqkit.report.chart import Bars, Chart, Series, smooth, smoothed, typical
from deqkit.report.frame import bars_figure, chart_figure
from deqkit.report.history import Evaluation, History, Record
from deqkit.report.markup import Html, element, join, missing, paragraph, section, table
from deqkit.report.measure import Measured, Missing
from deqkit.report.sections.cost import PART_NAMES, memory_bar
from deqkit.report.sections.learning import is_wide
from deqkit.report.sections.overview import describe_data, describe_layers, evals_per_solve, seconds_per_step
from deqkit.report.words import duration, figure, listed, number, plural, share, short_count, size, times


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A run on the page."""

    name: str
    """Unique on the page."""
    key: str
    """What the ids of its parts begin with."""
    measured: Measured

    @property
    def history(self) -> History:
        return self.measured.history


def comparison(runs: Sequence[Run], *, level: int) -> Html:
    """A section for every data set."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        history = run.history
        groups.setdefault(str(history.header.get("data_sha256") or history.config.data.source), []).append(run)
    return join(_group(group, f"compare{i}", level=level) for i, group in enumerate(groups.values(), 1))


def _group(runs: Sequence[Run], key: str, *, level: int) -> Html:
    parts = [paragraph(findings(runs), class_="lead"), _table(runs)]
    if len(runs) > 1:
        trained = [run for run in runs if run.history.steps]
        figures = [_loss_figure(trained, key, by_time=by_time) for by_time in (False, True) if trained]
        figures += [_memory_figure(runs, key), *([_depth_figure(trained, key)] if trained else [])]
        parts.append(element("div", *figures, class_="figures"))
    data = describe_data(runs[0].history.config.data)
    return section(f"On {data}", *parts, level=level, id_=key)


def findings(runs: Sequence[Run]) -> str:
    """What the comparison says, in a sentence or two."""
    headline = runs[0].history.headline
    best = sorted((run.history.best[headline], _named(run)) for run in runs if run.history.best is not None)
    held = sorted((memory.peak, run.name) for run, memory in _counted(runs))
    parts = []
    if best:
        worse = f" against {figure(best[-1][0])} by {best[-1][1]}" if len(best) > 1 else ""
        parts.append(f"Validation {headline}: {figure(best[0][0])} by {best[0][1]}{worse}")
    if len(held) > 1:
        least, most = held[0], held[-1]
        words = f"{size(least[0])} by {least[1]}, {share(least[0] / most[0])} of the {size(most[0])} of {most[1]}"
        parts.append(f"Memory of a step: {words}")
    return f"{'. '.join(parts)}." if parts else "None of these runs has been validated yet."


def _named(run: Run) -> str:
    return f"{run.name} (still shallow)" if run.history.best_is_shallow else run.name


def _counted(runs: Sequence[Run]) -> list[tuple[Run, TrainingMemory]]:
    return [(run, memory.own) for run in runs if not isinstance(memory := run.measured.memory, Missing)]


def _table(runs: Sequence[Run]) -> Html:
    headline = runs[0].history.headline
    tested = any(run.history.evaluation("test") for run in runs)
    head = ["run", f"validation {headline}", *([f"test {headline}"] if tested else []), "parameters"]
    head += ["memory of a step", "time of a step", "time in all", "evaluations a solve"]
    return table(head, [_row(run, headline, tested=tested) for run in runs], label="The runs side by side")


def _row(run: Run, headline: str, *, tested: bool) -> list[object]:
    history, memory = run.history, run.measured.memory
    test, seconds = history.evaluation("test"), seconds_per_step(history)
    return [
        element("a", run.name, href=f"#{run.key}"),
        _quality(history.best, headline) + (", shallow" if history.best_is_shallow else ""),
        *([_quality(test and test.figures, headline) + _remark(test)] if tested else []),
        short_count(run.measured.parameters.total),
        "not counted" if isinstance(memory, Missing) else size(memory.own.peak),
        "none" if seconds is None else duration(seconds),
        duration(history.seconds),
        _evals(history),
    ]


def _quality(figures: Record | None, headline: str) -> str:
    return "none yet" if figures is None or headline not in figures else figure(figures[headline])


def _remark(test: Evaluation | None) -> str:
    """What makes an evaluation hard to compare with others."""
    if test is None:
        return ""
    return ("" if test.is_complete else ", a part") + (", other settings" if test.settings else "")


def _evals(history: History) -> str:
    if not history.is_equilibrium:
        return describe_layers(history.config)
    evals = evals_per_solve(history)
    return "none yet" if evals is None else number(evals)


def _loss_figure(runs: Sequence[Run], key: str, *, by_time: bool) -> Html:
    series = [curve for i, run in enumerate(runs) for curve in _curves(run, i, by_time=by_time)]
    x, name = ("seconds of training", "time") if by_time else ("step", "loss")
    chart = Chart(series=series, x=x, y="nats per token", log_y=is_wide(series))
    title = f"Loss against {'time' if by_time else 'steps'}"
    caption = time_caption(runs) if by_time else loss_caption(runs)
    return chart_figure(chart, name=f"{key}-{name}", title=title, caption=caption)


def _curves(run: Run, number_: int, *, by_time: bool) -> list[Series]:
    """Training smoothed, validation as points, in the colour of the run."""
    steps, losses = run.history.series("loss")
    seconds = accumulate(run.history.series("seconds")[1])
    place = dict(zip(steps, seconds if by_time else map(float, steps), strict=True))
    training = smooth(list(place.values()), losses, label=run.name, colour=number_, dash=number_)
    points = [(place[r["step"]], r["loss"]) for r in run.history.validations if r["step"] in place]
    if not points:
        return [training]
    xs, ys = zip(*points, strict=True)
    return [training, Series(xs=xs, ys=ys, kind="points", colour=number_, dash=number_)]


def loss_caption(runs: Sequence[Run]) -> str:
    parts = []
    for run in runs:
        _, losses = run.history.series("loss")
        (end,) = smoothed(losses, at=[len(losses) - 1])
        parts.append(f"{run.name} at {figure(end)} after {plural(run.history.num_steps, 'step')}")
    return f"Lines are training, smoothed, and points are validation. Training ends with {listed(parts)}."


def time_caption(runs: Sequence[Run]) -> str:
    totals = sorted((sum(run.history.series("seconds")[1]), run.name) for run in runs)
    (least, quick), (most, slow) = totals[0], totals[-1]
    text = "The same curves against the time spent in training steps."
    if len(totals) == 1:
        return f"{text} {quick} took {duration(least)}."
    return f"{text} {quick} took {duration(least)} and {slow} {duration(most)}, {times(most / least)} as long."


def _depth_figure(runs: Sequence[Run], key: str) -> Html:
    series = [
        smooth(steps, depths, outliers=True, label=run.name, colour=i, dash=i)
        for i, run in enumerate(runs)
        for steps, depths in [run.history.depths]
    ]
    chart = Chart(series=series, x="step", y="per forward pass", from_zero=True)
    ends = [f"{number(typical(run.history.depths[1]))} in {run.name}" for run in runs]
    caption = f"How often a forward pass applies the cell: towards the end {listed(ends)}."
    return chart_figure(chart, name=f"{key}-depth", title="Applications of the cell", caption=caption)


def _memory_figure(runs: Sequence[Run], key: str) -> Html:
    counted = _counted(runs)
    if not counted:
        return missing("The memory of a step could not be counted for any of these runs.")
    bars = [memory_bar(run.name, memory) for run, memory in counted]
    least, most = (pick(memory.peak for _, memory in counted) for pick in (min, max))
    caption = f"Counted tensor by tensor, peaks go from {size(least)} to {size(most)}, {times(most / least)} as much."
    chart = Bars(bars=bars, labels=PART_NAMES)
    return bars_figure(chart, name=f"{key}-memory", title="Memory of a training step", caption=caption)
