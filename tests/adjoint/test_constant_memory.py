"""What is held between the forward and the backward pass is one evaluation of f, however long the solve was."""

import pytest
import torch
from torch import nn

from adjoint.cells import FULL_BUDGET, normal
from deqkit import DEQ
from deqkit.adjoint import Implicit, OneStep, Phantom, Reversible, Unrolled
from deqkit.analysis.memory import MemoryMeter, peak_memory
from deqkit.solve import GMRES, Anderson, Broyden

# B samples, N numbers in a state

BATCH, WIDTH = 32, 64
STATE_BYTES = BATCH * WIDTH * 8
STEPS = (5, 20, 100)


class WideCell(nn.Module):
    """Its hidden layer is eight states wide, so that one evaluation weighs more than what a solver keeps."""

    def __init__(self) -> None:
        super().__init__()
        self.up = nn.Linear(WIDTH, 8 * WIDTH).double()
        self.down = nn.Linear(8 * WIDTH, WIDTH).double()

    def forward(self, z_BN: torch.Tensor, x_BN: torch.Tensor) -> torch.Tensor:
        return 0.5 * torch.tanh(self.down(torch.tanh(self.up(z_BN))) + x_BN)


@pytest.fixture
def cell():
    return WideCell()


@pytest.fixture
def x():
    return normal(BATCH, WIDTH, seed=0)


def one_evaluation(cell, x):
    """The bytes a plain, recorded evaluation of f holds."""
    z = torch.zeros_like(x).requires_grad_()
    return peak_memory(lambda: cell(z, x)).held_bytes


def run(cell, x, steps, adjoint, **settings):
    """The meter after a forward pass of exactly so many steps, and the result that keeps the graph alive."""
    deq = DEQ(cell, tol=FULL_BUDGET, max_steps=steps, adjoint=adjoint, **settings)
    meter = MemoryMeter()
    with meter:
        z, solution = deq(x, return_solution=True)
    assert int(solution.num_evals.max()) >= steps  # some samples may hit the fixed point exactly
    return meter, z


@pytest.mark.parametrize("solver", [Anderson(), Broyden()], ids=["anderson", "broyden"])
@pytest.mark.parametrize("adjoint", [Implicit(), OneStep()], ids=["implicit", "one-step"])
def test_one_evaluation_is_held_however_many_steps_were_taken(cell, x, adjoint, solver):
    held, peaks, results = [], [], []
    for steps in STEPS:
        meter, z = run(cell, x, steps, adjoint, solver=solver)
        results.append(z)
        held.append(meter.current_bytes)
        peaks.append(meter.peak_bytes)
    assert max(held) <= 1.02 * min(held)
    # z* itself, the value f gives there and the solver's verdicts come on top.
    assert held[0] <= one_evaluation(cell, x) + 2.2 * STATE_BYTES
    # A memory of 5 or 8 steps bounds the working set; at 5 steps Broyden's is not full yet.
    assert peaks[2] <= 1.02 * peaks[1]


@pytest.mark.parametrize(
    "solver", [Anderson(), Broyden(memory=5), GMRES(restart=5)], ids=["anderson", "broyden", "gmres"]
)
def test_the_backward_pass_needs_no_more_memory_for_more_products(cell, x, solver):
    peaks = []
    for steps in STEPS:
        meter, z = run(cell, x, 10, Implicit(solver=solver, tol=FULL_BUDGET, max_steps=steps))
        meter.reset_peak()
        with meter:
            z.sum().backward()
        peaks.append(meter.peak_bytes)
        cell.zero_grad()
    assert peaks[2] <= 1.02 * peaks[1]


@pytest.mark.filterwarnings("ignore::deqkit.NumericalWarning")
def test_reversible_holds_the_same_however_many_steps_it_took(cell, x):
    held, peaks = [], []
    for steps in STEPS:
        meter, z = run(cell, x, 2 * steps, Reversible())
        held.append(meter.current_bytes)
        meter.reset_peak()
        with meter:
            z.sum().backward()
        peaks.append(meter.peak_bytes)
        cell.zero_grad()
    assert max(held) <= 1.02 * min(held)
    assert max(peaks) <= 1.02 * min(peaks)
    assert held[0] < one_evaluation(cell, x)  # it recomputes even that


@pytest.mark.parametrize("rule", [Unrolled, Phantom])
def test_rules_that_record_their_steps_grow_with_them(cell, x, rule):
    """The meter must be able to see growth."""
    few, many = (peak_memory(lambda k=k: DEQ(cell, adjoint=rule(steps=k))(x)).held_bytes for k in (5, 20))
    assert 3 < many / few < 4.2


def test_checkpointing_keeps_only_the_states(cell, x):
    stored, kept = (
        peak_memory(lambda c=c: DEQ(cell, adjoint=Unrolled(steps=20, checkpoint=c))(x)).held_bytes
        for c in (False, True)
    )
    assert kept <= 23 * STATE_BYTES < 0.2 * stored


def test_nothing_is_left_after_the_backward_pass_and_the_graph_is_freed_without_the_collector(cell, x):
    meter = MemoryMeter()
    with meter:
        z = DEQ(cell)(x)
        z.sum().backward()
    gradients = sum(p.numel() * 8 for p in cell.parameters())
    del z
    assert meter.current_bytes == gradients


def test_no_graph_is_kept_without_gradients(cell, x):
    with torch.no_grad():
        report = peak_memory(lambda: DEQ(cell)(x))
    assert report.held_bytes == STATE_BYTES
