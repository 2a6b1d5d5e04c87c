"""The tables of README.md and docs/performance.md are what `make documents` writes from results/."""

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def tables():
    spec = importlib.util.spec_from_file_location("tables", ROOT / "docs" / "tables.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


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
