"""A run that is interrupted and resumed ends with the bits of one that was left alone."""

import pytest

from deqkit.solve import Broyden
from train.runs import (
    TRELLIS,
    assert_same_run,
    assert_same_tensors,
    everything,
    latest,
    metrics_of,
    plain_of,
    run,
    tensors_of,
    tiny,
)

VARIANTS = {
    "adamw-cosine": {"optimiser": {"name": "adamw", "weight_decay": 0.1, "warmup_steps": 3}},
    "inverse-sqrt": {"optimiser": {"schedule": "inverse-sqrt", "warmup_steps": 2}},
    "averaged-sgd": {"optimiser": {"name": "sgd", "lr": 1.0, "average_after": 1}},
    "subsequences": {"model": {"subsequences": 2}, "cell": {"dropout": 0.1}},
    "random-steps": {"devices": {"random_steps": 8}},
    "penalty": {"regulariser": {"spectral": 0.5, "jacobian": 0.5, "every": 2}},
    "tied-layers": {"model": {"depth": 3}, "cell": {"dropout": 0.1}, "devices": {"warmup_steps": 2}},
    "untied-layers": {"model": {"depth": 2, "tied": False}, "cell": {"dropout": 0.1, "inject": False}},
    "trellis": {
        "cell": TRELLIS,
        "model": {"mem_len": 1, "output_dropout": 0.1, "solver": Broyden(memory=2, group="prefix")},
    },
    "trellis-of-single-rows": {"cell": TRELLIS, "model": {"mem_len": 1}, "optimiser": {"accumulate": 4}},
}


def run_step_by_step(config, path, *, steps_at_a_time=1):
    """Interrupt and resume again and again."""
    result = run(config, path, max_steps=steps_at_a_time)
    while not result["finished"]:
        result = run(config, path, resume=True, max_steps=steps_at_a_time)
    return result


@pytest.fixture(scope="module")
def undisturbed(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("undisturbed") / "run"
    run(everything(corpus), path)
    return path


def test_the_run_has_all_that_could_be_forgotten(undisturbed):
    """Otherwise the tests below would say little."""
    records = metrics_of(undisturbed, "train")
    assert [r["shallow"] for r in records] == [True] + 5 * [False]
    assert any("spectral" in r and "jacobian" in r for r in records)
    assert {r["epoch"] for r in records} == {0, 1}  # the data began again
    state = plain_of(latest(undisturbed))["state.json"]
    assert state["num_averaged"] == 4
    assert state["schedule"]["factor"] < 1  # the plateau was reached
    assert any(name.startswith("rank-0") and ".memory." in name for name in tensors_of(latest(undisturbed)))


@pytest.mark.parametrize("step", range(1, 6))
def test_resumed_after_any_step_ends_the_same(undisturbed, corpus, tmp_path, step):
    config = everything(corpus)
    first = run(config, tmp_path / "run", max_steps=step)
    assert (first["step"], first["finished"]) == (step, False)
    last = run(config, tmp_path / "run", resume=True)
    assert (last["step"], last["finished"]) == (6, True)
    assert_same_run(tmp_path / "run", undisturbed)


def test_resumed_after_every_step_ends_the_same(undisturbed, corpus, tmp_path):
    run_step_by_step(everything(corpus), tmp_path / "run")
    assert_same_run(tmp_path / "run", undisturbed)


@pytest.mark.parametrize("name", VARIANTS)
def test_every_kind_of_run_resumes_exactly(corpus, tmp_path, name):
    config = tiny(corpus, **VARIANTS[name])
    run(config, tmp_path / "whole")
    run_step_by_step(config, tmp_path / "pieces")
    assert_same_run(tmp_path / "pieces", tmp_path / "whole")


@pytest.mark.usefixtures("without_onednn")
def test_a_run_in_bf16_resumes_exactly(corpus, tmp_path):
    config = tiny(corpus, precision="bf16", cell={"dropout": 0.1})
    run(config, tmp_path / "whole")
    run_step_by_step(config, tmp_path / "pieces")
    assert_same_run(tmp_path / "pieces", tmp_path / "whole")


@pytest.mark.parametrize("options", [{}, {"model": {"mem_len": 4}, "cell": {"dropout": 0.2}}], ids=["plain", "memory"])
def test_copy_memory_resumes_exactly(tmp_path, options):
    config = tiny("copy-memory", **options)
    run(config, tmp_path / "whole")
    assert {r["epoch"] for r in metrics_of(tmp_path / "whole", "train")} == {0, 1}  # shuffled anew
    run_step_by_step(config, tmp_path / "pieces", steps_at_a_time=2)
    assert_same_run(tmp_path / "pieces", tmp_path / "whole")


def test_the_same_seed_gives_the_same_run_and_another_seed_another(corpus, tmp_path):
    config = tiny(corpus, cell={"dropout": 0.2})
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        run(tiny(corpus, cell={"dropout": 0.2}, seed=seed), tmp_path / name)
    assert config.seed == 0
    assert_same_run(tmp_path / "a", tmp_path / "b")
    assert metrics_of(tmp_path / "a") != metrics_of(tmp_path / "c")


def test_resuming_a_finished_run_changes_nothing(undisturbed, corpus):
    before, tensors = (undisturbed / "metrics.jsonl").read_bytes(), tensors_of(latest(undisturbed))
    result = run(everything(corpus), undisturbed, resume=True)
    assert result["finished"] and result["step"] == 6
    assert result["loss"] == metrics_of(undisturbed, "valid")[-1]["loss"]
    assert (undisturbed / "metrics.jsonl").read_bytes() == before
    assert_same_tensors(tensors_of(latest(undisturbed)), tensors)


def test_what_was_logged_after_the_checkpoint_is_cut_off(corpus, tmp_path):
    """As a kill leaves it: steps that no checkpoint has, and half a line."""
    config = tiny(corpus)
    run(config, tmp_path / "whole")
    run(config, tmp_path / "run", max_steps=3)
    with (tmp_path / "run" / "metrics.jsonl").open("a") as file:
        file.write('{"kind": "train", "step": 4, "loss": 1.0}\n{"kind": "train", "st')
    run(config, tmp_path / "run", resume=True)
    assert_same_run(tmp_path / "run", tmp_path / "whole")
