"""A checkpoint or run folder that is damaged, or does not fit: one clear line with the file and the remedy."""

import json
import shutil
from dataclasses import replace

import pytest
import safetensors.torch
import torch

from deqkit.train.checkpoint import CheckpointError, find_checkpoint
from deqkit.train.run_folder import RunError, RunFolder
from train.runs import assert_same_run, everything, latest, make_corpus, make_text, read_tensors, run, tiny

FILES = ("model", "optimiser", "averaged", "rank-0")


@pytest.fixture(scope="module")
def original(corpus, tmp_path_factory):
    path = tmp_path_factory.mktemp("original") / "run"
    run(everything(corpus), path, max_steps=4)
    return path


@pytest.fixture
def begun(original, tmp_path):
    """A run with checkpoints of steps 2, 3 and 4, to damage."""
    shutil.copytree(original, tmp_path / "run")
    return tmp_path / "run"


def refused(corpus, path, *words, error: type[ValueError] = CheckpointError, config=None):
    """Resuming fails with one line that has these words."""
    with pytest.raises(error) as caught:
        run(config or everything(corpus), path, resume=True)
    message = str(caught.value)
    assert "\n" not in message and len(message) < 600
    for word in words:
        assert str(word) in message
    return message


def forget_hashes(checkpoint):
    """As a version that wrote none would have left it: what is wrong must still be noticed, or told more exactly."""
    (checkpoint / "sha256.json").unlink()


def change_tensors(path, change):
    forget_hashes(path.parent)
    tensors = read_tensors(path)
    tensors = {name: tensor.clone() for name, tensor in tensors.items()}
    safetensors.torch.save_file(change(tensors), path)


def change_json(path, change):
    if (path.parent / "sha256.json").exists():
        forget_hashes(path.parent)
    record = json.loads(path.read_text())
    path.write_text(json.dumps(change(record)))


@pytest.mark.parametrize("name", [*(f"{name}.safetensors" for name in FILES), "state.json", "rank-0.json"])
def test_a_file_of_the_right_size_with_other_content(corpus, begun, name):
    """A disk that gives back other bits: nothing but a hash can tell."""
    path = latest(begun) / name
    content = bytearray(path.read_bytes())
    content[-3] ^= 1
    path.write_bytes(bytes(content))
    refused(corpus, begun, path, "was changed since it was written", "remove")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("how", ["missing", "empty", "header only", "cut short", "not safetensors"])
def test_a_damaged_file_of_tensors(corpus, begun, name, how):
    path = latest(begun) / f"{name}.safetensors"
    content = path.read_bytes()
    if how == "missing":
        path.unlink()
    else:
        damaged = {"empty": b"", "header only": content[:8], "cut short": content[:-100], "not safetensors": b"x" * 500}
        path.write_bytes(damaged[how])
    refused(corpus, begun, path, f"remove {latest(begun)} to use the one before")


@pytest.mark.parametrize("name", ["state.json", "rank-0.json"])
@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe", b"{}", b'{"step": 4}', b'{"dict": {}}'])
def test_a_damaged_json_file(corpus, begun, name, content):
    path = latest(begun) / name
    path.unlink() if content is None else path.write_bytes(content)
    refused(corpus, begun, latest(begun), "to use the one before")


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("what", ["tensor is missing", "tensor is larger"])
def test_tensors_that_do_not_fit(corpus, begun, name, what):
    def change(tensors):
        key = max(tensors, key=lambda k: tensors[k].numel())
        larger = torch.cat([tensors[key], tensors[key]])
        return {k: t for k, t in tensors.items() if k != key} | ({} if "missing" in what else {key: larger})

    change_tensors(latest(begun) / f"{name}.safetensors", change)
    refused(corpus, begun, latest(begun), "to use the one before")


def test_after_the_remedy_the_run_goes_on_from_the_checkpoint_before(corpus, begun, tmp_path):
    (latest(begun) / "optimiser.safetensors").write_bytes(b"")
    refused(corpus, begun, "remove")
    shutil.rmtree(latest(begun))
    assert latest(begun).name == "step-00000003"
    run(everything(corpus), begun, resume=True)
    run(everything(corpus), tmp_path / "whole")
    assert_same_run(begun, tmp_path / "whole")


