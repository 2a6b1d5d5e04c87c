"""Which tokens may be drawn, and how often they are."""

import math

import pytest
import torch

from deqkit.model.decode_sample import Sampling

PROBS = [0.1, 0.4, 0.05, 0.3, 0.15]  # from the likeliest: tokens 1, 3, 4, 0, 2


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, PROBS),
        ({"temperature": 0.5}, [p**2 / sum(q**2 for q in PROBS) for p in PROBS]),
        ({"temperature": 2}, [p**0.5 / sum(q**0.5 for q in PROBS) for p in PROBS]),
        ({"top_k": 2}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_k": 1}, [0, 1, 0, 0, 0]),
        ({"top_k": 9}, PROBS),
        ({"top_p": 0.3}, [0, 1, 0, 0, 0]),
        ({"top_p": 0.41}, [0, 4 / 7, 0, 3 / 7, 0]),
        ({"top_p": 0.8}, [0, 0.4 / 0.85, 0, 0.3 / 0.85, 0.15 / 0.85]),
        ({"top_p": 1.0}, PROBS),
        # of the two likeliest, 4/7 and 3/7, the first is enough
        ({"top_k": 2, "top_p": 0.55}, [0, 1, 0, 0, 0]),
        # the temperature comes first: 0.16 of 0.285 is enough, where 0.4 would not have been
        ({"temperature": 0.5, "top_p": 0.5}, [0, 1, 0, 0, 0]),
    ],
)
def test_probabilities_by_hand(options, expected):
    sampling = Sampling(**options)
    log_probs_BV = torch.tensor([PROBS, PROBS[::-1]], dtype=torch.float64).log()
    tokens_BC, probs_BC = sampling.candidates(log_probs_BV)
    found_BV = torch.zeros_like(log_probs_BV).scatter_add_(1, tokens_BC, probs_BC)
    torch.testing.assert_close(found_BV, torch.tensor([expected, expected[::-1]], dtype=torch.float64))

    count = 20_000
    generators = [torch.Generator().manual_seed(3)] * count
    drawn = sampling.choose(log_probs_BV[:1].expand(count, -1), generators)
    for token, p in enumerate(expected):
        share = float((drawn == token).double().mean())
        assert abs(share - p) <= 4.5 * math.sqrt(p * (1 - p) / count)  # exactly 0 where nothing may be drawn


def test_temperature_zero_is_the_likeliest_and_draws_nothing():
    generator = torch.Generator().manual_seed(0)
    before = generator.get_state()
    assert Sampling(temperature=0).choose(torch.tensor([PROBS]).log(), [generator]).tolist() == [1]
    assert torch.equal(generator.get_state(), before)


def test_the_end_of_the_range_is_never_passed(monkeypatch):
    """The largest draw gives the last token that has a probability, whatever the sum of probabilities rounds to."""
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.ones(1, dtype=torch.float64))
    generators = [torch.Generator()]
    assert Sampling().choose(torch.tensor([PROBS]).log(), generators).tolist() == [4]
    assert Sampling(top_p=0.41).choose(torch.tensor([PROBS]).log(), generators).tolist() == [3]


def test_a_draw_of_zero_does_not_give_a_token_without_probability(monkeypatch):
    monkeypatch.setattr(torch, "rand", lambda *_, **__: torch.zeros(1, dtype=torch.float64))
    log_probs_BV = torch.tensor([[-math.inf, math.log(0.5), math.log(0.5)]])
    assert Sampling().choose(log_probs_BV, [torch.Generator()]).tolist() == [1]
