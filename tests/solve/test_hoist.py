"""What f computes without its state is computed once in a solve, and nothing else changes."""

import threading
import weakref
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import spectral_norm, weight_norm
from torch.utils._python_dispatch import TorchDispatchMode

from deqkit import DEQ, Tolerance, fixed_point
from deqkit.analysis.solver_bench.cells import CELLS, CellSize
from deqkit.solve import FixedPointIteration, Solution, _hoist
from deqkit.solve._hoist import Hoist
from problems import normal

# B samples, T positions, D width

B, D = 4, 8
TOL = Tolerance(rtol=1e-6)
SMALL = CellSize(batch=4, length=6, width=16, heads=2, hidden=8)


@pytest.fixture(autouse=True)
def everything_pays(monkeypatch):
    """These matrices are too small for it."""
    for name in ("LEAST_SECONDS", "SECONDS_TO_NOTE", "SECONDS_PER_CALL", "SECONDS_PER_HIT"):
        monkeypatch.setattr(_hoist, name, 0.0)


class Operations(TorchDispatchMode):
    """Counts what torch is asked to do."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.counts[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def weight(seed: int, size: int = D, norm: float = 0.5) -> Tensor:
    w_DD = normal(seed, size, size)
    return w_DD * (norm / torch.linalg.matrix_norm(w_DD, 2))


W_DD, U_DD = weight(1), weight(2)
X_BD = normal(3, B, D)


def solve(f: Callable[..., Any], *args: Any, hoist: bool, z0: Any = None, **settings: Any) -> Solution:
    z0 = torch.zeros_like(args[0]) if z0 is None else z0
    return fixed_point(f, z0, args, tol=TOL, max_steps=60, hoist=hoist, **settings)


def assert_same_solve(f: Callable[..., Any], *args: Any, **settings: Any) -> Solution:
    with_it, without = (solve(f, *args, hoist=hoist, **settings) for hoist in (True, False))
    assert torch.equal(with_it.z, without.z) and torch.equal(with_it.residual, without.residual)
    assert with_it.num_evals.tolist() == without.num_evals.tolist()
    return with_it


def products(f: Callable[..., Any], *args: Any, hoist: bool, **settings: Any) -> tuple[int, int]:
    """Matrix products and evaluations of a solve."""
    with Operations() as operations:
        solution = solve(f, *args, hoist=hoist, compact=False, **settings)
    return operations.counts["mm"] + operations.counts["addmm"], int(solution.num_evals.max())


def test_a_projection_of_the_input_is_computed_no_more_than_three_times():
    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ W_DD + x @ U_DD)

    assert_same_solve(f, X_BD)
    num_products, num_evals = products(f, X_BD, hoist=True)
    assert num_evals > 5 and num_products == num_evals + 3
    assert products(f, X_BD, hoist=False) == (2 * num_evals, num_evals)


def test_a_chain_of_calls_with_views_and_keywords_is_computed_no_more_than_three_times():
    def f(z: Tensor, x: Tensor) -> Tensor:
        padded = F.pad(x[:, :-1], (1, 0))
        both = torch.cat([padded, x.flip(-1)], dim=-1).chunk(2, dim=-1)
        inputs = torch.addmm(both[0], both[1], U_DD.mT, beta=1, alpha=0.5)
        scale = torch.full((1,), 0.5, dtype=z.dtype).expand(D) * x.new_tensor(2.0)
        return torch.tanh(z @ W_DD + inputs * torch.ones(D, dtype=z.dtype).cumsum(0) / D * scale)

    assert_same_solve(f, X_BD)
    num_products, num_evals = products(f, X_BD, hoist=True)
    assert num_products == num_evals + 3
    with Operations() as operations:
        solve(f, X_BD, hoist=True, compact=False)
    assert operations.counts["flip"] == operations.counts["cumsum"] == 3


@pytest.mark.parametrize("name", CELLS)
def test_cells_of_the_benchmark_have_the_same_equilibria_and_gradients(name):
    found = []
    for hoist in (True, False):
        cell, x = CELLS[name](SMALL, torch.Generator().manual_seed(24))
        x = x.clone().requires_grad_()
        z = DEQ(cell, tol=Tolerance(rtol=1e-4), max_steps=80, hoist=hoist)(x)
        z = z if isinstance(z, tuple) else (z,)
        sum(part.square().mean() for part in z).backward()  # pyright: ignore[reportAttributeAccessIssue]
        found.append([*z, x.grad, *(p.grad for p in cell.parameters())])
    for with_it, without in zip(*found, strict=True):
        assert torch.equal(with_it, without)


class Attention(nn.Module):
    """Queries from the state, keys and values from the input, a module of torch's own."""

    def __init__(self) -> None:
        super().__init__()
        self.attend = nn.MultiheadAttention(D, 2, batch_first=True, dtype=torch.float64)
        self.mix = weight_norm(nn.Linear(D, D, dtype=torch.float64))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        attended, _ = self.attend(z, x, x, need_weights=False)
        return torch.tanh(0.3 * self.mix(z) + attended + x)


