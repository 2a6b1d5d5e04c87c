"""Which tolerance, step limit, solver and memory length a call uses."""

import dataclasses
from typing import Any

import pytest
import torch

from deqkit import Status, Tolerance
from deqkit.solve import Anderson, Broyden, Fallback, FixedPointIteration, NewtonKrylov
from model.models import BOTH, CELLS, TIGHT, flat, make, reconfigured, tokens

# B samples, T positions

both = pytest.mark.parametrize("kind", BOTH)
kinds = pytest.mark.parametrize("kind", CELLS)
NEVER = Tolerance(rtol=1e-30, patience=10**6)  # never satisfied: a solve takes all its steps


def evals(model: Any, **settings: Any) -> int:
    with torch.no_grad():
        output = model(tokens(), **settings)
    return int(output.solution.num_evals.max())


# --- tolerance and steps ---------------------------------------------------------------------------------------------


@both
def test_training_and_evaluation_have_limits_of_their_own(kind):
    model = make(kind, solver=Broyden(), tol=NEVER, eval_tol=NEVER, max_steps=7, eval_max_steps=11)
    assert evals(model.train()) == 7
    assert evals(model.eval()) == 11
    for mode in (True, False):
        assert evals(model.train(mode), max_steps=5) == 5


@both
def test_training_and_evaluation_have_tolerances_of_their_own(kind):
    model = make(kind, tol=Tolerance(rtol=1e-8), eval_tol=Tolerance(rtol=1e-2), max_steps=100, eval_max_steps=100)
    with torch.no_grad():
        trained, evaluated = model.train()(tokens()), model.eval()(tokens())
    assert trained.solution.residual.max() <= 1e-8 < 1e-5 < evaluated.solution.residual.max() <= 1e-2
    assert int(trained.solution.num_evals.max()) > int(evaluated.solution.num_evals.max())
    for mode in (True, False):
        with torch.no_grad():
            overridden = model.train(mode)(tokens(), tol=Tolerance(rtol=1e-5)).solution
        assert 1e-8 < overridden.residual.max() <= 1e-5
    # One of two overridden: the other stays that of the mode.
    other = reconfigured(model, solver=Broyden(), eval_max_steps=9)
    assert evals(other.eval(), tol=NEVER) == 9
    assert evals(other.train(), tol=NEVER) == 100


@both
def test_defaults_relax_evaluation(kind):
    model = make(kind)
    defaults = {f.name: f for f in dataclasses.fields(model.config)}
    tol, eval_tol = (defaults[name].default_factory() for name in ("tol", "eval_tol"))  # pyright: ignore
    assert tol.rtol < eval_tol.rtol
    solver = defaults["solver"].default_factory()  # pyright: ignore
    assert solver.group == "prefix"


@both
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("setting", [{"max_steps": 0}, {"max_steps": -1}, {"max_steps": 2.5}, {"tol": 1e-3}])
def test_impossible_settings_of_a_call_are_refused_in_both_modes(kind, training, setting):
    with pytest.raises(ValueError, match=next(iter(setting))):
        make(kind).train(training)(tokens(), **setting)


@both
def test_the_solver_of_a_call_wins(kind):
    model = make(kind, solver=FixedPointIteration(group="prefix"), tol=Tolerance(rtol=1e-9))
    plain, newton = evals(model), evals(model, solver=NewtonKrylov())
    assert plain != newton
    assert evals(model, solver=Fallback(Anderson(), NewtonKrylov())) > 0
    with pytest.raises(ValueError, match="solver"):
        model(tokens(), solver="broyden")


@both
def test_an_unfinished_solve_is_told_not_raised(kind):
    model = make(kind, max_steps=4)
    output = model(tokens(), tokens(seed=6))
    assert output.solution is not None and output.solution.status is Status.MAX_STEPS
    output.loss.backward()  # pyright: ignore
    assert model.core.verdicts[Status.MAX_STEPS] == 3
    assert output.solution.backward is not None


