"""`deqkit paper` on the command line."""

import json
from dataclasses import replace

import pytest

from deqkit.cli import main
from deqkit.cli import paper as command
from deqkit.paper import rows
from deqkit.paper.claim import Claim, Outcome, unmeasured

FIGURE = Outcome(measured="41 of 42", scale="small", holds=False, numbers={"a": 1}, remark="tried twice")


def no_file(workshop):
    raise FileNotFoundError("there is no such file")


def nothing(workshop):
    return unmeasured("it is large")


def bug(workshop):
    raise ZeroDivisionError


CHEAP = (
    Claim(row="cheap", where="table 9", claim="it works", paper="42", quick=lambda w: FIGURE, full=lambda w: FIGURE),
    Claim(row="quick-only", where="table 9", claim="it is", paper="-", quick=no_file),
    Claim(row="commands", where="table 8", claim="so", paper="-", quick=nothing, elsewhere=("deqkit a", "deqkit b")),
    Claim(row="prose", where="section 7", claim="so", paper="-", quick=nothing, source="a book"),
)


@pytest.fixture
def cheap(monkeypatch):
    monkeypatch.setattr(rows, "CLAIMS", CHEAP)
    monkeypatch.setattr(command, "CLAIMS", CHEAP)
    monkeypatch.setattr(command, "PARTS", (rows.Part(title="All", claims=CHEAP),))


@pytest.fixture
def paper(tmp_path, capsys):
    def call(*words):
        folders = [
            "--runs",
            str(tmp_path / "runs"),
            "--out",
            str(tmp_path / "results"),
            "--docs",
            str(tmp_path / "docs"),
        ]
        status = main(["paper", *words, *folders])
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return call


def test_all_quick_rows(cheap, paper, tmp_path):
    status, out, _ = paper()
    assert status == 0
    assert "cheap (table 9): does not hold" in out and "41 of 42" in out and "tried twice" in out
    assert "0 hold, 1 do not, 0 open, 3 not measured" in out
    found = json.loads((tmp_path / "results" / "paper_quick.json").read_text())["rows"]
    assert set(found) == {"cheap", "quick-only", "commands", "prose"}
    assert found["cheap"]["holds"] is False and found["cheap"]["numbers"] == {"a": 1}
    assert found["cheap"]["machine"]["cores"] and found["cheap"]["date"] and "commit" in found["cheap"]
    assert found["quick-only"]["holds"] is None and found["quick-only"]["remark"] == "there is no such file"


def test_full_length(cheap, paper, tmp_path):
    status, out, _ = paper("--full", "cheap")
    assert status == 0 and "written to" in out
    found = json.loads((tmp_path / "results" / "paper" / "cheap.json").read_text())
    assert found["row"] == "cheap" and found["full"] is True and found["measured"] == "41 of 42"
    assert not (tmp_path / "results" / "paper_quick.json").exists()


def test_reuse(paper, monkeypatch):
    """What a result has measured is handed to the row that asks for it, if the caller wants that."""
    found = {"found": [{"label": "one", "runs": [{"training_hash": "f00"}, {"seed": 1}]}]}
    first = Claim(
        row="first", where="-", claim="-", paper="-", quick=nothing, full=lambda w: replace(FIGURE, numbers=found)
    )
    second = Claim(
        row="second",
        where="-",
        claim="-",
        paper="-",
        quick=nothing,
        full=lambda w: replace(FIGURE, measured=str(dict(w.reusable))),
    )
    monkeypatch.setattr(rows, "CLAIMS", (first, second))
    paper("--full", "first")
    assert "{}" in paper("--full", "second")[1]
    assert "{'f00': {'training_hash': 'f00'}}" in paper("--full", "second", "--reuse")[1]