def test_weight_norm_is_computed_no_more_than_three_times():
    torch.manual_seed(0)
    cell, x = Attention(), normal(5, B, 3, D)
    assert_same_solve(cell, x)
    with Operations() as operations:
        solve(cell, x, hoist=True, compact=False)
    assert operations.counts["_weight_norm_interface"] == 3


def test_spectral_norm_in_training_still_iterates():
    found = []
    for hoist in (True, False):
        torch.manual_seed(0)
        linear = spectral_norm(nn.Linear(D, D, dtype=torch.float64), n_power_iterations=200)
        solution = solve(lambda z, x, linear=linear: 0.5 * torch.tanh(linear(z) + linear(x)), X_BD, hoist=hoist)
        found.append((solution.z, linear.parametrizations.weight[0]._u.clone()))  # pyright: ignore
    assert torch.equal(found[0][0], found[1][0]) and torch.equal(found[0][1], found[1][1])


def test_a_result_that_f_changes_in_place_is_computed_again():
    def f(z: Tensor, x: Tensor) -> Tensor:
        gates = x @ U_DD
        gates += z @ W_DD
        return gates.tanh_()

    assert_same_solve(f, X_BD)


def test_a_view_of_a_result_that_f_changes_in_place():
    def f(z: Tensor, x: Tensor) -> Tensor:
        gates = x @ U_DD
        gates[:, 1:] += (z @ W_DD)[:, 1:]
        return gates.tanh()

    assert_same_solve(f, X_BD)


def test_a_buffer_that_f_fills_by_item():
    kept = torch.zeros(B, D, dtype=torch.float64)

    def f(z: Tensor, x: Tensor) -> Tensor:
        fresh = torch.zeros(B, D, dtype=torch.float64)
        fresh[:, 1:] = z[:, :-1]
        kept[:] = z
        return torch.tanh(fresh @ W_DD + kept @ W_DD / 2 + x @ U_DD)

    assert_same_solve(f, X_BD, compact=False)


def test_a_result_that_only_late_evaluations_change():
    def make() -> Callable[..., Tensor]:
        calls = Counter[str]()

        def f(z: Tensor, x: Tensor) -> Tensor:
            calls["f"] += 1
            inputs = x @ U_DD
            return torch.tanh(inputs.add_(z @ W_DD) if calls["f"] > 4 else inputs + z @ W_DD)

        return f

    with_it, without = (solve(make(), X_BD, hoist=hoist) for hoist in (True, False))
    assert torch.equal(with_it.z, without.z)


def test_numbers_that_change_from_call_to_call_are_seen():
    """Such an f is no fixed function; the solve is the same all the same."""

    def make() -> Callable[..., Tensor]:
        calls = Counter[str]()

        def f(z: Tensor, x: Tensor) -> Tensor:
            calls["f"] += 1
            return torch.tanh(z @ W_DD + x * (1 + 0.5 ** calls["f"]))

        return f

    settings: dict[str, Any] = {"compact": False, "solver": FixedPointIteration()}
    with_it, without = (solve(make(), X_BD, hoist=hoist, **settings) for hoist in (True, False))
    assert torch.equal(with_it.z, without.z)


