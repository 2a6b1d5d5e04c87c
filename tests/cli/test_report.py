"""`deqkit report` on the command line."""

import pytest

from deqkit.cli import main


@pytest.fixture
def told(monkeypatch) -> list[tuple]:
    """What the command asks to be written, instead of writing it: tests/report looks at pages."""
    found = []

    def write_report(runs, out, *, on_progress):
        found.append((list(runs), out))
        on_progress("demo: samples", 3, 4)
        return out

    monkeypatch.setattr("deqkit.report.write_report", write_report)
    return found


def test_where_pages_are_written(told, tmp_path, capsys):
    one, two = tmp_path / "one", tmp_path / "two"
    assert main(["report", str(one)]) == 0
    assert main(["report", str(one), str(two)]) == 0
    assert main(["report", str(one), "--out", str(tmp_path / "page.html")]) == 0
    assert [runs for runs, _ in told] == [[one], [one, two], [one]]
    assert [str(out) for _, out in told] == [str(one / "report.html"), "report.html", str(tmp_path / "page.html")]
    printed = capsys.readouterr()
    assert printed.out.splitlines()[0] == f"Report written to {one / 'report.html'}"
    assert "deqkit: demo: samples (3/4)" in printed.err


def test_mistakes_are_one_line(tmp_path, capsys):
    (tmp_path / "half").mkdir()
    (tmp_path / "half" / "config.json").write_text("{")
    for words, status, message in (
        (["report", str(tmp_path / "nowhere")], 1, "nowhere is not a run: it has no config.json"),
        (["report", str(tmp_path / "half")], 1, "config.json is damaged"),
        (["report"], 1, "name at least one run"),
        (["report", str(tmp_path), "--ouut", "x"], 2, "--ouut"),
    ):
        assert main(words) == status
        complaint = capsys.readouterr().err
        assert message in complaint and complaint.count("\n") == 1, complaint
    assert not list(tmp_path.rglob("report.html"))


def test_the_overview_names_it(capsys):
    assert main(["--help"]) == 0
    assert "report" in capsys.readouterr().out
