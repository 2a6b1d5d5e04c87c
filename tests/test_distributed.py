"""DistributedDataParallel in two real processes: the gradient of the whole batch, whatever each solve took."""

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import spawn

from adjoint.cells import RatedCell
from adjoint.ddp_worker import RATES, RULES, Model, gradients_of, run
from deqkit.adjoint import Implicit

pytestmark = pytest.mark.skipif(not dist.is_gloo_available(), reason="needs the gloo backend")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    """What the two processes found."""
    folder = tmp_path_factory.mktemp("ddp")
    spawn(run, args=(str(folder),), nprocs=2)
    return [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in (0, 1)]


def assert_same(actual, expected):
    assert actual.keys() == expected.keys()
    for name, gradient in expected.items():
        torch.testing.assert_close(actual[name], gradient, rtol=1e-6, atol=1e-6, msg=name)


@pytest.mark.parametrize("name", RULES)
def test_gradients_equal_those_of_the_whole_batch_in_one_process(ranks, name):
    expected = gradients_of(Model(RULES[name]), *RatedCell.batch(*RATES))
    assert len(expected) == 5
    for result in ranks:
        assert_same(result[name], expected)


@pytest.mark.parametrize("name", ["implicit", "reversible"])
def test_the_two_processes_took_different_numbers_of_steps(ranks, name):
    """Otherwise the test above would say nothing about them."""
    easy, hard = (max(result[f"{name}-steps"]) for result in ranks)
    assert easy < 0.7 * hard


@pytest.mark.parametrize("way", ["two-calls", "accumulated"])
def test_two_forward_passes_for_one_synchronisation(ranks, way):
    expected = gradients_of(Model({"adjoint": Implicit(max_steps=400)}), *RatedCell.batch(*RATES), calls=2)
    for result in ranks:
        assert_same(result[way], expected)
