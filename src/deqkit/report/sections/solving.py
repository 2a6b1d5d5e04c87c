"""The solver through training: steps, residuals, failures and the gradient's error (the paper's figure 2, left)."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from deqkit.report.chart import Chart, Mark, Series, noisy, tail, typical
from deqkit.report.frame import chart_figure
from deqkit.report.history import History
from deqkit.report.markup import Html, element, missing, section
from deqkit.report.measure import Measured
from deqkit.report.words import exact, listed, number, plural, share

SIDES = (("", "forward", 0), ("backward_", "backward", 1))
"""Prefix of the metrics, name and colour."""

WORK = {"forward": "evaluations of the cell", "backward": "products with its Jacobian"}


def solving_section(measured: Measured, *, key: str, level: int) -> Html:
    history = measured.history
    return section("The solve through training", _content(history, key), level=level, id_=f"{key}-solving")


def _content(history: History, key: str) -> Html:
    if history.config.model.is_baseline:
        return missing("This network is run once: nothing is solved, so there are no solver steps or residuals.")
    if not history.is_equilibrium:
        depth = plural(int(history.config.model.depth), "layer")
        return missing(f"This run is a stack of {depth}: nothing is solved, so there are no solver steps or residuals.")
    if not _found(history, "evals"):
        return missing("Nothing has been solved in training yet.")
    makers = {
        "evals": _evals_figure,
        "residual": _residual_figure,
        "unconverged": _failures_figure,
        "grad_error": _error_figure,
    }
    figures = [
        make(history, key) if _found(history, name) else missing(f"{name} was not recorded in this run.")
        for name, make in makers.items()
    ]
    return element("div", *figures, class_="figures")


def _found(history: History, name: str) -> list[tuple[str, int, list[int], list[float]]]:
    """Side, colour, steps and values, forward and backward, where there are any."""
    found = [(side, colour, *history.series(prefix + name)) for prefix, side, colour in SIDES]
    return [entry for entry in found if entry[2]]


def _curves(history: History, name: str, *, outliers: bool = False) -> list[Series]:
    curves = [
        noisy(xs, ys, label=side, colour=colour, dash=colour, outliers=outliers)
        for side, colour, xs, ys in _found(history, name)
    ]
    return [series for pair in curves for series in pair]


def _evals_figure(history: History, key: str) -> Html:
    series = _curves(history, "evals")
    top = max(max(curve.ys) for curve in series)
    limits = [(at, side, colour) for (_, side, colour), at in zip(SIDES, _limits(history), strict=True)]
    # a limit far above the curves would press them flat; the caption tells it in any case
    marks = [
        Mark(at=at, text=f"{side} limit, {at}", colour=colour)
        for at, side, colour in limits
        if at is not None and at <= 1.6 * top
    ]
    chart = Chart(
        series=series, x="step", y="evaluations per solve", from_zero=True, marks=marks, phases=history.phases
    )
    return chart_figure(chart, name=f"{key}-evals", title="Solver steps", caption=evals_caption(history))


def _limits(history: History) -> tuple[int | None, int | None]:
    model = history.config.model
    return model.max_steps, getattr(model.adjoint, "max_steps", None)


def evals_caption(history: History) -> str:
    limits: dict[str, int | None] = dict(zip(("forward", "backward"), _limits(history), strict=True))
    parts = []
    for side, _, _, values in _found(history, "evals"):
        start, end = statistics.median(values[: max(1, len(values) // 5)]), typical(values)
        trend = "grew" if end > 1.1 * start else "fell" if end < 0.9 * start else "stayed"
        change = f"stayed near {number(end)}" if trend == "stayed" else f"{trend} from {number(start)} to {number(end)}"
        limit = "" if limits[side] is None else f" of at most {limits[side]}"
        parts.append(f"{WORK[side]} {change}{limit}")
    return f"From the first fifth of the solves to the last, {listed(parts)}."


def _residual_figure(history: History, key: str) -> Html:
    tolerances = _tolerances(history)
    colours = {side: colour for _, side, colour in SIDES}
    marks = [
        Mark(at=at, text=f"{side} tolerance, {exact(at)}", colour=colours[side]) for side, at in tolerances.items()
    ]
    series = _curves(history, "residual", outliers=True)
    positive = all(y > 0 for curve in series for y in curve.ys)
    chart = Chart(
        series=series, x="step", y="largest relative residual", log_y=positive, marks=marks, phases=history.phases
    )
    return chart_figure(chart, name=f"{key}-residual", title="Residuals", caption=residual_caption(history))


def _tolerances(history: History) -> dict[str, float]:
    model = history.config.model
    tolerances = {"forward": model.tol, "backward": getattr(model.adjoint, "tol", None)}
    return {side: tol.rtol for side, tol in tolerances.items() if tol is not None and tol.rtol > 0}


def residual_caption(history: History) -> str:
    tolerances, parts = _tolerances(history), []
    for side, _, _, values in _found(history, "residual"):
        end = typical(values)
        text = f"{number(end)} {side}"
        if side in tolerances:
            place = "within" if end <= tolerances[side] else "outside"
            text += f", {place} the tolerance of {exact(tolerances[side])}"
        parts.append(text)
    return f"The largest residual of a batch towards the end: {'; '.join(parts)}."


def _failures_figure(history: History, key: str) -> Html:
    chart = Chart(
        series=_curves(history, "unconverged"), x="step", y="share of solves", percent=True, phases=history.phases
    )
    caption = failures_caption(history)
    return chart_figure(chart, name=f"{key}-failures", title="Solves that did not converge", caption=caption)


def failures_caption(history: History) -> str:
    found = _found(history, "unconverged")
    if all(max(values) == 0 for _, _, _, values in found):
        sides = listed([f"every {side} solve" for side, _, _, _ in found])
        return f"{sides[0].upper()}{sides[1:]} of the run reached its tolerance."
    return f"Ended before their tolerance: {'; '.join(_failure_words(side, values) for side, _, _, values in found)}."


def _failure_words(side: str, values: Sequence[float]) -> str:
    if max(values) == 0:
        return f"no {side} solve"
    end = share(statistics.fmean(tail(values)))
    return f"{share(statistics.fmean(values))} of the {side} solves of the run, {end} in its last fifth"


def _error_figure(history: History, key: str) -> Html:
    steps, errors = history.series("grad_error")
    chart = Chart(
        series=noisy(steps, errors, label="smoothed", colour=0, outliers=True),
        x="step",
        y="estimated relative error",
        log_y=min(errors) > 0,
        phases=history.phases,
    )
    return chart_figure(chart, name=f"{key}-error", title="Error of the gradient", caption=error_caption(errors))


def error_caption(errors: Sequence[float]) -> str:
    end = typical(errors)
    text = "Both solves stop at a tolerance, so the gradient has a relative error, estimated at "
    text += f"{number(end, 2)} towards the end"
    if end < 1:
        text += f", which turns its direction by at most {number(math.degrees(math.asin(end)), 2)} degrees"
    return f"{text}, and at most {number(max(errors), 2)} in any step."
