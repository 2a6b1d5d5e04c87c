"""docs/paper.md is what the results say, to the last letter."""

import json
import re
from pathlib import Path

import pytest
from matplotlib.figure import Figure

from deqkit.paper import figures
from deqkit.paper.document import compose, told_verdict, write
from deqkit.paper.figures import draw, panels_of
from deqkit.paper.rows import CLAIMS, find
from deqkit.paper.run import read_best, save_full, save_quick, verdict

ROOT = Path(__file__).parents[2]
HEADER = {"date": "2026-01-02T03:04:05+00:00", "commit": "0123456789abcdef", "seed": 0, "config": {}}
HEADER |= {"machine": {"cores": 2, "cpu": "a processor", "torch": "2.6"}}
LINES = {
    "x": "step",
    "y": "loss",
    "log_x": False,
    "log_y": True,
    "series": [{"label": name, "x": list(range(1, 501)), "y": [1 / i for i in range(1, 501)]} for name in "abcdefg"],
}
BARS = {"kind": "bars", "y": "loss", "bars": [{"label": "a", "value": 2.0, "points": [1.0, 3.0]}]}
PARTS = {"kind": "bars", "y": "s", "parts": ["f", "rest"], "bars": [{"label": "a", "value": 3.0, "parts": [1.0, 2.0]}]}
POINTS = {**LINES, "kind": "points", "series": [{"label": "a", "x": [1.0], "y": [2.0], "colour": 1, "style": 11}]}
LEGEND = {"kind": "legend", "series": [{"label": "a", "colour": 1, "style": 11}]}


def result(row: str, *, full: bool = False, measured: str = "7 of 7", holds: bool | None = True, **numbers):
    found = {"row": row, "full": full, "seconds": 3.0, "measured": measured, "scale": "small", "holds": holds}
    return {**HEADER, **found, "numbers": numbers, "remark": "as expected"}


def test_the_document_is_up_to_date():
    document = compose(ROOT / "results")
    assert (ROOT / "docs" / "paper.md").read_text(encoding="utf-8") == document.text, "run `deqkit paper --document`"
    figures = {path.name for path in (ROOT / "docs" / "figures").glob("*.svg")}
    assert set(document.panels) <= figures


def test_results_are_of_rows_that_exist():
    assert set(read_best(ROOT / "results")) <= {claim.row for claim in CLAIMS}


def test_every_row_is_in_it_without_any_result(tmp_path):
    text = compose(tmp_path).text
    for claim in CLAIMS:
        assert f"\n### {claim.row}\n" in text and f"[{claim.row}](#{claim.row})" in text
    assert f"{len(CLAIMS)} rows: 0 hold, 0 do not, 0 are open, {len(CLAIMS)} are not measured here." in text


def test_full_length_wins_and_the_quick_check_is_told(tmp_path):
    save_quick(tmp_path, {"lstm": result("lstm", measured="quick figure", holds=False)})
    save_full(tmp_path, result("lstm", full=True, measured="long figure"))
    entry = compose(tmp_path).text.split("\n### lstm\n")[1].split("\n###")[0]
    assert "- Here: long figure" in entry and "- Verdict: **holds** (at full length)" in entry
    assert "- Quick check: does not hold: quick figure" in entry
    assert "commit 0123456789," in entry and "2026-01-02 in 3 s" in entry


def test_what_trainings_took_is_told(tmp_path):
    save_quick(tmp_path, {"lstm": {**result("lstm"), "trainings": {"demo": 50.0, "demo-lstm": 250.0}}})
    text = compose(tmp_path).text
    assert "2026-01-02 in 3 s on 2 models that took 5 minutes of a processor to train, commit" in text
    save_quick(tmp_path, {"lstm": {**result("lstm"), "trainings": {"demo": 50.0, "as measured before": None}}})
    assert "2026-01-02 in 3 s, commit" in compose(tmp_path).text


def test_a_check_that_has_no_longer_version_is_complete(tmp_path):
    save_quick(tmp_path, {row: result(row) for row in ("theorem-1", "lstm")})
    text = compose(tmp_path).text
    assert told_verdict(find(["theorem-1"])[0], result("theorem-1")) == "**holds** (complete check)"
    for row, check in (("theorem-1", "complete check"), ("lstm", "quick check")):
        assert f"- Verdict: **holds** ({check})" in text.split(f"\n### {row}\n")[1].split("\n###")[0]


