"""Faults found in torchdeq 0.1.0 (PEERS.md, 1.5) and in the original code (REFERENCE.md, 3 and 6): we have none.

One test for each fault that could appear in this library. Each would fail on a library that has the fault.

Not tested here, because nothing in deqkit.solve, deqkit.adjoint or deqkit.deq could have them:
- PEERS 5 in part, 1.3 `indexing`, `n_states`: states along the way are not sampled; the trace holds residuals only.
- PEERS 13: no spectral norm of our own; torch's parametrisations are used (see 19).
- PEERS 15, REFERENCE 3.6 output dropout: dropout layers belong to deqkit.layers; what a solve asks of them is tested.
- REFERENCE 3.2 `empty_cache`, 3.5 `torch.solve`, `cuda.synchronize`: removed or CUDA-only calls that we do not make.
- REFERENCE 3.3: subsequences and memory belong to deqkit.model.
- REFERENCE 3.5 rand_f_thres_delta, Jacobian regularisation schedule: training, deqkit.train.
- REFERENCE 6 #3 generation, #14 checkpoints, #22 slowness, IFR #1, transformer-xl #35: other stages, or not faults.
- REFERENCE 6 #6 DataParallel: DistributedDataParallel is what torch recommends; tests/test_distributed.py.
"""

import copy
import dataclasses
import functools
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations

from adjoint.cells import (
    BACKWARD_SOLVERS,
    FULL_BUDGET,
    TIGHT,
    AffineCell,
    RatedCell,
    TanhCell,
    gradients,
    loss_of,
    normal,
    relative_error,
    solve_tightly,
)
from deqkit import DEQ, NonFiniteError, NotConvergedError, Status, Tolerance, fixed_point
from deqkit.adjoint import Implicit, OneStep, Phantom, ReuseForward, Reversible, Unrolled
from deqkit.analysis import causality_leak, spectral_radius
from deqkit.analysis.memory import peak_memory
from deqkit.analysis.solver_bench.cells import TransformerBlock
from deqkit.solve import GMRES, Anderson, Broyden, Fallback, FixedPointIteration, NewtonKrylov

# B samples, N numbers in a state, T positions, D width

FORWARD_SOLVERS = {name: s for name, s in BACKWARD_SOLVERS.items() if not isinstance(s, GMRES)}
forward_solvers = pytest.mark.parametrize("solver", FORWARD_SOLVERS.values(), ids=FORWARD_SOLVERS.keys())


def transformer(*, batch=2, length=16, width=64, gain=1.0, dtype=torch.float32):
    """A post-LN causal block with the paper's initialisation, and its input."""
    block = TransformerBlock(width=width, heads=4).to(dtype)
    generator = torch.Generator().manual_seed(0)
    for name, p in block.named_parameters():
        std = 0.0 if name.endswith("bias") else gain * 0.05 * (256 / width) ** 0.5
        nn.init.normal_(p, std=std, generator=generator)
    return block, normal(batch, length, width, seed=1, dtype=dtype)


# --- PEERS.md 1.5: silent wrong numbers ------------------------------------------------------------------------------


@forward_solvers
def test_peers_01_one_overflow_does_not_poison_the_best_iterate(solver):
    """PEERS 1: 0 * inf = nan in `mask * x + ~mask * best` lost the best iterate and kept the batch running."""
    cell, x = TanhCell(), normal(3, 4, seed=5)
    overflows = torch.tensor([[False], [True], [False]])
    calls = []

    def f(z, x, overflows):
        calls.append(z.shape[0])
        return torch.where(overflows & (torch.tensor(len(calls)) == 4), float("inf"), cell(z, x))

    settings = {"solver": solver, "tol": TIGHT, "max_steps": 300, "throw": False}
    solution = fixed_point(f, torch.zeros_like(x), (x, overflows), **settings)
    assert solution.sample_status == (Status.CONVERGED, Status.NONFINITE, Status.CONVERGED)
    assert bool(solution.z.isfinite().all()) and bool(solution.residual.isfinite().all())
    assert len(calls) < 100


