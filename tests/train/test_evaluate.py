"""Figures of a model on a split, against a naive evaluation in float64."""

import math

import pytest
import torch

from deqkit.data import open_corpus
from deqkit.model import SequenceModel
from deqkit.solve import Anderson, Broyden, NonFiniteError, Tolerance
from deqkit.train.evaluate import evaluate, measure_leak, sweep
from deqkit.train.tasks import CopyTask, make_task
from train.runs import EXACT, EXACT_COPY, enlarge, tiny

# B samples, T positions, V vocabulary

VERY_TIGHT = {**EXACT, "eval_tol": Tolerance(rtol=1e-11, patience=200), "eval_max_steps": 300, "mem_len": 1000}


def make(config):
    """A contractive model in float64, in training mode."""
    torch.manual_seed(1)
    model = SequenceModel(config.model)
    enlarge(model)
    return model.double()


class Share:
    """Stands for a process of several, and hands over the sums of all of them."""

    def __init__(self, rank, world_size):
        self.process_index, self.num_processes = rank, world_size
        self.sums, self.residuals = torch.zeros(5), torch.zeros(1)

    def reduce(self, sums, how):
        assert how == "sum"
        self.sums = sums.clone()
        return sums

    def gather(self, residual):
        self.residuals = residual.clone()
        return residual


def nll_of_stream(model, ids):
    """The summed loss of one row: the whole of it in a single segment, so that nothing need be carried."""
    output = model(ids[None, :-1])
    probs = model.log_probs(output).softmax(-1)  # normalised once more: whatever log_probs gives sums to one
    chosen = probs[0, torch.arange(len(ids) - 1), ids[1:]]
    return -float(chosen.log().sum())


@pytest.mark.parametrize(("eval_batch", "eval_length"), [(1, 16), (1, 7), (3, 16), (4, 1000)])
def test_figures_equal_a_naive_evaluation(corpus, eval_batch, eval_length):
    """Memory reaches back to the start of every stream, so segments give what the whole text in one piece does."""
    config = tiny(corpus, model=VERY_TIGHT, data={"eval_batch": eval_batch, "eval_length": eval_length})
    model, task = make(config), make_task(config)
    figures = evaluate(model, task, "valid")
    ids = torch.tensor([int(i) for i in open_corpus(corpus).split("valid")])
    count = len(ids) - 1
    model.eval()
    with torch.no_grad():
        total, start = 0.0, 0
        for row in range(eval_batch):
            stop = start + count // eval_batch + (row < count % eval_batch)
            total += nll_of_stream(model, ids[start : stop + 1])
            start = stop
    assert start == count
    assert figures["num_tokens"] == count
    assert figures["loss"] == pytest.approx(total / count, abs=1e-9)
    assert figures["perplexity"] == pytest.approx(math.exp(total / count), rel=1e-9)
    assert figures["bits_per_byte"] == pytest.approx(total / math.log(2) / len(ids), abs=1e-9)
    assert figures["unconverged"] == 0 and figures["complete"]
    assert 0 < figures["residual"] <= 1e-11


def test_the_context_is_carried(corpus):
    """Without memory the same model does otherwise."""
    losses = []
    for mem_len in (1000, 0):
        config = tiny(corpus, model={**VERY_TIGHT, "mem_len": mem_len}, data={"eval_batch": 1})
        losses.append(evaluate(make(config), make_task(config), "valid")["loss"])
    assert abs(losses[0] - losses[1]) > 1e-4


def test_copy_memory_counts_no_padding():
    """Six samples in batches of four: the last batch has two rows of padding."""
    config = tiny("copy-memory", model={**VERY_TIGHT, "vocabulary": EXACT_COPY["vocabulary"]})
    model, task = make(config), make_task(config)
    assert isinstance(task, CopyTask)
    figures = evaluate(model, task, "test")
    inputs, targets = task.data.split("test")
    with torch.no_grad():
        log_probs = model.eval().log_probs(model(inputs))
    expected = -log_probs.gather(2, targets[..., None]).mean()
    assert figures["num_tokens"] == 6 * 25
    assert figures["loss"] == pytest.approx(float(expected), abs=1e-9)
    assert "bits_per_byte" not in figures


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("source", ["text", "copy-memory"])
def test_the_split_among_processes_does_not_matter(corpus, source, world_size):
    source, vocabulary = (corpus, EXACT) if source == "text" else (source, EXACT_COPY)
    config = tiny(source, model={**VERY_TIGHT, "vocabulary": vocabulary["vocabulary"]})
    model, task = make(config), make_task(config)
    whole, alone = Share(0, 1), evaluate(model, task, "valid")
    assert evaluate(model, task, "valid", accelerator=whole) == alone
    shares = [Share(rank, world_size) for rank in range(world_size)]
    for share in shares:
        evaluate(model, task, "valid", accelerator=share)
    nll, tokens, evals, solves, failed = torch.stack([s.sums for s in shares]).sum(0).tolist()
    assert tokens == alone["num_tokens"] and failed == 0
    assert nll / tokens == pytest.approx(alone["loss"], abs=1e-10)
    assert evals / solves == pytest.approx(alone["evals"], abs=1e-9)
    assert max(float(s.residuals) for s in shares) == pytest.approx(alone["residual"], rel=1e-3)


