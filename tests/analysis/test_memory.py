"""The memory meter on programs whose tensor memory can be counted by hand."""

import gc
import weakref

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from deqkit.analysis.memory import MemoryMeter, peak_memory

N = 1000
BYTES = 4 * N  # of one float32 vector


@pytest.fixture
def x() -> torch.Tensor:
    return torch.randn(N, generator=torch.Generator().manual_seed(0))


def test_one_result_counts_its_bytes_and_the_input_does_not(x):
    report = peak_memory(lambda: x * 2)
    assert (report.peak_bytes, report.held_bytes) == (BYTES, BYTES)
    assert torch.equal(report.result, x * 2)


def test_views_of_one_storage_count_once(x):
    def views():
        y = x * 2
        return y, y[10:], y.view(10, -1), y.view(10, -1).t(), y.detach()

    report = peak_memory(views)
    assert (report.peak_bytes, report.held_bytes) == (BYTES, BYTES)


def test_a_view_of_an_old_tensor_is_not_new(x):
    old = torch.zeros(N)
    report = peak_memory(lambda: (x.view(10, -1).t(), x[5:], old.add_(x), x.expand(3, N)))
    assert (report.peak_bytes, report.held_bytes) == (0, 0)


def test_freed_intermediates_lower_the_count(x):
    def chain():
        a = x * 2
        b = a + 1
        del a
        c = b.exp()
        del b
        return c

    report = peak_memory(chain)
    assert (report.peak_bytes, report.held_bytes) == (2 * BYTES, BYTES)


def test_a_view_keeps_its_storage_counted(x):
    meter = MemoryMeter()
    with meter:
        y = x * 2
        piece = y[:1]
        del y
        assert meter.current_bytes == BYTES
        del piece
        assert meter.current_bytes == 0


def test_in_place_and_out_operations_create_nothing(x):
    def in_place():
        y = x * 2
        y.add_(1).mul_(2)
        torch.exp(x, out=y)
        y[:10] = 0
        return y

    report = peak_memory(in_place)
    assert report.held_bytes == BYTES
    assert report.peak_bytes <= BYTES + 4  # assigning the number 0 makes a tensor of one element


def test_tensors_made_from_python_and_numpy_count():
    report = peak_memory(lambda: (torch.tensor([1.0, 2.0]), torch.zeros(N), torch.arange(3)))
    assert report.held_bytes == 2 * 4 + BYTES + 3 * 8


def test_resized_storages_are_counted_at_their_new_size():
    report = peak_memory(lambda: torch.empty(0).resize_(N))
    assert report.held_bytes == BYTES


def test_saved_tensors_count_until_the_graph_is_freed(x):
    w = torch.ones(N, requires_grad=True)
    meter = MemoryMeter()
    with meter:
        loss = (w * x).tanh().sum()  # tanh saves its result; its input is freed
    assert meter.current_bytes == BYTES + 4
    meter.reset_peak()
    with meter:
        loss.backward()
    assert meter.peak_bytes >= 2 * BYTES  # the saved tensor and at least one gradient: the backward pass is seen
    assert w.grad is not None
    assert meter.current_bytes == BYTES + 4  # the saved tensor went, the gradient came
    w.grad = None
    assert meter.current_bytes == 4
    del loss
    assert meter.current_bytes == 0


def test_releases_are_seen_outside_the_meter_too(x):
    meter = MemoryMeter()
    with meter:
        y = x * 2
    assert meter.current_bytes == BYTES
    del y
    assert meter.current_bytes == 0
    assert meter.peak_bytes == BYTES


@pytest.mark.parametrize("grad", [True, False])
def test_an_unrolled_network_grows_linearly_when_it_keeps_a_graph(x, grad):
    layer = nn.Linear(10, 10)

    def held_bytes(depth: int) -> int:
        def unroll() -> torch.Tensor:
            z = x.view(100, 10)
            with torch.set_grad_enabled(grad):
                for _ in range(depth):
                    z = layer(z).tanh()
            return z

        return peak_memory(unroll).held_bytes

    per_layer = BYTES if grad else 0  # tanh saves its result, which is also the next layer's input
    assert [held_bytes(depth) for depth in (1, 2, 4, 8)] == [BYTES + per_layer * n for n in (0, 1, 3, 7)]


def test_nothing_is_kept_alive_and_results_do_not_change(x):
    layer = nn.Linear(10, 10)
    expected = layer(x.view(100, 10)).relu()
    meter = MemoryMeter()
    with meter:
        seen = layer(x.view(100, 10)).relu()
    assert torch.equal(seen, expected)
    storage = weakref.ref(seen.untyped_storage())
    tensor = weakref.ref(seen)
    del seen
    assert storage() is None and tensor() is None
    assert meter.current_bytes == 0


def test_many_short_lived_storages_leave_no_trace(x):
    meter = MemoryMeter()
    with meter:
        for _ in range(200):  # addresses are used again and again
            y = x * 2
            del y
    assert (meter.current_bytes, meter.peak_bytes) == (0, BYTES)
    assert len(meter._tracked) <= 1  # the input itself


def test_a_meter_can_be_freed_before_the_tensors_it_saw(x):
    report = peak_memory(lambda: x * 2)
    gc.collect()
    del report  # its release callback finds no meter and does nothing


def test_fake_tensors_are_counted_without_allocating():
    with FakeTensorMode():
        big = torch.empty(10**6, 10**6)
        report = peak_memory(lambda: big * 2)
    assert report.held_bytes == 4 * 10**12


def test_sparse_tensors_are_refused():
    with pytest.raises(NotImplementedError, match="strided"):
        peak_memory(lambda: torch.eye(3).to_sparse())
