"""The paper's training devices: shallow warm-up, random step limit, early adjoint, separate tolerances."""

from typing import Any

import pytest
import torch

from deqkit.adjoint import OneStep
from deqkit.model.weights import read_tensors
from deqkit.solve import Anderson, Tolerance
from deqkit.train import loop
from deqkit.train.checkpoint import find_checkpoint
from deqkit.train.loop import _settings
from deqkit.train.state import TrainingState
from deqkit.train.tasks import make_task
from train.runs import latest, losses_of, metrics_of, plain_of, run, tiny, weights_of_run


def test_shallow_warm_up_trains_a_tied_stack_with_the_same_weights(corpus, tmp_path):
    run(tiny(corpus, devices={"warmup_steps": 3, "warmup_depth": 4}, steps=3), tmp_path / "warm")
    run(tiny(corpus, model={"depth": 4}, steps=3), tmp_path / "stack")
    assert losses_of(tmp_path / "warm") == losses_of(tmp_path / "stack")
    found, expected = weights_of_run(tmp_path / "warm"), weights_of_run(tmp_path / "stack")
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def test_a_learned_start_changes_nothing_in_the_warm_up(corpus, tmp_path):
    """Not by the random numbers of its weights, and not by its part of the norm that is clipped."""
    for start in ("learned", "zeros"):
        config = tiny(
            corpus,
            model={"start": start, "input_dropout": 0.2},
            devices={"warmup_steps": 4},
            optimiser={"lr": 0.02, "clip": 0.05},
            steps=4,
        )
        run(config, tmp_path / start)
    assert losses_of(tmp_path / "learned") == losses_of(tmp_path / "zeros")
    assert all(record["grad_norm"] > 0.05 for record in metrics_of(tmp_path / "zeros", "train"))


def test_after_the_warm_up_the_equilibrium_goes_on_with_the_optimiser(corpus, tmp_path):
    """Adam's mean of step 4 is 0.9 times that of step 3 plus 0.1 times the clipped gradient at the equilibrium."""
    path = tmp_path / "run"
    config = tiny(corpus, devices={"warmup_steps": 3}, steps=6, checkpoint_every=1, keep=10)
    run(config, path)
    records = metrics_of(path, "train")
    assert [r["shallow"] for r in records] == [True] * 3 + [False] * 3
    assert ["evals" in r for r in records] == [False] * 3 + [True] * 3
    state = TrainingState(config, make_task(config), loop._make_accelerator(config))
    state.load(find_checkpoint(path / "checkpoints", 3))
    batch = next(state.batches)
    output = state.model(batch.tokens_BT, batch.targets_BT, state.memory[0])
    assert len(output.solutions) == 1
    assert float(output.loss.detach()) == pytest.approx(records[3]["loss"], rel=1e-6)
    output.loss.backward()
    gradients = [p.grad for p in state.model.parameters() if p.grad is not None]
    scale = min(1.0, 0.25 / float(torch.stack([g.norm() for g in gradients]).norm()))
    moments = [
        read_tensors(find_checkpoint(path / "checkpoints", step) / "optimiser.safetensors") for step in (3, 4, 6)
    ]
    for i, gradient in enumerate(gradients):
        before, after, last = (m[f"optimiser.state.{i}.exp_avg"] for m in moments)
        torch.testing.assert_close(after, 0.9 * before + 0.1 * scale * gradient, rtol=1e-4, atol=1e-8)
        assert not torch.equal(after, last)
        assert [float(m[f"optimiser.state.{i}.step"]) for m in moments] == [3, 4, 6]


def test_what_a_shallow_network_reaches_is_never_the_best(corpus, tmp_path, monkeypatch):
    """It says nothing about the equilibrium of the same weights."""
    losses = iter([1.0, 2.0, 5.0, 4.0, 4.5, 6.0])
    monkeypatch.setattr(loop, "evaluate", lambda *_, **__: {"loss": next(losses)})
    config = tiny(corpus, devices={"warmup_steps": 2}, eval_every=1)
    run(config, tmp_path / "run")
    assert plain_of(latest(tmp_path / "run"))["state.json"]["best_step"] == 4


