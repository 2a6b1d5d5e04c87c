"""What every page is, whatever its run: whole, self-contained, in order and accessible."""

import itertools
import re

import pytest

from report.reading import captions, read_text
from report.small import KINDS

SECTIONS = ["learning", "solving", "convergence", "cost", "evaluation", "samples", "configuration"]
FIGURES = {
    "equilibrium": {"Loss", "Learning rate and gradient norm", "Solver steps", "Residuals", "Error of the gradient"},
    "tied": {"Loss", "From layer to layer", "Memory of a training step", "Time of a step"},
    "untied": {"Loss", "From layer to layer", "Memory of a training step", "Time of a step"},
    "copy": {"Loss", "Solver steps", "Solvers on one batch"},
    "several": {"Loss against steps", "Loss against time", "Applications of the cell", "Memory of a training step"},
}


@pytest.fixture(params=[*KINDS, "several"])
def kind(request) -> str:
    return request.param


@pytest.fixture
def page(pages, kind):
    return read_text(pages[kind])


def test_it_says_its_language_and_title(page, pages, kind):
    assert pages[kind].startswith("<!doctype html>")
    assert page.one("html").attributes["lang"] == "en"
    assert page.one("title").text == ("4 runs compared" if kind == "several" else f"small-{kind}") + " · deqkit"
    assert "width=device-width" in str(page.one("meta", name="viewport").attributes["content"])


def test_nothing_is_loaded_and_nothing_runs(page, pages, kind):
    text = pages[kind]
    assert not re.search(r"https?://|url\((?!#)|@import|javascript:", text)
    assert not [e for e in page.walk() if e.tag in ("script", "link", "img", "iframe", "object", "base")]
    assert not [e for e in page.walk() if any(name.startswith("on") or name == "src" for name in e.attributes)]
    assert len(text) < 600_000


def test_ids_are_unique_and_links_lead_somewhere(page):
    ids = [e.attributes["id"] for e in page.walk() if "id" in e.attributes]
    assert len(ids) == len(set(ids))
    targets = [str(e.attributes["href"]) for e in page.walk() if "href" in e.attributes]
    targets += [f"#{name}" for e in page.walk() for name in re.findall(r"url\(#([^)]*)\)", str(e.attributes))]
    assert targets and {target[1:] for target in targets} <= set(ids)


def test_headings_are_in_order(page):
    levels = [int(e.tag[1]) for e in page.walk() if re.fullmatch("h[1-6]", e.tag)]
    assert levels.count(1) == 1 and levels[0] == 1
    assert all(after <= before + 1 for before, after in itertools.pairwise(levels))


def test_all_sections_are_there(page, kind):
    ids = [e.attributes.get("id") for e in page.all("section")]
    runs = range(1, 5 if kind == "several" else 2)
    assert [f"run{run}-{name}" for run in runs for name in SECTIONS] == [i for i in ids if i and "-" in i]


def test_every_figure_has_a_name_and_a_meaning(page, kind):
    assert captions(page).keys() >= FIGURES[kind]
    for figure in page.all("figure"):
        (drawing,) = [e for e in figure.children if not isinstance(e, str) and e.tag == "svg"]
        assert drawing.attributes["role"] == "img" and len(str(drawing.attributes["aria-label"])) > 10
        caption = figure.one("figcaption").text
        assert re.search(r"\d|every|no ", caption, re.IGNORECASE) and caption.endswith(".")
    for drawing in page.all("svg"):
        assert "aria-label" in drawing.attributes or drawing.attributes["aria-hidden"] == "true"


def test_no_number_is_broken(page):
    for element in page.walk():
        if element.tag in ("figcaption", "p", "td", "text", "small"):
            assert not re.search(r"\b(nan|inf|None)\b", element.text), element.text


def test_tables_scroll_in_a_box_and_name_their_cells(page):
    boxes = page.all("div", class_="wide")
    assert len(boxes) == len(page.all("table")) > 0
    for box in boxes:
        assert box.attributes["tabindex"] == "0" and box.attributes["aria-label"]
        assert all(cell.attributes["scope"] in ("col", "row") for cell in box.all("th"))
        widths = {len([c for c in row.children if not isinstance(c, str)]) for row in box.all("tr")}
        assert len(widths) == 1


def test_drawings_take_their_colours_from_the_page(page):
    for drawing in page.all("svg"):
        style = " ".join(str(e.attributes) for e in drawing.walk())
        colours = set(re.findall(r"#[0-9a-f]{6}\b", style))
        assert not colours, f"{colours} would be the same in light and dark"
    assert "var(--c0)" in str([e.attributes for e in page.walk()])
