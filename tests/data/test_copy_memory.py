"""Copy memory: the sequences of the paper's appendix, and batches that can be resumed and shared out."""

import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deqkit.data import CopyGrowth, CopyMemory, DataError, copy_memory


@settings(deadline=None)
@given(blanks=st.integers(1, 40), num_samples=st.integers(1, 8), seed=st.integers(0, 2**32))
def test_the_sequences_are_those_of_the_paper(blanks, num_samples, seed):
    inputs_BT, targets_BT = copy_memory(num_samples, blanks, seed)
    assert inputs_BT.shape == targets_BT.shape == (num_samples, blanks + 20)
    assert inputs_BT.dtype == targets_BT.dtype == torch.int64
    for x, y in zip(inputs_BT.tolist(), targets_BT.tolist(), strict=True):
        symbols = x[:10]
        assert all(1 <= symbol <= 8 for symbol in symbols)
        # The paper counts from 1: x_{T+10} = 9 and nothing else; y_{T+11..T+20} = x_{1..10}.
        assert x == symbols + [0] * (blanks - 1) + [9] + [0] * 10
        assert y == [0] * (blanks + 10) + symbols


def test_symbols_are_uniform_and_follow_from_the_seed():
    inputs_BT, _ = copy_memory(20_000, 1, 0)
    shares = torch.bincount(inputs_BT[:, :10].flatten(), minlength=10)[1:9] / 200_000
    # 0.125 each, with a standard deviation of 0.00074: five of them.
    assert torch.all((shares - 0.125).abs() < 0.0037)
    again, other = copy_memory(20_000, 1, 0)[0], copy_memory(20_000, 1, 1)[0]
    assert torch.equal(inputs_BT, again) and not torch.equal(inputs_BT, other)
    drawn = copy_memory(20_000, 1, torch.Generator().manual_seed(0))[0]
    assert torch.equal(inputs_BT, drawn)


def test_the_dataset_has_the_sizes_of_the_paper_and_splits_of_their_own():
    data = CopyMemory(T=3)
    parts = {name: data.split(name)[0][:, :10] for name in ("train", "valid", "test")}
    assert {name: len(part) for name, part in parts.items()} == {"train": 20_000, "valid": 2_000, "test": 2_000}
    assert CopyMemory().T == 400
    for first, second in (("train", "test"), ("train", "valid"), ("valid", "test")):
        # Of 8^10 sequences two draws share none, but for a chance of a few percent; rows of the same seed all agree.
        same = (parts[first][:2_000] == parts[second]).all(dim=1)
        assert not same.any()
    assert torch.equal(data.split("test")[0], CopyMemory(T=3).split("test")[0])
    assert not torch.equal(data.split("test")[0], CopyMemory(T=3, seed=1).split("test")[0])
    assert not torch.equal(data.split("train")[0][:2_000], CopyMemory(T=3, seed=1).split("test")[0])


SMALL = CopyMemory(T=2, num_train=26, num_valid=5, num_test=7, seed=3)


def rows(inputs_BT: torch.Tensor) -> list[tuple[int, ...]]:
    return [tuple(row) for row in inputs_BT[:, :10].tolist()]


def test_an_epoch_takes_every_sample_at_most_once_in_another_order_each_time():
    batches = SMALL.batches(batch=4)
    assert batches.num_batches == 6
    known = rows(SMALL.split("train")[0])
    epochs = [[row for _ in range(6) for row in rows(next(batches).tokens_BT)] for _ in range(3)]
    for epoch in epochs:
        assert len(set(epoch)) == 24 and set(epoch) <= set(known)
        assert epoch != known[:24]
    assert epochs[0] != epochs[1] != epochs[2]
    assert batches.epoch == 3


def test_targets_stay_with_their_inputs():
    batch = next(SMALL.batches(batch=8))
    assert torch.equal(batch.targets_BT[:, -10:], batch.tokens_BT[:, :10])
    assert batch.new_context