def test_json(cheap, paper):
    _, out, _ = paper("cheap", "--json")
    assert json.loads(out)["cheap"]["holds"] is False
    _, out, _ = paper("--list", "--json")
    assert [row["row"] for row in json.loads(out)] == [claim.row for claim in CHEAP]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["cheep"], "unknown row 'cheep'; did you mean 'cheap'?"),
        (["--full"], "--full takes hours a row: name the rows"),
        (["--full", "quick-only"], "quick-only has no longer version: run `deqkit paper quick-only`"),
        (["--full", "cheap", "quick-only"], "quick-only has no longer version"),  # before anything is run
        (["--full", "commands"], "commands is not measured here; elsewhere: `deqkit a`, then `deqkit b`"),
        (["--full", "prose"], "prose is not measured here; elsewhere: a book"),
        (["quick-only"], "quick-only cannot be measured: there is no such file"),
        (["table-8"], "unknown row 'table-8'; table 8 of the paper is checked by commands"),
    ],
)
def test_mistakes(cheap, paper, tmp_path, words, message):
    status, out, err = paper(*words)
    assert status == 1 and message in err and err.count("\n") == 1 and not out
    assert not (tmp_path / "results").exists()


@pytest.mark.parametrize("seeds", [(), ("--json",), ("x",), ("1.5",), ("1", "--json", "--seeds")])
def test_seeds_that_are_none(cheap, paper, tmp_path, seeds):
    """Without a value it would have run every row with no seed at all."""
    status, out, err = paper("cheap", "--seeds", *seeds)
    assert status == 2 and "--seeds takes whole numbers" in err and err.count("\n") == 1 and not out
    assert not (tmp_path / "results").exists()


def test_a_row_that_lacks_something_does_not_stop_the_others(cheap, paper, tmp_path):
    status, out, err = paper("quick-only", "cheap")
    assert status == 1 and "quick-only cannot be measured" in err and "0 hold, 1 do not" in out
    assert set(json.loads((tmp_path / "results" / "paper_quick.json").read_text())["rows"]) == {"cheap"}


@pytest.mark.parametrize(
    "words",
    [
        ["cheap", "--seeds", "7", "8", "--full"],
        ["--seeds", "7", "8", "cheap", "--full"],
        ["--full", "--seeds", "7", "8", "cheap"],
        ["--seeds=7", "--full", "cheap"],
        ["--debug", "--full", "cheap", "--seeds", "7"],
    ],
)
def test_rows_may_stand_anywhere(cheap, paper, tmp_path, words):
    assert paper(*words)[0] == 0
    found = json.loads((tmp_path / "results" / "paper" / "cheap.json").read_text())
    assert found["seed"] == 7 and found["full"] is True


def test_what_is_not_measured_here_says_where_it_would_be(cheap, paper):
    status, out, _ = paper("commands")
    assert status == 0 and "elsewhere: `deqkit a`, then `deqkit b`" in out
    _, out, _ = paper("--list")
    assert [line.split()[0] for line in out.splitlines() if " elsewhere " in line] == ["commands", "prose"]


def test_a_bug_keeps_its_traceback(monkeypatch, paper):
    monkeypatch.setattr(rows, "CLAIMS", (Claim(row="broken", where="-", claim="-", paper="-", quick=bug),))
    with pytest.raises(ZeroDivisionError):
        paper("broken")


def test_the_list_names_every_row(paper):
    status, out, _ = paper("--list")
    assert status == 0
    for claim in rows.CLAIMS:
        assert claim.row in out
    status, out, _ = paper("--list", "lstm")
    assert "lstm" in out and "copy-memory" not in out


def test_a_quick_row_end_to_end_and_the_document(paper, tmp_path):
    status, out, _ = paper("task-copy-memory", "table-2-parameters")
    assert status == 0 and "2 hold, 0 do not, 0 open, 0 not measured" in out
    status, out, _ = paper("--list", "task-copy-memory")
    assert "holds" in out
    status, out, _ = paper("--document")
    assert status == 0 and "paper.md" in out
    assert "20,000 training and 2,000 test samples: yes" in (tmp_path / "docs" / "paper.md").read_text()


def test_missing_data_is_told(paper, tmp_path):
    for words in (["task-ptb"], ["--full", "best-perplexity-ptb"]):
        status, out, err = paper(*words, "--data", str(tmp_path / "nowhere"))
        assert status == 1 and not out and err.count("\n") == 1
        assert f"{words[-1]} cannot be measured: ptb is needed" in err and "deqkit data prepare ptb --from RAW" in err
        assert "RAW is a folder with train.txt, valid.txt and test.txt" in err
    assert not (tmp_path / "results").exists()
