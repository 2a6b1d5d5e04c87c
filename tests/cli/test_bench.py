"""The command line, and `deqkit bench solvers` on cells small enough for a test."""

import json
import subprocess
import sys

import pytest

from deqkit.cli import COMMANDS, main

SMALL = (
    "--size.batch 2 --size.length 4 --size.width 8 --size.heads 2 --size.hidden 4 --rounds 2 --tols 1e-3 --seed 3"
).split()


def bench(*options: str) -> int:
    return main(["bench", "solvers", *SMALL, *options])


def test_json_goes_to_stdout_and_to_the_file(tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert bench("--out", str(out), "--json", "--only", "default", "torchdeq/fixed_point_iter") == 0
    printed = capsys.readouterr()
    results = json.loads(printed.out)
    assert results == json.loads(out.read_text())
    assert results["config"]["size"]["width"] == 8
    assert {"cpu", "cores", "torch", "python"} <= set(results["machine"])
    assert [cell["cell"] for cell in results["cells"]] == ["transformer", "trellis", "mixed"]
    assert len(results["summary"]) == 13
    for cell in results["cells"]:
        assert cell["f_seconds"] > 0 and cell["reference"]["backward_residual"] < 1e-8
        for row in cell["rows"]:
            assert row["failure"] is None, row
            assert row["evals_forward"] > 0 and row["vjps"] > 0 and row["parameter_products"] == 1
            assert row["peak_mib"] > 0 and row["residual"] <= 1e-3
            assert row["status"] == ("CONVERGED" if row["library"] == "deqkit" else None)
            parts = row["seconds"]
            assert parts["total"] == pytest.approx(parts["f"] + parts["vjp"] + parts["parameters"] + parts["outside"])
            assert len(row["total_seconds"]) == 2
    defaults = {row["method"]: row for row in results["cells"][2]["rows"] if row["library"] == "deqkit"}
    compact, full = defaults["default"], defaults["default, compact=False"]
    assert compact["sample_evals_forward"] < full["sample_evals_forward"] == 2 * full["evals_forward"]


def test_tables_fit_120_columns_and_say_where_the_results_are(tmp_path, capsys):
    out = tmp_path / "bench.json"
    assert bench("--out", str(out), "--cells", "mixed", "--only", "default", "torchdeq") == 0
    printed = capsys.readouterr()
    lines = printed.out.splitlines()
    assert lines[-1] == f"Results written to {out}"
    assert max(len(line.rstrip()) for line in lines[:-1]) <= 120
    for name in ("deqkit default, compact=False", "relative tolerance 0.001", "grad err", "outside", "compaction"):
        assert name in printed.out
    assert "float64 reference" in printed.err


def test_a_cell_of_the_users_own(tmp_path, capsys):
    file, out = tmp_path / "mine.py", tmp_path / "bench.json"
    file.write_text(
        "import torch\n"
        "class Cell(torch.nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.w = torch.nn.Parameter(0.3 * torch.eye(3))\n"
        "    def initial_state(self, x):\n"
        "        return {'a': torch.zeros_like(x), 'b': torch.zeros_like(x)}\n"
        "    def forward(self, z, x):\n"
        "        return {'a': torch.tanh(z['b'] @ self.w + x), 'b': 0.5 * z['a']}\n"
        "def make():\n"
        "    return Cell(), torch.ones(2, 3)\n"
    )
    options = ["--cell", f"{file}:make", "--out", str(out), "--json", "--only"]
    assert bench(*options, "default", "fixed_point_iter", "prefix") == 0
    (cell,) = json.loads(capsys.readouterr().out)["cells"]
    assert not any("prefix" in row["method"] for row in cell["rows"])  # no positions
    assert all(row["failure"] is None and row["grad_error"] < 1e-2 for row in cell["rows"])
    assert {row["library"] for row in cell["rows"]} == {"torchdeq", "deqkit"}
    assert bench(*options, "prefix") == 1
    assert "has no positions" in capsys.readouterr().err


def test_without_torchdeq_its_rows_are_reported_missing(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert bench("--out", str(tmp_path / "b.json"), "--cells", "trellis", "--only", "default", "--json") == 0
    printed = capsys.readouterr()
    assert "torchdeq rows are missing" in printed.err and "deqkit[bench]" in printed.err
    results = json.loads(printed.out)
    assert results["torchdeq"] is False
    assert {row["library"] for row in results["cells"][0]["rows"]} == {"deqkit"}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("trian", "unknown command 'trian'"),
        ("bench", "bench needs a command: bench solvers"),
        ("bench solver", "did you mean 'bench solvers'?"),
        ("bench solvers --bogus 3", "unknown option --bogus"),
        ("bench solvers --rounds many", "--rounds"),
        ("bench solvers --rounds 0", "rounds must be at least 1, got 0"),
        ("bench solvers --size.heads 3", "heads must divide width"),
        ("bench solvers --cells lstm", "invalid choice 'lstm'"),
        ("bench solvers --cell missing.py:make", "does not exist"),
        ("bench solvers --only nothing", "matches no row"),
    ],
)
def test_a_mistake_gives_one_clear_line_and_a_status(words, message, capsys):
    assert main(words.split()) != 0
    printed = capsys.readouterr()
    assert printed.out == ""
    complaints = [line for line in printed.err.splitlines() if "float64 reference" not in line]
    assert len(complaints) == 1
    assert complaints[0].startswith("deqkit: ") and message in complaints[0]


def test_debug_shows_where_an_error_comes_from():
    with pytest.raises(ValueError, match="does not exist"):
        main("bench solvers --cell missing.py:make --debug".split())


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    printed = capsys.readouterr().out
    assert all(" ".join(path) in printed for path in COMMANDS)
    with pytest.raises(SystemExit) as exit_:
        main(["bench", "solvers", "--help"])
    assert exit_.value.code == 0
    assert "--rounds" in capsys.readouterr().out


def test_python_dash_m_is_the_command():
    done = subprocess.run([sys.executable, "-m", "deqkit", "nothing"], capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr.startswith("deqkit: unknown command 'nothing'; commands: bench solvers, ")
    assert done.stderr.count("\n") == 1
