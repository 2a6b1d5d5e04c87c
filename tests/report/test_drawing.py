"""Numbers in words, curves that are thinned, and colours that can be read."""

import re
from importlib.resources import files

import pytest

from deqkit.report import words
from deqkit.report.chart import Chart, Mark, Phase, Series, noisy, smoothed, thinned, typical
from deqkit.report.draw import draw, label_of
from report.reading import read_text


@pytest.mark.parametrize(
    ("shown", "expected"),
    [
        (words.number(1234.567), "1,235"),
        (words.number(6.7), "6.70"),
        (words.number(0.00012345, 2), "0.00012"),
        (words.number(1.25e-7, 2), "1.2e-7"),
        (words.number(0), "0"),
        (words.number(99.96), "100"),
        (words.number(9.999), "10.0"),
        (words.number(-0.05, 2), "-0.050"),
        (words.exact(0.02), "0.02"),
        (words.exact(1e-5), "1e-5"),
        (words.exact(100.0), "100"),
        (words.figure(123.456), "123.5"),
        (words.figure(0.0123456), "0.0123"),
        (words.short_count(347_168), "347 k"),
        (words.short_count(1_234_567), "1.23 M"),
        (words.short_count(999), "999"),
        (words.size(512), "0.500 KiB"),
        (words.size(37.6 * 2**20), "37.6 MiB"),
        (words.size(3 * 2**30), "3.00 GiB"),
        (words.duration(0.0873), "87.3 ms"),
        (words.duration(59.94), "59.9 s"),
        (words.duration(115), "1 min 55 s"),
        (words.duration(3600 * 5 + 60 * 7 + 12), "5 h 7 min"),
        (words.share(0.0), "0%"),
        (words.share(1.0), "100%"),
        (words.share(0.00001), "under 0.1%"),
        (words.share(0.99999), "over 99.9%"),
        (words.share(0.125), "12%"),
        (words.plural(1, "layer"), "1 layer"),
        (words.plural(1200, "step"), "1,200 steps"),
        (words.listed(["a"]), "a"),
        (words.listed(["a", "b", "c"]), "a, b and c"),
        (label_of(0.0), "0"),
        (label_of(12_000), "12k"),
        (label_of(0.001), "0.001"),
        (label_of(1e-4), "10⁻⁴"),
        (label_of(3e-7), "3·10⁻⁷"),
        (label_of(2e6), "2·10⁶"),
    ],
)
def test_words(shown, expected):
    assert shown == expected


def test_long_curves_are_thinned_and_keep_their_extremes():
    ys = [0.0] * 10_000
    ys[1234], ys[9876] = 5.0, -3.0
    faint = thinned(Series(xs=range(10_000), ys=ys, kind="faint"))
    assert len(faint.xs) <= 240 and max(faint.ys) == 5 and min(faint.ys) == -3
    assert list(faint.xs) == sorted(faint.xs)
    line = thinned(Series(xs=range(10_000), ys=range(10_000)))
    assert len(line.xs) == 240 and (line.xs[0], line.xs[-1]) == (0, 9_999) and list(line.xs) == list(line.ys)
    short = Series(xs=[1, 2], ys=[3, 4])
    assert thinned(short) is short
    many = [float(i % 7) for i in range(400_000)]
    both = noisy(range(400_000), many, label="a", colour=0)  # quick, however long a run was
    assert [len(series.xs) for series in both] == [240, 240]


def test_smoothing():
    assert smoothed([1.0, 5.0]) == [1.0, 5.0]  # too short to be smoothed
    flat = smoothed([2.0] * 100)
    assert flat == pytest.approx([2.0] * 100)
    bump = [0.0] * 100
    bump[50] = 5.0
    assert smoothed(bump)[48:53] == pytest.approx([1.0] * 5) and smoothed(bump)[47] == 0
    assert typical([9.0] * 8 + [1.0, 3.0]) == 2.0


def test_a_drawing_keeps_its_labels_and_is_small():
    steps = range(1, 3000)
    chart = Chart(
        series=[thinned(Series(xs=steps, ys=[1 / step**2 for step in steps], kind="faint"))],
        x="step <&>",
        y="loss",
        log_y=True,
        marks=[Mark(at=0.01, text="tolerance")],
        phases=[Phase(start=0, end=100, text="shallow")],
    )
    drawing = read_text(draw([chart], name="some", title='a "title" & more')).one("svg")
    labels = [text.text for text in drawing.all("text")]
    assert {"0.01", "10⁻⁶", "1k", "step <&>", "loss"} <= set(labels)
    assert drawing.attributes["aria-label"] == 'a "title" & more'
    assert all(str(e.attributes["id"]).startswith("some-") for e in drawing.walk() if "id" in e.attributes)
    assert len(draw([chart], name="some", title="t")) < 25_000


def palettes() -> dict[str, dict[str, str]]:
    """Variables of the style sheet: light, dark and print."""
    css = files("deqkit.report").joinpath("style.css").read_text(encoding="utf-8")
    blocks = re.findall(r":root\s*{([^}]*)}", css)
    found = [dict(re.findall(r"--([a-z0-9]+):\s*(#[0-9a-f]{6})", block)) for block in blocks]
    return dict(zip(("light", "dark", "print"), found, strict=True))


def contrast(one: str, other: str) -> float:
    """Of two colours, as WCAG 2 defines it."""

    def luminance(colour: str) -> float:
        parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
        linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    dark, light = sorted((luminance(one), luminance(other)))
    return (light + 0.05) / (dark + 0.05)


@pytest.mark.parametrize("theme", ["light", "dark", "print"])
def test_text_and_curves_can_be_read(theme):
    palette = palettes()[theme]
    for behind in ("page", "panel", "shade"):
        for text in ("ink", "muted", "accent", "wrong", "c0", "c1", "c2", "c3", "c4", "c5"):
            assert contrast(palette[text], palette[behind]) >= 4.5, f"{text} on {behind}"
