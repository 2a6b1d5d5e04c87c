"""Generation gives the tokens and log-probabilities of a model that is given the whole text and keeps nothing."""

import dataclasses

import pytest
import torch

from deqkit.layers import ConvolutionConfig, RecurrentConfig, attention
from deqkit.model import Generation, SequenceModel, decode_state
from model.models import CELLS, WIDTH, make, reconfigured, tokens

KINDS = {
    **{name: (name, {}) for name in CELLS},
    "learned": ("post", {"positions": "learned", "num_distances": 4}),
    "learned-local": ("pre", {"positions": "learned", "num_distances": 4, "local_size": 3}),
    "head-width": ("post", {"head_width": 5}),
    "weight-norm": ("post", {"normalise": "weight"}),
}
NEW = 12


def whole(model: SequenceModel, prompts, written: Generation) -> list[torch.Tensor]:
    """The log-probabilities of every token at the new positions, from one call on each whole text: (new, V)."""
    found = []
    model.eval()
    with torch.no_grad():
        for prompt, new in zip(prompts, written.tokens, strict=True):
            text = torch.cat([torch.as_tensor(prompt), new[:-1]])
            found.append(model.log_probs(model(text.unsqueeze(0)))[0, len(prompt) - 1 :])
    return found


def assert_exact(model: SequenceModel, prompts, written: Generation, tolerance: float = 1e-9) -> None:
    for expected, new, log_probs in zip(whole(model, prompts, written), written.tokens, written.log_probs, strict=True):
        actual = expected.gather(1, new.unsqueeze(1)).squeeze(1)
        torch.testing.assert_close(log_probs, actual, rtol=0, atol=tolerance)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("depth", [{}, {"depth": 4}, {"depth": 3, "tied": False}], ids=["deq", "tied", "untied"])
def test_greedy_text_is_that_of_solving_again(kind, depth):
    name, cell = KINDS[kind]
    model = make(name, cell=cell, **depth)
    prompts = tokens(2, 5)
    written = model.generate(prompts, max_tokens=NEW, temperature=0)
    assert_exact(model, prompts, written)
    for expected, new in zip(whole(model, prompts, written), written.tokens, strict=True):
        assert torch.equal(expected.argmax(1), new) and len(new) == NEW
    assert written.num_failed == [0, 0]
    assert [len(evals) for evals in written.num_evals] == [NEW, NEW]


@pytest.mark.parametrize(
    "cell",
    [
        RecurrentConfig(unit="lstm", input_width=WIDTH, hidden_width=6, output_width=WIDTH),
        ConvolutionConfig(input_width=WIDTH, hidden_width=6, output_width=WIDTH, kernel_size=2, num_levels=2),
    ],
    ids=["lstm", "tcn"],
)
def test_networks_to_compare_with_write_too(cell):
    config = dataclasses.replace(make().config, cell=cell, depth=1)
    model = SequenceModel(config).double()
    prompts = [[1, 2, 3], [4, 5]]
    assert_exact(model, prompts, model.generate(prompts, max_tokens=NEW, seed=0))


def test_a_stack_without_injection():
    model = make(depth=3, tied=False, cell={"inject": False})
    assert_exact(model, tokens(2, 5), model.generate(tokens(2, 5), max_tokens=NEW, seed=0))


@pytest.mark.parametrize("kind", ["post", "learned"])
@pytest.mark.parametrize("depth", [{}, {"depth": 3}], ids=["deq", "tied"])
@pytest.mark.parametrize("context", [1, 4])
def test_context_is_what_a_local_size_is(kind, depth, context):
    """The window slides over prompts of different lengths and over the room of the cache, which has to be moved."""
    name, cell = KINDS[kind]
    model = make(name, cell=cell, **depth)
    local = reconfigured(model, cell=dataclasses.replace(model.config.cell, local_size=context))
    prompts = [tokens(1, 11)[0], tokens(1, 2, seed=6)[0], tokens(1, 5, seed=7)[0]]
    written = model.generate(prompts, max_tokens=3 * NEW, seed=3, context=context)
    assert_exact(local, prompts, written)
    assert_exact(model, prompts, model.generate(prompts, max_tokens=4, seed=3, context=100))


@pytest.mark.parametrize("depth", [{}, {"depth": 3}], ids=["deq", "tied"])
@pytest.mark.parametrize("kind", ["post", "dilated"])
def test_long_prompts_are_read_in_pieces(kind, depth, monkeypatch):
    monkeypatch.setattr(decode_state, "MAX_PIECE", 4)
    model = make(kind, **depth)
    prompts = [tokens(1, 11)[0], tokens(1, 8, seed=6)[0]]
    assert_exact(model, prompts, model.generate(prompts, max_tokens=4, seed=0))


@pytest.mark.parametrize("kind", ["post", "learned", "learned-local"])
def test_blocks_of_queries_in_prompts_of_different_lengths(kind, monkeypatch):
    name, cell = KINDS[kind]
    model = make(name, cell=cell)
    prompts = [tokens(1, length)[0] for length in (9, 4, 1)]
    with monkeypatch.context() as short:
        short.setattr(attention, "BLOCK", 2)
        short.setattr(attention, "MIN_BLOCKS", 1)
        written = model.generate(prompts, max_tokens=3, temperature=0)
    assert_exact(model, prompts, written)


def test_a_loose_tolerance_gives_nearly_that():
    """And few evaluations: the last position's state is near."""
    model = make().float()
    written = model.generate(tokens(2, 5), max_tokens=NEW, temperature=0, tol=dataclasses.replace(TOL, rtol=1e-3))
    assert_exact(model, tokens(2, 5), written, tolerance=2e-2)
    assert all(int(evals[1:].max()) <= 8 for evals in written.num_evals)
    assert all(log_probs.dtype == torch.float32 for log_probs in written.log_probs)


TOL = make().config.eval_tol
