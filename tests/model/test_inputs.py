"""Tokens, targets, memories and configurations that do not fit: one clear ValueError each."""

from typing import Any

import pytest
import torch

from deqkit import Tolerance
from deqkit.adjoint import Implicit
from deqkit.layers import TransformerConfig, TransformerMemory, TrellisConfig, TrellisMemory, VocabularyConfig
from deqkit.model import ModelConfig, SequenceModel
from deqkit.solve import Broyden
from model.models import BOTH, CELLS, SIZE, WIDTH, make, tokens

# B samples, T positions

both = pytest.mark.parametrize("kind", BOTH)
ADAPTIVE = VocabularyConfig(size=SIZE, embedding_width=WIDTH, cutoffs=(3, 7), div_val=2)


# --- tokens ----------------------------------------------------------------------------------------------------------


@both
@pytest.mark.parametrize(
    "ids",
    [
        tokens()[0],
        tokens().unsqueeze(0),
        tokens()[:, :0],
        tokens()[:0],
        torch.tensor(3),
        tokens().double(),
        tokens() > 3,
        tokens().tolist(),
    ],
    ids=["1-D", "3-D", "no-positions", "no-samples", "scalar", "float", "bool", "list"],
)
def test_tokens_must_be_a_batch_of_ids(kind, ids):
    with pytest.raises(ValueError, match="tokens"):
        make(kind)(ids)


@both
@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
def test_ids_and_targets_may_be_of_either_integer_type(kind, dtype):
    model = make(kind)
    expected = model(tokens(), tokens(seed=6)).loss
    assert torch.equal(model(tokens().to(dtype), tokens(seed=6).to(dtype)).loss, expected)


@pytest.mark.parametrize("bad", [SIZE, 10**6, -1])
@pytest.mark.parametrize("vocabulary", [VocabularyConfig(size=SIZE, embedding_width=WIDTH), ADAPTIVE])
def test_ids_outside_the_vocabulary_are_refused(bad, vocabulary):
    ids = tokens()
    ids[1, 2] = bad
    with pytest.raises((ValueError, IndexError)):
        make("post", vocabulary=vocabulary)(ids)


@pytest.mark.parametrize("bad", [SIZE, 10**6])
@pytest.mark.parametrize("vocabulary", [VocabularyConfig(size=SIZE, embedding_width=WIDTH), ADAPTIVE])
def test_targets_outside_the_vocabulary_are_refused(bad, vocabulary):
    targets = tokens()
    targets[1, 2] = bad
    with pytest.raises((ValueError, IndexError)):
        make("post", vocabulary=vocabulary)(tokens(), targets)


@both
@pytest.mark.parametrize(
    "targets", [tokens()[:, 1:], tokens()[:1], tokens()[0], tokens().double()], ids=["short", "few", "1-D", "float"]
)
def test_targets_must_be_one_id_a_token(kind, targets):
    with pytest.raises(ValueError, match="targets"):
        make(kind)(tokens(), targets)


@both
def test_the_signature_is_the_one_of_the_issue(kind):
    model = make(kind)
    memory = model(tokens(seed=8)).memory
    by_name = model(tokens(), targets=tokens(seed=6), memory=memory, tol=None, max_steps=None, solver=None)
    by_place = model(tokens(), tokens(seed=6), memory)
    assert torch.equal(by_name.loss, by_place.loss)


@pytest.mark.parametrize("kind", CELLS)
def test_one_position_and_one_sample_are_enough(kind):
    for batch, length in ((1, 1), (3, 1), (1, 5)):
        output = make(kind)(tokens(batch, length), tokens(batch, length, seed=6))
        assert output.nll.shape == (batch, length)
        output.loss.backward()


# --- padding ---------------------------------------------------------------------------------------------------------


@both
def test_padding_counts_for_nothing(kind):
    model = make(kind)
    targets = tokens(seed=6)
    full = model(tokens(), targets)
    padded = targets.clone()
    padded[0, 4:], padded[2] = -1, -100
    output = model(tokens(), padded)
    keep = padded >= 0
    torch.testing.assert_close(output.nll, torch.where(keep, full.nll, 0.0))
    torch.testing.assert_close(output.loss, full.nll[keep].mean())
    output.loss.backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in model.parameters())


@both
def test_nothing_but_padding_gives_a_finite_loss_and_gradient(kind):
    """A rank or the rest of a batch may hold nothing else; 0 / 0 would poison the weights."""
    model = make(kind)
    output = model(tokens(), torch.full_like(tokens(), -1))
    assert output.nll is not None and not output.nll.any()
    assert output.loss is not None and output.loss.item() == 0
    output.loss.backward()
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())


@both
def test_without_targets_there_is_no_loss(kind):
    output = make(kind)(tokens())
    assert output.loss is None and output.nll is None


# --- memory ----------------------------------------------------------------------------------------------------------


