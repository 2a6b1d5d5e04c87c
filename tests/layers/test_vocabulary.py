"""Embedding and softmax: plain, split and adaptive, against torch's own modules and loops over the definition."""

import math
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

from deqkit.layers import Embedding, Softmax, VocabularyConfig, softmax
from layers.naive import fill, normal

# B samples, T positions, N tokens, D width, V vocabulary

VOCABULARIES: dict[str, dict[str, Any]] = {
    "plain": {},
    "projected": {"embedding_width": 4},
    "split": {"cutoffs": (3, 7)},
    "split-projected": {"cutoffs": (3, 7), "embedding_width": 4},
    "adaptive": {"cutoffs": (3, 7), "div_val": 2},
    "adaptive-projected": {"cutoffs": (2, 5, 11), "div_val": 3, "embedding_width": 27},
    "classes-of-one": {"cutoffs": (1, 2, 3), "div_val": 2},
}
vocabularies = pytest.mark.parametrize("options", VOCABULARIES.values(), ids=VOCABULARIES.keys())
ties = pytest.mark.parametrize("tie", [True, False], ids=["tied", "untied"])
SIZE, WIDTH = 13, 8


def make(*, tie: bool = True, size: int = SIZE, width: int = WIDTH, **options: Any) -> tuple[Embedding, Softmax]:
    vocabulary = VocabularyConfig(**{"size": size, "embedding_width": width, **options})
    embedding = Embedding(vocabulary, width).double()
    head = Softmax(vocabulary, width, embedding=embedding if tie else None).double()
    fill(nn.ModuleList([embedding, head]), seed=0)
    return embedding, head


# --- embedding -------------------------------------------------------------------------------------------------------


@vocabularies
def test_a_token_is_its_row_times_the_projection_of_its_class(options):
    embedding, _ = make(**options)
    tokens_BT = torch.arange(SIZE).flip(0).repeat(2, 1)
    cutoffs, div_val = options.get("cutoffs", ()), options.get("div_val", 1)
    for place, token in enumerate(tokens_BT[0].tolist()):
        cls = sum(token >= cutoff for cutoff in cutoffs)
        start = (0, *cutoffs)[cls]
        row = embedding.tables[cls][token - start] if div_val > 1 else embedding.tables[0][token]
        if len(embedding.projections):
            row = embedding.projections[cls if div_val > 1 else 0] @ row
        torch.testing.assert_close(embedding(tokens_BT)[1, place], row, rtol=1e-12, atol=1e-12)


def test_the_plain_one_is_nn_embedding_times_its_scale():
    vocabulary = VocabularyConfig(size=SIZE, embedding_width=WIDTH)
    embedding, theirs = Embedding(vocabulary, WIDTH, scale=3.0), nn.Embedding(SIZE, WIDTH)
    with torch.no_grad():
        theirs.weight.copy_(embedding.tables[0])
    tokens_BT = torch.randint(SIZE, (4, 5))
    torch.testing.assert_close(embedding(tokens_BT), 3 * theirs(tokens_BT))
    assert embedding(tokens_BT[:, :0]).shape == (4, 0, WIDTH)


@vocabularies
def test_dropout_takes_whole_words_wherever_they_occur(options):
    vocabulary = VocabularyConfig(**{"size": SIZE, "embedding_width": WIDTH, **options})
    embedding = Embedding(vocabulary, WIDTH, dropout=0.5).double()
    fill(embedding, seed=0)
    tokens_BT = torch.arange(SIZE).repeat(3, 2)
    kept, dropped = embedding.eval()(tokens_BT), embedding.train()(tokens_BT)
    ratio_BT = (dropped.norm(dim=2) / kept.norm(dim=2)).view(6, SIZE)
    assert torch.equal(ratio_BT, ratio_BT[:1].expand(6, SIZE))  # six occurrences, one fate
    expected = torch.where(ratio_BT > 0.5, 2.0, 0.0)
    torch.testing.assert_close(dropped.view(6, SIZE, WIDTH), expected.unsqueeze(2) * kept.view(6, SIZE, WIDTH))
    fates = torch.stack([embedding(tokens_BT)[0, :SIZE].norm(dim=1) > 0 for _ in range(400)]).double()
    assert (fates.mean(0) - 0.5).abs().max() < 5 * math.sqrt(0.25 / 400)  # every word, and another one each time


@vocabularies
@pytest.mark.parametrize("token", [SIZE, SIZE + 100, -1])
def test_tokens_outside_the_vocabulary_raise(options, token):
    """Anything but numbers from memory that happened to lie there."""
    embedding, _ = make(**options)
    with pytest.raises((IndexError, ValueError)):
        embedding(torch.tensor([[0, token]]))


