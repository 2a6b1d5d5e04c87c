"""The trained model's solve against plain stacking (the paper's figure 2, right, and the appendix's figure)."""

from __future__ import annotations

from deqkit.report.chart import Chart, Mark, Series
from deqkit.report.convergence import Convergence, Trace
from deqkit.report.frame import chart_figure
from deqkit.report.markup import Html, element, join, missing, paragraph, section, table
from deqkit.report.measure import Measured, Missing
from deqkit.report.words import exact, listed, number, plural

TITLE = "Convergence of the trained model"


def converging_section(measured: Measured, *, key: str, level: int) -> Html:
    convergence, trained = measured.convergence, measured.trained
    if measured.history.config.model.is_baseline:
        content = missing("This network is run once: it has no cell to solve or to apply again.")
    elif isinstance(convergence, Missing) or isinstance(trained, Missing):
        reason = convergence.reason if isinstance(convergence, Missing) else ""
        content = missing(f"The trained model could not be looked at: {reason}.")
    else:
        samples = plural(convergence.num_samples, "validation sequence")
        what = f"{samples} of {plural(convergence.length, 'position')} in {trained.description}; medians."
        content = join([paragraph(what, class_="note"), _content(convergence, key)])
    return section(TITLE, content, level=level, id_=f"{key}-convergence")


def _content(convergence: Convergence, key: str) -> Html:
    return element("div", _figure(convergence, key), _table(convergence), class_="figures")


def _figure(convergence: Convergence, key: str) -> Html:
    series = [
        Series(xs=range(1, len(trace.residuals) + 1), ys=trace.residuals, label=trace.name, colour=i, dash=i)
        for i, trace in enumerate(convergence.traces)
    ]
    x, y, marks = "evaluations of the cell", "relative residual", []
    if convergence.tolerance is not None:
        marks.append(Mark(at=convergence.tolerance, text=f"tolerance, {exact(convergence.tolerance)}", colour=0))
    if convergence.depth is not None:
        x, y = "layers", "relative change"
        marks.append(Mark(at=convergence.depth, text=f"depth of the run, {convergence.depth}", colour=0, axis="x"))
    chart = Chart(series=series, x=x, y=y, log_y=True, marks=marks)
    title = "From layer to layer" if convergence.depth is not None else "Solvers on one batch"
    return chart_figure(chart, name=f"{key}-trace", title=title, caption=convergence_caption(convergence))


def convergence_caption(convergence: Convergence) -> str:
    return _stack_caption(convergence) if convergence.depth is not None else _equilibrium_caption(convergence)


def _equilibrium_caption(convergence: Convergence) -> str:
    if convergence.tolerance is None:
        ends = [f"{trace.name} at {number(trace.residuals[-1], 2)}" for trace in convergence.traces]
        return f"After {len(convergence.traces[0].residuals)} evaluations, {listed(ends)}."
    parts = [_reach_words(trace, convergence.tolerance) for trace in convergence.traces]
    return f"To the tolerance of {exact(convergence.tolerance)}: {listed(parts)}.{_radius_words(convergence)}"


def _reach_words(trace: Trace, tolerance: float) -> str:
    evals = trace.evals_to(tolerance)
    if evals is None:
        return f"{trace.name} does not get there in {plural(len(trace.residuals), 'evaluation')}"
    return f"{trace.name} needs {plural(evals, 'evaluation')}"


def _radius_words(convergence: Convergence) -> str:
    if convergence.radius is None:
        return ""
    outcome = (
        "below 1, so plain iteration converges" if convergence.radius < 1 else "above 1, too large for plain iteration"
    )
    return f" The Jacobian's largest eigenvalue at the equilibrium is {number(convergence.radius)} in size, {outcome}."


def _stack_caption(convergence: Convergence) -> str:
    depth, own = convergence.depth, convergence.traces[0]
    assert depth is not None
    at_depth = own.residuals[min(depth, len(own.residuals)) - 1]
    text = f"The last of the {plural(depth, 'layer')} still changes the state by {number(at_depth, 2)} of its size"
    if len(own.residuals) <= depth:
        return f"{text}; layers with weights of their own cannot be unrolled further."
    end = own.residuals[-1]
    trend = "converges" if end < 0.1 * at_depth else "goes on changing"
    text += f"; unrolled to {len(own.residuals)} layers it {trend}, by {number(end, 2)} at the last"
    others = [f"{t.name} is at {number(t.residuals[-1], 2)} after {len(t.residuals)}" for t in convergence.traces[1:]]
    return f"{text}{'; ' if others else ''}{listed(others) if others else ''}."


def _table(convergence: Convergence) -> Html:
    tolerances = [1e-1, 1e-2, 1e-3, 1e-4]
    head = ["", *(f"{tolerance:g}" for tolerance in tolerances), "smallest"]
    rows = [
        [trace.name, *(trace.evals_to(tolerance) or "–" for tolerance in tolerances), number(min(trace.residuals), 2)]
        for trace in convergence.traces
    ]
    what = "Layers" if convergence.depth is not None else "Evaluations"
    note = f"{what} until the residual is first within a tolerance; “–” if it never was in the figure."
    title = element("p", f"{what} to a tolerance", class_="title")
    return element("div", title, table(head, rows, label=note), paragraph(note, class_="note"))