def test_a_part_of_a_split(corpus):
    config = tiny(corpus, model=VERY_TIGHT)
    model, task = make(config), make_task(config)
    part, whole = evaluate(model, task, "valid", max_batches=1), evaluate(model, task, "valid")
    assert not part["complete"] and whole["complete"]
    assert part["num_tokens"] == 4 * 16 < whole["num_tokens"]
    for figures in (part, whole):  # of bytes of that part, not of all
        assert figures["bits_per_byte"] == pytest.approx(figures["loss"] / math.log(2), rel=0.02)
    assert evaluate(model, task, "valid", max_batches=100)["complete"]


def test_settings_of_the_solve(corpus):
    config = tiny(corpus, model={**VERY_TIGHT, "solver": Anderson()})
    model, task = make(config), make_task(config)
    limited = evaluate(model, task, "valid", max_steps=3, tol=Tolerance(rtol=0.0))
    assert (limited["evals"], limited["unconverged"]) == (3.0, 1.0)
    assert evaluate(model, task, "valid", tol=Tolerance(rtol=1e-2))["evals"] < evaluate(model, task, "valid")["evals"]
    shallow = evaluate(model, task, "valid", depth=2)
    assert "evals" not in shallow and "residual" not in shallow


@pytest.mark.parametrize("training", [True, False])
def test_mode_gradients_and_random_numbers_are_left_alone(corpus, training):
    config = tiny(corpus, cell={"dropout": 0.5}, model={"input_dropout": 0.5})
    model, task = SequenceModel(config.model).train(training), make_task(config)
    before = torch.get_rng_state()
    first = evaluate(model, task, "valid")
    assert evaluate(model, task, "valid") == first  # no dropout
    measure_leak(model, task, "valid")
    assert model.training is training and torch.equal(torch.get_rng_state(), before)
    assert all(p.grad is None for p in model.parameters())


def test_every_part_gets_its_own_mode_back(corpus):
    config = tiny(corpus)
    model, task = SequenceModel(config.model), make_task(config)
    model.core.cell.eval()
    for action in (evaluate, measure_leak):
        action(model, task, "valid")
        assert model.training and not model.core.cell.training
    model.generate([torch.tensor([1, 2])], max_tokens=1)
    assert model.training and not model.core.cell.training


def test_the_mode_is_restored_after_a_failure(corpus):
    config = tiny(corpus)
    model, task = SequenceModel(config.model), make_task(config)
    with torch.no_grad():
        model.embedding.tables[0].fill_(math.nan)
    for action in (evaluate, measure_leak):
        with pytest.raises(NonFiniteError):
            action(model, task, "valid")
        assert model.training


def test_progress_is_told(corpus):
    config, seen = tiny(corpus), []
    evaluate(SequenceModel(config.model), make_task(config), "valid", on_batch=seen.append)
    assert seen == list(range(len(seen))) and len(seen) >= 2


@pytest.mark.parametrize("steps", [2, 4, 40])
def test_the_prefix_solver_never_leaks(corpus, steps):
    """Exactly zero, converged or not."""
    config = tiny(corpus)
    model = SequenceModel(config.model)
    settings = {"tol": Tolerance(rtol=1e-4), "max_steps": steps, "solver": Broyden(group="prefix")}
    assert measure_leak(model, make_task(config), "valid", **settings) == 0.0


def test_a_solver_that_mixes_positions_leaks_until_it_has_converged(corpus):
    config = tiny(corpus, model=VERY_TIGHT)
    model, task = make(config), make_task(config)
    few = {"solver": Broyden(), "tol": Tolerance(rtol=0.0), "max_steps": 4}
    assert measure_leak(model, task, "valid", **few) > 1e-6
    assert measure_leak(model, task, "valid", solver=Broyden()) < 1e-8
    assert measure_leak(model, task, "valid") == 0.0


def test_one_position_has_nothing_to_leak(corpus):
    config = tiny(corpus, data={"eval_length": 1})
    assert measure_leak(SequenceModel(config.model), make_task(config), "valid") == 0.0


def test_a_sweep_has_a_point_for_every_tolerance_and_limit(corpus):
    config = tiny(corpus, model=VERY_TIGHT)
    model, task, told = make(config), make_task(config), []
    points = sweep(
        model,
        task,
        "valid",
        tolerances=[1e-1, 1e-6],
        step_limits=[1, 3, 30],
        max_batches=2,
        on_point=lambda *point: told.append(point),
    )
    assert [(p.get("tolerance"), p.get("max_steps")) for p in points] == [
        (1e-1, None),
        (1e-6, None),
        (None, 1),
        (None, 3),
        (None, 30),
    ]
    assert points[2]["evals"] == 1.0 and 2.0 <= points[3]["evals"] <= 3.0 and points[4]["evals"] > 20  # to the limit
    assert points[0]["evals"] < points[1]["evals"]
    exact = evaluate(model, task, "valid", max_batches=2)["loss"]
    errors = [abs(p["loss"] - exact) for p in points]
    assert errors[1] < errors[0] and errors[2] > errors[3] > errors[4]
    assert errors[1] < 1e-5 and errors[4] < 1e-8
    assert told == [(told[i][0], i, 5) for i in range(5)] and told[0][0] == "tolerance 0.1"


def test_an_infinite_perplexity_is_a_number(corpus):
    figures = make_task(tiny(corpus)).figures(1e9, 10, "valid")
    assert math.isfinite(figures["perplexity"])