def test_peers_02_broyden_with_a_short_memory_converges():
    """PEERS 2: with 10 vectors the residual of a transformer cell grew to 3e5, then nan."""
    block, x = transformer()
    evaluations = {}
    for memory in (100, 10, 5):
        tol = Tolerance(rtol=1e-3)
        solution = fixed_point(block, torch.zeros_like(x), (x,), solver=Broyden(memory=memory), tol=tol, max_steps=100)
        assert solution.status is Status.CONVERGED
        evaluations[memory] = int(solution.num_evals.max())
    assert evaluations[100] > 12  # long enough for the short memories to be overwritten
    assert evaluations[10] <= 1.3 * evaluations[100]


@pytest.mark.parametrize("adjoint", [Implicit(tol=TIGHT, max_steps=200), ReuseForward(refine=100, tol=TIGHT)], ids=str)
def test_peers_03_double_backward_is_right(adjoint):
    """PEERS 3, deq #25: Hessian-vector products were 150 % wrong without an error."""
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    products = []
    for deq in (solve_tightly(cell, adjoint, solver=Broyden()), solve_tightly(cell, Unrolled(steps=300))):
        (grad,) = torch.autograd.grad(loss_of(deq(x)), x, create_graph=True)
        products.append(torch.autograd.grad((grad * normal(3, 4, seed=9)).sum(), [x, cell.weight]))
    assert relative_error(products[0], products[1]) < 1e-6


@forward_solvers
@pytest.mark.parametrize("start", ["zeros", "solution"])
def test_peers_04_a_solve_that_ends_early_keeps_the_implicit_gradient(solver, start):
    """PEERS 4: converging before the sampled steps fell back to the one-step gradient, 18 % off."""
    cell, x = TanhCell(norm=0.3), normal(3, 4, seed=5).requires_grad_()
    z0 = solve_tightly(cell)(x).detach() if start == "solution" else torch.zeros(3, 4, dtype=torch.float64)
    deq = solve_tightly(cell, solver=solver, max_steps=1000, tol=Tolerance(rtol=1e-10))
    inputs = [x, cell.weight]
    actual = gradients(lambda: deq(x, z0=z0), inputs)
    assert relative_error(actual, gradients(lambda: solve_tightly(cell, Unrolled(steps=200))(x), inputs)) < 1e-8
    one_step = gradients(lambda: solve_tightly(cell, OneStep())(x), inputs)
    assert relative_error(actual, one_step) > 1e-2


@forward_solvers
@pytest.mark.parametrize("max_steps", [1, 2, 3, 7, 30])
def test_peers_05_06_07_the_residual_reported_is_that_of_the_state_returned(solver, max_steps):
    """PEERS 5, 6, 7 and 1.2: iterate off by one, residual of another point, 1e8 after two steps."""
    cell, x = TanhCell(), normal(3, 4, seed=5)
    z, solution = DEQ(cell, solver=solver, tol=FULL_BUDGET, max_steps=max_steps)(x, return_solution=True)
    with torch.no_grad():
        fz = cell(z, x)
        torch.testing.assert_close(solution.residual, (fz - z).norm(dim=1) / fz.norm(dim=1), rtol=1e-6, atol=1e-15)
    assert bool(((solution.num_evals == max_steps) | (solution.residual == 0)).all())


def test_peers_06_damping_does_not_fake_convergence():
    """PEERS 6: with damping 0.01 a residual of 9.9e-2 was reported as 1e-3."""
    cell, x = TanhCell(), normal(3, 4, seed=5)
    solver, tol = FixedPointIteration(damping=0.01), Tolerance(rtol=1e-3)
    solution = fixed_point(cell, torch.zeros_like(x), (x,), solver=solver, tol=tol, max_steps=2000)
    with torch.no_grad():
        fz = cell(solution.z, x)
    assert bool(((fz - solution.z).norm(dim=1) <= 1e-3 * fz.norm(dim=1)).all())