def test_evaluation_during_the_warm_up_is_shallow_too(corpus, tmp_path):
    run(tiny(corpus, devices={"warmup_steps": 3}), tmp_path / "run")
    shallow, deep = metrics_of(tmp_path / "run", "valid")
    assert "evals" not in shallow and "evals" in deep


def limits_of(config):
    return [_settings(config, number).get("max_steps") for number in range(200)]


def test_the_random_step_limit_is_within_its_bounds_and_seeded(corpus):
    config = tiny(corpus, model={"max_steps": 12}, devices={"random_steps": 5})
    assert set(limits_of(config)) == set(range(7, 13))
    assert limits_of(config) == limits_of(tiny(corpus, model={"max_steps": 12}, devices={"random_steps": 5}))
    assert limits_of(config) != limits_of(tiny(corpus, devices={"random_steps": 5}, seed=1))
    counts = torch.bincount(torch.tensor(limits_of(config)))[7:]
    assert counts.min() >= 15  # about 33 each
    assert limits_of(tiny(corpus)) == [None] * 200


def test_the_random_step_limit_is_at_least_one(corpus):
    assert set(limits_of(tiny(corpus, model={"max_steps": 2}, devices={"random_steps": 9}))) == {1, 2}


def test_the_random_step_limit_is_what_the_solve_gets(corpus, tmp_path):
    """With a tolerance that is never met every solve runs to its limit (a causal one may save its last evaluation)."""
    never = {"solver": Anderson(), "tol": Tolerance(rtol=0.0), "max_steps": 12}
    config = tiny(corpus, model=never, devices={"random_steps": 6})
    run(config, tmp_path / "run")
    found = [record["evals"] for record in metrics_of(tmp_path / "run", "train")]
    assert found == limits_of(config)[:6]
    assert len(set(found)) > 2


def test_the_early_adjoint_is_used_exactly_for_its_steps(corpus, tmp_path):
    devices = {"warmup_steps": 1, "early_adjoint": OneStep(), "early_adjoint_steps": 2}
    run(tiny(corpus, devices=devices), tmp_path / "run")
    records = metrics_of(tmp_path / "run", "train")
    assert ["evals" in r for r in records] == [False, True, True, True, True, True]
    assert ["backward_evals" in r for r in records] == [False, False, False, True, True, True]
    assert [_settings(tiny(corpus, devices=devices), n).get("adjoint") for n in range(5)] == [
        None,
        OneStep(),
        OneStep(),
        None,
        None,
    ]


def test_the_early_tolerance_is_used_exactly_for_its_steps(corpus, tmp_path):
    """Met by the first evaluation, however far off it is."""
    devices = {"warmup_steps": 1, "early_rtol": 10.0, "early_rtol_steps": 2}
    run(tiny(corpus, devices=devices), tmp_path / "run")
    evals: list[Any] = [record.get("evals") for record in metrics_of(tmp_path / "run", "train")]
    assert evals[:3] == [None, 1.0, 1.0] and min(evals[3:]) > 1


def test_training_and_evaluation_have_tolerances_and_limits_of_their_own(corpus, tmp_path):
    never = Tolerance(rtol=0.0)
    model = {"max_steps": 5, "tol": never, "eval_max_steps": 9, "eval_tol": never, "solver": Anderson()}
    run(tiny(corpus, model=model), tmp_path / "run")
    assert {r["evals"] for r in metrics_of(tmp_path / "run", "train")} == {5.0}
    assert {r["evals"] for r in metrics_of(tmp_path / "run", "valid")} == {9.0}
    assert {r["unconverged"] for r in metrics_of(tmp_path / "run")} == {1.0}
