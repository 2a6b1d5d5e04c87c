"""The tables of README.md and docs/performance.md, and its plots, are what `make documents` writes from results/."""

import importlib
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def script(name):
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(ROOT / "docs")  # where Python finds plots.py and what it imports when it is run
        return importlib.import_module(name)


@pytest.fixture(scope="module")
def tables():
    return script("tables")


@pytest.fixture(scope="module")
def plots():
    return script("plots")


@pytest.mark.parametrize("name", ["README.md", "docs/performance.md"])
def test_documents_are_as_results_say(tables, name):
    text = (ROOT / name).read_text(encoding="utf-8")
    assert text == tables.filled(text), "run `make documents`"


def test_every_section_is_shown_once(tables):
    text = "".join((ROOT / name).read_text(encoding="utf-8") for name in tables.DOCUMENTS)
    for name in tables.SECTIONS:
        assert text.count(f"<!-- {name} -->") == text.count(f"<!-- end {name} -->") == 1


def test_a_figure_changed_by_hand_is_put_right(tables):
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    (row,) = [line for line in text.splitlines() if line.startswith("| `trellis-ptb` | `trellis-ptb-tied-60` |")]
    assert tables.filled(text.replace(row, row.replace("0.11", "0.01"))) == text != text.replace("0.11", "0.01")


def test_an_unknown_section_is_an_error(tables):
    with pytest.raises(ValueError, match="<!-- tabel --> is none of memory, paper"):
        tables.filled("<!-- tabel -->\n1\n<!-- end tabel -->")


def test_a_table_has_the_figures_of_its_file(tables, monkeypatch):
    """By hand, for one of them: values, their form and their order."""
    row = {"way": "cached", "tokens_per_second": 392.6, "evaluations_per_token": 2.04}
    found = {
        "rows": [row],
        "summary": [{"value": 25.32}, {"value": 3.07}],
        "config": {"context": 512, "depth": 16},
        "perplexity": {"equilibrium": 130.16, "stack": 129.8},
    }
    monkeypatch.setattr(tables, "read", {"bench_generate": found}.__getitem__)
    lines = tables.generation().splitlines()
    assert lines[:3] == ["| way | tokens a second | evaluations a token |", "|---|---|---|", "| cached | 393 | 2.0 |"]
    told = " ".join(lines[4:])
    assert "25.3 times the speed" in told and "130.2 against 129.8" in told


def test_plots_are_as_results_say(plots):
    for name, figure in plots.drawn():
        path = ROOT / "docs" / "figures" / name
        assert path.exists() and path.read_bytes() == figure, f"{name}: run `make documents`"


def test_every_plot_is_shown_once_and_described(plots):
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    shown = re.findall(r"!\[([^]]+)\]\(figures/([^)]+)\)", text)
    assert sorted(name for _, name in shown) == sorted(plots.FIGURES)
    assert all(len(described.split()) > 10 for described, _ in shown)


def test_a_plot_has_the_figures_of_its_file(plots, monkeypatch):
    """By hand: stages that are not shown add up to one part, and a bar is as long as its parts."""
    seconds = {
        "cell": 3e-3,
        "products": 0.0,
        "solver": 1e-3,
        "softmax": 2e-3,
        "penalty": 0.0,
        "data": 2e-4,
        "rest": 3e-4,
    }
    found = {"breakdown": {"inference": {"seconds": seconds, "tokens": 10.0}}}
    monkeypatch.setattr(plots, "read", {"bench_runtime": found}.__getitem__)
    ((bar,),) = [panel["bars"] for panel in plots.step()]
    assert bar["parts"] == pytest.approx([300, 0, 100, 200, 0, 50]) and bar["value"] == pytest.approx(650)


def test_the_paper_stands_beside_what_was_measured(plots):
    transformer, trellisnet = (
        {bar["label"]: bar["value"] for bar in panel["bars"] if bar["colour"] == plots.THEIRS}
        for panel in plots.ratios()
    )
    assert transformer == {"training, the paper": 2.82, "inference, the paper": 1.76}
    assert trellisnet == {"training, the paper": 2.40, "inference, the paper": 1.64}


def test_a_method_that_failed_is_named_and_not_drawn(plots, monkeypatch):
    done = {"library": "deqkit", "method": "anderson", "failure": None, "cost": 90.0, "grad_error": 0.1}
    failed = {"library": "torchdeq", "method": "anderson", "failure": "out of memory"}
    found = {"cells": [{"cell": "transformer", "rows": [done, failed]}]}
    monkeypatch.setattr(plots, "read", {"bench_solvers": found}.__getitem__)
    panel, legend = plots.solvers()
    assert panel["title"] == "transformer cell, torchdeq anderson failed"
    assert [(point["x"], point["y"]) for point in panel["series"]] == [([90.0], [0.1])]
    ours, theirs = legend["series"]
    assert ours["style"] == theirs["style"] and ours["colour"] != theirs["colour"]
