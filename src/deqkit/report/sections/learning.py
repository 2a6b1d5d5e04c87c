"""Learning curves, and what drove them."""

from __future__ import annotations

from deqkit.report.chart import Chart, Mark, Series, noisy, smoothed
from deqkit.report.frame import chart_figure
from deqkit.report.history import History
from deqkit.report.markup import Html, element, missing, section
from deqkit.report.measure import Measured
from deqkit.report.words import exact, figure, number, plural, share

WIDE = 50.0
"""Losses whose largest is so many times the smallest are drawn on a logarithmic scale."""


def learning_section(measured: Measured, *, key: str, level: int) -> Html:
    history = measured.history
    if history.steps:
        content = element("div", loss_figure(history, key), optimiser_figure(history, key), class_="figures")
    else:
        content = missing("No training is recorded here.")
    return section("Learning", content, level=level, id_=f"{key}-learning")


def loss_figure(history: History, key: str) -> Html:
    steps, losses = history.series("loss")
    series = noisy(steps, losses, label="training, smoothed", colour=1)
    if history.validations:
        points = [(record["step"], record["loss"]) for record in history.validations]
        xs, ys = zip(*points, strict=True)
        series.append(Series(xs=xs, ys=ys, label="validation", colour=0, kind="points"))
    chart = Chart(series=series, x="step", y="nats per token", log_y=is_wide(series), phases=history.phases)
    return chart_figure(chart, name=f"{key}-loss", title="Loss", caption=loss_caption(history))


def is_wide(series: list[Series]) -> bool:
    values = [y for curve in series for y in curve.ys]
    return min(values) > 0 and max(values) > WIDE * min(values)


def loss_caption(history: History) -> str:
    _, losses = history.series("loss")
    ends = smoothed(losses, at=[0, len(losses) - 1])
    verb = "fell" if ends[-1] < ends[0] else "rose"
    text = f"The training loss, smoothed, {verb} from {figure(ends[0])} to {figure(ends[-1])}"
    return f"{text}; {_validation_words(history, ends[-1])}."


def _validation_words(history: History, training: float) -> str:
    best = history.best
    if best is None:
        return "the model has not been validated yet"
    named = f", a perplexity of {figure(best['perplexity'])}" if "perplexity" in best else ""
    gap = best["loss"] - training
    side = f"{number(abs(gap), 2)} {'above' if gap >= 0 else 'below'} where training ends"
    since = "" if best is history.validations[-1] else f", and validation has not improved since step {best['step']:,}"
    of = "the validation loss" if len(history.validations) == 1 else "the best validation loss"
    return f"{of} is {figure(best['loss'])}{named}, {side}{since}"


def optimiser_figure(history: History, key: str) -> Html:
    steps, rates = history.series("lr")
    norm_steps, norms = history.series("grad_norm")
    clip = history.config.optimiser.clip
    marks = [Mark(at=clip, text=f"clipped to {exact(clip)}", colour=0)] if clip else []
    rate = Chart(
        series=[Series(xs=steps, ys=rates, colour=0)],
        x="step",
        y="learning rate",
        from_zero=True,
        phases=history.phases,
    )
    norm = Chart(
        series=noisy(norm_steps, norms, label="smoothed", colour=0, outliers=True),
        x="step",
        y="gradient norm",
        log_y=min(norms) > 0,
        marks=marks,
        phases=history.phases,
    )
    caption = optimiser_caption(history)
    return chart_figure(rate, norm, name=f"{key}-optimiser", title="Learning rate and gradient norm", caption=caption)


def optimiser_caption(history: History) -> str:
    _, rates = history.series("lr")
    _, norms = history.series("grad_norm")
    clip = history.config.optimiser.clip
    peak = rates.index(max(rates))
    text = f"The learning rate is highest at step {history.steps[peak]['step']:,}, {exact(rates[peak])}, "
    text += f"and {exact(rates[-1])} at step {history.num_steps:,}"
    if not clip:
        return f"{text}; gradients are not clipped."
    clipped = share(sum(norm > clip for norm in norms) / len(norms))
    return f"{text}; the gradient was clipped in {clipped} of {plural(len(norms), 'step')}."