@pytest.mark.parametrize("solver", [Anderson(), Broyden()], ids=["anderson", "broyden"])
def test_peers_08_a_tiny_right_hand_side_is_solved_like_any_other(solver):
    """PEERS 8: an absolute ridge swamped gradients of 1e-8, and the backward solve never converged."""
    cell, x = AffineCell(norm=0.95), normal(3, 5, seed=1).requires_grad_()
    adjoint = Implicit(solver=solver, tol=Tolerance(rtol=1e-6), max_steps=60)
    counts = []
    for scale in (1.0, 2.0**-27, 2.0**-100):
        z, solution = solve_tightly(cell, adjoint)(x, return_solution=True)
        v = scale * normal(3, 5, seed=2)
        assert relative_error(torch.autograd.grad(z, x, v), [v @ cell.inverse()]) < 1e-4
        assert solution.backward.status is Status.CONVERGED
        counts.append(solution.backward.num_evals.tolist())
    assert counts[0] == counts[1] == counts[2]


@forward_solvers
def test_peers_09_a_tolerance_means_the_same_for_every_batch_and_scale(solver):
    """PEERS 9, REFERENCE 3.1 and 3.4: norms over the batch tie samples together and change meaning with its size."""
    cell = RatedCell()
    x, rate = RatedCell.batch(0.9, 0.1, 0.5)
    settings = {"solver": solver, "tol": Tolerance(rtol=1e-4), "max_steps": 300, "throw": False}
    together = fixed_point(cell, torch.zeros_like(x), (x, rate), **settings)
    for i in range(3):
        alone = fixed_point(cell, torch.zeros_like(x[i : i + 1]), (x[i : i + 1], rate[i : i + 1]), **settings)
        assert int(alone.num_evals) == int(together.num_evals[i])
        torch.testing.assert_close(alone.z[0], together.z[i], rtol=1e-12, atol=1e-12)
    affine = lambda z, x: 0.8 * z.roll(1, 1) + x  # noqa: E731
    small, large = (fixed_point(affine, torch.zeros_like(x), (s * x,), **settings) for s in (2.0**-40, 2.0**40))
    if not isinstance(solver, NewtonKrylov):  # its difference step has a scale of its own
        assert torch.equal(small.num_evals, large.num_evals)
        assert torch.equal(2.0**80 * small.z, large.z)


def test_peers_10_two_calls_before_backward_and_two_backwards_through_one():
    """PEERS 10, REFERENCE 3.5, deq #12, #15, #24: hooks kept on the module recursed, or skipped the second solve."""
    cell, x = TanhCell(), normal(3, 4, seed=5).requires_grad_()
    deq = solve_tightly(cell)
    (expected,) = gradients(lambda: deq(x), [x])
    first, second = deq(x), deq(2 * x)
    loss = loss_of(first)
    once = torch.autograd.grad(loss, x, retain_graph=True)
    twice = torch.autograd.grad(loss, x, retain_graph=True)
    assert relative_error([*once, *twice], [expected, expected]) < 1e-12
    assert relative_error(torch.autograd.grad(loss_of(second), x), gradients(lambda: deq(2 * x), [x])) < 1e-12
    assert not deq._backward_hooks and not cell._backward_hooks


def test_peers_11_unknown_options_raise_and_settings_cannot_be_edited():
    """PEERS 11, torchdeq #12: misspelt options had no effect, and the caller's own dict was changed."""
    find = functools.partial(fixed_point, TanhCell(), torch.zeros(1, 4))
    build = functools.partial(DEQ, TanhCell())
    wrong: list[tuple[Any, str]] = [(build, "f_solvr"), (build, "stop_mode"), (find, "tolerance")]
    wrong += [(Anderson, "m"), (Tolerance, "rel"), (Implicit, "b_tol")]
    for make, name in wrong:
        with pytest.raises(TypeError, match=f"unexpected keyword argument '{name}'"):
            make(**{name: 1})
    for settings in (Anderson(), Tolerance(), Implicit()):
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(settings, dataclasses.fields(settings)[0].name, 1)


def test_peers_12_not_converging_is_told():
    """PEERS 12, REFERENCE 3.1: no warning, no flag."""
    cell, x = TanhCell(norm=0.9), normal(3, 4, seed=5)
    with pytest.raises(NotConvergedError, match="MAX_STEPS for sample 0, 1, 2") as raised:
        fixed_point(cell, torch.zeros_like(x), (x,), tol=TIGHT, max_steps=3)
    assert raised.value.solution.z.shape == x.shape
    deq = DEQ(cell, tol=TIGHT, max_steps=3)
    _, solution = deq(x, return_solution=True)
    assert solution.status is Status.MAX_STEPS and deq.verdicts == {Status.MAX_STEPS: 3}


