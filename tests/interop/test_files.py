"""Checkpoint files: what is read, what is refused, and that nothing in a file is ever executed."""

import os
import pickle
import zipfile
from collections import OrderedDict

import pytest
import torch
from safetensors.torch import save_file

from deqkit.interop import OriginalError, load_original
from interop.original_naming import SCENARIOS

SCENARIO = SCENARIOS["v2-adaptive"]


def assert_loads(source):
    for name, tensor in SCENARIO.load(source).state_dict().items():
        assert torch.equal(tensor, SCENARIO.model.state_dict()[name]), name


def saved(path, content, **options):
    torch.save(content, path, **options)
    return path


def as_zip(path, content):
    return saved(path, content)


def as_legacy(path, content):
    """The format of torch before 1.6, in which the released checkpoints are."""
    return saved(path, content, _use_new_zipfile_serialization=False)


each_format = pytest.mark.parametrize("save", [as_zip, as_legacy])


@each_format
@pytest.mark.parametrize("name", ["model.pkl", "model.pt", "model"])
def test_torch_save(save, name, tmp_path):
    path = save(tmp_path / name, OrderedDict(SCENARIO.state))
    assert_loads(path)
    assert_loads(str(path))


@each_format
def test_torch_save_of_a_module_s_state_dict_with_its_metadata_and_shared_storage(save, tmp_path):
    class Tables(torch.nn.Module):
        def __init__(self):
            super().__init__()
            for key, value in SCENARIO.state.items():
                self.register_parameter(key.replace(".", "/"), torch.nn.Parameter(value))

    state = Tables().state_dict()
    named = OrderedDict((key.replace("/", "."), value) for key, value in state.items())
    named["crit.out_layers.0.weight"] = named["word_emb.emb_layers.0.weight"]
    named._metadata = state._metadata  # pyright: ignore[reportAttributeAccessIssue]
    assert_loads(save(tmp_path / "model.pkl", named))


def test_safetensors(tmp_path):
    path = tmp_path / "model.safetensors"
    save_file({key: value.contiguous() for key, value in SCENARIO.state.items()}, path)
    assert_loads(path)


@pytest.mark.parametrize("name", ["model.pkl", "model.safetensors"])
def test_a_missing_file(name, tmp_path):
    with pytest.raises(FileNotFoundError, match=name):
        load_original(tmp_path / name)


@pytest.mark.parametrize("name", ["model.pkl", "model.safetensors"])
@pytest.mark.parametrize(
    "content", [b"", b"\0", b"just some text\n" * 100, bytes(range(256)) * 20], ids=["empty", "zero", "text", "noise"]
)
def test_files_that_are_no_checkpoints(name, content, tmp_path):
    (tmp_path / name).write_bytes(content)
    with pytest.raises(OriginalError, match=name):
        load_original(tmp_path / name)


@pytest.mark.parametrize("name", ["model", "model.safetensors"])
def test_a_directory(name, tmp_path):
    (tmp_path / name).mkdir()
    with pytest.raises(OriginalError, match=name):
        load_original(tmp_path / name)


@pytest.mark.parametrize("left", [0.02, 0.3, 0.9, 0.999])
@pytest.mark.parametrize("kind", ["zip", "legacy", "safetensors"])
def test_a_file_that_was_cut_off(kind, left, tmp_path):
    path = tmp_path / ("model.safetensors" if kind == "safetensors" else "model.pkl")
    if kind == "safetensors":
        save_file({key: value.contiguous() for key, value in SCENARIO.state.items()}, path)
    else:
        (as_zip if kind == "zip" else as_legacy)(path, SCENARIO.state)
    content = path.read_bytes()
    path.write_bytes(content[: int(left * len(content))])
    with pytest.raises(OriginalError, match=path.name):
        load_original(path)


@pytest.mark.parametrize(
    ("named", "content"),
    [
        ("state_dict: ", {"state_dict": {"inject_conv.weight": torch.ones(2, 2, 1)}}),
        ("step: ", {"step": 3, "inject_conv.weight": torch.ones(2, 2, 1)}),
        ("7: ", {7: torch.ones(2)}),
        ("model.pkl", [torch.ones(2)]),
        ("model.pkl", torch.ones(2)),
        ("model.pkl", None),
    ],
    ids=["nested", "a number in it", "no names", "list", "tensor", "none"],
)
def test_files_that_hold_something_else(named, content, tmp_path):
    path = saved(tmp_path / "model.pkl", content)
    with pytest.raises(OriginalError, match=named):
        load_original(path)


class Harmful:
    """A pickle that makes a directory when it is loaded."""

    def __init__(self, path):
        self.path = str(path)

    def __reduce__(self):
        return os.mkdir, (self.path,)


def as_pickle(path, content):
    path.write_bytes(pickle.dumps(content, protocol=2))  # torch warns of others before it refuses them
    return path


@pytest.mark.parametrize("save", [as_zip, as_legacy, as_pickle])
@pytest.mark.parametrize("name", ["model.pkl", "model.safetensors"])
def test_nothing_in_a_file_is_executed(save, name, tmp_path):
    marker, path = tmp_path / "executed", tmp_path / name
    save(path, {**SCENARIO.state, "harmful": Harmful(marker)})
    with pytest.raises(OriginalError, match=name):
        load_original(path)
    assert not marker.exists()
    load = pickle.load if save is as_pickle else (lambda file: torch.load(file, weights_only=False))
    with path.open("rb") as file:
        load(file)
    assert marker.exists()  # the pickle does what it should, if one lets it


class WholeModel(torch.nn.Module):
    """Stands for the original's model class, whose pickles `train_transformer.py` writes as `model.pt`."""

    def __init__(self):
        super().__init__()
        self.inject_conv = torch.nn.Conv1d(2, 6, 1)

    def __setstate__(self, state):
        raise AssertionError("a pickled model was brought to life")


@pytest.mark.parametrize("save", [as_zip, as_legacy])
def test_a_pickled_model_is_refused_with_the_remedy(save, tmp_path):
    path = save(tmp_path / "model.pt", WholeModel())
    with pytest.raises(OriginalError, match=r"torch\.save\(model\.state_dict\(\)"):
        load_original(path)


def test_a_zip_that_is_no_checkpoint(tmp_path):
    path = tmp_path / "model.pkl"
    with zipfile.ZipFile(path, "w") as file:
        file.writestr("readme.txt", "nothing here")
    with pytest.raises(OriginalError, match=path.name):
        load_original(path)
