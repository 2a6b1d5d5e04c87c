"""The page: read the runs, measure, write one file that needs no other."""

from __future__ import annotations

import os
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib.resources import files
from pathlib import Path

import deqkit
from deqkit.report.comparison import Run, comparison
from deqkit.report.history import History, read_history
from deqkit.report.markup import Html, element, join
from deqkit.report.measure import OnProgress, measure
from deqkit.report.sections.configuring import configuration_section
from deqkit.report.sections.converging import converging_section
from deqkit.report.sections.cost import cost_section
from deqkit.report.sections.evaluating import evaluating_section
from deqkit.report.sections.learning import learning_section
from deqkit.report.sections.overview import overview
from deqkit.report.sections.sampling import sampling_section
from deqkit.report.sections.solving import solving_section
from deqkit.report.words import plural

SECTIONS = (
    learning_section,
    solving_section,
    converging_section,
    cost_section,
    evaluating_section,
    sampling_section,
    configuration_section,
)


def write_report(
    runs: Sequence[str | Path], out: str | Path, *, on_progress: OnProgress = lambda *progress: None
) -> Path:
    """Write a page about one run, or about several side by side.

    Args:
        runs: run folders.
        out: the HTML file. It is replaced in one step: a reader finds the old page or the new one.
        on_progress: called with what is done, how much is done and of how much.

    Returns:
        The file written.

    Raises:
        RunError: a folder is no run, is damaged, or has nothing to report.
    """
    return _write(Path(out), render(gather(runs, on_progress)))


def gather(runs: Sequence[str | Path], on_progress: OnProgress = lambda *progress: None) -> list[Run]:
    """Read and measure runs."""
    if not runs:
        raise ValueError("name at least one run to report on")
    histories = [read_history(Path(run)) for run in runs]
    found = zip(_names(histories), measure(histories, on_progress), strict=True)
    return [Run(name=name, key=f"run{i}", measured=measured) for i, (name, measured) in enumerate(found, 1)]


def render(runs: Sequence[Run]) -> str:
    """The page as text."""
    title, body = _single(runs[0]) if len(runs) == 1 else _several(runs)
    head = element(
        "head",
        element("meta", charset="utf-8"),
        element("meta", name="viewport", content="width=device-width, initial-scale=1"),
        element("meta", name="color-scheme", content="light dark"),
        element("title", f"{title} · deqkit"),
        element("style", Html(files("deqkit.report").joinpath("style.css").read_text(encoding="utf-8"))),
    )
    foot = element("footer", f"Written by deqkit {deqkit.__version__}. Everything on this page is in this file.")
    return f"<!doctype html>\n{element('html', head, element('body', body, foot), lang='en')}\n"


def _single(run: Run) -> tuple[str, Html]:
    header = element("header", _eyebrow("Training run"), element("h1", run.name), overview(run.measured))
    return run.name, join([header, element("main", *_sections(run, level=2))])


def _several(runs: Sequence[Run]) -> tuple[str, Html]:
    title = f"{plural(len(runs), 'run')} compared"
    links = element("nav", *(element("a", run.name, href=f"#{run.key}") for run in runs), aria_label="Runs")
    header = element("header", _eyebrow("Comparison"), element("h1", title), links)
    return title, join([header, element("main", comparison(runs, level=2), *(_chapter(run) for run in runs))])


def _chapter(run: Run) -> Html:
    head = [_eyebrow("Training run"), element("h2", run.name), overview(run.measured)]
    return element("section", *head, *_sections(run, level=3), id_=run.key, class_="chapter")


def _sections(run: Run, *, level: int) -> list[Html]:
    return [make(run.measured, key=run.key, level=level) for make in SECTIONS]


def _eyebrow(text: str) -> Html:
    return element("p", text, class_="eyebrow")


def _names(histories: Sequence[History]) -> list[str]:
    """Recipes; with the folder where a recipe occurs twice."""
    recipes = Counter(history.config.recipe for history in histories)
    names = []
    for history in histories:
        recipe, folder = history.config.recipe, history.folder.path.resolve().name
        names.append(recipe if recipes[recipe] == 1 else f"{recipe} ({folder})")
    return names if len(set(names)) == len(names) else [str(history.folder.path) for history in histories]


def _write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.", suffix=".tmp")
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            file.write(text)
        os.chmod(temporary, 0o644)  # mkstemp makes it private, a page is for everyone
        os.replace(temporary, path)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return path