# --- PEERS.md 1.5: errors --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("solver", [Anderson(), Broyden(), FixedPointIteration()], ids=["anderson", "broyden", "plain"])
def test_peers_14_autocast_and_bfloat16_states(solver):
    """PEERS 14: autocast crashed in the backward pass; Anderson had no LU for bfloat16."""
    layer, x = nn.Linear(8, 8), normal(4, 8, seed=1, dtype=torch.float32)
    with torch.no_grad():
        layer.weight.mul_(0.5)
    deq = DEQ(lambda z, x: layer(torch.tanh(z)) + x, solver=solver, adjoint=Implicit(solver=solver))
    expected = torch.autograd.grad(loss_of(deq(x)), layer.weight)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        cast = deq(x)
    assert relative_error(torch.autograd.grad(loss_of(cast.float()), layer.weight), expected) < 5e-2
    layer.to(torch.bfloat16)
    half = deq(x.to(torch.bfloat16), tol=Tolerance(rtol=2e-2))
    assert half.dtype == torch.bfloat16
    assert relative_error(torch.autograd.grad(loss_of(half.float()), layer.weight), expected) < 1e-1


def test_peers_15_a_mask_drawn_once_per_solve_is_the_same_in_both_passes():
    """PEERS 15: masks are the cell's affair; the solve must keep to the one it was given, and refuse a fresh one."""

    class Masked(TanhCell):
        def bind(self, x):
            self.mask = (torch.rand(4, dtype=torch.float64) < 0.5).double()
            return (lambda z, x: self.mask * TanhCell.forward(self, z, x)), (x,)

    cell, x = Masked(), normal(3, 4, seed=5)
    z = solve_tightly(cell)(x)
    frozen = cell.mask
    actual = torch.autograd.grad(loss_of(z), cell.weight)
    expected = gradients(lambda: solve_tightly(lambda z, x: frozen * TanhCell.forward(cell, z, x))(x), [cell.weight])
    assert relative_error(actual, expected) < 1e-12
    plain = nn.Dropout(0.5)
    with pytest.raises(ValueError, match="one fixed function"):
        DEQ(lambda z, x: plain(cell(z, x)))(x)


@pytest.mark.parametrize("solver", BACKWARD_SOLVERS.values(), ids=BACKWARD_SOLVERS.keys())
def test_peers_16_every_solver_on_offer_works_backward_with_a_tuple_state_in_eval(solver):
    """PEERS 16: an offered backward solver raised TypeError; a tuple state in eval() raised AttributeError."""

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(0.4, dtype=torch.float64))

        def forward(self, state, x):
            a, b = state
            return torch.tanh(self.scale * b + x), torch.tanh(self.scale * a.sum(1, keepdim=True))

    cell, x = Pair().eval(), normal(3, 4, seed=5)
    z0 = (torch.zeros_like(x), torch.zeros(3, 1, dtype=torch.float64))
    run = lambda adjoint: torch.cat(solve_tightly(cell, adjoint)(x, z0=z0), 1)  # noqa: E731
    actual = gradients(lambda: run(Implicit(solver=solver, tol=TIGHT, max_steps=300)), [cell.scale])
    assert relative_error(actual, gradients(lambda: run(Unrolled(steps=300)), [cell.scale])) < 1e-9


def test_peers_17_the_tolerance_can_be_relaxed_for_one_call():
    """PEERS 17, REFERENCE 3.4: the paper's looser inference tolerance raised TypeError."""
    deq, x = DEQ(TanhCell(norm=0.9), tol=TIGHT, max_steps=300), normal(3, 4, seed=5)
    _, tight = deq(x, return_solution=True)
    _, loose = deq(x, tol=Tolerance(rtol=1e-2), return_solution=True)
    assert int(loose.num_evals.max()) < int(tight.num_evals.min())


