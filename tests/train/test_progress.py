"""A long evaluation that is interrupted goes on where it was, and ends with the same figures."""

import logging

import pytest
import torch

from deqkit.model import SequenceModel
from deqkit.train.evaluate import evaluate
from deqkit.train.progress import Progress
from deqkit.train.tasks import make_task
from train.runs import TRELLIS, enlarge, tiny

KEY = {"step": 7, "split": "train"}


class Interrupted(Exception):
    """Stands for Ctrl-C."""


def make(corpus, **options):
    config = tiny(corpus, data={"eval_batch": 2, "eval_length": 8}, **options)
    torch.manual_seed(1)
    built = SequenceModel(config.model)
    enlarge(built)
    return built, make_task(config)


def interrupt_after(num_batches):
    def on_batch(number):
        if number == num_batches:
            raise Interrupted

    return on_batch


def noted(path, key=KEY):
    return Progress(path, key, every=0.0)


@pytest.mark.parametrize("cell", [{}, {"cell": TRELLIS, "model": {"mem_len": 1}}], ids=["transformer", "trellis"])
@pytest.mark.parametrize("num_batches", [1, 2])
def test_the_figures_are_those_of_an_uninterrupted_pass(corpus, tmp_path, num_batches, cell):
    model, task = make(corpus, **cell)
    expected = evaluate(model, task, "train")
    path = tmp_path / "progress"
    with pytest.raises(Interrupted):
        evaluate(model, task, "train", progress=noted(path), on_batch=interrupt_after(num_batches))
    again = []
    actual = evaluate(model, task, "train", progress=noted(path), on_batch=again.append)
    assert again[0] == num_batches  # the batch that was interrupted is the first to be done again
    assert actual == expected
    assert not path.exists()


def test_interruptions_are_counted_and_the_time_between_is_not(corpus, tmp_path, monkeypatch):
    model, task = make(corpus)
    now = [100.0]
    monkeypatch.setattr("deqkit.train.progress.time.monotonic", lambda: now[0])

    def a_second_each(number):
        now[0] += 1
        if (number, now[0]) in ((1, 102.0), (2, 1002.0)):  # two batches of the first try, one of the second
            raise Interrupted

    path = tmp_path / "progress"
    for begin in (100.0, 1000.0):
        now[0] = begin
        with pytest.raises(Interrupted):
            evaluate(model, task, "train", progress=noted(path), on_batch=a_second_each)
    now[0] = 5000.0
    batches, last = [], noted(path)
    evaluate(model, task, "train", progress=last, on_batch=lambda number: (batches.append(number), a_second_each(-1)))
    assert last.interruptions == 2
    assert last.seconds == 2 + len(batches)  # what was noted of each try: one batch


def test_nothing_is_written_before_it_is_time(corpus, tmp_path):
    model, task = make(corpus)
    path = tmp_path / "progress"
    with pytest.raises(Interrupted):
        evaluate(model, task, "train", progress=Progress(path, KEY, every=3600.0), on_batch=interrupt_after(2))
    assert not path.exists()


def test_another_pass_begins_anew(corpus, tmp_path):
    model, task = make(corpus)
    path, again = tmp_path / "progress", []
    with pytest.raises(Interrupted):
        evaluate(model, task, "train", progress=noted(path), on_batch=interrupt_after(2))
    evaluate(model, task, "train", progress=noted(path, {**KEY, "step": 8}), on_batch=again.append)
    assert again[0] == 0


@pytest.mark.parametrize("content", [b"", b"not a file of tensors", b"\x00" * 64])
def test_a_damaged_file_is_named_and_the_pass_begins_anew(corpus, tmp_path, content, caplog):
    model, task = make(corpus)
    path, again = tmp_path / "progress", []
    path.write_bytes(content)
    with caplog.at_level(logging.WARNING):
        evaluate(model, task, "train", progress=noted(path), on_batch=again.append)
    assert again[0] == 0
    assert f"{path} is damaged" in caplog.text


def test_a_place_that_cannot_be_written_says_so(corpus, tmp_path):
    model, task = make(corpus)
    with pytest.raises(OSError, match="how far the evaluation is could not be written"):
        evaluate(model, task, "train", progress=noted(tmp_path / "missing" / "progress"))
