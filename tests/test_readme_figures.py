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