@pytest.mark.parametrize("adjoint", [Implicit(), OneStep(), Phantom(), Unrolled(steps=9), Reversible()], ids=str)
def test_peers_18_eval_mode_has_gradients(adjoint):
    """PEERS 18, torchdeq #8: eval() detached the result, so pretrained models could not be fine-tuned."""
    deq, x = DEQ(TanhCell(), adjoint=adjoint).eval(), normal(3, 4, seed=5).requires_grad_()
    deq(x).sum().backward()
    assert all(t.grad is not None and bool(t.grad.any()) for t in (x, *deq.parameters()))


@pytest.mark.parametrize("normalise", [parametrizations.weight_norm, parametrizations.spectral_norm])
def test_peers_19_normalised_weights_copy_load_and_train(normalise):
    """PEERS 19: weight-normed models could not be deepcopied, and a second step failed unless a reset was called."""

    class Cell(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = normalise(nn.Linear(4, 4, bias=False).double())

        def forward(self, z, x):
            return 0.3 * torch.tanh(self.layer(z)) + x

    deq, x = DEQ(Cell()), normal(3, 4, seed=5)
    deq.eval()  # spectral_norm's power iteration changes the weight in training: f must be one fixed function
    optimiser = torch.optim.SGD(deq.parameters(), lr=0.1)
    losses = []
    for _ in range(5):
        optimiser.zero_grad()
        loss = deq(x).square().sum()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1]
    twin = copy.deepcopy(deq)
    fresh = DEQ(Cell()).eval()
    fresh.load_state_dict(deq.state_dict())
    assert torch.equal(twin(x), deq(x)) and torch.equal(fresh(x), deq(x))


def test_peers_20_vmap_gets_a_clear_answer():
    """PEERS 20: none of the solvers worked under torch.func, each with another internal error."""
    with pytest.raises(NotImplementedError, match="Batches need no vmap"):
        torch.func.vmap(DEQ(TanhCell()))(normal(3, 1, 4, seed=5))


# --- REFERENCE.md, 3 and 6 -------------------------------------------------------------------------------------------


def test_reference_31_memory_does_not_grow_with_the_step_limit():
    """REFERENCE 3.1, deq #19, #28, #33: two states were stored for every step allowed."""
    x = normal(8, 256, seed=0)
    cell = lambda z, x: torch.tanh(0.9 * z.roll(1, 1) + x)  # noqa: E731
    state = 8 * 256 * 8
    settings = {"tol": FULL_BUDGET, "throw": False, "compact": False}
    run = lambda solver, n: fixed_point(cell, x, (x,), solver=solver, max_steps=n, **settings)  # noqa: E731
    for solver in (Broyden(memory=5), Anderson(memory=5)):
        peaks = [peak_memory(lambda s=solver, n=n: run(s, n)).peak_bytes for n in (20, 100)]
        assert peaks[1] <= peaks[0] + 1.1 * state  # a sample that is done is kept aside
        assert peaks[1] <= 24 * state  # ten for the memory, the rest for the points in hand


@forward_solvers
def test_reference_31_the_start_is_returned_untouched_when_no_step_beats_it(solver):
    """REFERENCE 3.1: the best iterate was an alias of the moving one, so the last, worst point came back."""
    z0 = torch.full((2, 3), 0.5, dtype=torch.float64)
    f = lambda z: torch.where(z == 0.5, 0.6, 1e3 + z.abs() * 2)  # noqa: E731
    solution = fixed_point(f, z0, solver=solver, max_steps=6, throw=False)
    assert torch.equal(solution.z, torch.full((2, 3), 0.5, dtype=torch.float64))
    assert solution.num_steps.tolist() == [0, 0]
    torch.testing.assert_close(solution.residual, torch.full((2,), 1 / 6, dtype=torch.float64))
    assert torch.equal(z0, torch.full((2, 3), 0.5, dtype=torch.float64))


def test_reference_32_the_cell_is_not_copied():
    """REFERENCE 3.2, deq #6, #9: a second copy of f doubled weights and state_dict."""
    cell = TanhCell()
    deq = DEQ(cell)
    deq(normal(3, 4, seed=5)).sum().backward()
    assert list(deq.parameters()) == list(cell.parameters())
    assert list(deq.state_dict()) == [f"cell.{name}" for name in cell.state_dict()]
    assert [m for m in deq.modules() if isinstance(m, TanhCell)] == [cell]


