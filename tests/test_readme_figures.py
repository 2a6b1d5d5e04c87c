"""Every figure in the README's table is the one in the results file that the command beside it wrote."""

import json
import re
from pathlib import Path

import pytest

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
