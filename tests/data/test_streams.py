"""Streams: every token once and in order, resumable anywhere, and shared out so that processes see one batch."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deqkit.data import DataError, EvaluationPass, PrepareConfig, Streams, prepare


def numbered(num_tokens: int) -> np.ndarray:
    """Ids that are their own positions, so that a batch says where it was taken from."""
    return np.arange(num_tokens, dtype=np.uint32)


@st.composite
def shapes(draw) -> dict[str, int]:
    """A batch, its processes, a length, and at least as many tokens as they need."""
    world_size = draw(st.integers(1, 3))
    batch, length = world_size * draw(st.integers(1, 4)), draw(st.integers(1, 7))
    least = batch * (length + 1)
    num_tokens = draw(st.integers(least, least + 60))
    return {"batch": batch, "length": length, "world_size": world_size, "num_tokens": num_tokens}


def take(streams: Streams, count: int) -> list[tuple[list, list, bool]]:
    found = [next(streams) for _ in range(count)]
    return [(batch.tokens_BT.tolist(), batch.targets_BT.tolist(), batch.new_context) for batch in found]


@settings(deadline=None)
@given(shape=shapes(), trim=st.booleans())
def test_an_epoch_reads_every_stream_once_and_in_order(shape, trim):
    batch, length, num_tokens = shape["batch"], shape["length"], shape["num_tokens"]
    streams = Streams(numbered(num_tokens), batch=batch, length=length, trim=trim)
    batches = [next(streams) for _ in range(streams.num_batches)]
    assert streams.epoch == 1
    tokens_BT = torch.cat([part.tokens_BT for part in batches], dim=1)
    targets_BT = torch.cat([part.targets_BT for part in batches], dim=1)
    per_stream = num_tokens // batch - 1 if trim else (num_tokens - 1) // batch
    distance = num_tokens // batch if trim else per_stream
    expected_BT = torch.arange(batch)[:, None] * distance + torch.arange(per_stream)
    assert torch.equal(tokens_BT, expected_BT) and torch.equal(targets_BT, expected_BT + 1)
    assert tokens_BT.dtype == targets_BT.dtype == torch.int64
    assert [part.new_context for part in batches] == [True] + [False] * (len(batches) - 1)
    assert all(part.tokens_BT.shape[1] == length for part in batches[:-1])
    again = next(streams)
    assert again.new_context and torch.equal(again.tokens_BT, batches[0].tokens_BT)


@settings(deadline=None)
@given(shape=shapes())
def test_without_trim_less_than_one_prediction_a_stream_is_left_out(shape):
    streams = Streams(numbered(shape["num_tokens"]), batch=shape["batch"], length=shape["length"])
    seen = sorted(i for _ in range(streams.num_batches) for i in next(streams).targets_BT.flatten().tolist())
    assert seen == list(range(1, len(seen) + 1))
    assert 0 <= shape["num_tokens"] - 1 - len(seen) < shape["batch"]


@settings(deadline=None)
@given(shape=shapes(), before=st.integers(0, 40), trim=st.booleans())
def test_a_resumed_run_sees_the_same_batches(shape, before, trim):
    def fresh() -> Streams:
        return Streams(numbered(shape["num_tokens"]), batch=shape["batch"], length=shape["length"], trim=trim)

    original, resumed = fresh(), fresh()
    take(original, before)
    state = json.loads(json.dumps(original.state_dict()))
    resumed.load_state_dict(state)
    assert resumed.epoch == original.epoch == before // original.num_batches
    assert take(resumed, 12) == take(original, 12)
    assert resumed.state_dict() == original.state_dict() and len(json.dumps(state)) < 200


@settings(deadline=None)
@given(shape=shapes(), before=st.integers(0, 10))
def test_processes_together_see_what_one_does(shape, before):
    ids, count = numbered(shape["num_tokens"]), 8
    common = {"batch": shape["batch"], "length": shape["length"]}
    alone = Streams(ids, **common)
    take(alone, before)
    ranks = [Streams(ids, **common, rank=r, world_size=shape["world_size"]) for r in range(shape["world_size"])]
    for streams in ranks:
        streams.load_state_dict(alone.state_dict())  # a position is the same for every process
    for _ in range(count):
        whole, parts = next(alone), [next(streams) for streams in ranks]
        assert torch.equal(torch.cat([part.tokens_BT for part in parts]), whole.tokens_BT)
        assert torch.equal(torch.cat([part.targets_BT for part in parts]), whole.targets_BT)
        assert all(part.new_context == whole.new_context for part in parts)
        assert len({len(part.tokens_BT) for part in parts}) == 1


@settings(deadline=None)
@given(
    num_tokens=st.integers(2, 90),
    share=st.integers(1, 5),
    world_size=st.integers(1, 3),
    length=st.integers(1, 9),
)
def test_an_evaluation_predicts_every_token_exactly_once(num_tokens, share, world_size, length):
    batch = share * world_size
    ids = numbered(num_tokens)
    passes = [EvaluationPass(ids, batch=batch, length=length, rank=r, world_size=world_size) for r in range(world_size)]
    seen, padded = [], 0
    for parts in zip(*passes, strict=True):
        assert len({part.tokens_BT.shape for part in parts}) == 1
        for part in parts:
            real = part.targets_BT != -100
            assert torch.equal(part.targets_BT[real], part.tokens_BT[real] + 1)
            assert not part.tokens_BT[~real].any()
            seen += part.targets_BT[real].tolist()
            padded += int((~real).sum())
    assert sorted(seen) == list(range(1, num_tokens))
    assert passes[0].num_predictions == num_tokens - 1
    assert padded < batch  # at most one position in each of the shorter streams
    assert [part.new_context for part in passes[0]] == [True] + [False] * (len(passes[0]) - 1)


def test_evaluation_streams_continue_from_batch_to_batch():
    batches = list(EvaluationPass(numbered(24), batch=3, length=3))
    assert [batch.tokens_BT.tolist() for batch in batches] == [
        [[0, 1, 2], [8, 9, 10], [16, 17, 18]],
        [[3, 4, 5], [11, 12, 13], [19, 20, 21]],
        [[6, 7], [14, 15], [22, 0]],
    ]
    assert batches[-1].targets_BT.tolist() == [[7, 8], [15, 16], [23, -100]]


def ordered_iterator(ids: np.ndarray, batch: int, length: int) -> list[tuple[list, list]]:
    """What the original's `LMOrderedIterator` does, restated: columns of equal length, the rest trimmed."""
    steps = len(ids) // batch
    columns = ids[: steps * batch].reshape(batch, steps).T
    found = []
    for i in range(0, steps - 1, length):
        size = min(length, steps - 1 - i)
        found.append((columns[i : i + size].T.tolist(), columns[i + 1 : i + 1 + size].T.tolist()))
    return found


