"""What must not matter: how a sequence is cut, what comes later, who else is in the batch, how z* is found."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from deqkit import Tolerance
from deqkit.layers import TransformerCell
from deqkit.solve import Anderson, Broyden, FixedPointIteration, NewtonKrylov
from layers import naive
from model.models import BOTH, CELLS, first, flat, in_segments, make, reconfigured, tokens

# B samples, T positions

LENGTH = 11
kinds = pytest.mark.parametrize("kind", CELLS)
modes = pytest.mark.parametrize("training", [True, False], ids=["train", "eval"])


def close(actual, expected, tolerance=1e-9):
    torch.testing.assert_close(actual, expected, rtol=tolerance, atol=tolerance)


# --- the equilibrium itself ------------------------------------------------------------------------------------------


@kinds
def test_the_state_is_a_fixed_point_of_the_formulas_and_the_loss_that_of_the_softmax(kind):
    """From token ids to nll without our code: loops over the definitions."""
    model = make(kind)
    ids, targets = tokens(2, 6), tokens(2, 6, seed=6)
    output = model(ids, targets)
    cell = model.cells[0]
    with torch.no_grad():
        x = model.embedding.tables[0][ids]
        if isinstance(cell, TransformerCell):
            x = x * 8**0.5
            u = x @ cell.injection.weight.mT + cell.injection.bias  # pyright: ignore
            close(naive.transformer(cell, output.z, u), output.z)
            hidden = output.z
        else:
            h, c = output.z
            u = naive.injected(cell, x, x[:, :0])
            close(naive.trellis(cell, (h, c), u, (h[:, :0], c[:, :0])), output.z)
            hidden = h[..., 3:]
        logits = hidden @ model.embedding.tables[0].mT + model.softmax.biases[0]
        nll = logits.exp().sum(2).log() - logits.gather(2, targets.unsqueeze(2)).squeeze(2)
    close(output.nll, nll)
    close(output.loss, nll.mean())
    close(model.log_probs(output), logits - logits.exp().sum(2, keepdim=True).log())
    assert torch.equal(output.hidden, hidden)


@kinds
@modes
def test_five_hundred_tied_layers_are_the_equilibrium(kind, training):
    model = make(kind).train(training)
    ids, targets = tokens(), tokens(seed=6)
    close(model(ids, targets, depth=500).nll, model(ids, targets).nll)


@pytest.mark.parametrize("kind", BOTH)
@pytest.mark.parametrize(
    "solver",
    [FixedPointIteration(), Anderson(), Anderson(group="prefix"), Broyden(memory=30), NewtonKrylov()],
    ids=lambda s: f"{type(s).__name__}-{s.group}",
)
def test_every_solver_finds_the_same_equilibrium(kind, solver):
    model = make(kind)
    close(flat(model(tokens(), solver=solver).z), flat(model(tokens()).z))


# --- segments and subsequences ---------------------------------------------------------------------------------------


@settings(max_examples=8, deadline=None, derandomize=True)
@given(cuts=st.lists(st.integers(1, LENGTH - 1), unique=True, max_size=4).map(sorted))
@kinds
def test_segments_with_memory_equal_the_joint_solve(kind, cuts):
    model = make(kind)
    ids, targets = tokens(), tokens(seed=6)
    with torch.no_grad():
        joint = model(ids, targets)
        outputs = in_segments(model, ids, targets, cuts)
    close(torch.cat([flat(o.z) for o in outputs], 1), flat(joint.z))
    close(torch.cat([o.nll for o in outputs], 1), joint.nll)  # pyright: ignore


@kinds
@pytest.mark.parametrize(("pieces", "mem_len", "training"), [(2, 0, True), (4, 2, False), (LENGTH + 5, 1000, True)])
def test_subsequences_equal_the_joint_solve(kind, pieces, mem_len, training):
    """Two pieces do not divide eleven positions; more pieces than positions make one of each.

    What is handed on to the next sequence (mem_len) does not bound what pieces of one sequence see of each other.
    """
    model = make(kind, mem_len=mem_len).train(training)
    ids, targets = tokens(), tokens(seed=6)
    split = reconfigured(model, subsequences=pieces)
    with torch.no_grad():
        joint, output = model(ids, targets), split(ids, targets)
    close(flat(output.z), flat(joint.z))
    close(output.nll, joint.nll)
    close([list(m) for m in output.memory], [list(m) for m in joint.memory])
    assert len(output.solutions) == min(pieces, LENGTH)
    lengths = [first(s.z).shape[1] for s in output.solutions]
    assert sum(lengths) == LENGTH and max(lengths) - min(lengths) <= 1


@kinds
def test_subsequences_see_all_of_the_memory(kind):
    """The original dropped old memory after the first piece (REFERENCE.md 3.3)."""
    model = make(kind)
    ids, targets = tokens(length=17), tokens(length=17, seed=6)
    split = reconfigured(model, subsequences=3)
    with torch.no_grad():
        joint = model(ids, targets)
        outputs = in_segments(split, ids, targets, [6, 9])
    close(torch.cat([o.nll for o in outputs], 1), joint.nll)  # pyright: ignore


def test_a_memory_as_long_as_the_window_is_enough():
    """A window of 3 looks back 2 positions: with mem_len=2 segments are exact, with 1 they are not."""
    model = make("local")
    ids, targets = tokens(), tokens(seed=6)
    with torch.no_grad():
        joint = model(ids, targets)
        for mem_len, exact in ((2, True), (1, False)):
            outputs = in_segments(reconfigured(model, mem_len=mem_len), ids, targets, [1, 2, 6])
            error = (torch.cat([o.nll for o in outputs], 1) - joint.nll).abs().max()  # pyright: ignore
            assert error < 1e-9 if exact else error > 1e-4


@pytest.mark.parametrize("kind", ["trellis", "dilated"])
def test_a_trellis_memory_is_exact_whatever_mem_len(kind):
    model = make(kind, mem_len=1)
    ids, targets = tokens(), tokens(seed=6)
    with torch.no_grad():
        joint = model(ids, targets)
        outputs = in_segments(model, ids, targets, [1, 2, 6])
    close(torch.cat([o.nll for o in outputs], 1), joint.nll)  # pyright: ignore


# --- causality -------------------------------------------------------------------------------------------------------


def leak(model, *, cut, max_steps=None, solver=None, tol=None) -> float:
    """Largest change of nll before `cut` when later tokens change."""
    ids, targets = tokens(batch=2), tokens(batch=2, seed=6)
    changed = ids.clone()
    changed[:, cut:] = (ids[:, cut:] + 1 + tokens(batch=2, seed=7)[:, cut:] % 11) % 13
    with torch.no_grad():
        runs = [model(t, targets, max_steps=max_steps, solver=solver, tol=tol).nll for t in (ids, changed)]
    assert not torch.allclose(runs[0][:, cut:], runs[1][:, cut:], atol=1e-3)
    return (runs[0] - runs[1])[:, :cut].abs().max().item()


@kinds
@pytest.mark.parametrize("cut", [1, 10])
def test_later_tokens_do_not_matter_at_the_equilibrium(kind, cut):
    assert leak(make(kind), cut=cut) < 1e-9


@kinds
@pytest.mark.parametrize(("training", "subsequences"), [(True, 1), (False, 1), (True, 2)])
def test_later_tokens_do_not_matter_in_an_unfinished_solve(kind, training, subsequences):
    """With the default solver, to rounding (samples that leave the batch change shapes of products)."""
    model = make(kind, subsequences=subsequences).train(training)
    for max_steps in (3, 4, 6, 9):
        assert leak(model, cut=5, max_steps=max_steps) < 1e-13
    assert leak(model, cut=5, tol=Tolerance(rtol=1e-2)) < 1e-13


@pytest.mark.parametrize("kind", BOTH)
def test_they_do_with_a_solver_that_mixes_positions(kind):
    """The control: the test above can fail."""
    model = make(kind)
    assert max(leak(model, cut=5, max_steps=n, solver=Broyden()) for n in (3, 4, 6)) > 1e-4


# --- batch -----------------------------------------------------------------------------------------------------------


@kinds
@modes
def test_a_sample_does_not_depend_on_its_batch(kind, training):
    model = make(kind).train(training)
    ids, targets = tokens(4), tokens(4, seed=6)
    with torch.no_grad():
        memory = model(tokens(4, 5, seed=8)).memory
        together = model(ids, targets, memory)
        for b in range(4):
            own = tuple(type(m)(*(t[b : b + 1] for t in m)) for m in memory)
            alone = model(ids[b : b + 1], targets[b : b + 1], own)
            close(flat(alone.z)[0], flat(together.z)[b])
            close(alone.nll[0], together.nll[b])  # pyright: ignore


@pytest.mark.parametrize("kind", BOTH)
def test_not_even_in_an_unfinished_solve(kind):
    model = make(kind)
    ids, targets = tokens(4), tokens(4, seed=6)
    with torch.no_grad():
        together = model(ids, targets, max_steps=4).nll
        alone = torch.cat([model(ids[b : b + 1], targets[b : b + 1], max_steps=4).nll for b in range(4)])
    close(alone, together, 1e-12)
