"""The equilibrium of the original, found by the model's own default solver, and everything that follows from it."""

import dataclasses

import torch
import torch.nn.functional as F

from deqkit import Status, Tolerance
from deqkit.solve import Broyden, FixedPointIteration
from interop.gradients import assert_gradients
from interop.recordings import Case, as_recorded, assert_same, each_case, each_recording

# The recorded equilibria have residuals of 1e-14 relative to their size, so this leaves some rounding, and far more
# than the error of 1e-9 that is allowed needs for an amplification ||(I - J)^-1|| of 1000.
TIGHT = Tolerance(rtol=1e-13)
SETTINGS = {"tol": TIGHT, "max_steps": 1000}


def tight_adjoint(model):
    """The model's own way to gradients, solved to the end."""
    return dataclasses.replace(model.config.adjoint, tol=Tolerance(rtol=1e-12), max_steps=1000)


def is_hard(recording):
    return recording.config.get("hard", False)


def assert_converged(output):
    assert output.solution.status is Status.CONVERGED, output.solution.describe()


def assert_memory(case, memory):
    """The memory after the segment; of a TrellisNet's the part that the original keeps too."""
    if not case.recording.is_trellis:
        assert_same(memory.z_BMD.transpose(0, 1), case.array("new_mem_z"))
        assert_same(memory.u_BMG.transpose(0, 1), case.array("new_mem_u"))
        return
    h_1BH, c_1BH = case.array("new_mem").chunk(2, -1)
    assert_same(memory.c_B1H.transpose(0, 1), c_1BH)
    if memory.h_BSH.shape[1]:  # nothing is kept for a kernel of one tap
        assert_same(memory.h_BSH[:, -1:].transpose(0, 1), h_1BH)


def assert_scores(case, model, output):
    """Everything the softmax says, in token order."""
    assert_same(model.log_probs(output), case.log_probs)
    assert_same(output.nll.T, case.of_loss("nll"))
    assert_same(output.loss, case.mean_loss.squeeze())


@each_case()
def test_given_the_memory_of_the_original(case):
    model = case.model()
    with torch.no_grad():
        output = model(case.tokens, case.targets, case.memory(model), **SETTINGS)
    assert_converged(output)
    assert_same(as_recorded(output.z), case.array("z_star"))
    assert_scores(case, model, output)
    assert_memory(case, output.memory[0])


@each_recording(lambda recording: not recording.is_trellis)
def test_one_segment_after_the_other_with_our_own_memory(recording):
    model, memory = recording.model(), None
    for segment in recording.segments:
        case = Case(recording, segment)
        with torch.no_grad():
            output = model(case.tokens, case.targets, memory, **SETTINGS)
        assert_same(as_recorded(output.z), case.array("z_star"))
        assert_scores(case, model, output)
        assert_memory(case, output.memory[0])
        memory = output.memory


@each_recording()
def test_the_first_segment_without_a_memory(recording):
    for loss in recording.losses:
        case, model = Case(recording, recording.segments[0], loss), recording.model(loss)
        with torch.no_grad():
            output = model(case.tokens, case.targets, **SETTINGS)
        assert_same(as_recorded(output.z), case.array("z_star"))
        assert_scores(case, model, output)


@each_recording(is_hard)
def test_an_equilibrium_marked_hard_repels_plain_iteration(recording):
    """Otherwise the tests above would not show that our solver finds what plain iteration cannot."""
    model, reached = recording.model(), []
    for segment in recording.segments:
        case = Case(recording, segment)
        with torch.no_grad():
            output = model(case.tokens, None, case.memory(model), solver=FixedPointIteration(), **SETTINGS)
        reached.append(output.solution.status is Status.CONVERGED)
    assert not all(reached)


