"""Interleaved timing, and the stages of a step, on calls and models whose times are known."""

import itertools
import time
from dataclasses import replace

import pytest
import torch

from deqkit.analysis import runtime, spectral_penalty, timing
from deqkit.analysis.runtime import STAGES, Stepper, breakdown, take
from deqkit.analysis.timing import Timing, compare_steps, interleaved, ratio
from deqkit.data import Batch
from deqkit.model import SequenceModel
from train.runs import tiny

PAUSE = 0.02  # seconds: far above what a tiny model's stages take by themselves


def make_config(**options):
    return replace(tiny("copy-memory").model, **options)


def batches(count, *, length=6):
    generator = torch.Generator().manual_seed(0)
    for number in range(count):
        ids = torch.randint(0, 10, (3, length + 1), generator=generator)
        yield Batch(ids[:, :-1], ids[:, 1:], new_context=number == 0)


def test_every_round_runs_every_call_in_another_order():
    ran = []
    calls = {name: lambda name=name: ran.append(name) for name in "abc"}
    timings = interleaved(calls, rounds=4, warm_up=1)
    assert [len(t.seconds) for t in timings.values()] == [4, 4, 4]
    assert ["".join(ran[i : i + 3]) for i in range(0, 15, 3)] == ["abc", "bca", "cab", "abc", "bca"]
    with pytest.raises(ValueError, match="rounds must be at least 1"):
        interleaved(calls, rounds=0)


def test_medians_quartiles_and_ratios(monkeypatch):
    assert Timing((3.0, 1.0, 2.0)).median == 2 and Timing((3.0, 1.0, 2.0)).spread == (1, 3)
    assert Timing((1.0, 2.0, 3.0, 4.0, 100.0)).spread == (2, 4)
    # A machine that slows down in the second round slows both, and the ratio stays.
    assert ratio(Timing((1.0, 10.0, 1.0)), Timing((2.0, 20.0, 2.0))) == {"ratio": 0.5, "low": 0.5, "high": 0.5}
    ticks = itertools.count()
    monkeypatch.setitem(timing.CLOCKS, "cpu", lambda: float(next(ticks)))
    compared = compare_steps({"ours": lambda: None, "theirs": lambda: next(ticks)}, rounds=3)
    assert compared["seconds"]["theirs"] == {"median": 2.0, "spread": [2.0, 2.0], "rounds": 3}
    assert compared["ratios"] == {"theirs": {"ratio": 0.5, "low": 0.5, "high": 0.5}}


def slow(function):
    def call(*args, **kwargs):
        time.sleep(PAUSE)
        return function(*args, **kwargs)

    return call


def penalty(output, number):
    if number % 2:
        return None
    f, args = output.equations[0].bind()
    return 0.1 * spectral_penalty(f, output.equations[0].z, args)


def measure(model, *, training, num_steps=2, source=None, **options):
    return breakdown(model, source or batches(num_steps + 1), num_steps=num_steps, training=training, **options)


def test_the_stages_of_training_add_up():
    model = SequenceModel(make_config())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    found = measure(model, training=True, optimiser=optimiser, clip=1.0, penalty=penalty)
    assert tuple(found["seconds"]) == STAGES
    assert found["total"] == pytest.approx(sum(found["seconds"].values()))
    assert all(value > 0 for value in found["seconds"].values())
    assert found["tokens"] == 18
    assert found["evaluations"] > 1 and found["products"] > 1


def test_the_total_is_the_time_that_passed():
    model = SequenceModel(make_config())
    measure(model, training=True)
    began = time.perf_counter()
    found = measure(model, training=True, num_steps=5)
    assert 0.3 * (time.perf_counter() - began) < 5 * found["total"] < time.perf_counter() - began


def test_inference_has_no_backward_stages():
    found = measure(SequenceModel(make_config()), training=False)
    assert found["products"] is None
    for stage in ("products", "penalty", "optimiser"):
        assert found["seconds"][stage] == 0


def test_a_stack_has_no_solver_and_calls_its_cell_once_a_layer():
    found = measure(SequenceModel(make_config(depth=4)), training=True)
    assert found["evaluations"] is None and found["seconds"]["solver"] == 0
    assert found["cell_calls"] == 4 and found["seconds"]["products"] > 0


def test_evaluations_of_the_cell_are_counted(monkeypatch):
    model = SequenceModel(make_config())
    bind, called = model.core.cell.bind, []

    def counted(*args):
        f, inputs = bind(*args)
        return lambda *state: called.append(1) or f(*state), inputs

    monkeypatch.setattr(model.core.cell, "bind", counted)
    model.train()
    batch = next(batches(1))
    loss = model(batch.tokens_BT, batch.targets_BT).loss
    assert loss is not None
    loss.backward()
    expected = len(called)
    found = measure(model, training=True, num_steps=1, source=iter([batch, batch]))
    assert found["cell_calls"] == expected > found["evaluations"] > 1  # one more, with a graph