@forward_solvers
def test_reference_35_nan_from_the_start_is_a_verdict(solver):
    """REFERENCE 3.5, deq #26: `lowest_xest` was unbound when nothing improved, or after two steps."""
    x = normal(3, 4, seed=5)
    with pytest.raises(NonFiniteError, match="NONFINITE for sample 0, 1, 2"):
        fixed_point(lambda z, x: z * float("nan"), torch.zeros_like(x), (x,), solver=solver)
    for max_steps in (1, 2):
        solution = fixed_point(
            TanhCell(), torch.zeros_like(x), (x,), solver=solver, max_steps=max_steps, tol=TIGHT, throw=False
        )
        assert solution.status is Status.MAX_STEPS and bool(solution.z.isfinite().all())


@pytest.mark.parametrize("solver", [Anderson(memory=8), Broyden(memory=8), NewtonKrylov()], ids=["a", "b", "n"])
def test_reference_35_singular_systems_are_survived(solver):
    """REFERENCE 3.5, deq #20: a singular matrix ended the run. Here all steps but a few are parallel or zero."""
    x = torch.ones(2, 6, dtype=torch.float64)
    for f in (lambda z, x: x, lambda z, x: 0.5 * z + x, lambda z, x: z):
        solution = fixed_point(f, torch.zeros_like(x), (x,), solver=solver, tol=TIGHT, max_steps=60)
        torch.testing.assert_close(f(solution.z, x), solution.z, rtol=1e-10, atol=1e-10)


def test_reference_35_divergence_ends_with_a_verdict_and_the_best_point():
    """REFERENCE 3.5, 6: no protective break; authors advise another solver, which Fallback does."""
    f = lambda z, x: 3 * z + x  # noqa: E731
    x = normal(2, 3, seed=0)
    start = torch.zeros_like(x)
    lost = fixed_point(f, start, (x,), solver=FixedPointIteration(), max_steps=100, throw=False)
    assert lost.status is Status.STALLED and int(lost.num_evals.max()) < 60
    chain = Fallback(FixedPointIteration(), NewtonKrylov())
    found = fixed_point(f, start, (x,), solver=chain, tol=Tolerance(rtol=1e-8), max_steps=300)
    torch.testing.assert_close(found.z, -x / 2, rtol=1e-6, atol=1e-6)


def test_reference_35_the_spectral_radius_of_a_rotation_is_right():
    """REFERENCE 3.5, PEERS 1.3: the power method's Rayleigh quotient fails for complex pairs."""
    turn = 0.9 * torch.tensor([[0.0, -1.0], [1.0, 0.0]], dtype=torch.float64)
    radius = spectral_radius(lambda z: z @ turn.mT, normal(3, 2, seed=0))
    torch.testing.assert_close(radius, torch.full((3,), 0.9, dtype=torch.float64), rtol=1e-9, atol=0)


@pytest.mark.parametrize("max_steps", [3, 10])
def test_reference_36_the_future_does_not_leak_into_the_past(max_steps):
    """REFERENCE 3.6: inner products over all positions let tokens see later ones while unconverged."""
    block, x = transformer(dtype=torch.float64)
    leak = {}
    for group in ("sample", "prefix"):
        deq = DEQ(block, solver=Anderson(group=group), max_steps=max_steps, compact=False)
        leak[group] = float(causality_leak(deq, x, generator=torch.Generator().manual_seed(0)).max())
    assert leak["prefix"] == 0 and leak["sample"] > 1e-6


def test_reference_36_training_and_evaluation_return_the_same_state():
    """REFERENCE 3.6, deq #35: training returned f(z*), evaluation z*: different at a loose tolerance."""
    deq, x = DEQ(TanhCell(), tol=Tolerance(rtol=0.3)), normal(3, 4, seed=5)
    with torch.no_grad():
        evaluated = deq.eval()(x)
    assert torch.equal(deq.train()(x), evaluated)
    assert not torch.allclose(deq.cell(evaluated, x), evaluated, rtol=1e-3)


