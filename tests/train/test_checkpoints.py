"""Which checkpoints are kept and found, and what is in them."""

import os
import shutil

import pytest
import torch

from deqkit.train import loop
from deqkit.train.checkpoint import CheckpointError, CheckpointWriter, find_checkpoint, flatten, prune, unflatten
from deqkit.train.load import load_run
from train.runs import assert_same_tensors, everything, plain_of, run, tensors_of, tiny


def steps_in(path):
    return sorted(int(p.name.removeprefix("step-")) for p in (path / "checkpoints").iterdir())


@pytest.fixture
def losses(monkeypatch):
    """Decide what every evaluation finds."""

    def decide(*values):
        following = iter(values)
        monkeypatch.setattr(loop, "evaluate", lambda *_, **__: {"loss": next(following)})

    return decide


@pytest.fixture
def folder(tmp_path):
    """Empty checkpoints of steps 1 to 5."""
    for step in range(1, 6):
        writer = CheckpointWriter(tmp_path / "checkpoints", step)
        writer.begin()
        writer.add_json("state.json", {"step": step, "best_step": 2})
        writer.commit()
    return tmp_path / "checkpoints"


@pytest.mark.parametrize("keep", [1, 3])
def test_the_last_and_the_best_are_kept(corpus, tmp_path, losses, keep):
    losses(5.0, 3.0, 4.0, 4.5, 4.2, 4.1)
    run(tiny(corpus, eval_every=1, checkpoint_every=1, keep=keep), tmp_path / "run")
    assert steps_in(tmp_path / "run") == sorted({2, *range(7 - keep, 7)})
    assert find_checkpoint(tmp_path / "run" / "checkpoints", "best").name == "step-00000002"


def test_a_new_best_replaces_the_old(corpus, tmp_path, losses):
    losses(5.0, 3.0, 2.0, 4.5, 4.2, 4.1)
    run(tiny(corpus, eval_every=1, checkpoint_every=1, keep=1), tmp_path / "run")
    assert steps_in(tmp_path / "run") == [3, 6]


def test_the_best_is_kept_when_no_checkpoint_was_due(corpus, tmp_path, losses):
    losses(5.0, 3.0, 4.0)
    run(tiny(corpus, eval_every=2, checkpoint_every=100, keep=1), tmp_path / "run")
    assert steps_in(tmp_path / "run") == [4, 6]
    assert find_checkpoint(tmp_path / "run" / "checkpoints", "best").name == "step-00000004"


def test_the_best_is_remembered_by_a_resumed_run(corpus, tmp_path, losses):
    config = tiny(corpus, eval_every=1, checkpoint_every=1, keep=1)
    losses(5.0, 3.0, 4.0)
    run(config, tmp_path / "run", max_steps=3)
    losses(3.5, 4.2, 3.1)
    run(config, tmp_path / "run", resume=True)
    assert steps_in(tmp_path / "run") == [2, 6]


def test_checkpoints_are_written_as_often_as_asked(corpus, tmp_path, losses):
    losses(5.0, 6.0)
    run(tiny(corpus, checkpoint_every=4, keep=10, steps=6), tmp_path / "run")
    assert steps_in(tmp_path / "run") == [3, 4, 6]  # the best, one that was due, the last


@pytest.mark.parametrize(("which", "name"), [("latest", "00000005"), ("best", "00000002"), (3, "00000003")])
def test_find_checkpoint(folder, which, name):
    assert find_checkpoint(folder, which).name == f"step-{name}"


def test_a_checkpoint_that_is_not_there(folder):
    with pytest.raises(CheckpointError, match="no checkpoint 7; there are those of steps 1, 2, 3, 4, 5"):
        find_checkpoint(folder, 7)
    shutil.rmtree(folder / "step-00000002")
    with pytest.raises(CheckpointError, match="no checkpoint 'best'"):
        find_checkpoint(folder, "best")


def test_other_names_are_no_checkpoints(folder):
    for name in ("step-6", "step-00000009.tmp", "step-abcdefgh", ".partial-step-00000010"):
        (folder / name).mkdir()
    assert find_checkpoint(folder).name == "step-00000005"


def test_an_interrupted_removal_leaves_nothing_that_passes_for_a_checkpoint(folder, monkeypatch):
    def interrupted(path, **_):
        (path / "state.json").unlink(missing_ok=True)
        raise KeyboardInterrupt

    monkeypatch.setattr(shutil, "rmtree", interrupted)
    with pytest.raises(KeyboardInterrupt):
        prune(folder, keep=1, best_step=None)
    for path in folder.glob("step-*"):
        assert (path / "state.json").exists()
    monkeypatch.undo()
    prune(folder, keep=1, best_step=None)
    assert [path.name for path in folder.iterdir()] == ["step-00000005"]


