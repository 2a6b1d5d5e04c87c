"""The cell of the original at a recorded point: values, Jacobian products and gradients, no solver involved."""

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel

from deqkit.analysis import jacobian_penalty
from interop.gradients import assert_gradients
from interop.recordings import as_recorded, assert_same, each_case


def bound(case, model):
    """f of the state alone, as the segment's tokens and the memory before it make it."""
    memory = case.memory(model)[0]
    u_BTG = model.cells[0].inject(model.embed(case.tokens), memory)
    f, args = model.cells[0].bind(u_BTG, memory)
    return lambda z: f(z, *args)


def tensors(state):
    return (state,) if isinstance(state, torch.Tensor) else tuple(state)


def products(case, model, v, w):
    """f(z), J v and J' w at the recorded point; J v as the derivative of J' x in x."""
    single = isinstance(v, torch.Tensor)
    z = tuple(t.clone().requires_grad_() for t in tensors(case.state("cell_z")))
    with sdpa_kernel(SDPBackend.MATH):  # the fused kernels have no second derivative
        value = tensors(bound(case, model)(z[0] if single else z))
        x = tuple(torch.zeros_like(t).requires_grad_() for t in value)
        transposed = torch.autograd.grad(value, z, x, create_graph=True)
        forward = torch.autograd.grad(transposed, x, tensors(v), retain_graph=True)
        backward = torch.autograd.grad(value, z, tensors(w))
    return [t[0] if single else t for t in (value, forward, backward)]


@each_case(each_loss=False)
def test_embedding_and_injection(case):
    model = case.model()
    memory = case.memory(model)[0]
    x_BTD = model.embed(case.tokens)
    u_BGT = as_recorded(model.cells[0].inject(x_BTD, memory))
    assert_same(x_BTD, case.array("word_emb"))
    if case.recording.is_trellis:
        assert_same(u_BGT, case.array("us"))
    else:
        assert_same(u_BGT, case.array("u1s"))
        assert_same(torch.cat([as_recorded(memory.u_BMG), u_BGT], 2), case.array("us"))


@each_case(each_loss=False)
def test_value(case):
    model = case.model()
    with torch.no_grad():  # with the fused attention, as in a solve
        assert_same(as_recorded(bound(case, model)(case.state("cell_z"))), case.array("cell_f"))


@each_case(each_loss=False)
def test_jacobian_products(case):
    value, forward, backward = products(case, case.model(), case.state("cell_v"), case.state("cell_w"))
    assert_same(as_recorded(value), case.array("cell_f"))
    assert_same(as_recorded(forward), case.array("cell_Jv"))
    assert_same(as_recorded(backward), case.array("cell_JTw"))


@each_case(each_loss=False)
def test_gradients(case):
    """Of <w, f(z)>, through the injection and the embedding too."""
    model = case.model()
    value = bound(case, model)(case.state("cell_z"))
    (as_recorded(value) * case.array("cell_w")).sum().backward()
    assert_gradients(model, case.gradients("cell"))


@each_case(lambda case: case.gradients("jac"), each_loss=False)
def test_jacobian_penalty(case, monkeypatch):
    """||J'v||^2 / N at the equilibrium, which is held fixed, for the recorded probe v."""
    model, probe = case.model(), case.state("jac_v")
    monkeypatch.setattr(torch, "randn", lambda shape, **_: probe.reshape(shape))
    penalty = jacobian_penalty(bound(case, model), case.state("z_star"))
    penalty.backward()
    assert_same(penalty, case.array("jac_loss").squeeze())
    assert_gradients(model, case.gradients("jac"))
