"""Gradients in float32 against the exact ones: ours with default settings, and the original's as shipped."""

import torch

from interop.gradients import global_error
from interop.recordings import each_case


def error_as_shipped(case):
    """The smallest of the errors that the original had, with any of its solvers and its own tolerances."""
    meta = case.recording.meta
    shipped = [value for key, value in meta.items() if key.startswith("as_shipped_float32")]
    if case.recording.is_trellis:
        rows = [row[f"{case.loss}_{case.segment}"]["grad_vs_quirk_exact"] for row in shipped]
    else:
        rows = [row[case.segment]["grad"] for by_solver in shipped for row in by_solver.values()]
    return min((row["global_rel"] for row in rows), default=0.0)


def single(memory):
    return tuple(type(part)(*(tensor.float() for tensor in part)) for part in memory)


@each_case(error_as_shipped)
def test_our_gradients_are_closer_to_the_exact_ones_than_the_original_s(case):
    model = case.model(torch.float32)
    output = model(case.tokens, case.targets, single(case.memory(model)))
    output.loss.backward()
    assert global_error(model, case.gradients("exact")) < error_as_shipped(case)