@settings(deadline=None)
@given(before=st.integers(0, 20))
def test_a_resumed_run_sees_the_same_samples(before):
    original, resumed = SMALL.batches(batch=4), SMALL.batches(batch=4)
    for _ in range(before):
        next(original)
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    for _ in range(9):
        assert torch.equal(next(resumed).tokens_BT, next(original).tokens_BT)


def test_sequences_grow_by_one_factor_from_short_to_long():
    growth = CopyGrowth(first_T=4, steps=5)
    batches = CopyMemory(T=64, num_train=26).batches(batch=4, growth=growth)
    lengths = [next(batches).tokens_BT.shape[1] - 20 for _ in range(14)]
    # 16-fold in five steps: each is 16 ** (1/5) = 1.74 times the one before, across the end of an epoch of six
    assert lengths == [4] * 6 + [7, 12, 21, 37, 64, 64, 64, 64]


def test_growing_sequences_go_on_where_they_were():
    growth = CopyGrowth(first_T=2, steps=4)
    data = CopyMemory(T=30, num_train=12)
    original, resumed = (data.batches(batch=4, growth=growth) for _ in range(2))
    for _ in range(6):
        next(original)
    resumed.load_state_dict(json.loads(json.dumps(original.state_dict())))
    assert torch.equal(next(resumed).tokens_BT, next(original).tokens_BT)
    with pytest.raises(DataError, match="growth"):
        data.batches(batch=4).load_state_dict(original.state_dict())


@pytest.mark.parametrize("wrong", [{"first_T": 0, "steps": 3}, {"first_T": 3, "steps": 0}])
def test_growth_from_or_in_nothing_is_refused(wrong):
    with pytest.raises(ValueError, match="at least 1"):
        CopyGrowth(**wrong)


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_processes_together_see_what_one_does(world_size):
    alone = SMALL.batches(batch=8)
    ranks = [SMALL.batches(batch=8, rank=rank, world_size=world_size) for rank in range(world_size)]
    for _ in range(7):
        parts = torch.cat([next(part).tokens_BT for part in ranks])
        assert torch.equal(parts, next(alone).tokens_BT)


@pytest.mark.parametrize(("batch", "world_size"), [(3, 1), (4, 2), (7, 1), (10, 2)])
def test_an_evaluation_sees_every_sample_once_and_pads_the_rest(batch, world_size):
    ranks = [list(SMALL.evaluation("test", batch=batch, rank=r, world_size=world_size)) for r in range(world_size)]
    seen = []
    for parts in zip(*ranks, strict=True):
        assert {part.tokens_BT.shape for part in parts} == {(batch // world_size, 22)}
        for part in parts:
            real = (part.targets_BT != -100).any(dim=1)
            assert torch.all(part.targets_BT[~real] == -100)
            seen += rows(part.tokens_BT[real])
    assert seen == rows(SMALL.split("test")[0])


def test_wrong_sizes_are_refused():
    for options in ({"T": 0}, {"num_train": 0}, {"num_test": -1}, {"seed": -1}):
        with pytest.raises(ValueError, match="at least"):
            CopyMemory(**options)
    with pytest.raises(ValueError, match="T must be at least 1, got 0"):
        copy_memory(2, 0, 0)
    with pytest.raises(ValueError, match="num_samples must be at least 1"):
        copy_memory(0, 5, 0)
    with pytest.raises(ValueError, match="split must be one of train, valid, test, got 'dev'"):
        SMALL.split("dev")
    with pytest.raises(DataError, match="batch 32 needs at least as many samples, but num_train is 26"):
        SMALL.batches(batch=32)
    with pytest.raises(DataError, match="saved with seed 3, but here seed is 4"):
        CopyMemory(T=2, num_train=26, seed=4).batches(batch=4).load_state_dict(SMALL.batches(batch=4).state_dict())
