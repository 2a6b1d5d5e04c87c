"""Broyden against dense matrices: g(z) = f(z) - z, B0 = -I, good updates of the inverse by Sherman-Morrison."""

import pytest
import torch
from torch.nn import functional as F

from deqkit.solve import Broyden, Status, Tolerance, fixed_point
from problems import normal, tanh

# N numbers in a state; B is the inverse Jacobian here, as in the paper

NO_TOL = Tolerance()


def sherman_morrison(b_NN, dz_N, dg_N):
    """The good update: B + (dz - B dg) dz'B / (dz'B dg), after which B dg = dz."""
    b_dg_N = b_NN @ dg_N
    return b_NN + torch.outer(dz_N - b_dg_N, dz_N @ b_NN) / (dz_N @ b_dg_N)


def dense_broyden(g, z_N, *, steps, memory=None, damping=1.0):
    """Iterates z_0 ... z_steps of Broyden's method; B is rebuilt from -I with the last `memory` pairs."""
    iterates, pairs, g_N = [z_N], [], g(z_N)
    for _ in range(steps):
        b_NN = -torch.eye(len(z_N), dtype=z_N.dtype)
        for dz_N, dg_N in pairs if memory is None else pairs[-memory:]:
            b_NN = sherman_morrison(b_NN, dz_N, dg_N)
        next_z_N = iterates[-1] - damping * b_NN @ g_N
        next_g_N = g(next_z_N)
        pairs.append((next_z_N - iterates[-1], next_g_N - g_N))
        iterates.append(next_z_N)
        g_N = next_g_N
    return torch.stack(iterates)


def drive(solver, f, z_N, *, steps):
    """The same iterates from the solver, stepped by hand on a batch of one."""
    z_BPN = z_N.view(1, 1, -1)
    state = solver.init(z_BPN, NO_TOL)
    iterates = [z_N]
    for _ in range(steps):
        z_BPN, state = solver.step(z_BPN, f(z_BPN.view(1, -1)).view(1, 1, -1), state)
        iterates.append(z_BPN.flatten())
    return torch.stack(iterates), state


PROBLEMS = {
    "tanh": (tanh(torch.float64).f, (tanh(torch.float64).args[0][:1],), 7),
    # Not a contraction: wrong updates would blow up at once.
    "affine": (lambda z, a: z @ a + 1, (-1.5 * torch.eye(6).double() + 0.5 * normal(50, 6, 6),), 6),
}


@pytest.mark.parametrize("damping", [1.0, 0.6])
@pytest.mark.parametrize("memory", [None, 1, 2, 3, 9])
@pytest.mark.parametrize("problem", PROBLEMS)
def test_iterates_are_those_of_the_dense_method(problem, memory, damping):
    """Full memory: the paper's method. Limited: exactly the matrix that the last m pairs build from -I."""
    f, args, steps = PROBLEMS[problem]
    steps = steps if memory is None else 10
    z0_N = normal(51, 6)
    dense = dense_broyden(
        lambda z_N: f(z_N.view(1, -1), *args).flatten() - z_N, z0_N, steps=steps, memory=memory, damping=damping
    )
    solver = Broyden(memory=100 if memory is None else memory, damping=damping)
    iterates, _ = drive(solver, lambda z: f(z, *args), z0_N, steps=steps)
    # Rounding is amplified along the way, most where few pairs leave a poorly conditioned B.
    torch.testing.assert_close(iterates, dense, rtol=1e-7, atol=1e-7 * float(dense.abs().max()))
    assert (dense[-1] - dense[-2]).norm() > 1e-12, "compare iterates while they move"


def test_memory_grows_past_its_first_allocation_and_wraps():
    """Room starts at 8 pairs, doubles on demand and is reused after `memory`: 12 pairs over 40 steps."""
    a_NN = normal(52, 30, 30)
    a_NN = 0.95 * a_NN / torch.linalg.matrix_norm(a_NN, 2)
    f = lambda z: torch.tanh(z @ a_NN) + 1  # noqa: E731
    z0_N = normal(53, 30)
    iterates, state = drive(Broyden(memory=12), f, z0_N, steps=25)
    dense = dense_broyden(lambda z_N: f(z_N.view(1, -1)).flatten() - z_N, z0_N, steps=25, memory=12)
    assert state.dz_BPMN.shape[2] == 12
    torch.testing.assert_close(iterates, dense, rtol=1e-6, atol=1e-6)


def test_transposed_inverse_matches_the_dense_one():
    """`apply_transposed` is what ReuseForward starts from: (I - J)^-T v with I - J the negative of g's Jacobian."""
    f, args, _ = PROBLEMS["tanh"]
    z_N = normal(54, 6)
    iterates, state = drive(Broyden(memory=3), lambda z: f(z, *args), z_N, steps=6)
    b_NN = -torch.eye(6).double()
    g = [f(z.view(1, -1), *args).flatten() - z for z in iterates]
    for i in range(2, 5):  # the three pairs before the last step was taken
        b_NN = sherman_morrison(b_NN, iterates[i + 1] - iterates[i], g[i + 1] - g[i])
    v_N = normal(55, 6)
    torch.testing.assert_close(state.apply_transposed(v_N.view(1, 1, -1)).flatten(), -b_NN.mT @ v_N)


def transformer_cell(width=32, heads=2):
    """Post-LN causal block, N(0, 0.05 * sqrt(256 / width)): the gain of the cell in PEERS.md 4, smaller."""
    generator = torch.Generator().manual_seed(0)

    def draw(*shape):
        return torch.randn(shape, generator=generator) * 0.05 * (256 / width) ** 0.5

    qkv, inject, project = draw(width, 3 * width), draw(width, 3 * width), draw(width, width)
    up, down = draw(width, 4 * width), draw(4 * width, width)

    def cell(z_BTD, x_BTD):
        parts = (z_BTD @ qkv + x_BTD @ inject).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (heads, -1)).transpose(1, 2) for part in parts)
        mixed_BTD = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        u_BTD = F.layer_norm(z_BTD + mixed_BTD @ project, (width,))
        return F.layer_norm(u_BTD + F.relu(u_BTD @ up) @ down, (width,))

    return cell, torch.randn(2, 48, width, generator=generator)


@pytest.mark.parametrize("group", ["sample", "prefix"])
@pytest.mark.parametrize("memory", [3, 10])
def test_limited_memory_is_stable_on_a_transformer_cell(memory, group):
    """torchdeq's Broyden with 3 or 10 vectors is nan on this cell (PEERS.md 1.5, 2)."""
    cell, x_BTD = transformer_cell()
    solution = fixed_point(
        cell,
        torch.zeros_like(x_BTD),
        (x_BTD,),
        solver=Broyden(memory=memory, group=group),
        tol=Tolerance(rtol=1e-5),
        max_steps=300,
        trace=True,
    )
    assert solution.status is Status.CONVERGED
    assert solution.trace is not None
    assert all(trace.isfinite().all() and trace.max() < 3 for trace in solution.trace)


def test_the_transformer_cell_is_hard_enough_for_that():
    torchdeq = pytest.importorskip("torchdeq.solver", reason="needs the bench extra")
    cell, x_BTD = transformer_cell()
    for memory in (3, 10):
        z_BTD, _, _ = torchdeq.broyden_solver(
            lambda z: cell(z, x_BTD),
            torch.zeros_like(x_BTD),
            max_iter=80,
            tol=1e-5,
            stop_mode="rel",
            LBFGS_thres=memory,
        )
        assert z_BTD.isnan().any()
