"""The tasks as the paper's appendix F describes them, against the data that we have."""

from __future__ import annotations

from functools import partial
from pathlib import Path

from deqkit.data import CopyMemory, open_corpus
from deqkit.paper.claim import Claim, Outcome
from deqkit.paper.workshop import Workshop

PTB_WORDS, PTB_VOCABULARY = 888_000, 10_000
WT103_WORDS, WT103_VOCABULARY = 100_000_000, 260_000


def copy_task(workshop: Workshop) -> Outcome:
    """The task's description, position by position."""
    data = CopyMemory()
    inputs, targets = data.split("test")
    num_train = len(data.split("train")[0])
    T, symbols = data.T, inputs[:, :10]
    rest = inputs[:, 10:].clone()
    rest[:, T - 1] -= 9  # position T + 10, counted from 1
    facts = {
        "length T + 20": inputs.shape[1] == targets.shape[1] == T + 20,
        "ten symbols of 1 to 8": bool((symbols >= 1).all() and (symbols <= 8).all()) and len(symbols.unique()) == 8,
        "zeros after them, and 9 at T + 10": not bool(rest.any()),
        "targets: zeros up to T + 10, then the symbols": not bool(targets[:, : T + 10].any())
        and bool((targets[:, T + 10 :] == symbols).all()),
        "20,000 training and 2,000 test samples": (num_train, len(inputs)) == (20_000, 2_000),
    }
    return Outcome(
        measured="; ".join(f"{fact}: {'yes' if true else 'NO'}" for fact, true in facts.items()),
        scale="the data of recipe copy-memory, every sample",
        holds=all(facts.values()),
        numbers={"facts": facts},
        remark="Code of the TCN's authors, which others used, has eleven 9s; this is the paper's version.",
    )


def text_task(workshop: Workshop, *, name: str, words: int, vocabulary: int, at_least: bool) -> Outcome:
    """Words without line ends, and the vocabulary."""
    corpus = open_corpus(Path(workshop.corpus(name)))
    ids = corpus.split("train")
    ends = int((ids == corpus.vocabulary.token_to_id("<eos>")).sum())
    found = len(ids) - ends
    whole = corpus.manifest.as_published is not False
    right = found >= words and corpus.vocab_size >= vocabulary
    if not at_least:
        right = abs(found / words - 1) < 0.001 and corpus.vocab_size == vocabulary
    return Outcome(
        measured=f"{found:,} words and {ends:,} line ends for training, vocabulary {corpus.vocab_size:,}",
        scale=f"the corpus {name}" + ("" if whole else ", of which only a part is here"),
        holds=right if whole else None,
        numbers={
            "words": found,
            "line_ends": ends,
            "vocabulary": corpus.vocab_size,
            "notes": list(corpus.manifest.notes),
        },
        remark="The paper's count is of words without line ends, which are predicted as well."
        if whole
        else "A part of the text says nothing about the whole.",
    )


CLAIMS: tuple[Claim, ...] = (
    Claim(
        row="task-copy-memory",
        where="appendix F, copy memory",
        claim="ten symbols, T blanks, a sign, and the symbols again; 20,000 training and 2,000 test samples",
        paper="T = 400: length 420",
        quick=copy_task,
    ),
    Claim(
        row="task-ptb",
        where="appendix F, Penn Treebank",
        claim="Penn Treebank has about 888 thousand words for training and a vocabulary of 10,000",
        paper="888K words, vocabulary 10,000",
        quick=partial(text_task, name="ptb", words=PTB_WORDS, vocabulary=PTB_VOCABULARY, at_least=False),
    ),
    Claim(
        row="task-wikitext-103",
        where="section 5; appendix F, WikiText-103",
        claim="WikiText-103 has over 100 million words for training and a vocabulary of over 260 thousand",
        paper="over 100M words (110 times Penn Treebank), vocabulary over 260K",
        quick=partial(text_task, name="wikitext-103", words=WT103_WORDS, vocabulary=WT103_VOCABULARY, at_least=True),
    ),
)