def test_equal_numbers_of_another_kind_are_other_arguments():
    def f(z: Tensor, x: Tensor) -> Tensor:
        whole, real, truth = torch.full((D,), 1), torch.full((D,), 1.0), torch.full((D,), True)
        assert (whole.dtype, real.dtype, truth.dtype) == (torch.int64, torch.float32, torch.bool)
        return torch.tanh(z @ W_DD + x * whole * real * truth)

    assert_same_solve(f, X_BD)


def test_autocast_in_a_part_of_f():
    def f(z: Tensor, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            rough = x @ U_DD.float()
        exact = x @ U_DD.float()
        assert (rough.dtype, exact.dtype) == (torch.bfloat16, torch.float32)
        return torch.tanh(z @ W_DD.float() + exact + rough.float())

    assert_same_solve(f, X_BD.float())


def test_random_numbers_without_the_state_are_still_found_out():
    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ W_DD + F.dropout(x, 0.5))

    with pytest.raises(ValueError, match="not one fixed function"):
        solve(f, X_BD, hoist=True)


def test_an_f_that_differentiates():
    """The gradient of an energy, as in Hopfield networks and denoisers."""

    def f(z: Tensor, x: Tensor) -> Tensor:
        with torch.enable_grad():
            z = z.detach().requires_grad_()
            inputs = (x @ U_DD).detach().requires_grad_()
            energy = (z @ W_DD).square().sum() / 2 - (z * (inputs @ U_DD)).sum()
            (slope,) = torch.autograd.grad(energy, z)
        return z.detach() - 0.5 * (slope + z.detach())

    assert_same_solve(f, X_BD)