def test_prune_removes_what_interrupted_writes_left(folder):
    CheckpointWriter(folder, 6).begin()
    assert len(list(folder.iterdir())) == 6
    prune(folder, keep=2, best_step=3)
    assert sorted(path.name for path in folder.iterdir()) == [f"step-0000000{step}" for step in (3, 4, 5)]


def test_a_checkpoint_is_there_only_when_it_is_committed(tmp_path):
    writer = CheckpointWriter(tmp_path, 1)
    writer.begin()
    writer.add_tensors("a.safetensors", {"x": torch.ones(3)})
    with pytest.raises(CheckpointError, match="has no checkpoint"):
        find_checkpoint(tmp_path)
    writer.commit()
    assert_same_tensors(tensors_of(find_checkpoint(tmp_path)), {"a.safetensors:x": torch.ones(3)})


def test_resuming_leaves_the_checkpoint_it_came_from_as_it_is(corpus, tmp_path):
    """Tensors may be mapped from its files: updates in place must not reach them."""
    config = everything(corpus, keep=10)
    run(config, tmp_path / "run", max_steps=3)
    checkpoint = find_checkpoint(tmp_path / "run" / "checkpoints", 3)
    before = {path.name: path.read_bytes() for path in checkpoint.iterdir()}
    run(config, tmp_path / "run", resume=True)
    assert {path.name: path.read_bytes() for path in checkpoint.iterdir()} == before


def test_nothing_is_pickled(corpus, tmp_path):
    run(everything(corpus), tmp_path / "run")
    kinds = {path.suffix for path in (tmp_path / "run").rglob("*") if path.is_file()}
    assert kinds == {".json", ".jsonl", ".safetensors"}


def test_a_checkpoint_says_where_it_comes_from(corpus, tmp_path):
    config = tiny(corpus)
    run(config, tmp_path / "run")
    state = plain_of(find_checkpoint(tmp_path / "run" / "checkpoints"))["state.json"]
    assert state["step"] == 6 and state["num_processes"] == 1 and len(state["vocabulary"]) == 64
    assert state["model"]["cell"]["kind"] == "TransformerConfig"


def test_load_run_gives_the_averaged_weights_of_the_best(corpus, tmp_path, losses):
    losses(5.0, 4.0, 3.0, 2.0, 6.0, 7.0)
    config = tiny(corpus, eval_every=1, optimiser={"average_after": 2})
    run(config, tmp_path / "run")
    found = load_run(tmp_path / "run")
    assert (found.step, found.config, found.model.training) == (4, config, False)
    saved = tensors_of(find_checkpoint(tmp_path / "run" / "checkpoints", 4))
    for name, parameter in found.model.named_parameters():
        assert torch.equal(parameter, saved[f"averaged.safetensors:{name}"])
    assert load_run(tmp_path / "run", "latest").step == 6


@pytest.mark.parametrize(
    "tree",
    [
        {},
        {"a": 1, "b": [None, "x", 2.5, True]},
        {
            "state": {"0": {"step": torch.tensor(3.0), "m": torch.ones(2)}},
            "groups": [{"lr": 0.1, "betas": [0.9, 0.98]}],
        },
    ],
)
def test_flatten_and_unflatten(tree):
    tensors, rest = flatten(tree, "t")
    assert unflatten(tensors, rest) == tree  # the very same tensors
    assert all(name.startswith("t.") for name in tensors)


def test_files_are_on_disk_before_the_checkpoint_has_its_name(tmp_path, monkeypatch):
    """All files and their folder are synced, then renamed, then the folder above is synced."""
    order = []
    fsync, rename = os.fsync, os.rename
    monkeypatch.setattr(os, "fsync", lambda h: (order.append(os.readlink(f"/proc/self/fd/{h}")), fsync(h)))
    monkeypatch.setattr(os, "rename", lambda a, b: (order.append("rename"), rename(a, b)))
    writer = CheckpointWriter(tmp_path, 1)
    writer.begin()
    writer.add_tensors("a.safetensors", {"x": torch.ones(3)})
    writer.add_json("b.json", {})
    writer.commit()
    partial = f"{tmp_path}/.partial-step-00000001"
    files = [f"{partial}/{name}" for name in ("a.safetensors", "b.json", "sha256.json")]
    assert order == [*files, partial, "rename", str(tmp_path)]
