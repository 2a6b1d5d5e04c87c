"""Samples: continued token by token, as solving the whole text would."""

from dataclasses import replace

import pytest
import torch

from deqkit.report.history import read_history
from deqkit.report.samples import CopySample, TextSamples, continue_text, take_samples
from deqkit.report.trained import load_trained
from deqkit.solve import Tolerance
from deqkit.train.load import load_run
from deqkit.train.tasks import make_task
from report.small import TEXT, small, train_run

EXACT = {"eval_tol": Tolerance(rtol=1e-6), "eval_max_steps": 200}


@pytest.mark.parametrize("mem_len", [40, 0], ids=["memory", "window"])
def test_the_likeliest_text_is_that_of_solving_everything_again(mem_len, corpus, tmp_path):
    config = small(corpus, model={"mem_len": mem_len, **EXACT}, steps=4)
    config = replace(config, data=replace(config.data, eval_length=40))
    history = read_history(train_run(config, tmp_path / "run"))
    trained = load_trained(history, make_task(config))
    prompt = list(b"the equilibrium ")
    with torch.no_grad():
        written = continue_text(trained, prompt, num_tokens=12)[0]
        model, expected = load_run(tmp_path / "run").model, torch.tensor([prompt])
        for _ in range(12):
            likeliest = model.log_probs(model(expected))[:, -1].argmax(-1, keepdim=True)
            expected = torch.cat([expected, likeliest], 1)
    assert written == expected[0, -12:].tolist()


def test_text_is_the_same_every_time_and_from_the_validation_text(runs, gathered):
    samples = gathered["equilibrium"].measured.samples
    assert isinstance(samples, TextSamples)
    assert samples.prompt + samples.actual in 3 * TEXT
    greedy, warm = samples.continuations
    assert (greedy.temperature, warm.temperature) == (0.0, 0.8) and greedy.text != warm.text
    history = read_history(runs["equilibrium"])
    torch.manual_seed(123)
    assert take_samples(load_trained(history, make_task(history.config))) == samples


def test_copy_memory_shows_what_the_model_predicts(runs, gathered):
    sample = gathered["copy"].measured.samples
    assert isinstance(sample, CopySample)
    run = load_run(runs["copy"])
    tokens, targets = make_task(run.config).data.split("valid")  # pyright: ignore[reportAttributeAccessIssue]
    with torch.no_grad():
        predicted = run.model.log_probs(run.model(tokens[:4])).argmax(-1)[:, -10:]
    assert sample.predicted == predicted[0].tolist()
    assert sample.symbols == tokens[0, :10].tolist() == targets[0, -10:].tolist()
    assert sample.num_examples == 4
    assert sample.share_right == pytest.approx((predicted == targets[:4, -10:]).double().mean().item())
