"""A sample's result depends on that sample alone: not on its batch, on compaction or on when verdicts are read."""

from typing import Any

import pytest
import torch

from deqkit import DEQ
from deqkit.adjoint import Implicit, OneStep, Phantom
from deqkit.analysis import peak_memory
from deqkit.solve import (
    Anderson,
    Broyden,
    Fallback,
    FixedPointIteration,
    NewtonKrylov,
    NotConvergedError,
    Status,
    Tolerance,
    fixed_point,
)
from deqkit.solve._batch import norms
from deqkit.solve._packing import cut, rows_left
from deqkit.solve.broyden import BroydenMemory
from problems import SOLVERS, Problem, affine_problem, causal_mixing, flat, normal

# B samples, N numbers in a state

TOL = Tolerance(rtol=1e-7)


def uneven_problem(name: str, size: int = 4) -> Problem:
    """Samples of very different difficulty, so that they leave the batch one by one. f works on each sample alone."""
    if SOLVERS[name].group == "prefix":
        problem = causal_mixing(torch.float64, batch=size)
        scales = torch.tensor([0.1, 3.0, 1.0, 0.3, 2.0, 0.5])[:size, None, None].double()
        return Problem(
            name="uneven causal", f=problem.f, z0=problem.z0, args=(problem.args[0] * scales,), z_star=None, causal=True
        )
    a_BNN = normal(30, size, 12, 12)
    norms_B = torch.tensor([0.1, 0.9, 0.6, 0.3, 0.8, 0.5])[:size].double()
    a_BNN = a_BNN * (norms_B / torch.linalg.matrix_norm(a_BNN, 2))[:, None, None]
    return affine_problem("uneven", a_BNN, normal(31, size, 12), torch.float64)


def solve(name: str, problem: Problem, samples=slice(None), max_steps=300, tol=TOL, **options):
    args = tuple(t[samples] for t in problem.args)
    return fixed_point(
        problem.f,
        problem.z0[samples],
        args,
        solver=SOLVERS[name],
        tol=tol,
        max_steps=max_steps,
        throw=False,
        **options,
    )


def assert_same(a, b, *, exact: bool, num_evals: bool = True):
    for field in ("z", "residual", "residual_norm", "amplification"):
        left, right = getattr(a, field), getattr(b, field)
        if exact:
            assert torch.equal(left.nan_to_num(-1.0), right.nan_to_num(-1.0)), field
        else:
            # Residuals near the tolerance carry the rounding of larger iterates.
            torch.testing.assert_close(left, right, rtol=1e-5, atol=1e-12, equal_nan=True, msg=field)
    assert a.sample_status == b.sample_status
    if num_evals:
        assert a.num_evals.tolist() == b.num_evals.tolist() and a.num_steps.tolist() == b.num_steps.tolist()


@pytest.mark.parametrize("max_steps", [4, 9, 300])
@pytest.mark.parametrize("name", SOLVERS)
def test_compaction_changes_nothing_but_the_work(name, max_steps):
    problem = uneven_problem(name)
    work = {True: 0, False: 0}
    solutions = {}
    for compact in (True, False):

        def counted(z, *args, compact=compact):
            work[compact] += len(z)
            return problem.f(z, *args)

        counted_problem = Problem(name="", f=counted, z0=problem.z0, args=problem.args, z_star=None)
        solutions[compact] = solve(name, counted_problem, max_steps=max_steps, compact=compact, trace=True)
    assert_same(solutions[True], solutions[False], exact=False)
    for left, right in zip(solutions[True].trace, solutions[False].trace, strict=True):
        torch.testing.assert_close(left, right, rtol=1e-4, atol=1e-12)
    if max_steps == 300:
        assert solutions[True].num_evals.unique().numel() > 1, "the problem should be uneven"
        assert work[True] < work[False]
        looks = int(work[True] - solutions[True].num_evals.sum())
        assert 4 + 1 <= looks <= 4 + 2  # at two samples when the first leaves, at all at the end


