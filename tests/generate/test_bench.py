"""`deqkit bench generate`."""

import json

import pytest

from deqkit.analysis.generation_bench import GenerationBenchConfig, run_generation_bench
from deqkit.cli import main
from model.models import make
from train.runs import run, tiny

SMALL = ("--context", "6", "--num-tokens", "4", "--num-solved-again", "1", "--repeats", "2", "--batch", "2")


def test_a_run_and_the_same_cell_in_layers(run_of_bytes, tmp_path, capsys):
    out = tmp_path / "bench.json"
    words = ["bench", "generate", str(run_of_bytes), *SMALL, "--depth", "3", "--batches", "1", "--out", str(out)]
    assert main(words) == 0
    printed = capsys.readouterr().out
    assert "how many times quicker" in printed and str(out) in printed.replace("\n", "")
    results = json.loads(out.read_text())
    assert [row["way"] for row in results["rows"]] == ["cached", "solved again", "stack"]
    assert results["rows"][2]["evaluations_per_token"] == 3
    assert all(len(row["milliseconds_per_step"]) == 2 and row["tokens_per_second"] > 0 for row in results["rows"])
    assert set(results["perplexity"]) == {"equilibrium", "stack"} and results["machine"]["cores"]


def test_against_a_run_with_layers(run_of_bytes, tmp_path, capsys):
    config = json.loads((run_of_bytes / "config.json").read_text())
    source = config.get("config", config)["data"]["source"]
    run(tiny(source, model={"depth": 2}, steps=1, eval_every=1, checkpoint_every=1), tmp_path / "stack")
    words = ["bench", "generate", str(run_of_bytes), *SMALL, "--batches", "1", "--json"]
    out = ["--out", str(tmp_path / "bench.json")]
    assert main([*words, *out, "--against", str(tmp_path / "stack")]) == 0
    results = json.loads(capsys.readouterr().out)
    assert results["rows"][2]["evaluations_per_token"] == 2
    assert results["run"]["recipe"] == "tiny" and results["against"] == {"recipe": "tiny", "step": 1}
    assert main(["bench", "generate", str(tmp_path / "stack"), *SMALL, *out]) == 1
    assert "name a run with an equilibrium" in capsys.readouterr().err
    assert main([*words, *out, "--against", str(run_of_bytes)]) == 1
    assert "name one with layers" in capsys.readouterr().err


def test_ratios_are_of_the_times():
    told = []
    config = GenerationBenchConfig(context=5, num_tokens=3, num_solved_again=1, repeats=3, depth=2)
    results = run_generation_bench(config, make(), on_progress=lambda *step: told.append(step))
    times = {row["way"]: row["milliseconds_per_step"] for row in results["rows"]}
    for entry, other in zip(results["summary"], ("solved again", "stack"), strict=True):
        ratios = sorted(b / a for a, b in zip(times["cached"], times[other], strict=True))
        assert entry["value"] == pytest.approx(ratios[1]) and entry["holds"] == (ratios[1] >= entry["bar"])
    assert [name.partition(": ")[2] for name, _, _ in told] == ["cached", "solved again", "stack"] * 3  # in turn


def test_mistakes():
    with pytest.raises(ValueError, match="num_tokens must be a whole number of at least 2"):
        GenerationBenchConfig(num_tokens=1)
    with pytest.raises(ValueError, match="lower batch or context"):
        run_generation_bench(GenerationBenchConfig(), make(), text=make().embedding.tables[0][0], on_progress=print)
    assert main(["bench", "generate", "--recipe", "nothing"]) == 1