def test_an_equilibrium_inside_another():
    inner = DEQ(lambda z, x: torch.tanh(z @ W_DD + x @ U_DD), tol=Tolerance(rtol=1e-8))

    def on_the_input(z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(z @ W_DD + inner(x))

    def on_the_state(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * inner(z + x)

    for f in (on_the_input, on_the_state):
        assert_same_solve(f, X_BD)


def test_inference_mode():
    with torch.inference_mode():
        x = X_BD * 2
        assert_same_solve(lambda z, x: torch.tanh(z @ W_DD + x @ U_DD), x)


@pytest.mark.slow
def test_a_compiled_part_of_f():
    part = torch.compile(lambda z, x: torch.tanh(z @ W_DD + x @ U_DD), backend="eager")
    assert_same_solve(lambda z, x: part(z, x), X_BD, compact=False)


def test_solves_in_two_threads():
    results: dict[int, Tensor] = {}

    def work(seed: int) -> None:
        x = normal(seed, B, D)
        results[seed] = solve(lambda z, x: torch.tanh(z @ W_DD + x @ U_DD), x, hoist=True).z

    threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for seed, z in results.items():
        x = normal(seed, B, D)
        assert torch.equal(z, solve(lambda z, x: torch.tanh(z @ W_DD + x @ U_DD), x, hoist=False).z)


def test_nothing_is_kept_after_a_solve():
    kept: list[weakref.ref[Tensor]] = []

    def f(z: Tensor, x: Tensor) -> Tensor:
        inputs = x @ U_DD
        kept.append(weakref.ref(inputs))
        return torch.tanh(z @ W_DD + inputs)

    solve(f, X_BD, hoist=True)
    assert kept and all(ref() is None for ref in kept)


def test_only_what_is_used_again_is_kept():
    hoist = Hoist()
    made: list[weakref.ref[Tensor]] = []

    def f(z: Tensor, x: Tensor) -> Tensor:
        new = torch.tensor([float(len(made))]) * x  # another number in every evaluation
        made.append(weakref.ref(new))
        return z + new + x.sin()

    with torch.no_grad():
        for _ in range(4):
            hoist.evaluate(f, X_BD.clone(), (X_BD,))
    assert [ref() is None for ref in made] == [True] * 4


def test_a_cell_that_binds_sees_to_it_itself_and_an_idle_mode_is_off():
    seen = []

    class Cell(nn.Module):
        def bind(self, x: Tensor) -> tuple[Any, tuple[Tensor, ...]]:
            return self._step, (x @ U_DD,)

        def _step(self, z: Tensor, inputs: Tensor) -> Tensor:
            seen.append(torch.overrides._get_current_function_mode())
            return torch.tanh(z @ W_DD + inputs)

    DEQ(Cell(), tol=TOL)(X_BD)
    assert seen and all(mode is None for mode in seen)

    seen.clear()

    def f(z: Tensor, x: Tensor) -> Tensor:
        seen.append(torch.overrides._get_current_function_mode())
        return torch.tanh(z @ W_DD + x)  # nothing to compute once

    solve(f, X_BD, hoist=True, compact=False)
    assert [mode is None for mode in seen] == [True, False] + [True] * (len(seen) - 2)


def test_what_saves_too_little_is_not_left_out(monkeypatch):
    seen = []

    def f(z: Tensor, x: Tensor) -> Tensor:
        seen.append(torch.overrides._get_current_function_mode())
        return torch.tanh(z @ W_DD + x @ U_DD)

    monkeypatch.setattr(_hoist, "SECONDS_PER_CALL", 1.0)
    solve(f, X_BD, hoist=True, compact=False)
    assert [mode is None for mode in seen] == [True, False, False] + [True] * (len(seen) - 3)

    seen.clear()
    monkeypatch.setattr(_hoist, "LEAST_SECONDS", 1.0)
    solve(f, X_BD, hoist=True, compact=False)
    assert seen == [None] * len(seen)


def test_equal_calls_have_results_of_their_own():
    linear = nn.Linear(D, D, dtype=torch.float64)
    net = nn.Sequential(linear, nn.ReLU(inplace=True))

    def cloned(z: Tensor, x: Tensor) -> Tensor:
        a, b = x.clone(), x.clone()
        a[:, 0] = 0.5 * z[:, 0]
        return torch.tanh(z @ W_DD + a - b)

    def with_relu(z: Tensor, x: Tensor) -> Tensor:
        return 0.3 * torch.tanh(z @ W_DD) + linear(x) - net(x)

    def buffers(z: Tensor, x: Tensor) -> Tensor:
        filled, mask = torch.zeros_like(x), torch.zeros_like(x)
        filled.copy_(z)
        return torch.tanh(filled @ W_DD + x @ U_DD + mask)

    for f in (cloned, with_relu, buffers):
        with torch.no_grad():
            assert_same_solve(f, X_BD)


class Hidden:
    """Keeps things in a buffer, in ways that torch does not count as changes."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.kept = torch.zeros(B, D, dtype=torch.float64)

    def __call__(self, z: Tensor, x: Tensor) -> Tensor:
        inputs = x @ U_DD
        match self.how:
            case "data of a result":
                inputs.data.add_(z @ W_DD)
            case "numpy of a result":
                values = inputs.numpy()
                values += (z @ W_DD).numpy()
            case "data of a buffer":
                self.kept.data.copy_(z)
                inputs = inputs + self.kept @ W_DD
            case "another tensor as data":
                self.kept.data = z
                inputs = inputs + self.kept @ W_DD
            case "numpy into an empty tensor":
                out = torch.empty(B, D, dtype=torch.float64)
                out.numpy()[:] = (z @ W_DD).numpy()
                inputs = inputs + out
            case "numpy into zeros":
                out = torch.zeros(B, D, dtype=torch.float64)
                out.numpy()[:] = (z @ W_DD).numpy()
                inputs = inputs + out
        return torch.tanh(inputs)


@pytest.mark.parametrize(
    "how",
    [
        "data of a result",
        "numpy of a result",
        "data of a buffer",
        "another tensor as data",
        "numpy into an empty tensor",
        "numpy into zeros",
    ],
)
def test_changes_that_torch_does_not_count(how):
    assert_same_solve(Hidden(how), X_BD, compact=False)
    assert_same_solve(Hidden(how), X_BD, compact=False, solver=FixedPointIteration())


def test_a_list_that_is_filled_with_other_tensors():
    work: list[Tensor] = []

    def f(z: Tensor, x: Tensor) -> Tensor:
        work.extend(torch.from_numpy(z.numpy().copy()) for _ in range(3))
        joined = torch.cat(work, dim=-1)
        work.clear()
        return torch.tanh(joined[:, :D] @ W_DD + x @ U_DD)

    for _ in range(5):
        assert_same_solve(f, X_BD, compact=False)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("padding", [False, True])
def test_the_fast_way_through_attention_is_not_blocked(padding):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(D, 2, dim_feedforward=16, batch_first=True)
    encoder = nn.TransformerEncoder(layer, 2).eval()
    mask = torch.zeros(B, 5, dtype=torch.bool)
    mask[:, 3:] = padding
    x = normal(7, B, 5, D).float()

    class Cell(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.encoder = encoder

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return 0.3 * self.encoder(z + x, src_key_padding_mask=mask[: len(z)])

    cell = Cell().eval()
    assert_same_solve(cell, x, compact=False)
    assert_same_solve(lambda z, x: cell(z, x), x, compact=False)


def test_lazy_modules_and_modules_that_are_made_in_the_first_call():
    def solved(make: Callable[[], Any], *, hoist: bool) -> Tensor:
        torch.manual_seed(0)
        return solve(make(), X_BD.float(), hoist=hoist, compact=False).z

    class Late(nn.Module):
        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            if not hasattr(self, "norm"):
                self.norm, self.linear = nn.LayerNorm(D), nn.Linear(D, D)
            return 0.3 * torch.tanh(self.linear(z) + self.norm(x))

    def lazy() -> Any:
        linear = nn.LazyLinear(D)
        return lambda z, x: 0.3 * torch.tanh(linear(z) + linear(x))

    for make in (lazy, Late):
        assert torch.equal(solved(make, hoist=True), solved(make, hoist=False))


def test_running_means_are_updated_as_often():
    def means(*, hoist: bool) -> Tensor:
        norm = nn.BatchNorm1d(D, dtype=torch.float64)
        solve(lambda z, x: torch.tanh(z @ W_DD + norm(x) * 0.1), X_BD, hoist=hoist, compact=False)
        return norm.running_mean  # pyright: ignore[reportReturnType]

    assert torch.equal(means(hoist=True), means(hoist=False))


@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")  # torch's own use of it
def test_forward_mode_inside_f():
    def f(z: Tensor, x: Tensor) -> Tensor:
        slope = torch.func.jvp(lambda y: torch.sin(y @ U_DD) * X_BD.cos(), (x,), (X_BD,))[1]
        return 0.3 * slope + 0.1 * z

    def pulled_back(z: Tensor, x: Tensor) -> Tensor:
        pull: Any = torch.func.vjp(lambda y: torch.tanh(y @ W_DD + x @ U_DD), z)[1]
        return 0.2 * pull(X_BD.sin())[0] + x

    assert_same_solve(f, X_BD, compact=False)
    assert_same_solve(pulled_back, X_BD, compact=False)


def test_a_result_that_f_differentiates_by():
    def f(z: Tensor, x: Tensor) -> Tensor:
        y = x.detach().clone()
        with torch.enable_grad():
            y.requires_grad_()
            (torch.tanh(y @ U_DD) * z.detach()).sum().backward()
        assert y.grad is not None
        return torch.tanh(z @ W_DD + 0.3 * y.grad + x @ U_DD)  # not solved by 0, from where it starts

    assert_same_solve(f, X_BD, compact=False)


def test_what_would_need_much_memory_is_not_kept():
    alive: list[weakref.ref[Tensor]] = []
    most = Counter[str]()

    def f(z: Tensor, x: Tensor) -> Tensor:
        y = x
        for _ in range(40):
            y = torch.sin(y @ U_DD)
            alive.append(weakref.ref(y))
            most["alive"] = max(most["alive"], sum(ref() is not None for ref in alive))
        return torch.tanh(z @ W_DD + y)

    assert_same_solve(f, X_BD)
    assert 1 < most["alive"] <= 20


def test_many_small_calls_are_not_watched(monkeypatch):
    monkeypatch.undo()
    seen = Counter[str]()

    def f(z: Tensor, x: Tensor) -> Tensor:
        for place in range(200):
            seen[f"watched {place}"] += torch.overrides._get_current_function_mode() is not None
            z = 0.9 * torch.tanh(z) + 0.1 * x
        return z

    monkeypatch.setattr(_hoist, "LEAST_SECONDS", 0.0)
    assert_same_solve(f, X_BD, compact=False)
    assert max(seen.values()) <= 1  # in one evaluation, most of it no longer


def test_random_numbers_under_a_seed_of_their_own():
    def f(z: Tensor, x: Tensor) -> Tensor:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(5)
            x = F.dropout(x, 0.2)
            z = F.dropout(z, 0.2)
        return torch.tanh(z @ W_DD + x @ U_DD)

    assert_same_solve(f, X_BD, compact=False)


def test_zeros_of_another_sign_are_other_results():
    calls = Counter[str]()

    def make() -> Callable[..., Tensor]:
        calls.clear()
        zero = torch.zeros(D, dtype=torch.float64)

        def f(z: Tensor, x: Tensor) -> Tensor:
            calls["f"] += 1
            zero.numpy()[:] = -0.0 if calls["f"] > 2 else 0.0
            return torch.tanh(z @ W_DD + x * torch.copysign(torch.ones(D, dtype=torch.float64), zero * 1))

        return f

    settings: dict[str, Any] = {"compact": False, "solver": FixedPointIteration()}
    with_it, without = (solve(make(), X_BD, hoist=hoist, **settings).z for hoist in (True, False))
    assert torch.equal(with_it, without)


def test_factorisations_are_kept_and_nested_tensors_left_alone():
    def factors(z: Tensor, x: Tensor) -> Tensor:
        q, r = torch.linalg.qr(U_DD)
        return torch.tanh(z @ W_DD + x @ q @ r)

    assert_same_solve(factors, X_BD)
    with Operations() as operations:
        solve(factors, X_BD, hoist=True, compact=False)
    assert operations.counts["linalg_qr"] == 3

    parts = torch.nested.as_nested_tensor([X_BD[0, :3], X_BD[1, :5]], layout=torch.jagged)

    def nested(z: Tensor, x: Tensor) -> Tensor:
        padded = torch.nested.to_padded_tensor(parts * 2, 0.0)
        return torch.tanh(z @ W_DD + x @ U_DD + padded.sum())

    assert_same_solve(nested, X_BD)


def test_calls_that_shift_when_samples_leave_are_tried_again():
    """What was found out before samples left is found out again, wherever the call then stands."""

    def make() -> Callable[..., Tensor]:
        buffer = torch.zeros(B, D, dtype=torch.float64)

        def f(z: Tensor, x: Tensor, gain: Tensor) -> Tensor:
            rows = torch.stack([row * 1.0 for row in x.unbind(0)])
            buffer.numpy()[: len(z)] = z.numpy()
            return torch.tanh(gain * ((buffer * 1.0)[: len(z)] @ W_DD) + rows @ U_DD)

        return f

    gain = torch.tensor([0.1, 0.1, 0.1, 1.9], dtype=torch.float64).unsqueeze(1)
    found = [
        fixed_point(make(), torch.zeros_like(X_BD), (X_BD, gain), tol=TOL, solver=FixedPointIteration(), hoist=hoist)
        for hoist in (True, False)
    ]
    assert torch.equal(found[0].z, found[1].z)