def test_the_time_of_all_quick_checks_is_told(tmp_path):
    assert "The quick versions took" not in compose(tmp_path).text
    save_quick(tmp_path, {row: {**result(row), "seconds": 90.0} for row in ("lstm", "theorem-1")})
    assert "measured here. The quick versions took 3 minutes in all.\n" in compose(tmp_path).text


def test_what_was_not_measured_has_no_length_and_no_date(tmp_path):
    nothing = result("table-2-cited", measured="not measured", holds=None)
    save_quick(tmp_path, {"table-2-cited": nothing, "lstm": result("lstm", holds=None)})
    text = compose(tmp_path).text
    entry = text.split("\n### table-2-cited\n")[1].split("\n###")[0]
    assert "- Verdict: **not measured**\n" in entry and "- Measured" not in entry and "- Command" not in entry
    assert "- Elsewhere: the published code of those models\n" in entry
    assert "| not measured | **not measured** |" in text and "| 7 of 7 | **open** (quick check) |" in text


def test_commands_are_code(tmp_path):
    entry = compose(tmp_path).text.split("\n### table-2-ptb-deq-trellisnet\n")[1].split("\n###")[0]
    train, evaluate = "deqkit train ptb-deq-trellisnet --data.source data/ptb", "deqkit eval runs/ptb-deq-trellisnet"
    assert f"- Elsewhere: `{train}`, then `{evaluate} --split test`\n" in entry


def test_a_full_row_that_lacked_its_data_does_not_hide_the_quick_one(tmp_path):
    save_quick(tmp_path, {"lstm": result("lstm", measured="quick figure")})
    save_full(tmp_path, result("lstm", full=True, measured="not measured", holds=None))
    assert "- Here: quick figure" in compose(tmp_path).text


def test_rows_that_are_run_alone_leave_the_others(tmp_path):
    save_quick(tmp_path, {"lstm": result("lstm"), "copy-memory": result("copy-memory")})
    save_quick(tmp_path, {"lstm": result("lstm", measured="again")})
    rows = json.loads((tmp_path / "paper_quick.json").read_text())["rows"]
    assert rows["lstm"]["measured"] == "again" and rows["copy-memory"]["measured"] == "7 of 7"


@pytest.mark.parametrize("measured", ["not measured", "not measured: no data"])
def test_what_could_not_be_measured_now_does_not_replace_an_earlier_measurement(tmp_path, measured):
    nothing = result("lstm", measured=measured, holds=None)
    save_quick(tmp_path, {"lstm": nothing})
    assert read_best(tmp_path)["lstm"]["measured"] == measured  # there was none
    save_quick(tmp_path, {"lstm": result("lstm", measured="quick figure")})
    save_quick(tmp_path, {"lstm": nothing, "copy-memory": result("copy-memory")})
    assert read_best(tmp_path)["lstm"]["measured"] == "quick figure"
    assert "copy-memory" in read_best(tmp_path)
    assert save_full(tmp_path, {**nothing, "full": True}).startswith("written to")
    save_full(tmp_path, result("lstm", full=True, measured="long figure"))
    assert "keeps" in save_full(tmp_path, {**nothing, "full": True})
    assert read_best(tmp_path)["lstm"]["measured"] == "long figure"


def test_tables_and_figures(tmp_path):
    table = {"columns": ["model", "a|b"], "rows": [["x", "1"], ["y", "2"]]}
    panels = [{"title": "first", **LINES}, {"title": "second", **BARS}]
    save_quick(tmp_path, {"lstm": result("lstm", table=table, figures=panels, caption="What they show.")})
    docs = tmp_path / "docs"
    stale, foreign = docs / "figures" / "copy-memory.svg", docs / "figures" / "other.svg"
    stale.parent.mkdir(parents=True)
    for path in (stale, foreign):
        path.write_text("old")
    written = write(tmp_path, docs)
    assert written == [docs / "paper.md", docs / "figures" / "lstm.svg"]
    assert not stale.exists() and foreign.exists()  # a figure of a row that has none any more, and somebody else's
    text = written[0].read_text()
    assert "| model | a\\|b |\n|---|---|\n| x | 1 |\n| y | 2 |\n" in text
    assert "![lstm](figures/lstm.svg)\n\n*What they show.*\n" in text
    assert written[1].read_bytes().startswith(b"<?xml")


