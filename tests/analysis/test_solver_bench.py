"""The parts of the solver benchmark, each against an answer known from elsewhere."""

import json
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from deqkit.analysis.results import results_header, write_results
from deqkit.analysis.solver_bench.cells import CELLS, CellSize, load_cell
from deqkit.analysis.solver_bench.measure import MeasuredCell, initial_state
from deqkit.analysis.solver_bench.methods import DEFAULT, NO_COMPACTION, Settings, all_methods
from deqkit.analysis.solver_bench.reference import joined_gradient, reference_gradient, relative_residual
from deqkit.analysis.solver_bench.run import SolverBenchConfig
from deqkit.analysis.solver_bench.summary import summarise

TINY = CellSize(batch=3, length=5, width=8, heads=2, hidden=4)


class Linear(nn.Module):
    """z = z W + x: the equilibrium is x (I - W)^-1."""

    def __init__(self, *, norm: float = 0.5) -> None:
        super().__init__()
        w = torch.randn(6, 6, generator=torch.Generator().manual_seed(3))
        self.w = nn.Parameter(norm * w / torch.linalg.matrix_norm(w, 2))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return z @ self.w + x


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """These tensors are so small that threads only wait for each other, for seconds on a busy machine."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(4, 6, generator=torch.Generator().manual_seed(1))


def closed_form_gradient(cell: Linear, x: Tensor, loss: Callable[[Tensor], Tensor]) -> Tensor:
    w = cell.w.detach().double().requires_grad_()
    z = torch.linalg.solve((torch.eye(6, dtype=torch.float64) - w).mT, x.double().mT).mT
    return torch.autograd.grad(loss(z), w)[0].flatten()


def test_reference_gradient_is_the_closed_form(x):
    cell, loss = Linear(), lambda z: z.sin().mean()
    reference = reference_gradient(cell, x, loss)
    assert reference is not None
    torch.testing.assert_close(reference.gradient, closed_form_gradient(cell, x, loss), rtol=1e-9, atol=1e-12)
    assert cell.w.grad is None and cell.w.dtype is torch.float32


def test_there_is_no_reference_where_plain_iteration_diverges(x):
    assert reference_gradient(Linear(norm=5.0), x, lambda z: z.mean(), max_steps=200) is None


def test_measuring_counts_evaluations_products_and_samples(x):
    cell = Linear()
    measured = MeasuredCell(cell, clock=iter(range(10_000)).__next__)

    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(ctx, z):
            return z.clone()

        @staticmethod
        def backward(ctx, *grads):
            z = torch.zeros(3, 6, requires_grad=True)
            with torch.enable_grad():
                f_z = measured(z, x[:3])
            for _ in range(2):
                torch.autograd.grad(f_z, z, torch.ones(3, 6), retain_graph=True)
            return grads[0]

    def solve() -> Tensor:
        with torch.no_grad():
            z = measured(torch.zeros_like(x), x)
            measured(z[:2], x[:2])
        return Rule.apply(measured(z, x))  # pyright: ignore[reportReturnType]

    grad = torch.autograd.grad
    _, tally = measured.measure(solve, lambda z: z.sum())
    assert torch.autograd.grad is grad
    assert (tally.evals_forward, tally.sample_evals_forward) == (3, 10)
    assert (tally.evals_backward, tally.sample_evals_backward) == (1, 3)
    assert (tally.vjps, tally.sample_vjps) == (2, 6)
    assert tally.parameter_products == 1
    # The clock ticks once a reading: two readings an evaluation or product, so each lasts one tick.
    assert tally.seconds["f"] == 4 and tally.seconds["vjp"] == 2
    assert tally.total_seconds == sum(tally.seconds.values()) + tally.outside_seconds
    assert cell.w.grad is not None


def test_products_with_parameters_are_told_from_products_with_the_state(x):
    measured = MeasuredCell(Linear(), clock=iter(range(10_000)).__next__)

    def solve() -> Tensor:
        z = measured(torch.zeros_like(x), x)
        torch.autograd.grad(z.sum(), list(measured.parameters()), retain_graph=True)
        return z

    _, tally = measured.measure(solve, lambda z: z.sum())
    assert (tally.vjps, tally.parameter_products) == (0, 2)


def test_an_unmeasured_cell_is_the_cell_itself(x):
    cell = Linear()
    assert torch.equal(MeasuredCell(cell, clock=float)(x, x), cell(x, x))


@pytest.mark.parametrize("name", CELLS)
def test_cells_are_causal_and_per_sample(name):
    cell, x = CELLS[name](TINY, torch.Generator().manual_seed(3))
    parts = [torch.randn_like(part) for part in _leaves(initial_state(cell, x))]
    z = tuple(parts) if len(parts) > 1 else parts[0]
    before = _leaves(cell(z, x))
    later = x.clone()
    later[:, 3:] += 1
    for old, new in zip(before, _leaves(cell(z, later)), strict=True):
        torch.testing.assert_close(new[:, :3], old[:, :3])
        assert not torch.equal(new[:, 3:], old[:, 3:])
    first = _leaves(cell(tuple(p[:1] for p in z) if isinstance(z, tuple) else z[:1], x[:1]))
    for old, new in zip(before, first, strict=True):
        torch.testing.assert_close(new, old[:1])


@pytest.mark.parametrize("method", all_methods(), ids=lambda method: method.label)
@pytest.mark.parametrize("name", CELLS)
def test_every_method_finds_the_equilibrium_and_its_gradient(name, method):
    cell, x = CELLS[name](TINY, torch.Generator().manual_seed(3))
    loss = lambda z: torch.stack([part.sin().mean() for part in _leaves(z)]).sum()  # noqa: E731
    z = method.build(cell, Settings(tol=1e-5, max_steps=200))(x).z
    loss(z).backward()
    assert relative_residual(cell(z, x), z) <= 2e-5
    if method.label != "torchdeq/anderson":  # its backward solve does not converge (PEERS.md 1.5, 8)
        reference = reference_gradient(cell, x, loss)
        assert reference is not None
        error = (joined_gradient(cell) - reference.gradient).norm() / reference.gradient.norm()
        assert error < 1e-2  # the tolerance, times the conditioning of these cells


def test_a_cell_is_loaded_from_a_file(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("import torch\ndef make():\n    return torch.nn.Linear(2, 2), torch.zeros(1, 2)\n")
    cell, x = load_cell(f"{file}:make")
    assert isinstance(cell, nn.Linear) and x.shape == (1, 2)


@pytest.mark.parametrize(
    ("code", "spec", "message"),
    [
        ("", "{}", "file.py:function"),
        ("", "{}:make", "no function 'make'"),
        ("", "missing.py:make", "does not exist"),
        ("def make(", "{}:make", "cannot be loaded"),
        ("make = lambda: 3", "{}:make", "must return"),
        ("make = lambda: (3, 4)", "{}:make", "nn.Module with parameters"),
        ("import torch\nmake = lambda: (torch.nn.Linear(2, 2), 4)", "{}:make", "x must be a tensor"),
    ],
)
def test_a_wrong_cell_file_is_explained(tmp_path, code, spec, message):
    file = tmp_path / "mine.py"
    file.write_text(code)
    with pytest.raises(ValueError, match=message):
        load_cell(spec.format(file))


@pytest.mark.parametrize("field", [{"rounds": 0}, {"tols": ()}, {"tols": (2.0,)}, {"max_steps": 0}, {"cells": ()}])
def test_a_wrong_config_is_refused(field):
    with pytest.raises(ValueError):
        SolverBenchConfig(**field)


def row(label: str, *, cost: float, **numbers) -> dict:
    library, _, method = label.partition("/")
    measured = {"residual": 5e-4, "grad_error": 0.05, "grad_error_estimate": 0.1, "outside_share": 0.1}
    measured |= {"peak_mib": 50.0, "vjps": 30, "cost": cost, "total_seconds": [cost, 2 * cost, 3 * cost]}
    return {"library": library, "method": method, "tol": 1e-3, "failure": None, **measured, **numbers}


def test_bars_are_computed_from_the_rows():
    transformer = [
        row("torchdeq/broyden", cost=200.0),
        row("torchdeq/fixed_point_iter", cost=100.0),
        row("torchdeq/anderson", cost=10.0, residual=0.1),  # not converged: no rival
        row(DEFAULT, cost=50.0, solver_overhead=0.06),
        row("deqkit/anderson prefix", cost=55.0, solver_overhead=0.04),
        row("deqkit/anderson", cost=50.0, outside_share=0.2),
        row("deqkit/broyden", cost=40.0, grad_error=0.06, peak_mib=90.0),
    ]
    mixed = [row(DEFAULT, cost=10.0), row(NO_COMPACTION, cost=30.0)]
    bars = {b["name"]: b for b in summarise([_cell("transformer", transformer), _cell("mixed", mixed)])}
    assert {name: (b["value"], b["holds"]) for name, b in bars.items()} == {
        "cost of default / torchdeq's best": (0.5, True),
        "cost as exact / torchdeq's, transformer": (0.5, True),
        "cost as exact / torchdeq's, mixed": (None, None),
        "forward solver / f, default": (0.06, False),
        "forward solver / f, anderson prefix": (0.04, True),
        "time outside f, anderson": (0.2, False),
        "time outside f, broyden": (0.1, True),
        "peak tensors, default": (50.0, True),
        "peak tensors, broyden": (90.0, False),
        "products in the backward solve": (30, True),
        "compaction speed-up, 7 easy + 1 hard": (3.0, True),
        "reported gradient error, factor off": (2.0, True),
    }


def test_a_cheaper_but_less_exact_gradient_does_not_hold_the_bar():
    rows = [row("torchdeq/fixed_point_iter", cost=100.0), row(DEFAULT, cost=50.0, grad_error=0.06)]
    bars = summarise([_cell("transformer", rows)])
    assert (bars[0]["value"], bars[0]["holds"]) == (0.5, False)
    assert (bars[1]["value"], bars[1]["holds"]) == (None, False)


def test_what_was_not_measured_has_no_verdict():
    failed = {"library": "deqkit", "method": "default", "tol": 1e-3, "failure": "ValueError: no"}
    assert {bar["holds"] for bar in summarise([_cell("transformer", [failed])])} == {None}


def test_results_are_written_whole_or_not_at_all(tmp_path):
    path = tmp_path / "deep" / "results.json"
    header = results_header(benchmark="test", seed=3, config=SolverBenchConfig())
    write_results(path, {**header, "value": 1})
    written = json.loads(path.read_text())
    assert written["seed"] == 3 and written["config"]["rounds"] == 5
    assert written["machine"]["torch"] == torch.__version__
    with pytest.raises(ValueError):
        write_results(path, {"value": float("nan")})
    with pytest.raises(TypeError):
        write_results(path, {"value": torch.zeros(1)})
    assert json.loads(path.read_text()) == written
    assert [file.name for file in path.parent.iterdir()] == ["results.json"]


def _cell(name: str, rows: list[dict]) -> dict:
    return {"cell": name, "rows": rows}


def _leaves(state) -> list[Tensor]:
    return list(state) if isinstance(state, tuple | list) else [state]