def memories(kind: str) -> dict[str, Any]:
    """Memories that do not belong to `make(kind)` and a batch of 3."""
    model, other = make(kind), make("trellis" if kind == "post" else "post")
    with torch.no_grad():
        own, foreign = model(tokens()).memory, other(tokens()).memory
        few = model(tokens(2)).memory
    first = type(own[0])
    return {
        "other-batch": few,
        "other-kind": foreign,
        "too-narrow": (first(*(t[..., :2] for t in own[0])),),
        "uneven": (first(*(t[:, 1:] if i == 1 else t for i, t in enumerate(own[0]))),),
        "unwrapped": own[0],
        "of-two-cells": own * 2,
        "tensor": own[0][0],
        "output": model(tokens()),
    }


@both
@pytest.mark.parametrize(
    "name", ["other-batch", "other-kind", "too-narrow", "uneven", "unwrapped", "of-two-cells", "tensor", "output"]
)
def test_a_memory_that_does_not_fit_is_refused(kind, name):
    with pytest.raises(ValueError, match="memory"):
        make(kind)(tokens(), memory=memories(kind)[name])


def test_a_trellis_memory_of_another_kernel_is_refused():
    with torch.no_grad():
        memory = make("dilated")(tokens()).memory
    with pytest.raises(ValueError, match="memory"):
        make("trellis")(tokens(), memory=memory)


def test_memories_are_made_of_tensors_only():
    """What the messages above rely on, and what a checkpoint or a beam search takes apart."""
    assert TransformerMemory._fields == ("z_BMD", "u_BMG")
    assert TrellisMemory._fields == ("h_BSH", "c_B1H", "x_BSD")


# --- configurations --------------------------------------------------------------------------------------------------

VOCABULARY = VocabularyConfig(size=SIZE, embedding_width=WIDTH)
MISTAKES: list[tuple[dict[str, Any], str]] = [
    *[
        ({name: rate}, name)
        for name in ("embedding_dropout", "input_dropout", "output_dropout")
        for rate in (-0.1, 1.0)
    ],
    *[({"depth": depth}, "depth.*equilibrium") for depth in (0, -1, 2.5, "deep", None, True)],
    ({"tied": False}, "untied.*depth"),
    ({"checkpoint": True}, "checkpoint.*depth"),
    ({"cell": TransformerConfig(width=WIDTH, num_heads=2, hidden_width=4, inject=False)}, "inject=True"),
    ({"mem_len": -1}, "mem_len.*-1"),
    ({"mem_len": 2.5}, "mem_len.*2.5"),
    *[({name: 0}, f"{name}.*0") for name in ("subsequences", "max_steps", "eval_max_steps")],
    ({"subsequences": 1.5}, "subsequences.*1.5"),
    ({"solver": "broyden"}, "solver.*broyden"),
    ({"tol": 1e-3}, "tol.*0.001"),
    ({"eval_tol": 1e-3}, "tol.*0.001"),
    ({"adjoint": "implicit"}, "adjoint.*implicit"),
    ({"adjoint": Implicit}, "adjoint"),
    ({"solver": Broyden}, "solver"),
    ({"cell": TrellisConfig(input_width=4, hidden_width=2, output_width=4)}, "embedding_width 8.*input_width 4"),
    ({"cell": TrellisConfig(input_width=8, hidden_width=2, output_width=4)}, "tied.*output_width 4.*input_width 8"),
    ({"cell": CELLS["trellis"], "vocabulary": ADAPTIVE}, "div_val=1"),
    ({"cell": {"width": 8}}, "cell"),
    ({"vocabulary": 13}, "vocabulary"),
]


@pytest.mark.parametrize(("change", "message"), MISTAKES, ids=lambda value: str(value)[:40])
def test_a_mistake_in_the_configuration_is_refused_where_it_is_made(change, message):
    """By the configuration, before a model is built or trained for an hour up to its first evaluation."""
    fields: dict[str, Any] = {"vocabulary": VOCABULARY, "cell": CELLS["post"]}
    ModelConfig(**fields)
    with pytest.raises(ValueError, match=message):
        ModelConfig(**{**fields, **change})


def test_untied_weights_free_the_widths_of_a_trellis():
    vocabulary = VocabularyConfig(size=SIZE, embedding_width=WIDTH, cutoffs=(4,), tie_weights=False)
    cell = TrellisConfig(input_width=WIDTH, hidden_width=2, output_width=5, init_std=None)
    model = SequenceModel(ModelConfig(vocabulary=vocabulary, cell=cell, tol=Tolerance(rtol=1e-3)))
    output = model(tokens(), tokens(seed=6))
    assert output.hidden.shape == (3, 11, 5)
    torch.testing.assert_close(model.log_probs(output).logsumexp(2), torch.zeros(3, 11), atol=1e-5, rtol=0.0)
