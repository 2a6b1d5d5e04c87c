"""TrellisNet across segments, where the original is not exact and ours is.

The original pads the injection with zeros at the start of every segment, so the first positions miss the tokens before
them, and repeats one position of history as far as its kernel reaches. `test_parity_equilibrium` shows that our cell
reproduces its second segment when given that memory. With its own memory ours equals one solve of the whole text.
"""

import dataclasses

import torch

from deqkit import Tolerance
from interop.recordings import Case, as_recorded, assert_same, each_recording
from interop.test_parity_equilibrium import SETTINGS


def run_segments(recording, loss):
    """All segments with our own memory, in training mode."""
    model, memory, outputs = recording.model(loss), None, []
    for segment in recording.segments:
        case = Case(recording, segment, loss)
        outputs.append(model(case.tokens, case.targets, memory, **SETTINGS))
        memory = outputs[-1].memory
    return model, outputs


def joint_text(recording, loss):
    cases = [Case(recording, segment, loss) for segment in recording.segments]
    return torch.cat([c.tokens for c in cases], 1), torch.cat([c.targets for c in cases], 1)


@each_recording(lambda recording: recording.is_trellis)
def test_segments_equal_one_solve_of_the_whole_text(recording):
    for loss in recording.losses:
        with torch.no_grad():
            model, outputs = run_segments(recording, loss)
            joint = model(*joint_text(recording, loss), **SETTINGS)
        assert_same(torch.cat([as_recorded(o.z) for o in outputs], 2), as_recorded(joint.z))
        assert_same(torch.cat([o.nll for o in outputs], 1), joint.nll)
        for ours, expected in zip(outputs[-1].memory[0], joint.memory[0], strict=True):
            assert_same(ours, expected)


@each_recording(lambda recording: recording.is_trellis)
def test_the_gradient_of_a_later_segment_is_that_of_the_whole_text_with_its_past_held_fixed(recording):
    """Joint solve by hand: only the later positions move, so that the past is as constant as a memory is."""
    loss = recording.losses[-1]
    model, outputs = run_segments(recording, loss)
    adjoint = dataclasses.replace(model.config.adjoint, tol=Tolerance(rtol=1e-12), max_steps=1000)
    last = Case(recording, recording.segments[-1], loss)
    split = sum(o.hidden.shape[1] for o in outputs[:-1])
    tokens_BT, _ = joint_text(recording, loss)
    cell = model.cells[0]

    def gradients(value):
        return torch.autograd.grad(value, [p for p in model.parameters() if p.numel()])

    memory = outputs[-2].memory if len(outputs) > 1 else None
    actual = gradients(model(last.tokens, last.targets, memory, adjoint=adjoint, **SETTINGS).loss)

    x_BTD = model.embed(tokens_BT)
    x_BTD = torch.cat([x_BTD[:, :split].detach(), x_BTD[:, split:]], 1)
    f, args = cell.bind(cell.inject(x_BTD))
    past = [part[:, :split] for part in _joined(outputs)]

    def later(state):
        whole = tuple(torch.cat(pair, 1) for pair in zip(past, state, strict=True))
        return tuple(part[:, split:] for part in f(whole, *args))

    state = adjoint.attach(later, tuple(part.detach() for part in outputs[-1].z))
    expected = gradients(model.softmax.nll(cell.output(state), last.targets).mean())
    for ours, joint in zip(actual, expected, strict=True):
        assert float((ours - joint).norm()) <= 1e-7 * float(joint.norm())


def _joined(outputs):
    """h and c over all segments, detached."""
    return [torch.cat([part.detach() for part in parts], 1) for parts in zip(*(o.z for o in outputs), strict=True)]


@each_recording(lambda recording: recording.is_trellis)
def test_the_first_segment_agrees_with_the_original_and_later_ones_do_not(recording):
    """The fault of the original begins with the segment; a kernel of one tap has no history to get wrong."""
    with torch.no_grad():
        _, outputs = run_segments(recording, recording.losses[0])
    first, *later = (
        (as_recorded(output.z) - Case(recording, segment).array("z_star")).abs()
        for segment, output in zip(recording.segments, outputs, strict=True)
    )
    assert first.max() < 1e-9
    for difference_BDT in later:
        has_history = recording.config["kernel_size"] > 1
        assert (difference_BDT[..., 0].max() > 1e-6) == has_history