@pytest.mark.parametrize("solver", [Broyden(memory=8), Anderson(memory=8)], ids=lambda s: type(s).__name__)
def test_compaction_does_not_copy_what_the_solver_remembers(solver):
    """With eight pairs that is most of what a solve holds: a copy of it would be half as much again."""
    size, width = 4, 4096
    shrink_B1 = torch.tensor([[0.5], [0.99], [0.9], [0.97]], dtype=torch.float64)
    target_BN = normal(33, size, width)

    def peak(compact):
        f = lambda z_BN, b_BN, a_B1: a_B1 * torch.sin(z_BN) + b_BN  # noqa: E731
        options: dict[str, Any] = {"solver": solver, "tol": TOL, "max_steps": 200, "compact": compact}
        memory = peak_memory(lambda: fixed_point(f, torch.zeros_like(target_BN), (target_BN, shrink_B1), **options))
        assert memory.result.num_evals.unique().numel() > 1, "samples should leave one by one"
        return memory.peak_bytes

    states = 8 * size * width
    assert peak(True) < peak(False) + 4 * states  # what the loop and the arguments are cut down to; a copy: 13


def test_rows_that_are_left_move_as_little_as_they_can():
    done_B = torch.tensor([False, True, False, True, False, False])
    index = rows_left(done_B, 4)
    assert index.tolist() == [0, 4, 2, 5]
    state = BroydenMemory(
        dz_BPMN=(memory := torch.arange(6.0).view(6, 1, 1, 1)),
        df_BPMN=-torch.arange(6.0).view(6, 1, 1, 1),
        k_BPMM=(small := torch.arange(6.0).view(6, 1, 1, 1)),
        squares_BPM=torch.zeros(6, 1, 1),
        dots_BPM=torch.zeros(6, 1, 1),
        last=(shared := torch.arange(6.0).view(6, 1, 1), shared),
    )
    left = cut(state, index)
    for found in (left.dz_BPMN, -left.df_BPMN, left.k_BPMM, left.last[0]):
        assert found.flatten().tolist() == [0, 4, 2, 5]
    assert left.dz_BPMN.data_ptr() == memory.data_ptr()
    assert shared.flatten().tolist() == small.flatten().tolist() == list(range(6))  # others may refer to them


@pytest.mark.parametrize("compact", [True, False])
@pytest.mark.parametrize("name", SOLVERS)
def test_reading_verdicts_less_often_changes_nothing(name, compact):
    problem = uneven_problem(name)
    for max_steps in (5, 300):
        every = solve(name, problem, compact=compact, max_steps=max_steps)
        for check_every in (3, 7):
            seldom = solve(name, problem, compact=compact, check_every=check_every, max_steps=max_steps)
            assert_same(every, seldom, exact=not compact)


@pytest.mark.parametrize("max_steps", [3, 300])
@pytest.mark.parametrize("name", SOLVERS)
def test_a_sample_alone_gives_the_same_bits_as_in_a_batch(name, max_steps):
    problem = uneven_problem(name)
    together = solve(name, problem, max_steps=max_steps, compact=False)
    for sample in range(len(problem.z0)):
        alone = solve(name, problem, slice(sample, sample + 1), max_steps=max_steps, compact=False)
        assert torch.equal(alone.z[0], together.z[sample])
        assert torch.equal(alone.residual[0], together.residual[sample])
        assert alone.num_evals[0] == together.num_evals[sample]
        assert alone.sample_status[0] is together.sample_status[sample]


@pytest.mark.parametrize("name", SOLVERS)
def test_a_failing_sample_does_not_disturb_the_others(name):
    """Compare the batch with one where a sample is replaced by a hopeless one: z = 2 z + b grows without bound."""
    problem = uneven_problem(name)
    if problem.causal:
        hopeless = Problem(
            name="",
            f=lambda z, x, w: torch.where(w.view(-1, 1, 1), 1e30 * z * z + 1, problem.f(z, x)),
            z0=problem.z0,
            args=(*problem.args, torch.arange(4) == 2),
            z_star=None,
        )
    else:
        a_BNN, b_BN = (t.clone() for t in problem.args)
        a_BNN[2] = 1e200 * torch.eye(12)
        hopeless = Problem(name="", f=problem.f, z0=problem.z0, args=(a_BNN, b_BN), z_star=None)
    good = solve(name, problem, compact=False)
    bad = solve(name, hopeless, compact=False)
    others = [0, 1, 3]
    assert bad.sample_status[2] is not Status.CONVERGED or name in ("gmres", "gmres-restarted")
    assert torch.equal(flat(good.z)[others], flat(bad.z)[others])
    assert torch.equal(good.residual[others], bad.residual[others])
    assert good.num_evals[others].tolist() == bad.num_evals[others].tolist()


