"""Gradients, clipping, optimisers, accumulation and averaging against formulas written out here."""

import math

import pytest
import torch

from deqkit.data import open_corpus
from deqkit.model import SequenceModel
from deqkit.model.weights import load_weights, read_tensors
from deqkit.train import loop
from deqkit.train.checkpoint import find_checkpoint
from deqkit.train.evaluate import evaluate
from deqkit.train.state import TrainingState
from deqkit.train.tasks import make_task
from train.runs import EXACT, EXACT_COPY, contractive, losses_of, metrics_of, run, tiny, weights_of_run


def initial_model(config):
    torch.manual_seed(config.seed)
    return SequenceModel(config.model)


def first_batch(corpus, batch=4, length=8):
    """The first segment of every stream, cut by hand."""
    ids = torch.tensor([int(i) for i in open_corpus(corpus).split("train")])
    per_stream = (len(ids) - 1) // batch
    rows = [ids[row * per_stream :][: length + 1] for row in range(batch)]
    return torch.stack([row[:-1] for row in rows]), torch.stack([row[1:] for row in rows])


@pytest.fixture(scope="module")
def by_hand(corpus):
    """Loss, weights and gradients before the first step."""
    model = initial_model(tiny(corpus))
    loss = model(*first_batch(corpus)).loss
    loss.backward()
    weights = {name: p.detach().clone() for name, p in model.named_parameters()}
    gradients = {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}
    assert gradients.keys() == weights.keys()
    norm = math.sqrt(sum(float(g.double().square().sum()) for g in gradients.values()))
    return float(loss.detach()), weights, gradients, norm


def updated(corpus, path, **optimiser):
    """The weights after one step."""
    run(tiny(corpus, optimiser=optimiser, steps=1), path)
    return weights_of_run(path)


def assert_close(actual, expected, tolerance=1e-6):
    for name, tensor in expected.items():
        torch.testing.assert_close(actual[name], tensor, rtol=tolerance, atol=tolerance, msg=name)


def test_loss_and_gradient_norm_of_the_first_step(corpus, by_hand, tmp_path):
    """The norm is that before clipping."""
    loss, _, _, norm = by_hand
    updated(corpus, tmp_path / "run", clip=0.01)
    (record,) = metrics_of(tmp_path / "run", "train")
    assert record["loss"] == pytest.approx(loss, rel=1e-6)
    assert record["grad_norm"] == pytest.approx(norm, rel=1e-5)
    assert norm > 0.1


@pytest.mark.parametrize("share", [0.0, 0.5, 2.0])
def test_sgd_with_weight_decay_and_clipping(corpus, by_hand, tmp_path, share):
    """w - lr (c g + decay w), with c = min(1, clip / |g|); clip = 0 means no limit."""
    _, weights, gradients, norm = by_hand
    found = updated(corpus, tmp_path / "run", name="sgd", lr=0.5, weight_decay=0.1, clip=share * norm)
    scale = 1.0 if not share else min(1.0, share)
    assert_close(found, {n: w - 0.5 * (scale * gradients[n] + 0.1 * w) for n, w in weights.items()})


def test_adam(corpus, by_hand, tmp_path):
    """The first step is lr g / (|g| + 1e-8), with the decay in g."""
    _, weights, gradients, _ = by_hand
    found = updated(corpus, tmp_path / "run", name="adam", lr=0.01, weight_decay=0.1, clip=0.0)
    total = {n: g + 0.1 * weights[n] for n, g in gradients.items()}
    expected = {n: weights[n] - 0.01 * g / (g.abs() + 1e-8) for n, g in total.items()}
    assert_close(found, expected, 1e-5)


def test_adamw(corpus, by_hand, tmp_path):
    _, weights, gradients, _ = by_hand
    found = updated(corpus, tmp_path / "run", name="adamw", lr=0.01, weight_decay=0.1, clip=0.0)
    expected = {n: (1 - 0.001) * weights[n] - 0.01 * g / (g.abs() + 1e-8) for n, g in gradients.items()}
    certain = {n: t for n, t in expected.items() if gradients[n].abs().min() > 1e-6}  # no rounding in the sign
    assert len(certain) >= 3
    assert_close(found, certain, 1e-5)


