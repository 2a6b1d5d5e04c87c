"""The file: written in one step, and safe to open whatever names and texts a run has."""

import os
from dataclasses import replace

import pytest

from deqkit.report import write_report
from deqkit.report.chart import Bar, Bars
from deqkit.report.draw import draw_bars
from deqkit.report.markup import Html, element, join, markup
from deqkit.report.page import render
from report.reading import read_text
from report.small import make_corpus, small, train_run

pytestmark = pytest.mark.usefixtures("quick")

EVIL = '</style><script>alert("1")</script>&amp; '


def test_nothing_of_a_run_becomes_markup(tmp_path):
    corpus = make_corpus(tmp_path / "<i>raw", text=EVIL)
    paths = [train_run(small(corpus, recipe=EVIL, steps=2), tmp_path / f"{i}<b>run") for i in range(2)]
    for chosen in (paths[:1], paths):
        page = read_text(write_report(chosen, tmp_path / "report.html").read_text(encoding="utf-8"))
        assert not page.all("script") and not page.all("b") and not page.all("i")
        assert EVIL in page.one("title").text or len(chosen) == 2
        samples = [quote.text for quote in page.all("blockquote")]
        assert len(samples) == 3 * len(chosen) and "<script>" in samples[0]
    names = [link.text for link in page.one("nav").all("a")]
    assert names == [f"{EVIL} (0<b>run)", f"{EVIL} (1<b>run)"]


def test_text_is_escaped_and_markup_is_not():
    assert element("p", "<&>", Html("<br>"), class_='"x"') == '<p class="&quot;x&quot;">&lt;&amp;&gt;<br></p>'
    assert element("a", element("b", "<"), href=None, hidden=True) == "<a hidden><b>&lt;</b></a>"
    assert join(["<", element("hr")]) == "&lt;<hr>" and markup(3) == "3"


def test_names_in_drawings_are_text():
    name = '$x$ <b> id="a" #fe0000 12.3456 ' + "long " * 20
    bars = Bars(bars=[Bar(text=name, parts=[1, 2], total="3")], labels=["a", "b"])
    drawing = read_text(draw_bars(bars, name="n", title="t"))
    assert [text.text for text in drawing.all("text")] == [f"{name[:47]}…", "3"]


def test_the_same_run_gives_the_same_page(gathered):
    runs = [replace(gathered["equilibrium"], key="run1")]
    assert render(runs) == render(runs)


def test_a_page_is_replaced_in_one_step(runs, tmp_path, monkeypatch):
    out = tmp_path / "new" / "report.html"
    assert write_report([runs["untied"]], out) == out
    before = out.read_text(encoding="utf-8")
    assert oct(out.stat().st_mode & 0o777) == "0o644"

    def fail(*paths: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(os, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_report([runs["tied"]], out)
    assert out.read_text(encoding="utf-8") == before and list(out.parent.iterdir()) == [out]


def test_progress_is_told(runs, tmp_path):
    told = []
    write_report([runs["untied"], runs["untied"]], tmp_path / "r.html", on_progress=lambda *step: told.append(step))
    assert [done for _, done, _ in told] == list(range(8)) and {total for *_, total in told} == {8}
    assert told[0][0] == "small-untied: memory of a step"
