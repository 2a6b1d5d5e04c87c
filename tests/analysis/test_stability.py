"""Spectral radius and penalties against dense Jacobians."""

import math

import pytest
import torch

from deqkit.analysis import jacobian_penalty, spectral_penalty, spectral_radius
from problems import normal, tanh, two_tensors

# B samples, N numbers in a state


def linear(z_BN, a_BNN):
    return (a_BNN @ z_BN.unsqueeze(2)).squeeze(2) + 1


def eigenvalue_sizes(a_BNN):
    return torch.linalg.eigvals(a_BNN).abs().amax(1)


def rotation(angle, radius):
    rows = [[math.cos(angle), -math.sin(angle)], [math.sin(angle), math.cos(angle)]]
    return radius * torch.tensor(rows, dtype=torch.float64)


@pytest.mark.parametrize("seed", range(4))
def test_spectral_radius_of_random_matrices(seed):
    """Full Arnoldi is exact, complex pairs included: half of all random matrices have a dominant one."""
    a_BNN = normal(seed, 5, 8, 8)
    assert torch.linalg.eigvals(a_BNN).imag.abs().amax() > 0.1
    radius_B = spectral_radius(linear, normal(seed + 1, 5, 8), (a_BNN,))
    torch.testing.assert_close(radius_B, eigenvalue_sizes(a_BNN), rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("angle", [0.3, math.pi / 2, math.pi])
def test_spectral_radius_of_rotations(angle):
    """A power iteration with a Rayleigh quotient gives radius * |cos(angle)| here: 0 for a quarter turn."""
    a_BNN = torch.block_diag(rotation(angle, 1.3), rotation(1.0, 0.4)).unsqueeze(0)
    radius_B = spectral_radius(linear, normal(0, 1, 4), (a_BNN,))
    torch.testing.assert_close(radius_B, torch.tensor([1.3], dtype=torch.float64), rtol=1e-9, atol=1e-9)


def test_spectral_radius_with_fewer_steps_than_unknowns():
    """A dominant pair that stands out is found to three digits by 25 steps in 200 dimensions."""
    a_NN = 0.5 * normal(3, 200, 200) / 200**0.5
    a_NN[:2, :2] += rotation(1.2, 1.5)
    radius_B = spectral_radius(linear, normal(4, 1, 200), (a_NN.unsqueeze(0),), steps=25)
    torch.testing.assert_close(radius_B, eigenvalue_sizes(a_NN.unsqueeze(0)), rtol=1e-3, atol=0)


def test_spectral_radius_where_arnoldi_ends_early():
    """Identity, zero, nilpotent and rank-one Jacobians exhaust the Krylov space at once; samples do not mix."""
    nilpotent_NN = torch.diag(torch.ones(5).double(), 1)
    one_N = torch.ones(6).double()
    a_BNN = torch.stack((0.7 * torch.eye(6).double(), torch.zeros(6, 6).double(), torch.outer(one_N, one_N) / 10))
    radius_B = spectral_radius(linear, normal(5, 3, 6), (a_BNN,))
    torch.testing.assert_close(radius_B, torch.tensor([0.7, 0.0, 0.6], dtype=torch.float64), rtol=1e-9, atol=1e-9)
    # The radius of a nilpotent matrix is 0, but eigenvalues of order 6 are known to the sixth root of rounding only.
    assert spectral_radius(linear, normal(5, 1, 6), (nilpotent_NN.unsqueeze(0),)).item() < 0.02


def test_spectral_radius_of_float32_and_of_tuples():
    problem = two_tensors(torch.float64)
    jacobian_BNN = dense_jacobian(problem)
    radius_B = spectral_radius(problem.f, problem.z_star, problem.args)
    torch.testing.assert_close(radius_B, eigenvalue_sizes(jacobian_BNN), rtol=1e-6, atol=1e-8)
    single = two_tensors(torch.float32)
    radius_B = spectral_radius(single.f, single.z_star, single.args)
    assert radius_B.dtype == torch.float32
    torch.testing.assert_close(radius_B.double(), eigenvalue_sizes(jacobian_BNN), rtol=1e-3, atol=1e-4)


def dense_jacobian(problem):
    """df/dz per sample, by autograd on the flattened state."""
    z = problem.z_star
    shapes = [t.shape[1:] for t in z] if isinstance(z, tuple) else None

    def one(sample):
        x = tuple(t[sample : sample + 1] for t in problem.args)

        def f(z_N):
            if shapes is None:
                return problem.f(z_N.unsqueeze(0), *x).flatten()
            parts = z_N.split([s.numel() for s in shapes])
            out = problem.f(tuple(p.reshape(1, *s) for p, s in zip(parts, shapes, strict=True)), *x)
            return torch.cat([t.flatten() for t in out])

        at_N = z[sample] if shapes is None else torch.cat([t[sample].flatten() for t in z])
        return torch.func.jacrev(f)(at_N)

    return torch.stack([one(sample) for sample in range(len(problem.args[0]))])


def test_jacobian_penalty_is_the_mean_square_of_the_jacobian():
    """Unbiased: 4000 probes give ||J||_F^2 / N to 3 percent, five times its standard error."""
    problem = tanh(torch.float64)
    exact = dense_jacobian(problem).square().sum((1, 2)).mean() / 6
    estimate = jacobian_penalty(
        problem.f, problem.z_star, problem.args, probes=4000, generator=torch.Generator().manual_seed(0)
    )
    torch.testing.assert_close(estimate, exact, rtol=0.03, atol=0)
    singles = torch.stack(
        [
            jacobian_penalty(problem.f, problem.z_star, problem.args, generator=torch.Generator().manual_seed(seed))
            for seed in range(300)
        ]
    )
    error = singles.std() / len(singles) ** 0.5
    assert (singles.mean() - exact).abs() < 4 * error


def test_jacobian_penalty_of_a_constant_is_zero():
    for constant in (lambda z: torch.ones_like(z), lambda z: torch.ones_like(z) + 0 * z):
        assert jacobian_penalty(constant, normal(0, 2, 3)).item() == 0


def test_jacobian_penalty_is_differentiable_in_what_f_touches():
    """Against differences of the same estimator with the same noise, in a closed-over weight and in args."""
    w_NN, x_BN, z_BN = 1.5 * normal(6, 4, 4), normal(7, 2, 4), 0.3 * normal(8, 2, 4)

    def value(w_NN, x_BN):
        f = lambda z, x: torch.tanh(z @ w_NN + x)  # noqa: E731
        return jacobian_penalty(f, z_BN, (x_BN,), probes=2, generator=torch.Generator().manual_seed(1))

    assert torch.autograd.gradcheck(value, (w_NN.requires_grad_(), x_BN.requires_grad_()))


def test_jacobian_penalty_gradient_in_expectation():
    """d/dA of ||A||_F^2 / N is 2 A / N for the linear map."""
    a_NN = normal(9, 3, 3).requires_grad_()
    penalty = jacobian_penalty(lambda z: z @ a_NN.mT, normal(10, 1, 3), probes=3000)
    (gradient,) = torch.autograd.grad(penalty, a_NN)
    torch.testing.assert_close(gradient, 2 * a_NN.detach() / 3, rtol=0, atol=0.15)  # standard error 0.03


def test_spectral_penalty_of_a_symmetric_map_is_exact():
    """(max |eigenvalue| - threshold)^2, with gradient 2 (sigma - threshold) q q' for a symmetric J."""
    q_NN, _ = torch.linalg.qr(normal(11, 5, 5))
    a_NN = (q_NN * torch.tensor([2.0, 0.5, -0.3, 0.1, 0.0]).double() @ q_NN.mT).requires_grad_()
    penalty = spectral_penalty(lambda z: z @ a_NN.mT, normal(12, 2, 5), steps=40)
    torch.testing.assert_close(penalty.detach(), torch.tensor(1.0).double())
    (gradient,) = torch.autograd.grad(penalty, a_NN)
    torch.testing.assert_close(gradient, 2 * torch.outer(q_NN[:, 0], q_NN[:, 0]))


def test_spectral_penalty_leaves_contractions_alone():
    a_BNN = normal(13, 3, 6, 6)
    a_BNN = 0.99 * a_BNN / torch.linalg.matrix_norm(a_BNN, 2)[:, None, None]
    a_BNN.requires_grad_()
    penalty = spectral_penalty(linear, normal(14, 3, 6), (a_BNN,))
    assert penalty.item() == 0
    assert torch.autograd.grad(penalty, a_BNN)[0].eq(0).all()


def test_spectral_penalty_makes_an_expansive_map_contract():
    """Gradient descent on the penalty alone brings the spectral radius below one; the small modes stay."""
    w_NN = torch.diag(torch.tensor([-3.0, 0.6, 0.2, -0.4]).double()) + 0.05 * normal(15, 4, 4)
    start_NN = w_NN.clone()
    w_NN.requires_grad_()
    f = lambda z: z @ w_NN.mT + 1  # noqa: E731
    z_BN = normal(16, 2, 4)
    values = []
    for _ in range(60):
        penalty = spectral_penalty(f, z_BN, threshold=0.9, steps=10)
        (gradient,) = torch.autograd.grad(penalty, w_NN)
        values.append(penalty.item())
        with torch.no_grad():
            w_NN -= 0.1 * gradient
    assert values[0] > 4
    assert all(later < 0.9 * earlier for earlier, later in zip(values[:5], values[1:6], strict=True))
    assert values[-1] < 1e-3 * values[0]
    assert spectral_radius(f, z_BN).max() < 1
    torch.testing.assert_close(w_NN.detach()[1:, 1:], start_NN[1:, 1:], rtol=0, atol=0.05)


def test_wrong_settings():
    z_BN = torch.zeros(1, 2)
    for call, name in (
        (lambda: jacobian_penalty(torch.tanh, z_BN, probes=0), "probes"),
        (lambda: spectral_penalty(torch.tanh, z_BN, steps=-1), "steps"),
        (lambda: spectral_radius(torch.tanh, z_BN, steps=0), "steps"),
    ):
        with pytest.raises(ValueError, match=name):
            call()


def test_measuring_leaves_z_and_parameters_without_gradients():
    z_BN = normal(17, 2, 3).requires_grad_()
    w_NN = normal(18, 3, 3).requires_grad_()
    f = lambda z: torch.tanh(z @ w_NN)  # noqa: E731
    assert not spectral_radius(f, z_BN).requires_grad
    jacobian_penalty(f, z_BN).backward()
    assert z_BN.grad is None and w_NN.grad is not None
    with torch.no_grad():
        assert spectral_radius(f, z_BN).shape == (2,)
