"""Samples of what the model writes."""

from __future__ import annotations

import re

from deqkit.report.markup import Html, element, join, missing, paragraph, section, table
from deqkit.report.measure import Measured, Missing
from deqkit.report.samples import NUM_TOKENS, SEED, CopySample, TextSamples
from deqkit.report.trained import Trained
from deqkit.report.words import plural, share


def sampling_section(measured: Measured, *, key: str, level: int) -> Html:
    samples, trained = measured.samples, measured.trained
    if isinstance(samples, Missing) or isinstance(trained, Missing):
        reason = samples.reason if isinstance(samples, Missing) else ""
        content = missing(f"There are no samples: {reason}.")
    elif isinstance(samples, CopySample):
        content = _copy(samples, trained)
    else:
        content = _text(samples, trained)
    return section("Samples", content, level=level, id_=f"{key}-samples")


def _text(samples: TextSamples, trained: Trained) -> Html:
    note = (
        f"Written by the model itself, {plural(NUM_TOKENS, 'token')} each, from {trained.description}, "
        f"with seed {SEED}. The beginning, in grey, is from the validation text, which the model was not trained on."
    )
    quotes = [_quote("How the text goes on", samples.prompt, samples.actual)]
    for found in samples.continuations:
        how = "the likeliest token every time" if found.temperature == 0 else f"temperature {found.temperature:g}"
        quotes.append(_quote(f"Written by the model, {how}", samples.prompt, found.text))
    return join([paragraph(note, class_="note"), element("div", *quotes, class_="quotes")])


def _quote(title: str, prompt: str, text: str) -> Html:
    body = element(
        "blockquote", element("span", _shortened(prompt.lstrip()), class_="prompt"), element("ins", _shortened(text))
    )
    return element("div", element("p", title, class_="title"), body, class_="quote")


def _shortened(text: str) -> Html:
    """The text, with many line breaks in a row, which hardly trained models write, as their number."""
    pieces = re.split(r"(\n{4,})", text)
    return join(
        element("em", f"\n{len(piece)} line breaks\n") if number_ % 2 else piece for number_, piece in enumerate(pieces)
    )


def _copy(sample: CopySample, trained: Trained) -> Html:
    note = (
        f"The first validation example, in {trained.description}: ten symbols of 1 to 8, {sample.num_blanks:,} blanks, "
        f"then the sign to repeat them. In {plural(sample.num_examples, 'example')}, {share(sample.share_right)} "
        f"of the symbols come back right; guessing gets 1 in 8."
    )
    places = [str(place) for place in range(1, len(sample.symbols) + 1)]
    predicted = [
        value if value == wanted else element("mark", value, title="wrong")
        for value, wanted in zip(sample.predicted, sample.symbols, strict=True)
    ]
    rows = [["input", *sample.symbols], ["target", *sample.symbols], ["prediction", *predicted]]
    return join([paragraph(note, class_="note"), table(["place", *places], rows, label="One copy-memory example")])