@pytest.mark.parametrize(
    "panel",
    [LINES, BARS, {**BARS, "log_y": True}, {**LINES, "log_x": True}, {**BARS, "mark": 1.0}, PARTS, POINTS, LEGEND],
)
def test_a_figure_is_the_same_every_time_and_has_a_background(panel):
    first = draw([panel])
    assert first == draw([panel])
    assert re.search(rb"fill: #ffffff", first)
    assert draw([panel], form="png").startswith(b"\x89PNG")


def drawn_text(panel):
    """The words of a panel; a dot is a path, and has none."""
    axes = Figure().subplots()
    figures._draw_panel(axes, panel)
    labels = [text.get_text() for text in axes.texts]
    return axes, labels


def bars(*points, **options):
    found = [{"label": str(i), "value": own[0], "points": list(own)} for i, own in enumerate(points)]
    return {"kind": "bars", "y": "perplexity", "bars": found, **options}


def test_close_values_are_dots_and_the_mean_is_over_all_seeds():
    axes, labels = drawn_text(bars((98.8, 97.8, 98.9), (101.0,)))
    assert not axes.patches and labels == ["mean 98.50", "101.0"]
    assert "does not begin at zero" in axes.get_xlabel() and axes.get_xlim()[0] > 90
    axes, _ = drawn_text(bars((134.2,), (134.3,)))
    assert axes.get_xlim()[1] - axes.get_xlim()[0] > 0.03 * 134  # a difference of nothing does not fill the page
    axes, labels = drawn_text(bars((1e-7, 3e-7), (0.05,), log_y=True))
    assert not axes.patches and labels == ["mean 2.0e-7", "0.05"] and axes.get_xlabel() == "perplexity"


def test_a_legend_of_many_curves_has_room_of_its_own():
    few = {**LINES, "series": LINES["series"][:3]}
    heights = [float(re.search(rb'height="([0-9.]+)pt"', draw([panel]))[1]) for panel in (few, LINES, POINTS)]  # pyright: ignore
    assert heights[1] > heights[0] == heights[2]


def test_values_far_apart_are_bars():
    axes, labels = drawn_text(bars((100.0,), (20.0,)))
    assert len(axes.patches) == 2 and axes.get_xlim()[0] == 0 and labels == ["100", "20"]


def test_the_axis_ends_soon_after_the_last_curve_has_come_to_rest():
    xs = list(range(1, 201))
    fall = {"label": "a", "x": xs, "y": [max(10 ** (-x / 6), 1e-7) for x in xs]}
    quick = {"label": "b", "x": xs, "y": [max(10 ** (-x / 3), 1e-7) for x in xs]}
    panel = {"x": "evaluations", "y": "residual", "log_y": True, "series": [fall, quick]}
    axes, _ = drawn_text(panel)
    assert 40 < axes.get_xlim()[1] < 70 and axes.get_xlabel() == "evaluations (followed up to 200)"
    still = {**fall, "y": [1 / x for x in xs]}
    axes, _ = drawn_text({**panel, "series": [quick, still]})
    assert axes.get_xlim()[1] > 200 and axes.get_xlabel() == "evaluations"


def test_few_places_on_a_logarithmic_axis_have_ticks_of_their_own():
    series = [{"label": "a", "x": [400, 800, 1600], "y": [1.0, 2.0, 3.0]}]
    axes, _ = drawn_text({"x": "T", "y": "loss", "log_x": True, "series": series})
    assert [text.get_text() for text in axes.get_xticklabels()] == ["400", "800", "1,600"]


def test_a_panel_of_unknown_kind_is_an_error():
    with pytest.raises(ValueError, match="got 'bar'"):
        draw([{**BARS, "kind": "bar"}])


def test_where_panels_are_found():
    assert panels_of({}) == [] and panels_of({"figure": LINES}) == [LINES] and panels_of({"figures": [BARS]}) == [BARS]


def test_every_link_of_the_document_leads_somewhere():
    text = (ROOT / "docs" / "paper.md").read_text(encoding="utf-8")
    for target in re.findall(r"\]\((figures/[^)]+)\)", text):
        assert (ROOT / "docs" / target).exists()


def test_what_was_measured_in_part_is_open():
    part = {"measured": "116.4 against 116.7", "holds": None}
    assert verdict(part) == "open"
    assert verdict({**part, "measured": "not measured: days on several GPUs"}) == "not measured"
    assert verdict(None) == "not measured" and verdict({**part, "holds": False}) == "does not hold"