@settings(deadline=None)
@given(shape=shapes())
def test_trimmed_is_what_the_original_iterator_gives(shape):
    ids, batch, length = numbered(shape["num_tokens"]), shape["batch"], shape["length"]
    expected = ordered_iterator(ids, batch, length)
    evaluation = EvaluationPass(ids, batch=batch, length=length, trim=True)
    assert [(part.tokens_BT.tolist(), part.targets_BT.tolist()) for part in evaluation] == expected
    assert evaluation.num_predictions == sum(len(row) for _, targets in expected for row in targets)
    streams = Streams(ids, batch=batch, length=length, trim=True)
    assert [part[:2] for part in take(streams, streams.num_batches)] == expected


@pytest.mark.parametrize("trim", [False, True])
def test_too_few_tokens_say_how_many_are_needed(trim):
    needed = 32 * 65 if trim else 32 * 64 + 1
    Streams(numbered(needed), batch=32, length=64, trim=trim)
    with pytest.raises(
        DataError, match=rf"batch 32 x length 64 needs at least {needed:,} tokens.*{needed - 1:,}; lower"
    ):
        Streams(numbered(needed - 1), batch=32, length=64, trim=trim)
    with pytest.raises(DataError, match="leave nothing to predict"):
        EvaluationPass(numbered(1), batch=4, length=8, trim=trim)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"batch": 8}, "saved with batch 4, but here batch is 8"),
        ({"num_tokens": 101}, "saved with num_tokens 100, but here num_tokens is 101"),
        ({"trim": True}, "saved with trim False"),
    ],
)
def test_a_position_in_other_data_is_refused(change, message):
    state = Streams(numbered(100), batch=4, length=5).state_dict()
    num_tokens = change.pop("num_tokens", 100)
    other = Streams(numbered(num_tokens), **{"batch": 4, "length": 5, **change})
    with pytest.raises(DataError, match=message):
        other.load_state_dict(state)


def test_a_position_that_is_none_is_refused():
    streams = Streams(numbered(100), batch=4, length=5)
    for wrong in ({"offset": 24}, {"offset": -1}, {"epoch": -1}):
        with pytest.raises(DataError, match="there is no position"):
            streams.load_state_dict({**streams.state_dict(), **wrong})
    with pytest.raises(DataError, match="a position has batch, epoch, num_tokens, offset, trim"):
        streams.load_state_dict({"epoch": 0, "offset": 0})


def test_the_length_may_change_on_the_way():
    streams = Streams(numbered(100), batch=2, length=5)
    take(streams, 3)
    longer = Streams(numbered(100), batch=2, length=9)
    longer.load_state_dict(streams.state_dict())
    assert next(longer).tokens_BT[0].tolist() == list(range(15, 24))


@pytest.mark.parametrize(
    "wrong",
    [{"batch": 3, "world_size": 2}, {"batch": 0}, {"rank": 2, "world_size": 2}, {"rank": -1}, {"length": 0}],
)
def test_shapes_that_make_no_sense_are_refused(wrong):
    options = {"batch": 4, "length": 5, **wrong}
    with pytest.raises(ValueError, match="batch|rank|length"):
        Streams(numbered(100), **options)
    with pytest.raises(ValueError, match="batch|rank|length"):
        EvaluationPass(numbered(100), **options)


def test_streams_read_a_memory_map(tmp_path):
    source = tmp_path / "text.txt"
    source.write_text("abcdefghij\n" * 100)
    config = PrepareConfig(dataset="text", source=source, out=tmp_path / "out", tokens="bytes")
    corpus = prepare(config)
    batch = next(Streams(corpus.split("train"), batch=2, length=4))
    text = "abcdefghij\n" * 100
    size = (len(corpus.split("train")) - 1) // 2
    assert [corpus.decode(row) for row in batch.tokens_BT.tolist()] == [text[:4], text[size : size + 4]]
    batch.tokens_BT[0, 0] = 5  # a copy, not the file
    assert corpus.decode(corpus.split("train")[:4]) == "abcd"