# --- softmax ---------------------------------------------------------------------------------------------------------


def check_distribution(head: Softmax, size: int, width: int) -> None:
    """Sums to one; nll gathers from it in token order and is 0 for padding."""
    hidden_BTD = 3 * normal(2, size + 1, width, seed=1)
    log_probs_BTV = head.log_probs(hidden_BTD)
    assert log_probs_BTV.shape == (2, size + 1, size)
    torch.testing.assert_close(log_probs_BTV.logsumexp(2), torch.zeros(2, size + 1).double(), rtol=0.0, atol=1e-12)
    generator = torch.Generator().manual_seed(2)
    targets_BT = torch.stack([torch.randperm(size + 1, generator=generator) - 1 for _ in range(2)])  # each token once
    expected_BT = -log_probs_BTV.gather(2, targets_BT.clamp(min=0).unsqueeze(2)).squeeze(2)
    expected_BT = torch.where(targets_BT < 0, 0.0, expected_BT)
    torch.testing.assert_close(head.nll(hidden_BTD, targets_BT), expected_BT, rtol=1e-12, atol=1e-12)


@vocabularies
@ties
def test_probabilities_sum_to_one_and_nll_is_gathered_from_them(options, tie):
    check_distribution(make(tie=tie, **options)[1], SIZE, WIDTH)


@st.composite
def any_vocabulary(draw):
    size = draw(st.integers(2, 30))
    cutoffs = tuple(sorted(draw(st.sets(st.integers(1, size - 1), max_size=4))))
    div_val = draw(st.sampled_from([1, 2, 3])) if cutoffs else 1
    least = div_val ** len(cutoffs)
    return {
        "size": size,
        "cutoffs": cutoffs,
        "div_val": div_val,
        "embedding_width": draw(st.integers(least, least + 5)),
        "width": draw(st.integers(1, 6)),
        "tie": draw(st.booleans()),
    }


@settings(max_examples=60, deadline=None, derandomize=True)
@given(options=any_vocabulary())
def test_any_vocabulary_has_a_distribution(options):
    _, head = make(**options)
    check_distribution(head, options["size"], options["width"])


@pytest.mark.parametrize(("cutoffs", "div_val"), [((3,), 2), ((3, 7), 2), ((2, 5, 9), 2), ((1, 12), 4)])
def test_is_torchs_adaptive_softmax(cutoffs, div_val):
    """Its head has no projection and its tails no biases; with those out of the way values and gradients are equal."""
    width = 16
    _, head = make(tie=False, width=width, cutoffs=cutoffs, div_val=div_val)
    theirs = nn.AdaptiveLogSoftmaxWithLoss(width, SIZE, list(cutoffs), div_value=div_val, head_bias=True).double()
    with torch.no_grad():
        head.projections[0].copy_(torch.eye(width))
        theirs.head.weight.copy_(torch.cat([head.tables[0], head.class_table]))
        theirs.head.bias.copy_(torch.cat([head.biases[0], head.class_bias]))
        for i, tail in enumerate(theirs.tail, start=1):
            head.biases[i].zero_()
            tail[0].weight.copy_(head.projections[i].mT)  # pyright: ignore
            tail[1].weight.copy_(head.tables[i])  # pyright: ignore
    hidden_ND, targets_N = normal(40, width, seed=1).requires_grad_(), torch.randint(SIZE, (40,))
    torch.testing.assert_close(head.log_probs(hidden_ND), theirs.log_prob(hidden_ND), rtol=1e-11, atol=1e-11)
    ours_N, theirs_N = head.nll(hidden_ND, targets_N), -theirs(hidden_ND, targets_N).output
    torch.testing.assert_close(ours_N, theirs_N, rtol=1e-11, atol=1e-11)
    weight_N = normal(40, seed=2)
    grads = [torch.autograd.grad((nll_N * weight_N).sum(), hidden_ND) for nll_N in (ours_N, theirs_N)]
    torch.testing.assert_close(grads[0], grads[1], rtol=1e-10, atol=1e-10)


@vocabularies
@ties
@pytest.mark.parametrize("logits", [1, 40])
def test_computing_in_parts_changes_nothing(options, tie, logits, monkeypatch):
    embedding, head = make(tie=tie, **options)
    hidden_BTD = normal(3, 6, WIDTH, seed=1).requires_grad_()
    targets_BT, weight_BT = torch.randint(-1, SIZE, (3, 6)), normal(3, 6, seed=2)
    wanted = [hidden_BTD, *head.parameters()]

    def run() -> tuple[Tensor, tuple[Tensor, ...]]:
        nll_BT = head.nll(hidden_BTD, targets_BT)
        return nll_BT, torch.autograd.grad(
            (nll_BT * weight_BT).sum(), wanted, allow_unused=True, materialize_grads=True
        )

    whole = run()
    monkeypatch.setattr(softmax, "MAX_LOGITS", logits)
    torch.testing.assert_close(run(), whole, rtol=1e-12, atol=1e-12)