def rotating_and_slow(z_BN: torch.Tensor, gain_B: torch.Tensor) -> torch.Tensor:
    """gain 1: a quarter turn, on which plain iteration stalls; else a slow contraction, which only takes time."""
    turned_BN = torch.stack((-z_BN[:, 1], z_BN[:, 0]), dim=1)
    return torch.where(gain_B.unsqueeze(1) == 1, turned_BN, gain_B.unsqueeze(1) * z_BN) + 1


@pytest.mark.parametrize("following", [Anderson(), Broyden(), NewtonKrylov()], ids=lambda s: type(s).__name__)
def test_fallback_does_not_make_a_stalled_sample_wait_for_a_slow_one(following):
    """The stalled sample has half its budget left whatever its neighbour does. Was a bug: budgets were shared."""
    solver = Fallback(FixedPointIteration(), following)
    gains_B = torch.tensor([1.0, 0.9999]).double()
    options: dict[str, Any] = dict(solver=solver, tol=Tolerance(rtol=1e-6), max_steps=40, throw=False, compact=False)
    z0_BN = torch.zeros(2, 2).double()
    alone = fixed_point(rotating_and_slow, z0_BN[:1], (gains_B[:1],), **options)
    together = fixed_point(rotating_and_slow, z0_BN, (gains_B,), **options)
    assert alone.status is Status.CONVERGED
    assert together.sample_status[0] is Status.CONVERGED
    assert torch.equal(together.z[0], alone.z[0])


def test_sizes_do_not_depend_on_neighbours_or_on_looking():
    """In float32 norms are taken in two ways that round differently. Was a bug: one odd number chose it for all."""
    x_BPN = normal(32, 8, 3, 50).float()
    plain_XBP = norms(x_BPN, 2 * x_BPN, look=True)
    for odd in (0.0, 1e-20, 1e25, float("nan")):
        other_BPN = torch.cat((torch.full_like(x_BPN[:1], odd), x_BPN[1:]))
        for look in (True, False):
            assert torch.equal(norms(other_BPN, 2 * x_BPN, look=look)[:, 1:], plain_XBP[:, 1:])


# --- samples that are none: they depend on each other ---


def coupled(z_BN, x_BN):
    """Every sample sees the mean of all."""
    return torch.tanh(0.8 * z_BN.mean(0) + x_BN)


COUPLED_X = normal(40, 8, 6) * torch.logspace(-2, 1, 8).double().unsqueeze(1)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_samples_that_depend_on_each_other_are_found_out_when_the_first_leaves(mode):
    with mode(), pytest.raises(ValueError, match="depend on each other.*one sample"):
        fixed_point(coupled, torch.zeros_like(COUPLED_X), (COUPLED_X,), max_steps=300, throw=False)


@pytest.mark.parametrize("max_steps", [6, 12, 300])
@pytest.mark.parametrize("solver", [FixedPointIteration(), Anderson()], ids=repr)
def test_without_compaction_a_sample_that_the_others_disturb_is_solved_again(solver, max_steps):
    tol = Tolerance(rtol=1e-6)
    solution = fixed_point(
        coupled, torch.zeros_like(COUPLED_X), (COUPLED_X,), solver=solver, tol=tol, max_steps=max_steps,
        compact=False, throw=False,
    )  # fmt: skip
    f_z = coupled(solution.z, COUPLED_X)
    true_B = (f_z - solution.z).norm(dim=1) / f_z.norm(dim=1)
    converged_B = torch.tensor([status is Status.CONVERGED for status in solution.sample_status])
    assert bool((true_B[converged_B] <= 2 * tol.rtol).all())
    if max_steps == 300:
        torch.testing.assert_close(solution.residual, true_B, rtol=1e-6, atol=1e-12)
    assert bool(converged_B.all()) == (max_steps == 300)


