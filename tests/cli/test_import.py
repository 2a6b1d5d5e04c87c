"""`deqkit import` makes a run that can be loaded and evaluated."""

import torch
from safetensors.torch import save_file

from deqkit.cli import main
from deqkit.train.load import load_run
from interop.original_naming import SCENARIOS


def make_checkpoint(path):
    scenario = SCENARIOS["v1a"]
    save_file({name: tensor.contiguous().clone() for name, tensor in scenario._state.items()}, path)
    return scenario.model


def test_the_run_holds_the_model(tmp_path, capsys):
    model = make_checkpoint(tmp_path / "original.safetensors")
    run = tmp_path / "run"
    assert main(["import", str(tmp_path / "original.safetensors"), "--out", str(run), "--mem-len", "3"]) == 0
    assert str(run) in capsys.readouterr().out
    loaded = load_run(run)
    assert loaded.config.recipe == "imported" and loaded.config.model.mem_len == 3
    tokens = torch.tensor([[1, 2, 3, 4]])
    with torch.no_grad():
        ours = loaded.model.double()(tokens, tokens, depth=3).nll
        torch.testing.assert_close(ours, model(tokens, tokens, depth=3).nll, rtol=1e-5, atol=1e-5)


def test_there_is_nothing_to_resume(tmp_path, capsys):
    make_checkpoint(tmp_path / "original.safetensors")
    run = tmp_path / "run"
    main(["import", str(tmp_path / "original.safetensors"), "--out", str(run)])
    assert main(["train", "--resume", str(run)]) == 1
    assert "recipe imported needs text" in capsys.readouterr().err


def test_bad_files_cost_nothing(tmp_path, capsys):
    (tmp_path / "text.pkl").write_text("not a checkpoint")
    run = tmp_path / "run"
    assert main(["import", str(tmp_path / "text.pkl"), "--out", str(run)]) == 1
    assert main(["import", str(tmp_path / "absent.pkl"), "--out", str(run)]) == 1
    assert capsys.readouterr().err.count("\n") == 2
    assert not run.exists()
    make_checkpoint(tmp_path / "original.safetensors")
    run.mkdir()
    (run / "mine.txt").write_text("kept")
    assert main(["import", str(tmp_path / "original.safetensors"), "--out", str(run)]) == 1
    assert [path.name for path in run.iterdir()] == ["mine.txt"]