@forward_solvers
@pytest.mark.parametrize("shape", [(3,), (3, 2), (3, 2, 2, 2), (3, 2, 1, 2, 1)], ids=str)
def test_reference_36_states_of_any_rank(solver, shape):
    """REFERENCE 3.6, deq #17: only 3-D states were accepted."""
    x = normal(*shape, seed=0).requires_grad_()
    f = lambda z, x: torch.tanh(0.5 * z.flip(-1) + x) if z.ndim > 1 else torch.tanh(0.5 * z + x)  # noqa: E731
    deq = solve_tightly(f, Implicit(tol=TIGHT, max_steps=200), solver=solver)
    assert deq(x).shape == shape
    expected = gradients(lambda: solve_tightly(f, Unrolled(steps=100))(x), [x])
    assert relative_error(gradients(lambda: deq(x), [x]), expected) < 1e-9


def test_reference_36_a_warm_start_saves_steps():
    """REFERENCE 3.6: no warm start."""
    deq, x = DEQ(TanhCell(norm=0.95), tol=Tolerance(rtol=1e-8), max_steps=300), normal(3, 4, seed=5)
    z, cold = deq(x, return_solution=True)
    _, warm = deq(x + 1e-4, z0=z.detach(), return_solution=True)
    assert int(warm.num_evals.sum()) < int(cold.num_evals.sum())


def test_reference_6_a_small_deq_of_ones_own_learns():
    """deq #4, #10, #35: custom cells did not learn. A DEQ in a few lines fits a teacher."""
    teacher, student, x = TanhCell(seed=0), TanhCell(seed=9), normal(64, 4, seed=5)
    with torch.no_grad():
        target = solve_tightly(teacher)(x)
    deq = DEQ(student)
    optimiser = torch.optim.Adam(deq.parameters(), lr=0.1)
    losses = []
    for _ in range(80):
        optimiser.zero_grad()
        loss = (deq(x) - target).square().mean()
        loss.backward()
        optimiser.step()
        losses.append(loss.item())
    assert losses[-1] < 0.02 * losses[0]


def test_reference_6_the_sign_of_the_backward_system():
    """mdeq #8: z = a z + x has dz/dx = 1 / (1 - a) = 4, and dz/da = x / (1 - a)^2 = 32."""
    a = torch.tensor(0.75, dtype=torch.float64, requires_grad=True)
    x = torch.tensor([[2.0]], dtype=torch.float64, requires_grad=True)
    z = solve_tightly(lambda z, x: a * z + x)(x)
    by_x, by_a = torch.autograd.grad(z.sum(), [x, a])
    torch.testing.assert_close(torch.stack((z.sum(), by_x.sum(), by_a)), torch.tensor([8.0, 4.0, 32.0]).double())


def test_reference_6_a_model_goes_over_from_pretraining_to_equilibrium():
    """deq #29: the first backward pass after weight-tied pretraining crashed."""
    cell, x = TanhCell(), normal(8, 4, seed=5)
    deq = DEQ(cell)
    optimiser = torch.optim.SGD(cell.parameters(), lr=0.1)
    for adjoint in (Unrolled(steps=4), Unrolled(steps=4), Implicit(), Implicit()):
        optimiser.zero_grad()
        deq(x, adjoint=adjoint).square().sum().backward()
        assert all(p.grad is not None and bool(p.grad.isfinite().all()) for p in cell.parameters())
        optimiser.step()


def test_reference_6_the_default_dtype_of_torch_does_not_matter():
    """deq #22: the code set a default tensor type and failed with any other."""
    cell, x = TanhCell(dtype=torch.float32), normal(3, 4, seed=5, dtype=torch.float32).requires_grad_()
    results = []
    before = torch.get_default_dtype()
    for dtype in (torch.float32, torch.float64, torch.float16):
        torch.set_default_dtype(dtype)
        try:
            z = DEQ(cell)(x)
            results.append([z.detach(), *torch.autograd.grad(z.sum(), [x, cell.weight])])
        finally:
            torch.set_default_dtype(before)
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))
