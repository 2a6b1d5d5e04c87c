"""What is added to the loss, against the formulas."""

import pytest
import torch
from torch import nn

from deqkit.analysis import jacobian_penalty, spectral_penalty
from deqkit.model import ModelOutput, SequenceModel
from deqkit.train.config import RegulariserConfig
from deqkit.train.objective import Objective
from train.runs import TRELLIS, metrics_of, run, tiny

TOKENS = torch.randint(256, (3, 8), generator=torch.Generator().manual_seed(1))
HIDDEN = torch.randn(2, 5, 4, generator=torch.Generator().manual_seed(2), dtype=torch.float64)


class Fixed(nn.Module):
    """A model whose loss is 2 and whose hidden vectors are given."""

    def __init__(self, hidden):
        super().__init__()
        self.hidden = hidden

    def forward(self, *_, **__):
        return ModelOutput(z=None, hidden=self.hidden, memory=(), solutions=(), loss=torch.tensor(2.0).double())


def objective_of(model, *, penalise=False, tokens=TOKENS, **weights):
    value, added, output = Objective(model, RegulariserConfig(**weights))(tokens, tokens, None, penalise=penalise)
    return value, added, output


def test_activation_regularisation():
    """alpha times the mean of h^2 over samples, positions and channels."""
    value, added, _ = objective_of(Fixed(HIDDEN), activation=3.0)
    expected = 3 * sum(float(h) ** 2 for h in HIDDEN.flatten()) / HIDDEN.numel()
    assert added.keys() == {"activation"}
    assert float(added["activation"]) == pytest.approx(expected, rel=1e-12)
    assert float(value) == pytest.approx(2 + expected, rel=1e-12)


def test_temporal_activation_regularisation():
    """beta times the mean of (h_t+1 - h_t)^2; the same words at every position cost nothing."""
    value, added, _ = objective_of(Fixed(HIDDEN), temporal=0.5)
    pairs = [float(HIDDEN[b, t + 1, d] - HIDDEN[b, t, d]) for b in range(2) for t in range(4) for d in range(4)]
    expected = 0.5 * sum(p**2 for p in pairs) / len(pairs)
    assert float(added["temporal"]) == pytest.approx(expected, rel=1e-12)
    assert float(value) == pytest.approx(2 + expected, rel=1e-12)
    _, added, _ = objective_of(Fixed(HIDDEN[:, :1].expand(2, 5, 4)), temporal=0.5)
    assert float(added["temporal"]) == 0.0


def test_a_single_position_has_no_change():
    value, added, _ = objective_of(Fixed(HIDDEN[:, :1]), temporal=0.5, activation=1.0)
    assert added.keys() == {"activation"} and torch.isfinite(value)


def test_without_regularisers_it_is_the_loss():
    value, added, _ = objective_of(Fixed(HIDDEN), penalise=True)
    assert (float(value), added) == (2.0, {})


@pytest.mark.parametrize("cell", [None, TRELLIS], ids=["transformer", "trellis"])
@pytest.mark.parametrize("subsequences", [1, 2])
def test_penalties_are_the_mean_over_the_solves(cell, subsequences):
    """The same random numbers, drawn in the same order, give the same estimates."""
    config = tiny("unused", cell=cell, model={"subsequences": subsequences, "max_steps": 30}).model
    model = SequenceModel(config)
    torch.manual_seed(7)
    value, added, output = objective_of(model, jacobian=2.0, spectral=3.0, penalise=True)
    assert len(output.equations) == subsequences
    torch.manual_seed(7)
    expected = {}
    for name, weight, penalty in (("jacobian", 2.0, jacobian_penalty), ("spectral", 3.0, spectral_penalty)):
        found = [float(penalty(*bind(equation)).detach()) for equation in output.equations]
        expected[name] = weight * sum(found) / subsequences
    for name, number in expected.items():
        assert float(added[name].detach()) == pytest.approx(number, rel=1e-5)
    assert expected["jacobian"] > 0
    assert output.loss is not None
    assert float(value.detach()) == pytest.approx(float(output.loss.detach()) + sum(expected.values()), rel=1e-6)


def bind(equation):
    f, args = equation.bind()
    return f, equation.z, args


def test_penalties_reach_the_weights():
    model = SequenceModel(tiny("unused").model)
    torch.manual_seed(7)
    _, added, _ = objective_of(model, jacobian=1.0, penalise=True)
    grads = torch.autograd.grad(added["jacobian"], list(model.core.cell.parameters()), allow_unused=True)
    assert sum(g is not None and float(g.norm()) > 1e-6 for g in grads) >= 3


def test_penalties_are_taken_now_and_then_and_at_the_equilibrium_only(corpus, tmp_path):
    config = tiny(corpus, regulariser={"jacobian": 0.1, "spectral": 0.1, "every": 2}, devices={"warmup_steps": 3})
    run(config, tmp_path / "run")
    records = metrics_of(tmp_path / "run", "train")
    assert [r["step"] for r in records if "jacobian" in r] == [5]
    assert [r["step"] for r in records if "spectral" in r] == [5]


def test_regularisers_are_logged_beside_the_loss_and_not_in_it(corpus, tmp_path):
    run(tiny(corpus, steps=1), tmp_path / "plain")
    run(tiny(corpus, steps=1, regulariser={"activation": 1.0, "temporal": 1.0}), tmp_path / "regularised")
    (plain,), (record,) = metrics_of(tmp_path / "plain", "train"), metrics_of(tmp_path / "regularised", "train")
    assert record["loss"] == plain["loss"]
    assert record["activation"] > 0 and record["temporal"] > 0
    assert record["grad_norm"] != plain["grad_norm"]


@pytest.mark.parametrize("cell", [None, TRELLIS], ids=["transformer", "trellis"])
@pytest.mark.parametrize("tied", [True, False])
def test_auxiliary_losses_are_those_of_the_stack_cut_off_earlier(cell, tied):
    """Layers 2 and 4 of five: their loss is that of a stack that ends there."""
    model = SequenceModel(tiny("unused", cell=cell, model={"depth": 5, "tied": tied}).model)
    value, added, output = objective_of(model, auxiliary=0.5, auxiliary_every=2)
    if tied:
        cut = [model(TOKENS, TOKENS, depth=n).loss for n in (2, 4)]
    else:
        cut = []
        for n in (2, 4):
            shorter = SequenceModel(tiny("unused", cell=cell, model={"depth": n, "tied": False}).model)
            weights = model.state_dict()
            shorter.load_state_dict({name: weights[name] for name in shorter.state_dict()})
            cut.append(shorter(TOKENS, TOKENS).loss)
    expected = 0.5 * torch.stack(cut).mean()
    torch.testing.assert_close(added["auxiliary"], expected)
    torch.testing.assert_close(value, output.loss + expected)
    if tied:
        weights = list(model.cells[0].parameters())
        grads = [torch.autograd.grad(loss, weights) for loss in (added["auxiliary"], expected)]
        torch.testing.assert_close(*grads)


def test_a_shallow_start_without_earlier_layers_has_no_auxiliary_loss(corpus, tmp_path):
    config = tiny(
        corpus,
        model={"depth": 3},
        devices={"warmup_depth": 2, "warmup_steps": 3},
        regulariser={"auxiliary": 0.1, "auxiliary_every": 2},
    )
    run(config, tmp_path / "run")
    assert [r["step"] for r in metrics_of(tmp_path / "run", "train") if "auxiliary" in r] == [4, 5, 6]
