"""Broyden against dense matrices: g(z) = f(z) - z, B0 = -I, good updates of the inverse by Sherman-Morrison."""

import pytest
import torch

from deqkit.solve import Broyden, Tolerance, fixed_point
from problems import evaluation, normal, tanh

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
        fz_BPN = f(z_BPN.view(1, -1)).view(1, 1, -1)
        z_BPN, state = solver.step(evaluation(z_BPN, fz_BPN), state)
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


def test_pairs_of_rounding_noise_drop_out():
    """f(z) = z + 1 up to rounding: its residual tells nothing, and dividing by its changes would send z off."""
    z_BPN = normal(56, 1, 1, 6) + 3
    solver = Broyden()
    state = solver.init(z_BPN, NO_TOL)
    for step in range(5):
        fz_BPN = z_BPN + 1 + torch.finfo(torch.float64).eps * normal(57 + step, 1, 1, 6).sign()
        z_BPN, state = solver.step(evaluation(z_BPN, fz_BPN), state)
        torch.testing.assert_close(z_BPN, fz_BPN)
    assert (state.squares_BPM == 0).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_pairs_whose_residual_turns_are_no_noise(dtype):
    """f(z) = z + R z + b with R'= -R: no residual changes along its step (s.dg = 0), yet two pairs tell all of R.

    Was a bug: all pairs were taken for noise, which left plain iteration, and that diverges here.
    """
    r_NN = torch.tensor([[0.0, 0.3], [-0.3, 0.0]], dtype=dtype)
    b_BN = normal(58, 4, 2).to(dtype)
    f = lambda z, b: z + (r_NN * z.unsqueeze(1)).sum(2) + b  # noqa: E731
    solution = fixed_point(f, torch.zeros_like(b_BN), (b_BN,), solver=Broyden(), tol=Tolerance(rtol=1e-4), max_steps=30)
    torch.testing.assert_close(solution.z, -b_BN @ torch.linalg.inv(r_NN).mT, rtol=1e-2, atol=1e-2)