def graph(seed: int, radius: float):
    """The rows of a state as the nodes of a graph: samples that depend on each other."""
    a_BB, w_NN = normal(seed, 6, 6), normal(seed + 1, 3, 3)
    a_BB = a_BB * (radius / torch.linalg.eigvals(a_BB).abs().max())
    w_NN = w_NN / torch.linalg.matrix_norm(w_NN, 2)
    return lambda z, x: a_BB @ torch.tanh(z @ w_NN) + x, normal(seed + 2, 6, 3)


def true_residual(f, z, x):
    with torch.no_grad():
        return (f(z, x) - z).norm(dim=1) / f(z, x).norm(dim=1)


@pytest.mark.parametrize("patience", [3, 10])
def test_fallback_says_of_dependent_samples_what_is_so(patience):
    """The first solver's samples must not be left where they were while the second moves the others."""
    solver = Fallback(Anderson(), NewtonKrylov(), patience=patience)
    verdicts = []
    for seed in range(30):
        f, x = graph(3 * seed, 0.6)
        solution = fixed_point(
            lambda z, f=f, x=x: f(z, x), torch.zeros_like(x), solver=solver, max_steps=300, throw=False
        )
        assert (true_residual(f, solution.z, x) - solution.residual).abs().max() < 1e-6
        assert (solution.residual[solution.codes == Status.CONVERGED.severity] < 2.01e-3).all()
        verdicts.append(solution.status)
    assert verdicts.count(Status.CONVERGED) > 20


@pytest.mark.parametrize("adjoint", [Implicit(), Phantom(steps=2)], ids=repr)
def test_dependent_samples_that_fail_have_true_residuals_and_gradients(adjoint):
    """Each is returned from an evaluation of its own, and only all of them together have a residual."""
    failed = 0
    for seed in range(20):
        f, x = graph(3 * seed, 0.95)
        deq = DEQ(f, compact=False, adjoint=adjoint)
        with torch.no_grad():
            z, solution = deq(x, return_solution=True)
        failed += solution.status is not Status.CONVERGED
        assert (true_residual(f, z, x) - solution.residual).abs().max() < 1e-6
        z, solution = deq(x.requires_grad_(), return_solution=True)
        assert (true_residual(f, z, x) - solution.residual).abs().max() < 1e-6
        (gradient,) = torch.autograd.grad(z.sum(), x)
        assert torch.isfinite(gradient).all()
    assert failed > 3


def test_a_verdict_is_withdrawn_when_the_others_disturb_it_at_the_end():
    """The first sample is solved until the second, which never is, comes back to its own best point."""
    f = lambda z, x: torch.stack([0.5 * z[0] + x[0] + 0.1 * torch.tanh(100 * z[1]), 3 - z[1]])  # noqa: E731
    x = torch.ones(2, 1, dtype=torch.float64)
    z, solution = DEQ(f, solver=FixedPointIteration(), max_steps=12, compact=False)(x, return_solution=True)
    assert (true_residual(f, z, x) - solution.residual).abs().max() < 1e-6
    assert bool((solution.codes[solution.residual > 2e-3] != Status.CONVERGED.severity).all())


def test_as_one_sample_they_have_one_honest_verdict():
    solution = fixed_point(
        lambda z, x: coupled(z[0], x[0])[None], torch.zeros_like(COUPLED_X)[None], (COUPLED_X[None],), tol=TOL
    )
    exact = torch.zeros_like(COUPLED_X)
    for _ in range(400):
        exact = coupled(exact, COUPLED_X)
    torch.testing.assert_close(solution.z[0], exact, rtol=1e-5, atol=1e-5)
    assert list(solution.sample_status) == [Status.CONVERGED]


