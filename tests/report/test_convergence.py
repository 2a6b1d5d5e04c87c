"""Curves of the trained model, against loops written out here."""

import statistics

import pytest
import torch

from deqkit.report.convergence import NUM_EVALS, Convergence, Trace, measure_convergence
from deqkit.report.history import read_history
from deqkit.report.sections.converging import convergence_caption
from deqkit.report.trained import Trained, load_trained
from deqkit.train.load import load_run
from deqkit.train.tasks import make_task
from report.small import train_run, trellis


def trained_of(path) -> Trained:
    history = read_history(path)
    return load_trained(history, make_task(history.config))


@torch.no_grad()
def changes(path, num_layers: int) -> list[list[float]]:
    """||z' - z|| / ||z'|| of every layer and sample of the second validation segment, by going through the layers."""
    run = load_run(path)
    model, (first, second) = run.model, list(make_task(run.config).evaluation("valid"))[:2]
    x = model.embed(second.tokens_BT if not second.new_context else first.tokens_BT)
    memory = [None] * len(model.cells) if second.new_context else model(first.tokens_BT).memory
    z, found = None, []
    for layer in range(num_layers):
        cell = model.cells[layer % len(model.cells)]
        u = cell.inject(x, memory[layer % len(model.cells)])
        if z is None:
            z = x if path.name == "untied" else cell.initial_state(u)
        after = cell(z, u, memory[layer % len(model.cells)])
        parts = [(z, after)] if isinstance(z, torch.Tensor) else list(zip(z, after, strict=True))
        moved = sum(((new - old).double().flatten(1).square().sum(1) for old, new in parts), torch.zeros(()))
        size = sum((new.double().flatten(1).square().sum(1) for _, new in parts), torch.zeros(()))
        found.append((moved / size).sqrt().tolist())
        z = after
    return found


@pytest.mark.parametrize("kind", ["equilibrium", "tied", "untied", "copy"])
def test_plain_stacking_is_going_through_the_layers(kind, runs, gathered):
    convergence = gathered[kind].measured.convergence
    trace = next(t for t in convergence.traces if t.name in ("plain iteration", "layer after layer"))
    expected = [statistics.median(samples) for samples in changes(runs[kind], 2 if kind == "untied" else 12)]
    assert trace.residuals[:12] == pytest.approx(expected, rel=1e-3)  # float32, and the loop measures in float32
    assert len(trace.residuals) == (2 if kind == "untied" else NUM_EVALS)


def test_a_state_of_two_parts(corpus, tmp_path):
    path = train_run(trellis(corpus), tmp_path / "trellis")
    convergence = measure_convergence(trained_of(path))
    expected = [statistics.median(samples) for samples in changes(path, 6)]
    assert convergence.traces[-1].residuals[:6] == pytest.approx(expected, rel=1e-3)


def test_what_is_compared(gathered):
    names = {kind: [t.name for t in run.measured.convergence.traces] for kind, run in gathered.items()}
    assert names["equilibrium"] == ["Broyden, causal", "Anderson", "plain iteration"]
    assert names["tied"] == ["layer after layer", "Broyden, causal"]
    assert names["untied"] == ["layer after layer"]


def test_the_eigenvalue_tells_whether_plain_iteration_converges(gathered):
    convergence = gathered["equilibrium"].measured.convergence
    plain = convergence.traces[-1]
    assert (convergence.radius < 1) == (plain.residuals[-1] < 1e-3)


def make(depth: int | None = None, **residuals: list[float]) -> Convergence:
    traces = [Trace(name=name, residuals=found) for name, found in residuals.items()]
    return Convergence(
        traces=traces, num_samples=4, length=8, tolerance=None if depth else 0.1, depth=depth, radius=None
    )


def test_captions_follow_the_curves():
    caption = convergence_caption(make(quick=[1.0, 0.05], slow=[1.0, 0.6, 0.3]))
    assert caption == "To the tolerance of 0.1: quick needs 2 evaluations and slow does not get there in 3 evaluations."
    settles = convergence_caption(make(depth=2, layers=[1.0, 0.5, 0.2, 0.001]))
    assert "changes the state by 0.50 of its size" in settles and "it converges" in settles
    wanders = convergence_caption(make(depth=2, layers=[1.0, 0.5, 0.5, 0.4]))
    assert "it goes on changing, by 0.40 at the last" in wanders
    assert "cannot be unrolled further" in convergence_caption(make(depth=2, layers=[1.0, 0.5]))