@each_case(lambda case: is_hard(case.recording))
def test_a_hard_equilibrium_is_not_found_by_luck(case):
    """From starts that differ from zero by rounding, almost, the same solver finds it too."""
    model, memory = case.model(), case.memory(case.model())[0]
    u_BTG = model.cells[0].inject(model.embed(case.tokens), memory)
    start_BTD = case.state("z_star")
    for seed in range(6):
        noise = torch.randn(start_BTD.shape, dtype=start_BTD.dtype, generator=torch.Generator().manual_seed(seed))
        with torch.no_grad():
            z = model.core(u_BTG, memory, z0=1e-6 * noise, **SETTINGS)
        assert_same(as_recorded(z), case.array("z_star"))


@each_case()
def test_the_backward_solve(case):
    """dL/dz at z*, and (I - J')^-1 dL/dz: the gradient of what is added to f at the equilibrium."""
    model, z = case.model(), case.state("z_star")
    leaves = [t.clone().requires_grad_() for t in (z if case.recording.is_trellis else (z,))]
    state = leaves if case.recording.is_trellis else leaves[0]
    loss = model.softmax.nll(model.cells[0].output(state), case.targets).mean()
    direct = torch.autograd.grad(loss, leaves, materialize_grads=True)
    assert_same(as_recorded(direct), case.of_loss("dL_dz"))

    memory = case.memory(model)[0]
    f, args = model.cells[0].bind(model.cells[0].inject(model.embed(case.tokens), memory), memory)
    added = [torch.zeros_like(t).requires_grad_() for t in leaves]

    def shifted(state, added, args):
        value = f(state, *args)
        return tuple(v + a for v, a in zip(value, added, strict=True)) if len(added) > 1 else value + added[0]

    attached = tight_adjoint(model).attach(shifted, z, (tuple(added), args))
    model.softmax.nll(model.cells[0].output(attached), case.targets).mean().backward()
    assert_same(as_recorded([a.grad for a in added]), case.of_loss("implicit_v"))


@each_case()
def test_gradients(case):
    """Of the mean loss, through the equilibrium, exact."""
    model = case.model()
    # Any solver will do here; this one finds the hard equilibria, too.
    settings = {"solver": Broyden(memory=30, group="prefix"), "adjoint": tight_adjoint(model), **SETTINGS}
    output = model(case.tokens, case.targets, case.memory(model), **settings)
    output.loss.backward()
    assert_converged(output)
    assert output.solution.backward.status is Status.CONVERGED, output.solution.backward.describe()
    assert_gradients(model, case.gradients("exact"))


@each_case(lambda case: case.depths)
def test_stacks_of_tied_layers(case, monkeypatch):
    """The cell applied a few times, from zero: what the original trains at first."""
    for depth in case.depths:
        model, stack = case.model(), f"stack{depth}"
        if case.recording.is_trellis:
            _embed_as_the_original(model, monkeypatch)
        output = model(case.tokens, case.targets, case.memory(model), depth=depth)
        output.loss.backward()
        assert_gradients(model, case.gradients(stack))
        if case.recording.is_trellis:
            logits_BTV = case.array(f"{stack}_logits").transpose(0, 1)
            assert_same(model.log_probs(output), logits_BTV.log_softmax(-1))
            assert_same(as_recorded(output.z)[..., -1], case.array(f"{stack}_new_mem").squeeze(0))
            assert_same(output.loss, case.array(f"{stack}_loss_{case.loss}_mean").squeeze())
        else:
            assert_same(as_recorded(output.z), case.array(f"{stack}_z"))
            assert_same(output.nll.T, case.array(f"{stack}_nll"))
            assert_same(output.loss, case.array(f"{stack}_loss_mean").squeeze())


def _embed_as_the_original(model, monkeypatch):
    """Its TrellisNet takes the last token for padding: as an input that token gets no gradient.

    The stacks were recorded as its autograd gives them, with this fault; the exact gradients were not.
    """
    table = model.embedding.tables[0]
    monkeypatch.setattr(model.embedding, "forward", lambda tokens: F.embedding(tokens, table, padding_idx=-1))