@both
def test_the_solution_of_several_pieces_is_the_worst_of_them(kind):
    model = make(kind, subsequences=3, max_steps=5)
    output = model(tokens())
    residuals = [float(s.residual.max()) for s in output.solutions]
    assert len(residuals) == 3 and output.solution is output.solutions[residuals.index(max(residuals))]


def test_a_model_that_diverges_raises():
    model = make("post")
    with torch.no_grad():
        model.cells[0].project.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="NONFINITE"):
        model(tokens())


# --- memory length ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mem_len", [0, 1, 3, 7, 1000])
@pytest.mark.parametrize("pieces", [1, 2])
def test_a_transformer_remembers_at_most_mem_len_positions(mem_len, pieces):
    """Those at the end: states, and the injections that belong to them."""
    model = make("post", mem_len=mem_len, subsequences=pieces)
    ids, memory, states, injections = tokens(2, 12), None, [], []
    with torch.no_grad():
        for start, end in ((0, 3), (3, 8), (8, 9), (9, 12)):
            output = model(ids[:, start:end], memory=memory)
            memory = output.memory
            states.append(output.z)
            injections.append(model.cells[0].inject(model.embed(ids[:, start:end])))
            z, u = memory[0]
            seen = min(mem_len, end)
            assert z.shape[1] == u.shape[1] == seen
            assert torch.equal(z, torch.cat(states, 1)[:, end - seen :])
            torch.testing.assert_close(u, torch.cat(injections, 1)[:, end - seen :], rtol=1e-12, atol=1e-12)
            for part in memory[0]:  # nothing longer stays in memory behind it
                assert part.untyped_storage().nbytes() == part.numel() * 8


@kinds
def test_without_memory_segments_know_nothing_of_each_other(kind):
    model = make(kind, mem_len=0)
    with torch.no_grad():
        before = model(tokens(seed=8))
        expected, output = model(tokens()), model(tokens(), memory=before.memory)
    assert torch.equal(flat(output.z), flat(expected.z))


@kinds
def test_memory_matters(kind):
    model = make(kind)
    with torch.no_grad():
        before = model(tokens(seed=8))
        expected, output = model(tokens()), model(tokens(), memory=before.memory)
    assert (flat(output.z) - flat(expected.z))[:, 0].abs().max() > 1e-3


@kinds
def test_a_memory_is_neither_changed_nor_shared(kind):
    """The same memory can be used again: beam search and repeated evaluation rely on it."""
    model = make(kind)
    with torch.no_grad():
        memory = model(tokens(seed=8)).memory
        copies = [t.clone() for m in memory for t in m]
        one = model(tokens(), memory=memory)
        two = model(tokens(), memory=memory)
    assert torch.equal(flat(one.z), flat(two.z))
    assert all(torch.equal(a, b) for a, b in zip(copies, (t for m in memory for t in m), strict=True))
    flat_memory = [t for m in one.memory for t in m]
    pointers = {t.untyped_storage().data_ptr() for t in (one.z if isinstance(one.z, tuple) else (one.z,))}
    assert not pointers & {t.untyped_storage().data_ptr() for t in flat_memory if t.numel()}


def test_a_memory_longer_than_mem_len_is_seen_in_full():
    """mem_len bounds what is handed on; what a caller hands in is taken as it is."""
    model = make("post")
    short = reconfigured(model, mem_len=2)
    with torch.no_grad():
        memory = model(tokens(seed=8)).memory
        assert torch.equal(short(tokens(), memory=memory).z, model(tokens(), memory=memory).z)
        assert short(tokens(), memory=memory).memory[0][0].shape[1] == 2


@both
def test_tolerances_hold_for_every_sample(kind):
    model = make(kind, tol=TIGHT, solver=Broyden(memory=5, group="prefix"))
    output = model(tokens(5))
    assert output.solution is not None and output.solution.residual.shape == (5,)
    assert output.solution.status is Status.CONVERGED
