"""The learning rate of every step, against values computed by hand."""

import math

import pytest

from deqkit.train.config import OptimiserConfig
from deqkit.train.schedule import Schedule
from train.runs import metrics_of, run, tiny


def rates(num_steps, **options):
    schedule = Schedule(OptimiserConfig(lr=1.0, **options), num_steps)
    return [schedule.lr(step) for step in range(num_steps)]


@pytest.mark.parametrize("name", ["constant", "cosine", "inverse-sqrt", "plateau"])
def test_warm_up_rises_linearly_from_its_first_share(name):
    assert rates(10, schedule=name, warmup_steps=4)[:4] == [0.25, 0.5, 0.75, 1.0]


@pytest.mark.parametrize("name", ["constant", "cosine", "plateau"])
def test_without_warm_up_the_first_step_has_the_full_rate(name):
    assert rates(5, schedule=name)[0] == 1.0


def test_constant():
    assert rates(6, schedule="constant", warmup_steps=2) == [0.5, 1, 1, 1, 1, 1]


def test_cosine():
    """Half a cosine over the steps after the warm-up; step 4 of 4 would be zero."""
    half = math.sqrt(0.5)
    assert rates(6, warmup_steps=2) == pytest.approx([0.5, 1.0, 1.0, (1 + half) / 2, 0.5, (1 - half) / 2])


def test_cosine_ends_at_its_floor():
    found = rates(1000, floor=0.1)
    assert found[0] == 1.0
    assert found[500] == pytest.approx(0.55)
    assert found[-1] == pytest.approx(0.1, abs=1e-5)
    assert found == sorted(found, reverse=True) and min(found) >= 0.1


def test_a_run_that_goes_on_after_its_last_step_stays_at_the_floor():
    schedule = Schedule(OptimiserConfig(lr=2.0, floor=0.1), 10)
    assert schedule.lr(10) == schedule.lr(50) == pytest.approx(0.2)


def test_inverse_square_root():
    found = rates(36, schedule="inverse-sqrt", warmup_steps=4)
    assert found[3] == 1.0
    assert found[15] == pytest.approx(0.5)  # sqrt(4 / 16)
    assert found[35] == pytest.approx(1 / 3)
    assert rates(4, schedule="inverse-sqrt") == pytest.approx([1, 2**-0.5, 3**-0.5, 0.5])


def test_inverse_square_root_does_not_fall_below_its_floor():
    assert rates(100, schedule="inverse-sqrt", floor=0.25)[-1] == 0.25


def test_plateau_by_hand():
    options = OptimiserConfig(lr=1.0, schedule="plateau", plateau_factor=0.5, plateau_patience=2, floor=0.2)
    schedule = Schedule(options, 100)
    found = []
    for loss in (5.0, 4.0, 4.0, 4.5, 3.0, 3.5, 3.5, 3.5, 3.5, 2.0, 9.0, 9.0):
        schedule.evaluated(loss)
        found.append(schedule.lr(50))
    # the fourth is the second without improvement; so are the seventh, the ninth (floor) and the last
    assert found == [1, 1, 1, 0.5, 0.5, 0.5, 0.25, 0.25, 0.2, 0.2, 0.2, 0.2]
    assert (schedule.best, schedule.waited) == (2.0, 0)


def test_evaluations_change_no_other_schedule():
    schedule = Schedule(OptimiserConfig(lr=1.0, schedule="constant", plateau_patience=1), 10)
    for loss in (1.0, 2.0, 3.0):
        schedule.evaluated(loss)
    assert schedule.lr(5) == 1.0


@pytest.mark.parametrize("losses", [(), (3.0,), (3.0, 4.0, 5.0, 2.0, 6.0)])
def test_state_is_restored(losses):
    options = OptimiserConfig(schedule="plateau", plateau_patience=2)
    schedule, other = Schedule(options, 10), Schedule(options, 10)
    for loss in losses:
        schedule.evaluated(loss)
    other.load_state_dict(schedule.state_dict())
    assert other == schedule


def test_the_loop_uses_the_schedule(corpus, tmp_path):
    config = tiny(corpus, optimiser={"lr": 0.02, "warmup_steps": 4}, steps=6)
    run(config, tmp_path / "run")
    found = [record["lr"] for record in metrics_of(tmp_path / "run", "train")]
    assert found == pytest.approx([0.005, 0.01, 0.015, 0.02, 0.02, 0.01])


def test_the_loop_tells_a_plateau_of_every_evaluation(corpus, tmp_path, monkeypatch):
    from deqkit.train import loop

    losses = iter([3.0, 4.0, 2.0, 5.0, 5.0, 5.0])
    monkeypatch.setattr(loop, "evaluate", lambda *_, **__: {"loss": next(losses)})
    options = {"lr": 1.0, "name": "sgd", "schedule": "plateau", "plateau_patience": 1, "plateau_factor": 0.5}
    run(tiny(corpus, optimiser=options, eval_every=1), tmp_path / "run")
    found = [record["lr"] for record in metrics_of(tmp_path / "run", "train")]
    assert found == [1.0, 1.0, 0.5, 0.5, 0.25, 0.125]