GRAPH = torch.tensor([0, 1, 2, 2, 2, 2])  # two graphs of one node and one of four


def message_passing(z_BN, x_BN, graph_B):
    """Only some samples see each other, and those that are looked at when the first leaves may be others."""
    weight = 0.25 * normal(43, 4, 4)
    return torch.tanh(torch.zeros(3, 4, dtype=z_BN.dtype).index_add(0, graph_B, z_BN)[graph_B] @ weight + x_BN)


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("solver", [Broyden(), Anderson()], ids=repr)
def test_no_verdict_on_samples_of_which_only_some_depend_on_each_other_is_wrong(solver, seed):
    x = normal(50 + seed, 6, 4) * torch.tensor([0.1, 0.1, 1, 1, 1, 9]).double().unsqueeze(1)
    try:
        solution = fixed_point(message_passing, torch.zeros_like(x), (x, GRAPH), solver=solver, max_steps=100)
    except ValueError as error:
        assert "depend on each other" in str(error)
        return
    f_z = message_passing(solution.z, x, GRAPH)
    true_B = (f_z - solution.z).norm(dim=1) / f_z.norm(dim=1)
    assert true_B.max() <= 2e-3  # the tolerance is 1e-3


def silent_without_the_last_look():
    """An x for which two samples at the first cut show nothing, and the result is wrong."""
    for seed in range(60):
        x = normal(50 + seed, 6, 4) * torch.tensor([0.1, 0.1, 1, 1, 1, 9]).double().unsqueeze(1)
        try:
            solution = fixed_point(message_passing, torch.zeros_like(x), (x, GRAPH), max_steps=100, check_samples=False)
        except (ValueError, NotConvergedError):
            continue
        f_z = message_passing(solution.z, x, GRAPH)
        if ((f_z - solution.z).norm(dim=1) > 0.05 * f_z.norm(dim=1)).any():
            return x
    raise AssertionError("no such x: the test shows nothing")


@pytest.mark.parametrize("adjoint", [Implicit(), OneStep(), Phantom(steps=3)], ids=repr)
def test_what_the_first_cut_does_not_show_is_found_out_at_the_end(adjoint):
    x = silent_without_the_last_look()
    with pytest.raises(ValueError, match="another result alone than beside the others: they depend on each other"):
        fixed_point(message_passing, torch.zeros_like(x), (x, GRAPH), max_steps=100)
    deq = DEQ(message_passing, max_steps=100, adjoint=adjoint)
    with torch.no_grad(), pytest.raises(ValueError, match="another result alone than beside the others"):
        deq(x, GRAPH)
    with pytest.raises(ValueError, match="another result alone than beside the others"):
        deq(x.requires_grad_(), GRAPH)


class Counting(torch.nn.Module):
    """The sizes of the batches that it was evaluated for."""

    def __init__(self, f) -> None:
        super().__init__()
        self.f, self.sizes = f, []

    def forward(self, z, *args):
        self.sizes.append(z.shape[0])
        return self.f(z, *args)


class Independent(Counting):
    independent_samples = True


def test_looking_whether_samples_are_independent_takes_two_of_them_once_and_all_at_the_end():
    problem = uneven_problem("broyden", size=6)

    def directly(cell, **options):
        return fixed_point(cell, problem.z0, problem.args, tol=TOL, max_steps=300, **options)

    def by_deq(cell):
        return DEQ(cell, tol=TOL, max_steps=300)(*problem.args, z0=problem.z0, return_solution=True)[1]

    def spent(solve, cell):
        solution = solve(cell)
        return sum(cell.sizes) - int(solution.num_evals.sum())

    assert spent(directly, Counting(problem.f)) == 2 + 6
    assert spent(lambda cell: directly(cell, check_samples=False), Counting(problem.f)) == 2
    with torch.no_grad():
        assert spent(by_deq, Counting(problem.f)) == 2 + 6
        assert spent(by_deq, Independent(problem.f)) == 2
    assert spent(by_deq, Counting(problem.f)) == 2 + 6  # the evaluation with a graph, that of the adjoint