def test_another_vocabulary(corpus, begun):
    change_json(latest(begun) / "state.json", lambda state: {**state, "vocabulary": "0" * 64})
    refused(corpus, begun, latest(begun), "another vocabulary", corpus)


def test_another_text_with_the_same_vocabulary(corpus, begun, tmp_path):
    other = make_corpus(tmp_path / "other", make_text(200))
    config = everything(corpus)
    config = replace(config, data=replace(config.data, source=other))
    refused(corpus, begun, begun, "other data", other, config=config, error=RunError)


def test_another_batch(corpus, begun):
    config = everything(corpus)
    refused(corpus, begun, "batch 4", "batch is 8", config=replace(config, data=replace(config.data, batch=8)))


def test_another_number_of_processes(corpus, begun):
    change_json(latest(begun) / "state.json", lambda state: {**state, "num_processes": 2})
    refused(corpus, begun, latest(begun), "2 processes", "resume with as many")


def test_another_model(corpus, begun):
    config = everything(corpus)
    cell = replace(config.model.cell, hidden_width=48)
    refused(corpus, begun, "model.safetensors", "shape", config=replace(config, model=replace(config.model, cell=cell)))


def test_another_optimiser(corpus, begun):
    config = everything(corpus)
    sgd = replace(config, optimiser=replace(config.optimiser, name="sgd"))
    refused(corpus, begun, latest(begun), "another optimiser than sgd", config=sgd)


@pytest.mark.parametrize("damage", ["gone", "cut"])
def test_metrics_that_are_shorter_than_the_checkpoint_says(corpus, begun, damage):
    path = begun / "metrics.jsonl"
    content = path.read_bytes()
    path.unlink() if damage == "gone" else path.write_bytes(content[:-50])
    refused(corpus, begun, path, "put it back", error=RunError)
    assert not path.exists() if damage == "gone" else path.read_bytes() == content[:-50]


def test_checkpoints_that_were_all_removed_late_in_a_run(corpus, begun):
    """Beginning again would throw away what the metrics tell."""
    metrics = (begun / "metrics.jsonl").read_bytes()
    shutil.rmtree(begun / "checkpoints")
    refused(corpus, begun, "has no checkpoint", begun / "checkpoints")
    assert (begun / "metrics.jsonl").read_bytes() == metrics


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (None, "is not a run: it has no config.json"),
        (b"{", "damaged"),
        (b"\xff", "damaged"),
        (b"[]", "does not hold the configuration"),
        (b'{"config": {"kind": "TrainConfig"}}', "is missing"),
        (b'{"config": []}', "must be an object"),
    ],
)
def test_a_damaged_configuration(begun, content, words):
    path = begun / "config.json"
    path.unlink() if content is None else path.write_bytes(content)
    with pytest.raises(RunError, match=words):
        RunFolder(begun).config()


def test_a_mistyped_field_of_the_configuration_suggests_the_right_one(begun):
    def misspell(record):
        record["config"]["optimiser"]["warmup_step"] = record["config"]["optimiser"].pop("warmup_steps")
        return record

    change_json(begun / "config.json", misspell)
    with pytest.raises(RunError, match=r"config.json: config.optimiser: unknown field 'warmup_step'.*'warmup_steps'"):
        RunFolder(begun).config()


def test_a_folder_that_is_in_use(corpus, begun, tmp_path):
    with pytest.raises(RunError, match=f"{begun} exists already: pass --resume {begun}"):
        run(tiny(corpus), begun)
    (tmp_path / "file").write_text("")
    with pytest.raises(RunError, match="is a file"):
        run(tiny(corpus), tmp_path / "file")


def test_resuming_what_is_no_run(corpus, tmp_path):
    with pytest.raises(RunError, match="is not a run"):
        run(tiny(corpus), tmp_path / "nothing", resume=True)
    assert not (tmp_path / "nothing").exists()


def test_find_checkpoint_in_an_empty_folder(tmp_path):
    with pytest.raises(CheckpointError, match="has no checkpoint: the run ended before the first was written"):
        find_checkpoint(tmp_path / "checkpoints")
