"""What `deqkit eval` found: figures by split, and quality against tolerance and step limit (the paper's figure 3)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from deqkit.report.chart import Chart, Series
from deqkit.report.frame import chart_figure
from deqkit.report.history import Evaluation, History, Record
from deqkit.report.markup import Html, element, folded, join, missing, section, table
from deqkit.report.measure import Measured
from deqkit.report.words import count, figure, number, share

CLOSE = 0.01
"""A quality within this share of the best counts as the same."""
COLUMNS: dict[str, tuple[str, Any]] = {
    "perplexity": ("perplexity", figure),
    "loss": ("loss", figure),
    "bits_per_byte": ("bits per byte", figure),
    "evals": ("evaluations", number),
    "unconverged": ("not converged", share),
    "num_tokens": ("tokens", count),
}


def evaluating_section(measured: Measured, *, key: str, level: int) -> Html:
    history = measured.history
    if history.evaluations:
        content = join([_table(history), *_sweeps(history, key)])
    else:
        command = element("code", f"deqkit eval {history.folder.path} --split test")
        content = element("p", "Not evaluated apart from training: try ", command, ".", class_="missing")
    return section("Evaluation", content, level=level, id_=f"{key}-evaluation")


def _table(history: History) -> Html:
    shown = [name for name in COLUMNS if any(name in found.figures for found in history.evaluations)]
    head = ["split", *(COLUMNS[name][0] for name in shown), "causality leak"]
    rows = [
        [_name(found), *(_cell(found.figures, name) for name in shown), _leak(found.leak)]
        for found in history.evaluations
    ]
    return table(head, rows, label="Figures of the evaluation, by split")


def _name(evaluation: Evaluation) -> str:
    """The split, and in what its evaluation was not the usual one."""
    part = "" if evaluation.is_complete else ", a part"
    return evaluation.split + part + "".join(f", {name} {value}" for name, value in evaluation.settings.items())


def _cell(figures: Record, name: str) -> str:
    return "–" if figures.get(name) is None else COLUMNS[name][1](figures[name])


def _leak(leak: float | None) -> str:
    return "not measured" if leak is None else "0" if leak == 0 else f"{number(leak, 2)} nats"


def _sweeps(history: History, key: str) -> list[Html]:
    found = []
    for number_, evaluation in enumerate(history.evaluations, 1):
        figures = [
            _sweep_figure(points, name, evaluation, f"{key}-sweep{number_}-{name}")
            for name in ("tolerance", "max_steps")
            if (points := [point for point in evaluation.sweep if point.get(name) is not None])
        ]
        if figures:
            found.append(element("div", *figures, class_="figures"))
            found.append(folded(f"Points of the sweep on {evaluation.split}", _sweep_table(evaluation)))
    return found or [missing("No sweep over tolerances and step limits was asked for.")]


def _sweep_figure(points: Sequence[Record], name: str, evaluation: Evaluation, figure_name: str) -> Html:
    quality = "perplexity" if "perplexity" in points[0] else "loss"
    points = sorted(points, key=lambda point: point[name])
    ys = [point[quality] for point in points]
    title = f"{quality.capitalize()} against {'tolerance' if name == 'tolerance' else 'the step limit'}"
    chart = Chart(
        series=[Series(xs=[point[name] for point in points], ys=ys, colour=0, kind="points")],
        x="tolerance" if name == "tolerance" else "step limit",
        y=f"{quality} on {evaluation.split}",
        log_x=name == "tolerance",
        log_y=min(ys) > 0 and max(ys) > 3 * min(ys),
    )
    return chart_figure(chart, name=figure_name, title=title, caption=sweep_caption(points, name, quality))


def sweep_caption(points: Sequence[Record], name: str, quality: str) -> str:
    """How far one can go before quality is lost. `points` go from tight to loose, or from few steps to many."""
    best = min(point[quality] for point in points)
    close = [point for point in points if point[quality] <= best * (1 + CLOSE)]
    chosen = max(close, key=lambda p: p[name]) if name == "tolerance" else min(close, key=lambda p: p[name])
    evals = f", with {number(chosen['evals'])} evaluations a solve" if "evals" in chosen else ""
    worst = max(points, key=lambda point: point[quality])
    what = "up to a tolerance of" if name == "tolerance" else "from a step limit of"
    text = f"The {quality} stays within {CLOSE:.0%} of its best, {figure(best)}, {what} {chosen[name]:g}{evals}"
    return f"{text}; it is {figure(worst[quality])} at {worst[name]:g}."


def _sweep_table(evaluation: Evaluation) -> Html:
    shown = [name for name in COLUMNS if any(name in point for point in evaluation.sweep)]
    rows = [[_setting(point), *(_cell(point, name) for name in shown)] for point in evaluation.sweep]
    return table(["setting", *(COLUMNS[name][0] for name in shown)], rows, label="Points of the sweep")


def _setting(point: Record) -> str:
    if point.get("tolerance") is not None:
        return f"tolerance {point['tolerance']:g}"
    return f"limit {point['max_steps']:g}" if point.get("max_steps") is not None else "as configured"