@pytest.mark.parametrize("accumulate", [2, 4])
@pytest.mark.parametrize("source", ["text", "copy-memory"])
def test_accumulation_changes_nothing(corpus, tmp_path, accumulate, source):
    """With memory carried from step to step, part by part."""
    source, model = (corpus, EXACT) if source == "text" else (source, EXACT_COPY)
    for parts in (1, accumulate):
        options = {"name": "sgd", "lr": 0.5, "clip": 0.0, "accumulate": parts}
        with contractive():
            run(tiny(source, model=model, optimiser=options, steps=5), tmp_path / str(parts))
    whole, parted = tmp_path / "1", tmp_path / str(accumulate)
    assert losses_of(parted) == pytest.approx(losses_of(whole), rel=1e-6)
    assert_close(weights_of_run(parted), weights_of_run(whole), 1e-5)  # solves are exact to 1e-6


@pytest.mark.parametrize("source", ["text", "copy-memory"])
def test_memory_is_forgotten_where_the_rows_do_not_go_on(corpus, tmp_path, source):
    """A text begins again with step 6; samples of copy memory never go on."""
    source, model = (corpus, EXACT) if source == "text" else (source, {**EXACT_COPY, "mem_len": 8})
    config = tiny(source, model=model, checkpoint_every=1, keep=10)
    with contractive():
        run(config, tmp_path / "run")
    state = TrainingState(config, make_task(config), loop._make_accelerator(config))
    state.load(find_checkpoint(tmp_path / "run" / "checkpoints", 5))
    batch = next(state.batches)
    assert batch.new_context
    found = [float(state.model(batch.tokens_BT, batch.targets_BT, m).loss.detach()) for m in (None, state.memory[0])]
    assert losses_of(tmp_path / "run")[5] == pytest.approx(found[0], abs=1e-6)
    assert abs(found[0] - found[1]) > 1e-5


def test_the_average_of_the_weights(corpus, tmp_path):
    path = tmp_path / "run"
    options = {"name": "sgd", "lr": 1.0, "average_after": 2}
    config = tiny(corpus, optimiser=options, eval_every=1, checkpoint_every=1, keep=10)
    run(config, path)
    steps = [path / "checkpoints" / f"step-{step:08d}" for step in range(1, 7)]
    assert [(step / "averaged.safetensors").exists() for step in steps] == [False, False, True, True, True, True]
    since = [read_tensors(step / "model.safetensors") for step in steps[2:]]
    averaged = read_tensors(steps[-1] / "averaged.safetensors")
    for name, tensor in averaged.items():
        torch.testing.assert_close(tensor, torch.stack([w[name] for w in since]).mean(0), rtol=1e-5, atol=1e-6)
    # what is evaluated is the average, and what is trained is not
    model = initial_model(config)
    load_weights(model, averaged, source="test")
    loss = evaluate(model, make_task(config), "valid")["loss"]
    assert metrics_of(path, "valid")[-1]["loss"] == pytest.approx(loss, rel=1e-9)
    load_weights(model, since[-1], source="test")
    assert evaluate(model, make_task(config), "valid")["loss"] != pytest.approx(loss, rel=1e-4)


@pytest.mark.usefixtures("without_onednn")
def test_bf16_runs_and_stays_near_float32(corpus, tmp_path):
    for precision in ("float32", "bf16"):
        with contractive():
            model = {"vocabulary": EXACT["vocabulary"], "output_dropout": 0.1}
            run(tiny(corpus, model=model, precision=precision), tmp_path / precision)
    assert losses_of(tmp_path / "bf16") == pytest.approx(losses_of(tmp_path / "float32"), rel=2e-2)
    assert losses_of(tmp_path / "bf16") != losses_of(tmp_path / "float32")
    assert {t.dtype for t in weights_of_run(tmp_path / "bf16").values()} == {torch.float32}


def test_training_learns(corpus, tmp_path):
    """Else all of the above could be true of noise."""
    run(tiny(corpus, steps=40, eval_every=40, checkpoint_every=40, optimiser={"lr": 2e-2}), tmp_path / "run")
    found = losses_of(tmp_path / "run")
    assert found[0] == pytest.approx(math.log(256), abs=0.5)
    assert sum(found[-5:]) / 5 < 3.0