def test_parts_hold_no_more_logits_than_allowed(monkeypatch):
    _, head = make()
    sizes = []
    cross_entropy = F.cross_entropy
    monkeypatch.setattr(F, "cross_entropy", lambda x, *a, **k: (sizes.append(x.numel()), cross_entropy(x, *a, **k))[1])
    monkeypatch.setattr(softmax, "MAX_LOGITS", 4 * SIZE)
    head.nll(normal(3, 6, WIDTH, seed=1), torch.randint(SIZE, (3, 6)))
    assert len(sizes) == 5 and max(sizes) <= 4 * SIZE


@vocabularies
def test_padding_gets_no_gradient(options):
    _, head = make(**options)
    hidden_BTD = normal(2, 4, WIDTH, seed=1).requires_grad_()
    targets_BT = torch.tensor([[-1, 0, -100, 12], [5, -1, 3, -7]])
    nll_BT = head.nll(hidden_BTD, targets_BT)
    assert torch.equal(nll_BT == 0, targets_BT < 0)
    (grad,) = torch.autograd.grad(nll_BT.sum(), hidden_BTD)
    assert torch.equal(grad.abs().sum(2) == 0, targets_BT < 0)


@vocabularies
@pytest.mark.parametrize("target", [SIZE, SIZE + 100])
def test_targets_outside_the_vocabulary_raise(options, target):
    _, head = make(**options)
    with pytest.raises((IndexError, ValueError)):
        head.nll(normal(1, 2, WIDTH, seed=1), torch.tensor([[0, target]]))


# --- tying -----------------------------------------------------------------------------------------------------------


@vocabularies
def test_tied_weights_are_one_tensor_whose_gradient_is_the_sum(options):
    embedding, head = make(tie=True, **options)
    assert all(a is b for a, b in zip(embedding.tables, head.tables, strict=True))
    first_free = [any(p is q for q in embedding.projections) for p in head.projections]
    assert first_free == [False, *[True] * (len(first_free) - 1)] if first_free else True  # tie_projs of the original
    other_embedding, other_head = make(tie=False, **options)
    for mine, theirs in ((embedding, other_embedding), (head, other_head)):
        theirs.load_state_dict(mine.state_dict())
    tokens_BT, targets_BT = torch.randint(SIZE, (2, 30)), torch.randint(SIZE, (2, 30))
    pairs = ((embedding, head), (other_embedding, other_head))
    for in_, out in pairs:
        out.nll(in_(tokens_BT).sin(), targets_BT).mean().backward()
    for tied, a, b in zip(embedding.tables, other_embedding.tables, other_head.tables, strict=True):
        assert a.grad is not None and b.grad is not None and a.grad.any()
        torch.testing.assert_close(tied.grad, a.grad + b.grad, rtol=1e-10, atol=1e-12)
    if len(head.projections) == len(embedding.projections):  # one a class, all but the first shared
        shared = list(zip(embedding.projections, other_embedding.projections, other_head.projections, strict=True))[1:]
        for tied, a, b in shared:
            assert a.grad is not None and b.grad is not None
            torch.testing.assert_close(tied.grad, a.grad + b.grad, rtol=1e-10, atol=1e-12)


@vocabularies
@ties
def test_every_parameter_gets_a_gradient_whatever_the_targets_are(options, tie):
    """A class without targets in the batch has gradient zero, not none: DDP stops at parameters without one."""
    embedding, head = make(tie=tie, **options)
    tokens_BT = torch.zeros(2, 3, dtype=torch.long)
    head.nll(embedding(tokens_BT), tokens_BT).sum().backward()
    both = nn.ModuleDict({"embedding": embedding, "softmax": head})
    assert [name for name, p in both.named_parameters() if p.grad is None] == []


def test_tables_start_at_the_standard_deviation_asked_for():
    vocabulary = VocabularyConfig(size=3000, embedding_width=32, cutoffs=(1000, 2000), div_val=2)
    embedding = Embedding(vocabulary, 64, std=0.05)
    head = Softmax(vocabulary, 64, std=0.05)
    for weight in (*embedding.tables, *embedding.projections, *head.tables, *head.projections):
        assert abs(weight.std().item() - 0.05) < 5 * 0.05 / math.sqrt(2 * weight.numel())
    assert not any(bias.any() for bias in (*head.biases, head.class_bias))
