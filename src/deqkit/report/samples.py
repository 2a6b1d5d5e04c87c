"""What the trained model makes of a text, or of one copy-memory example."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from deqkit.layers import TransformerConfig
from deqkit.report.trained import Trained
from deqkit.train.tasks import CopyTask, TextTask

# B samples, T positions

PROMPT, NUM_TOKENS = 32, 60
SEARCHED = 4_000
"""Tokens in which a passage to begin with is looked for."""
TEMPERATURES = (0.0, 0.8)
"""Of the samples; 0 takes the likeliest token every time."""
SEED = 0
NUM_SYMBOLS = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Continuation:
    """A text that the model wrote."""

    temperature: float
    text: str


@dataclass(frozen=True, kw_only=True, slots=True)
class TextSamples:
    """Continuations of the beginning of the validation text."""

    prompt: str
    actual: str
    """How the text really goes on."""
    continuations: Sequence[Continuation]


@dataclass(frozen=True, kw_only=True, slots=True)
class CopySample:
    """One example of copy memory, at the ten positions that matter, and how many a batch gets right."""

    symbols: Sequence[int]
    predicted: Sequence[int]
    num_blanks: int
    share_right: float
    num_examples: int


@torch.no_grad()
def take_samples(trained: Trained) -> TextSamples | CopySample:
    """Samples that fit the task."""
    task = trained.task
    if isinstance(task, CopyTask):
        return _copy_sample(trained, task)
    assert isinstance(task, TextTask), f"no samples for {type(task).__name__}"
    return _text_samples(trained, task)


def _text_samples(trained: Trained, task: TextTask) -> TextSamples:
    prompt, actual = _passage(task)
    decode = task.corpus.decode
    texts = map(decode, continue_text(trained, prompt, num_tokens=NUM_TOKENS))
    written = [Continuation(temperature=t, text=text) for t, text in zip(TEMPERATURES, texts, strict=True)]
    return TextSamples(prompt=decode(prompt), actual=decode(actual), continuations=written)


def _passage(task: TextTask) -> tuple[list[int], list[int]]:
    """A beginning and what follows it: of the passages near the start of the validation text the one that is most
    like prose, for a table or a list says little about a model."""
    ids = [int(index) for index in task.corpus.split("valid")[:SEARCHED]]
    length = max(1, min(PROMPT, len(ids) // 2))
    starts = range(0, max(1, len(ids) - length - NUM_TOKENS), length)
    start = max(starts, key=lambda start: _prose(task.corpus.decode(ids[start : start + length])))
    return ids[start : start + length], ids[start + length : start + length + NUM_TOKENS]


def _prose(text: str) -> float:
    """The share of letters and single spaces."""
    kept = "".join(character for character in text if character.isalpha() or character == " ")
    return len(re.sub(" +", " ", kept)) / max(1, len(text))


def continue_text(trained: Trained, prompt: Sequence[int], *, num_tokens: int) -> list[list[int]]:
    """The tokens that follow, at each of the `TEMPERATURES`."""
    model, config = trained.model, trained.model.config
    context = trained.window + config.mem_len if isinstance(config.cell, TransformerConfig) else None
    settings: dict[str, Any] = {"max_tokens": num_tokens, "context": context, "depth": trained.depth, "seed": SEED}
    written = [model.generate([prompt], temperature=temperature, **settings) for temperature in TEMPERATURES]
    return [generation.tokens[0].tolist() for generation in written]


def _copy_sample(trained: Trained, task: CopyTask) -> CopySample:
    batch = next(iter(task.evaluation("valid")))
    real_B = (batch.targets_BT >= 0).all(1)
    tokens_BT, targets_BT = batch.tokens_BT[real_B], batch.targets_BT[real_B]
    output = trained.model(tokens_BT, depth=trained.depth)
    predicted_BT = trained.model.log_probs(output).argmax(-1)[:, -NUM_SYMBOLS:]
    right_BT = predicted_BT == targets_BT[:, -NUM_SYMBOLS:]
    return CopySample(
        symbols=targets_BT[0, -NUM_SYMBOLS:].tolist(),
        predicted=predicted_BT[0].tolist(),
        num_blanks=task.data.T,
        share_right=float(right_BT.double().mean()),
        num_examples=len(tokens_BT),
    )
