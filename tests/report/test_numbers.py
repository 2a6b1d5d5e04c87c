"""The numbers on a page are those of the run, computed here once more from its files."""

import json
import re
import statistics
from pathlib import Path

import pytest
import safetensors.torch

from deqkit.analysis.training_memory import training_memory
from deqkit.train.run_folder import RunFolder
from report.reading import captions, read_text, rows, tiles
from report.small import KINDS


def records(run: Path, kind: str) -> list[dict]:
    lines = (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def values(run: Path, name: str) -> list[float]:
    return [record[name] for record in records(run, "train") if name in record]


def last_fifth(found: list[float]) -> float:
    return statistics.median(found[-max(1, len(found) // 5) :])


def numbers(text: str) -> list[float]:
    return [float(match.replace(",", "")) for match in re.findall(r"\d[\d,]*(?:\.\d+)?(?:e-?\d+)?", text)]


def assert_has(text: str, *expected: float, rel: float = 5e-3) -> None:
    """Every expected number is in the text, to three digits."""
    for value in expected:
        assert any(shown == pytest.approx(value, rel=rel, abs=1e-12) for shown in numbers(text)), (value, text)


@pytest.mark.parametrize("kind", KINDS)
def test_the_head_of_a_run(kind, runs, pages):
    run, found = runs[kind], tiles(read_text(pages[kind]))
    name = "loss" if kind == "copy" else "perplexity"
    shallow = 2 if kind == "equilibrium" else 0
    best = min((r for r in records(run, "valid") if r["step"] > shallow), key=lambda r: r["loss"])
    value, note = found[f"Validation {name}"]
    assert float(value) == pytest.approx(best[name], rel=5e-4) and note == f"best, at step {best['step']}"
    deep = [r["seconds"] for r in records(run, "train") if r["step"] > shallow]
    assert_has(found["Time of a step"][0], 1000 * statistics.median(deep))
    weights = safetensors.torch.load_file(next(run.glob("checkpoints/step-*/model.safetensors")))
    assert_has(found["Parameters"][0], sum(tensor.numel() for tensor in weights.values()) / 1000)


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_of_a_step(kind, runs, pages):
    page, config = read_text(pages[kind]), RunFolder(runs[kind]).config()
    peak = training_memory(config.model, batch=4, length=25 if kind == "copy" else 8).peak
    assert_has(tiles(page)["Memory of a step"][0], peak / 2**10)
    assert_has(captions(page)["Memory of a training step"], peak / 2**10)


@pytest.mark.parametrize("kind", ["equilibrium", "copy"])
def test_the_solves(kind, runs, pages):
    page, run = read_text(pages[kind]), runs[kind]
    assert_has(tiles(page)["Evaluations a solve"][0], records(run, "valid")[-1]["evals"])
    found = captions(page)
    assert_has(found["Solver steps"], last_fifth(values(run, "evals")), last_fifth(values(run, "backward_evals")), 5)
    assert_has(found["Residuals"], last_fifth(values(run, "residual")), last_fifth(values(run, "backward_residual")))
    assert_has(found["Error of the gradient"], max(values(run, "grad_error")), rel=5e-2)
    failed = [share for name in ("unconverged", "backward_unconverged") for share in [values(run, name)] if max(share)]
    assert failed
    for share in failed:
        mean = 100 * sum(share) / len(share)
        assert_has(found["Solves that did not converge"], mean, 100 * share[-1], rel=5e-2)


def test_within_or_outside_the_tolerance_is_what_the_numbers_say(runs, pages):
    caption = captions(read_text(pages["equilibrium"]))["Residuals"]
    for place, name in zip(re.findall("within|outside", caption), ("residual", "backward_residual"), strict=True):
        assert place == ("within" if last_fifth(values(runs["equilibrium"], name)) <= 0.01 else "outside")


@pytest.mark.parametrize("kind", KINDS)
def test_learning(kind, runs, pages):
    found, losses = captions(read_text(pages[kind])), values(runs[kind], "loss")
    assert_has(found["Loss"], losses[0], losses[-1])  # so short a curve is not smoothed
    rates, norms = values(runs[kind], "lr"), values(runs[kind], "grad_norm")
    clipped = 100 * sum(norm > 0.25 for norm in norms) / len(norms)
    assert_has(found["Learning rate and gradient norm"], max(rates), rates[-1], len(norms))
    assert_has(found["Learning rate and gradient norm"], clipped, rel=5e-2)


@pytest.mark.parametrize("kind", KINDS)
def test_the_time_of_a_run(kind, runs, pages):
    seconds = sum(r["seconds"] for name in ("train", "valid") for r in records(runs[kind], name))
    shown = seconds if seconds >= 1 else 1000 * seconds
    assert_has(captions(read_text(pages[kind]))["Time of a step"], shown)


def test_the_comparison(runs, pages):
    page = read_text(pages["several"])
    tables = [rows(e) for e in page.all("table") if rows(e)[0][0] == "run"]
    assert [[row[0] for row in table[1:]] for table in tables] == [
        ["small-equilibrium", "small-tied", "small-untied"],
        ["small-copy"],  # other data: not compared with the rest
    ]
    for row in (row for table in tables for row in table[1:]):
        shown = dict(zip(next(t for t in tables if row in t)[0], row, strict=True))
        run = runs[row[0].removeprefix("small-")]
        single = tiles(read_text(pages[run.name]))
        headline = "loss" if run.name == "copy" else "perplexity"
        assert shown[f"validation {headline}"] == single[f"Validation {headline}"][0]
        assert shown["memory of a step"] == single["Memory of a step"][0]
        assert shown["time of a step"] == single["Time of a step"][0]
        assert shown["parameters"] == single["Parameters"][0]
    assert [row[-1] for row in tables[0][2:]] == ["3 layers", "2 layers"]
    assert float(tables[0][1][-1]) == pytest.approx(records(runs["equilibrium"], "valid")[-1]["evals"], rel=5e-3)


def test_the_sentence_of_the_comparison(runs, pages):
    lead = next(p.text for p in read_text(pages["several"]).one("section", id="compare1").all("p", class_="lead"))
    best = {kind: min(r["perplexity"] for r in records(runs[kind], "valid")) for kind in ("tied", "untied")}
    best["equilibrium"] = min(r["perplexity"] for r in records(runs["equilibrium"], "valid") if r["step"] > 2)
    order = sorted(best, key=lambda kind: best[kind])
    assert re.search(rf"by small-{order[0]} against .* by small-{order[-1]}\.", lead)
    assert_has(lead, best[order[0]], best[order[-1]])
