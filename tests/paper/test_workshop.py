"""A model is trained once, goes on where it was stopped, and is never taken for another."""

import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest

from deqkit.paper.claim import Claim, unmeasured
from deqkit.paper.run import check
from deqkit.paper.workshop import Workshop
from deqkit.solve import Anderson, Tolerance
from deqkit.train.loop import train
from deqkit.train.run_folder import RunFolder, read_metrics
from train.runs import TRELLIS, make_corpus, make_text, tiny


@pytest.fixture
def workshop(tmp_path):
    return Workshop(runs=tmp_path / "runs")


def steps_of(workshop, name):
    records = read_metrics(RunFolder(workshop.runs / name).metrics)
    return [record["step"] for record in records if record["kind"] == "train"]


def test_a_model_is_trained_once(workshop, corpus):
    told = []
    workshop = replace(workshop, tell=told.append)
    first = workshop.trained(tiny(corpus))
    assert steps_of(workshop, "tiny-seed-0") == [1, 2, 3, 4, 5, 6] and told == ["tiny-seed-0: step 6 of 6"] * 2
    before = (first.folder.metrics.stat().st_mtime_ns, first.folder.metrics.read_bytes())
    second = workshop.trained(tiny(corpus))
    assert (second.folder.metrics.stat().st_mtime_ns, second.folder.metrics.read_bytes()) == before
    assert second.step == first.step and len(told) == 2


def test_a_result_names_the_models_it_is_of_and_what_they_took(workshop, corpus):
    workshop.used["an earlier row's"] = 1.0

    def work(workshop):
        workshop.trained(tiny(corpus))
        return unmeasured("")

    result = check(Claim(row="r", where="w", claim="c", paper="p", quick=work), workshop, full=False)
    records = [r for r in read_metrics(workshop.runs / "tiny-seed-0" / "metrics.jsonl") if r["kind"] == "train"]
    assert result["trainings"] == {"tiny-seed-0": pytest.approx(sum(r["processor_seconds"] for r in records))}


def test_a_run_of_an_earlier_version_has_no_processor_seconds(workshop, corpus):
    metrics = workshop.trained(tiny(corpus)).folder.metrics
    metrics.write_text(metrics.read_text().replace('"processor_seconds"', '"unknown"'))
    workshop.trained(tiny(corpus))
    assert workshop.used == {"tiny-seed-0": None}


def test_the_first_seed_serves_where_one_model_will_do(workshop):
    assert workshop.recipe("demo").seed == 0 and replace(workshop, seeds=()).recipe("demo").seed == 0
    assert replace(workshop, seeds=(2, 1)).recipe("demo").seed == 2


def test_a_half_done_run_goes_on(workshop, corpus):
    config = tiny(corpus)
    train(config, RunFolder(workshop.runs / "tiny-seed-0"), max_steps=2)
    assert not workshop.has(config)
    workshop.trained(config)
    assert steps_of(workshop, "tiny-seed-0") == [1, 2, 3, 4, 5, 6] and workshop.has(config)


def test_an_interrupted_training_is_not_taken_for_a_result(workshop, corpus):
    """SIGTERM or Ctrl-C ends a training between two steps, with a checkpoint."""
    config = tiny(corpus, steps=20)

    def interrupt(line):
        signal.raise_signal(signal.SIGTERM)

    with pytest.raises(KeyboardInterrupt, match="interrupted at tiny-seed-0, step 10 of 20; the same command"):
        replace(workshop, tell=interrupt).trained(config)
    assert not workshop.has(config)
    assert workshop.trained(config).folder.metrics.exists() and workshop.has(config)
    assert steps_of(workshop, "tiny-seed-0") == list(range(1, 21))


def test_another_configuration_is_refused(workshop, corpus):
    workshop.trained(tiny(corpus))
    with pytest.raises(ValueError, match=r"another configuration .* \(optimiser.lr is 0.01 there and 0.02 here\)"):
        workshop.trained(tiny(corpus, optimiser={"lr": 2e-2}))


def test_how_an_equilibrium_would_be_solved_makes_no_difference_to_a_stack(workshop, corpus):
    """It does to an equilibrium."""
    stack = {"depth": 2}
    first = workshop.trained(tiny(corpus, model=stack), "stack")
    other = {"eval_tol": Tolerance(rtol=0.3), "solver": Anderson(memory=2), "max_steps": 7}
    assert workshop.trained(tiny(corpus, model={**stack, **other}), "stack").step == first.step
    with pytest.raises(ValueError, match="model.cell"):
        workshop.trained(tiny(corpus, model={**stack, "cell": TRELLIS}), "stack")
    workshop.trained(tiny(corpus))
    with pytest.raises(ValueError, match="model.eval_tol"):
        workshop.trained(tiny(corpus, model={"eval_tol": Tolerance(rtol=0.3)}))


def test_the_place_of_the_data_makes_no_difference(workshop, corpus, tmp_path):
    workshop.trained(tiny(corpus, expected_time="a second"))
    moved = shutil.copytree(corpus, tmp_path / "moved")
    run = workshop.trained(tiny(str(moved)))
    assert run.config.data.source == str(moved)
    assert workshop.tested(run)["num_tokens"] > 0


def test_other_data_is_refused(workshop, corpus, tmp_path):
    workshop.trained(tiny(corpus))
    other = make_corpus(tmp_path / "other", make_text(90))
    with pytest.raises(ValueError, match="tiny-seed-0 was trained on other data"):
        workshop.trained(tiny(other))


def test_seeds_that_may_be_trained_and_those_that_are(workshop, corpus):
    config = tiny(corpus)
    workshop.trained(replace(config, seed=2))
    assert [c.seed for c in workshop.seeds_of(config, (0, 1, 2))] == [0, 1, 2]
    only = replace(workshop, seeds=(1,))
    assert [c.seed for c in only.seeds_of(config, (0, 1, 2))] == [1, 2]


def test_what_is_missing_is_named(workshop, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where nobody has prepared a corpus
    with pytest.raises(ValueError, match="ptb is needed, and data has no folder ptb: run `deqkit data prepare ptb"):
        replace(workshop, data=None).recipe("ptb-mini", corpus="ptb")
    with pytest.raises(ValueError, match="--data has no folder ptb: .* --out DATA/ptb`.* pass --data DATA") as told:
        replace(workshop, data=tmp_path / "none").recipe("ptb-mini", corpus="ptb")
    assert str(tmp_path) not in str(told.value)  # it is kept in results
    with pytest.raises(ValueError, match="did you mean 'ptb-mini'"):
        workshop.recipe("ptb-mimi")


def test_a_recipe_gets_its_corpus(workshop, tmp_path):
    (tmp_path / "ptb").mkdir()
    (tmp_path / "ptb" / "manifest.json").write_text("{}")
    config = replace(workshop, data=tmp_path).recipe("ptb-mini", corpus="ptb")
    assert Path(config.data.source) == tmp_path / "ptb"