@pytest.mark.parametrize("stage", ["embedding", "softmax", "cell", "data", "penalty", "optimiser"])
def test_time_goes_to_the_stage_that_takes_it(stage, monkeypatch):
    model = SequenceModel(make_config())
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    options = {"optimiser": optimiser, "penalty": penalty}
    source = batches(3)
    if stage == "embedding":
        monkeypatch.setattr(model.embedding, "forward", slow(model.embedding.forward))
    elif stage == "softmax":
        monkeypatch.setattr(model.softmax, "nll", slow(model.softmax.nll))
    elif stage == "cell":
        bind = model.core.cell.bind
        monkeypatch.setattr(model.core.cell, "bind", lambda *a: (slow((bound := bind(*a))[0]), bound[1]))
    elif stage == "data":
        source = map(slow(lambda batch: batch), batches(3))
    elif stage == "penalty":
        options["penalty"] = slow(penalty)
    else:
        monkeypatch.setattr(optimiser, "step", slow(optimiser.step))
    seconds = measure(model, training=True, source=source, **options)["seconds"]
    assert seconds[stage] >= PAUSE
    if stage == "cell":
        assert seconds["cell"] >= 3 * PAUSE  # several evaluations, and the penalty's is not among them
        assert seconds["penalty"] >= PAUSE / 2


class SlowBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, *grads):
        time.sleep(PAUSE)
        return grads[0]


def backward_slow(function):
    return lambda *args: SlowBackward.apply(function(*args))


def test_backward_time_is_divided_where_gradients_arrive(monkeypatch):
    """A gradient that is slow in the softmax, in the cell or in the embedding is slow there."""
    for stage, owner, name in (("softmax", "softmax", "nll"), ("embedding", "embedding", "forward")):
        model = SequenceModel(make_config())
        module = getattr(model, owner)
        monkeypatch.setattr(module, name, backward_slow(getattr(module, name)))
        seconds = measure(model, training=True)["seconds"]
        assert seconds[stage] >= PAUSE, stage
    model = SequenceModel(make_config())
    monkeypatch.setattr(model.core.cell, "inject", backward_slow(model.core.cell.inject))
    assert measure(model, training=True)["seconds"]["products"] >= PAUSE


def test_all_that_a_penalty_does_is_its_own():
    """Its evaluation of f, and its gradient on the way down to the embedding."""
    watch = runtime._Stopwatch()
    watch.enter("penalty")
    with watch.inside("cell"):
        pass
    watch.arrive("embedding")
    watch.enter("rest")
    assert watch.seconds["penalty"] > 0 and watch.seconds["cell"] == watch.seconds["embedding"] == 0
    with watch.inside("cell"):
        pass
    watch.arrive("embedding")
    watch.enter("rest")
    assert watch.seconds["cell"] > 0 and watch.seconds["embedding"] > 0


def test_evaluations_of_a_backward_solve_are_not_the_solvers_time():
    watch = runtime._Stopwatch()
    watch.enter("products")
    with watch.inside("cell"):
        pass
    assert watch.in_backward > 0
    watch.enter("rest")
    before = watch.in_backward
    with watch.inside("cell"):
        pass
    assert watch.in_backward == before


def test_the_model_is_left_as_it_was():
    model = SequenceModel(make_config())
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    optimiser = torch.optim.SGD(model.parameters(), lr=0.0)
    measure(model, training=True, optimiser=optimiser)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    for owner, name in ((model, "embed"), (model.softmax, "nll"), (model.core.cell, "bind")):
        assert name not in vars(owner)


def test_memory_is_carried_until_a_new_context():
    model = SequenceModel(make_config(mem_len=4))
    stepper = Stepper(model, training=False)
    first, second = batches(2)
    stepper.step(first)
    with_memory = stepper.step(second).loss
    alone = Stepper(model, training=False).step(second).loss
    assert with_memory is not None and alone is not None and not torch.equal(with_memory, alone)
    again = stepper.step(first).loss  # begins a new context
    expected = Stepper(model, training=False).step(first).loss
    assert again is not None and expected is not None and torch.equal(again, expected)


def test_a_step_in_bfloat16_is_that_of_autocast(without_onednn):
    """Model and penalty; the backward pass is outside, as in training."""
    seen: list[bool] = []

    def penalty(output, number):
        seen.append(torch.is_autocast_enabled("cpu"))
        assert output.loss is not None
        output.loss.register_hook(lambda grad: seen.append(torch.is_autocast_enabled("cpu")))

    model, (batch,) = SequenceModel(make_config()), batches(1)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(batch.tokens_BT, batch.targets_BT).loss
    losses = [Stepper(model, training=True, bf16=bf16, penalty=penalty).step(batch).loss for bf16 in (True, False)]
    assert losses[0] is not None and losses[1] is not None
    assert torch.equal(losses[0], expected) and not torch.equal(losses[1], expected)
    assert seen == [True, False, False, False]


def test_steps_go_round_and_mistakes_are_told():
    model = SequenceModel(make_config())
    step = Stepper(model, training=False).over(take(batches(5), 2))
    losses = [step().loss for _ in range(4)]
    assert losses[0] is not None and losses[2] is not None and torch.equal(losses[0], losses[2])
    assert len(take(batches(2), 5)) == 2
    with pytest.raises(ValueError, match="there is no batch"):
        Stepper(model, training=False).over([])
    with pytest.raises(ValueError, match="3 steps need 4 batches, there are 2"):
        breakdown(model, batches(2), num_steps=3, training=False)


def test_runtime_has_the_timing_functions():
    assert runtime.interleaved is interleaved and runtime.compare_steps is compare_steps
