"""Texts that are written side by side do not know of each other, and the model is left as it was."""

import dataclasses

import pytest
import torch

from deqkit import NonFiniteError
from model.models import BOTH, SIZE, make, tokens

PROMPTS = [[3, 1, 4, 1, 5, 9, 2], [6], [5, 3], [5, 8, 9, 7, 9, 3, 2]]
NEW = 10


@pytest.mark.parametrize("depth", [{}, {"depth": 3}, {"depth": 2, "tied": False}], ids=["deq", "tied", "untied"])
@pytest.mark.parametrize("kind", BOTH)
def test_a_batch_gives_what_each_prompt_gives_alone(kind, depth):
    model = make(kind, **depth)
    together = model.generate(PROMPTS, max_tokens=NEW, seed=7)
    for number, prompt in enumerate(PROMPTS):
        alone = model.generate([prompt], max_tokens=NEW, seed=7 + number)
        assert torch.equal(together.tokens[number], alone.tokens[0])
        torch.testing.assert_close(together.log_probs[number], alone.log_probs[0], rtol=0, atol=1e-10)


def test_seeds_of_texts():
    model = make()
    first, again = (model.generate([[1, 2]] * 3, max_tokens=NEW, seed=5) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.tokens, again.tokens, strict=True))
    assert not torch.equal(first.tokens[0], first.tokens[1])  # the same prompt, another text
    chosen = model.generate([[1, 2]] * 2, max_tokens=NEW, seed=[6, 5])
    assert torch.equal(chosen.tokens[0], first.tokens[1]) and torch.equal(chosen.tokens[1], first.tokens[0])
    longer = model.generate([[1, 2]], max_tokens=2 * NEW, seed=5)
    assert torch.equal(longer.tokens[0][:NEW], first.tokens[0])
    others = [model.generate([[1, 2]], max_tokens=3 * NEW).tokens[0] for _ in range(2)]
    assert not torch.equal(*others)


@pytest.mark.parametrize("kind", BOTH)
def test_texts_that_stop_leave_the_batch(kind):
    model = make(kind)
    free = model.generate(PROMPTS, max_tokens=NEW, seed=7)
    stop = {int(free.tokens[0][2]), int(free.tokens[2][5])}
    stopped = model.generate(PROMPTS, max_tokens=NEW, seed=7, stop=stop)
    lengths = set()
    for whole, cut, log_probs in zip(free.tokens, stopped.tokens, stopped.log_probs, strict=True):
        ends = [place for place, token in enumerate(whole.tolist()) if token in stop]
        length = ends[0] + 1 if ends else NEW
        assert torch.equal(cut, whole[:length]) and len(log_probs) == length
        lengths.add(length)
    assert len(lengths) > 1  # or nobody left early


def test_tokens_are_told_as_they_come():
    told = []
    written = make().generate(PROMPTS[:2], max_tokens=3, seed=0, on_token=lambda *news: told.append(news))
    assert [sample for sample, _, _ in told] == [0, 1] * 3
    for sample in (0, 1):
        assert [token for s, token, _ in told if s == sample] == written.tokens[sample].tolist()
        assert [p for s, _, p in told if s == sample] == written.log_probs[sample].tolist()


def test_dropout_is_off_and_the_model_is_left_as_it_was():
    model = make(cell={"dropout": 0.5}, input_dropout=0.5).train()
    state = torch.get_rng_state()
    texts = [model.generate(tokens(2, 4), max_tokens=4, seed=0).tokens for _ in range(2)]
    assert model.training and torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(*texts, strict=True))
    model(torch.cat([tokens(2, 4), torch.stack(texts[0])], 1)[:, :-1], tokens(2, 7)).loss.backward()


def test_solves_that_do_not_converge_are_counted():
    written = make().generate(PROMPTS[:2], max_tokens=4, seed=0, max_steps=2)
    assert written.num_failed == [4, 4]
    assert all(int(evals.max()) <= 3 for evals in written.num_evals)


def test_what_is_not_finite_is_an_error():
    model = make()
    with torch.no_grad():
        model.embedding.tables[0][4] = torch.nan
    with pytest.raises(NonFiniteError):
        model.generate([[1, 4]], max_tokens=2)
    model = make(vocabulary=dataclasses.replace(model.config.vocabulary, tie_weights=False))
    with torch.no_grad():
        model.softmax.biases[0][4] = 100.0
        model.embedding.tables[0][4] = torch.inf
    with pytest.raises(NonFiniteError):  # in the solve of a single position
        model.generate([[1]], max_tokens=2, temperature=0)
    with torch.no_grad():
        model.softmax.biases[0][5] = torch.nan
    for depth in ("equilibrium", 2):
        with pytest.raises(ValueError, match="prompt 0: the model's probabilities are not finite after 0 new tokens"):
            model.generate([[1], [1, 2]], max_tokens=2, depth=depth)


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        ([], {}, "there is no prompt"),
        ([[1], []], {}, "prompt 1 is empty"),
        ([[1, SIZE]], {}, f"from 0 to {SIZE - 1}, got 1 to {SIZE}"),
        ([[-1]], {}, "got -1"),
        ([[0.5]], {}, "row of token ids"),
        ([[[1]]], {}, "row of token ids"),
        ([[1]], {"max_tokens": 0}, "max_tokens must be a whole number of at least 1"),
        ([[1]], {"temperature": -1}, "temperature must be at least 0"),
        ([[1]], {"temperature": float("nan")}, "temperature must be at least 0"),
        ([[1]], {"top_k": 0}, "top_k must be a whole number of at least 1"),
        ([[1]], {"top_p": 0.0}, "top_p must be above 0 and at most 1"),
        ([[1]], {"top_p": 1.1}, "top_p must be above 0 and at most 1"),
        ([[1]], {"context": 0}, "context must be a whole number of at least 1"),
        ([[1]], {"seed": [1, 2]}, "one for each of the 1 prompts, got 2"),
        ([[1]], {"depth": 0}, "depth must be"),
        ([[1]], {"tol": 1e-3}, "tol must be a Tolerance"),
    ],
)
def test_mistakes(prompts, options, message):
    with pytest.raises(ValueError, match=message):
        make().generate(prompts, **{"max_tokens": 2, **options})


def test_a_cell_without_attention_has_no_context():
    with pytest.raises(ValueError, match="context=5 limits what attention sees"):
        make("trellis").generate([[1]], max_tokens=2, context=5)
