"""A learned start: where solves begin changes how long they take and nothing else."""

import pytest
import torch

from deqkit import Tolerance
from deqkit.model import SequenceModel, num_parameters
from deqkit.model.start import TAPS, LearnedStart, start_error
from model.models import BOTH, assert_same_gradients, flat, gradients, make, reconfigured, tokens

# B samples, T positions

both = pytest.mark.parametrize("kind", BOTH)
IDS, TARGETS = tokens(), tokens(seed=6)


def with_guess(kind: str, **options) -> SequenceModel:
    """A model whose guess is not zero, and far from right."""
    model = make(kind, start="learned", **options)
    with torch.no_grad():
        for parameter in start_of(model).parameters():
            parameter.copy_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(3)))
    return model


def start_of(model: SequenceModel) -> LearnedStart:
    assert model.start is not None
    return model.start


def test_a_guess_is_a_linear_map_of_the_last_inputs():
    start = LearnedStart(4, 5).double()
    x = torch.randn(2, 6, 4).double()
    assert torch.equal(start(x), torch.zeros(2, 6, 5).double())
    torch.nn.init.normal_(start.map.weight)
    torch.nn.init.normal_(start.map.bias)
    expected = start.map.bias.expand(2, 6, 5).clone()
    for position in range(6):
        for tap in range(TAPS):
            seen = position - (TAPS - 1) + tap
            if seen >= 0:
                expected[:, position] += x[:, seen] @ start.map.weight[:, 4 * tap : 4 * tap + 4].T
    torch.testing.assert_close(start(x), expected)


@both
@pytest.mark.parametrize("pieces", [1, 3])
def test_the_equilibrium_and_its_gradient_do_not_depend_on_it(kind, pieces):
    model = with_guess(kind, subsequences=pieces)
    zeros = make(kind, subsequences=pieces)
    zeros.load_state_dict(model.state_dict(), strict=False)
    guessed, expected = model(IDS, TARGETS), zeros(IDS, TARGETS)
    torch.testing.assert_close(flat(guessed.z), flat(expected.z), rtol=1e-9, atol=1e-9)
    found = gradients(model, guessed.loss)
    of_start = {name for name in found if name.startswith("start.")}
    assert len(of_start) == 2 and all(not found.pop(name).any() for name in of_start)
    assert_same_gradients(found, gradients(zeros, expected.loss))


@both
def test_its_error_trains_the_start_and_nothing_else(kind):
    model = with_guess(kind)
    output = model(IDS, TARGETS)
    guess_BTS, z_BTS = start_of(model)(model.embed(IDS)).detach(), flat(output.z).detach()
    expected = float((guess_BTS - z_BTS).norm() ** 2 / z_BTS.norm() ** 2)
    assert float(output.start_error.detach()) == pytest.approx(expected, rel=1e-9)
    found = gradients(model, output.start_error)
    assert {name for name, grad in found.items() if grad.any()} == {"start.map.weight", "start.map.bias"}


@both
def test_the_best_guess_begins_nearer_to_the_end(kind):
    """The map of least error on a text, by least squares; the first evaluation measures where a solve begins."""
    model = make(kind, start="learned", tol=Tolerance(rtol=1e-4))
    torch.nn.init.zeros_(start_of(model).map.bias)
    before = model(IDS, TARGETS)
    assert float(before.start_error.detach()) == 1
    with torch.no_grad():
        x_BTD = torch.nn.functional.pad(model.embed(IDS), (0, 0, TAPS - 1, 0))
        taps = torch.cat([x_BTD[:, tap : tap + IDS.shape[1]] for tap in range(TAPS)], -1)
        best = torch.linalg.lstsq(taps.flatten(0, 1), flat(before.z).flatten(0, 1)).solution
        start_of(model).map.weight.copy_(best.T)
    after = model(IDS, TARGETS)
    assert float(after.start_error.detach()) < 0.3
    assert after.solution.num_evals.double().mean() <= before.solution.num_evals.double().mean()
    with torch.no_grad():
        guessed = model(IDS, max_steps=1).solution.residual_norm
        start_of(model).map.weight.zero_()
        from_zeros = model(IDS, max_steps=1).solution.residual_norm
    assert (guessed < 0.6 * from_zeros).all()


@both
def test_a_shallow_stack_trains_it_too(kind):
    """Every weight has a gradient in every phase of training, as data parallelism wants."""
    model = with_guess(kind)
    output = model(IDS, TARGETS, depth=2)
    assert float(output.start_error.detach()) == pytest.approx(
        float(start_error(start_of(model)(model.embed(IDS)), output.z).detach())
    )


def test_evaluation_has_no_error_to_learn_from():
    model = with_guess("post").eval()
    assert model(IDS, TARGETS).start_error is None and make("post")(IDS, TARGETS).start_error is None


@both
def test_generation_is_the_same_text(kind):
    model = with_guess(kind).eval()
    zeros = make(kind).eval()
    zeros.load_state_dict(model.state_dict(), strict=False)
    texts = [m.generate([[1, 2, 3, 4]], max_tokens=6, temperature=0) for m in (model, zeros)]
    assert torch.equal(texts[0].tokens[0], texts[1].tokens[0])
    torch.testing.assert_close(texts[0].log_probs[0], texts[1].log_probs[0], rtol=1e-9, atol=1e-9)


@both
def test_it_counts_apart_from_the_cell(kind):
    plain, learned = num_parameters(make(kind)), num_parameters(make(kind, start="learned"))
    state = 8 if kind == "post" else 2 * (3 + 8)
    assert learned.start == TAPS * 8 * state + state and plain.start == 0
    assert (learned.embedding, learned.rest) == (plain.embedding, plain.rest)
    assert learned.total == plain.total + learned.start


def test_nothing_but_zeros_and_learned():
    with pytest.raises(ValueError, match="start must be"):
        make("post", start="warm")


@both
@pytest.mark.parametrize("length", [1, 4, 5, 100])
def test_pieces_by_length_are_the_same_equilibrium(kind, length):
    model = make(kind)
    output = reconfigured(model, subsequence_length=length)(IDS, TARGETS)
    assert len(output.solutions) == {1: 11, 4: 3, 5: 3, 100: 1}[length]
    torch.testing.assert_close(flat(output.z), flat(model(IDS, TARGETS).z), rtol=1e-9, atol=1e-9)


def test_a_sequence_is_cut_in_one_way():
    with pytest.raises(ValueError, match="by number or by length"):
        make("post", subsequences=2, subsequence_length=4)
    with pytest.raises(ValueError, match="subsequence_length"):
        make("post", subsequence_length=0)
    config = make("post", subsequence_length=8).config
    assert [config.num_pieces(length) for length in (1, 8, 9, 64)] == [1, 1, 2, 8]
