"""Every figure in the README's tables, and in docs/performance.md, is the one in the results file of its command."""

import json
import re
from pathlib import Path

import pytest

from deqkit.paper.rows import find
from deqkit.paper.run import read_best, verdict

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results" / "bench_solvers.json"
ROW = re.compile(
    r"^\| (torchdeq|deqkit) `(.+?)` \| (\d+) \| (\d+) \| (\S+) \| (\d+) \| (\d+) % \| (\d+) \|$", re.MULTILINE
)


def readme_rows() -> list[tuple[str, ...]]:
    return ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_the_table_is_there():
    assert len(readme_rows()) >= 5


@pytest.mark.parametrize("row", readme_rows(), ids=lambda row: "/".join(row[:2]))
def test_row(row):
    library, name, num_evals, num_products, grad_error, cost, outside, peak = row
    cells = {cell["cell"]: cell for cell in json.loads(RESULTS.read_text(encoding="utf-8"))["cells"]}
    (measured,) = [
        r for r in cells["transformer"]["rows"] if (r["library"], r["method"], r["tol"]) == (library, name, 1e-3)
    ]
    assert int(num_evals) == measured["evals_forward"]
    assert int(num_products) == measured["vjps"]
    assert grad_error == f"{measured['grad_error']:.1e}"
    assert int(cost) == round(measured["cost"])
    assert int(outside) == round(100 * measured["outside_share"])
    assert int(peak) == round(measured["peak_mib"])


MEMORY = ROOT / "results" / "bench_memory.json"
MEMORY_ROW = re.compile(r"^\| `(.+?)` \| `(.+?)` \| ([\d,]+) \| ([\d,]+) \| (\S+) \| (\S+) \|$", re.MULTILINE)


def memory_rows() -> list[tuple[str, ...]]:
    return MEMORY_ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_every_comparison_of_memory_is_there():
    comparisons = json.loads(MEMORY.read_text(encoding="utf-8"))["comparisons"]
    assert [row[:2] for row in memory_rows()] == [(c["equilibrium"], c["layers"]) for c in comparisons]


@pytest.mark.parametrize("row", memory_rows(), ids=lambda row: "/".join(row[:2]))
def test_memory_row(row):
    results = json.loads(MEMORY.read_text(encoding="utf-8"))
    (measured,) = [c for c in results["comparisons"] if (c["equilibrium"], c["layers"]) == row[:2]]
    peaks = [f"{results['bytes'][name]['peak'] / 2**20:,.0f}" for name in row[:2]]
    paper = "-" if measured["paper_ratio"] is None else f"{measured['paper_ratio']:.2f}"
    assert row[2:] == (*peaks, f"{measured['ratio']:.2f}", paper)


PAPER_ROW = re.compile(
    r"^\| \[(\S+)\]\(docs/paper\.md#\1\) \| (.+?) \| (.+?) \| \*\*(.+?)\*\* \((.+?)\) \|$", re.MULTILINE
)


def paper_rows() -> list[tuple[str, ...]]:
    return PAPER_ROW.findall((ROOT / "README.md").read_text(encoding="utf-8"))


def test_the_rows_of_the_paper_are_there():
    assert len(paper_rows()) >= 5


@pytest.mark.parametrize("row", paper_rows(), ids=lambda row: row[0])
def test_paper_row(row):
    name, paper, measured, told, length = row
    result = read_best(ROOT / "results")[name]
    (claim,) = find([name])
    assert (paper, measured, told) == (claim.paper, result["measured"], verdict(result))
    assert length == ("at full length" if result["full"] else "quick check")


RUNTIME_ROW = re.compile(r"^\| (\w+ \w+ layers) \| (\w+) \| (\S+)x \| (\S+) to (\S+) \|$", re.MULTILINE)


def test_ratios_of_runtime():
    results = json.loads((ROOT / "results" / "bench_runtime.json").read_text(encoding="utf-8"))["comparison"]
    rows = RUNTIME_ROW.findall((ROOT / "docs" / "performance.md").read_text(encoding="utf-8"))
    assert len(rows) == 4
    for model, phase, *figures in rows:
        measured = results[phase]["ratios"][model]
        assert figures == [f"{measured[name]:.2f}" for name in ("ratio", "low", "high")]


def test_ratios_of_the_trellisnet():
    results = json.loads((ROOT / "results" / "bench_runtime_trellisnet.json").read_text(encoding="utf-8"))
    training, inference = (results["comparison"][p]["ratios"]["70 tied layers"] for p in ("training", "inference"))
    text = " ".join((ROOT / "docs" / "performance.md").read_text(encoding="utf-8").split())
    told = f"{training['ratio']:.2f}x the time of 70 tied layers in training and {inference['ratio']:.2f}x in inference"
    assert told in text


GENERATION_ROW = re.compile(r"^\| (\w[\w ]+) \| (\d+) \| (\S+) \|$", re.MULTILINE)


def test_speed_of_generation():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    results = json.loads((ROOT / "results" / "bench_generate.json").read_text(encoding="utf-8"))
    rows = GENERATION_ROW.findall(text[text.index("<!-- generation -->") : text.index("<!-- end generation -->")])
    assert [row[0] for row in rows] == [way["way"] for way in results["rows"]]
    for (_, speed, evals), way in zip(rows, results["rows"], strict=True):
        assert (speed, evals) == (f"{way['tokens_per_second']:.0f}", f"{way['evaluations_per_token']:.1f}")
    for ratio in results["summary"]:
        assert f"{ratio['value']:.1f} times" in text


LENGTH_ROW = re.compile(r"^\| (\w+) \| ([\d,]+) \| (\S+) \| (\S+) \| (\S+) \| (\S+) \| (\d+) \|$", re.MULTILINE)


def test_growth_with_length():
    text = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
    text = text[text.index("<!-- length -->") : text.index("<!-- end length -->")]
    found = LENGTH_ROW.findall(text)
    expected = []
    for model, file in (("TrellisNet", "bench_length.json"), ("Transformer", "bench_length_transformer.json")):
        results = json.loads((ROOT / "results" / file).read_text(encoding="utf-8"))
        for row in results["rows"]:
            training, inference = row["training"], row["inference"]
            times = [f"{1e6 * part['seconds_per_token']:.0f}" for part in (training, inference)]
            counts = [f"{training['evaluations']:.1f}", f"{training['products']:.1f}"]
            expected.append((model, f"{row['length']:,}", *times, *counts, f"{row['peak_bytes'] / 2**20:.0f}"))
        for ratio in results["summary"]:
            assert f"{ratio['value']:.2f}" in text
    assert found == expected
