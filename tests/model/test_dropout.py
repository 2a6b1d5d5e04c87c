"""Dropout of a whole model: on the right axis, one draw a call, none in evaluation, the same for all pieces."""

from typing import Any

import pytest
import torch

from model.models import BOTH, assert_same_gradients, flat, gradients, make, reconfigured, tokens

# B samples, T positions

both = pytest.mark.parametrize("kind", BOTH)
MODEL: dict[str, Any] = {"embedding_dropout": 0.2, "input_dropout": 0.3, "output_dropout": 0.4}
CELL: dict[str, dict[str, Any]] = {
    "post": {"dropout": 0.3, "hidden_dropout": 0.2},
    "trellis": {"hidden_dropout": 0.3, "weight_dropout": 0.2},
}
TARGETS = tokens(seed=6)


SEED = 0  # of weights under which the masks below leave a contraction


def seeded(model: Any, seed: int = 3) -> Any:
    torch.manual_seed(seed)
    return model(tokens(), TARGETS)


@both
def test_output_dropout_takes_channels_of_a_sample_at_all_positions(kind):
    """The original dropped whole positions (REFERENCE.md 0.6)."""
    model = make(kind, output_dropout=0.4)
    output = seeded(model)
    ratio = output.hidden / model.cells[0].output(output.z)
    assert torch.equal(ratio == 0, (ratio == 0)[:, :1].expand_as(ratio))  # one fate for all positions
    torch.testing.assert_close(ratio[ratio != 0], torch.full_like(ratio[ratio != 0], 1 / 0.6))
    masks = (ratio != 0)[:, 0]
    assert masks.any(1).all() and not masks.all() and not torch.equal(masks[0], masks[1])


@both
def test_input_dropout_takes_channels_of_a_sample_at_all_positions(kind):
    model = make(kind, input_dropout=0.5)
    torch.manual_seed(3)
    ratio = model.embed(tokens()) / model.embedding(tokens())
    assert torch.equal(ratio == 0, (ratio == 0)[:, :1].expand_as(ratio))
    torch.testing.assert_close(ratio[ratio != 0], torch.full_like(ratio[ratio != 0], 2.0))
    assert not torch.equal(ratio[0, 0], ratio[1, 0])


@both
def test_embedding_dropout_takes_words(kind):
    model = make(kind, embedding_dropout=0.5)
    torch.manual_seed(3)
    gone = model.embed(tokens()).abs().sum(2) == 0
    fates = {token: set(gone[tokens() == token].tolist()) for token in tokens().unique().tolist()}
    assert all(len(fate) == 1 for fate in fates.values()) and gone.any() and not gone.all()


@both
def test_a_seed_decides_everything(kind):
    model = make(kind, cell=CELL[kind], **MODEL)
    assert torch.equal(seeded(model).nll, seeded(model).nll)
    assert not torch.allclose(seeded(model).nll, seeded(model, seed=4).nll, atol=1e-2)


@both
@pytest.mark.parametrize("depth", ["equilibrium", 4])
def test_evaluation_drops_nothing_and_draws_nothing(kind, depth):
    attention = {"attention_dropout": 0.5} if kind == "post" else {}
    model = make(kind, cell={**CELL[kind], **attention}, depth=depth, **MODEL).eval()
    plain = make(kind, depth=depth)
    plain.load_state_dict(model.state_dict())
    before = torch.get_rng_state()
    assert torch.equal(model(tokens(), TARGETS).nll, plain(tokens(), TARGETS).nll)
    assert torch.equal(before, torch.get_rng_state())


@both
def test_masks_are_the_same_at_every_step_and_layer(kind):
    """300 layers under one draw of masks reach the equilibrium under that draw."""
    model = make(kind, cell=CELL[kind], seed=SEED, **MODEL)
    expected = seeded(model)
    torch.manual_seed(3)
    output = model(tokens(), TARGETS, depth=300)
    torch.testing.assert_close(output.nll, expected.nll, rtol=1e-9, atol=1e-9)
    assert_same_gradients(gradients(model, output.loss), gradients(model, expected.loss))


@both
@pytest.mark.parametrize("pieces", [2, 5])
def test_all_pieces_of_a_sequence_share_their_masks(kind, pieces):
    model = make(kind, cell={**CELL[kind], "normalise": "weight"}, seed=SEED, **MODEL)
    split = reconfigured(model, subsequences=pieces)
    expected, output = seeded(model), seeded(split)
    torch.testing.assert_close(flat(output.z), flat(expected.z), rtol=1e-9, atol=1e-9)
    assert_same_gradients(gradients(split, output.loss), gradients(model, expected.loss))


@pytest.mark.parametrize(("kind", "attention"), [("post", 0.0), ("post", 0.3), ("trellis", 0.0)])
def test_the_equations_of_an_output_are_those_that_were_solved(kind, attention):
    """Whoever penalises the Jacobian or draws a residual must see the masks of the solve."""
    model = make(kind, cell={**CELL[kind], **({"attention_dropout": attention} if attention else {})}, seed=SEED)
    output = seeded(model)
    for equation in output.equations:
        f, args = equation.bind()
        torch.testing.assert_close(flat(f(equation.z, *args)), flat(equation.z), rtol=1e-9, atol=1e-9)


@both
def test_spectral_norm_is_that_of_one_matrix_for_all_pieces(kind):
    """In training each reading of the weight is a step of the power iteration, so it must be read once a call."""
    model = make(kind, cell={"normalise": "spectral"})
    split = reconfigured(model, subsequences=4)
    expected, output = seeded(model), seeded(split)
    torch.testing.assert_close(flat(output.z), flat(expected.z), rtol=1e-9, atol=1e-9)
