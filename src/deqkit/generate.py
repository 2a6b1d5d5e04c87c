"""Stage 7: a trained run goes on from texts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from deqkit.data import Corpus, DataError
from deqkit.layers import TransformerConfig
from deqkit.train.load import LoadedRun

OnText = Callable[[int, str], None]
"""Called with the number of a prompt and the next piece of its text."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenText:
    """A prompt and what the model made of it: `prompt + text` is the whole."""

    prompt: str
    """As the vocabulary has it: unknown words are `<unk>`, and at word level spaces and case may differ."""
    text: str
    tokens: tuple[int, ...]
    log_probs: tuple[float, ...]
    num_evals: tuple[int, ...]
    """Evaluations of the cell for each token; the first one's are the prompt's."""
    num_failed: int
    """Solves that ended without converging."""


def generate_text(
    run: LoadedRun,
    prompts: Sequence[str],
    *,
    max_tokens: int,
    stop: str | None = None,
    context: int | None = None,
    on_text: OnText | None = None,
    **options: Any,
) -> list[WrittenText]:
    """Go on from texts with a run's model and vocabulary.

    Args:
        prompts: texts to begin with.
        max_tokens: new tokens of every text.
        stop: a text of one token after which to end.
        context: positions that attention sees; `trained_context` of the run if left out.
        on_text: called with the prompt, and then with every piece of text as soon as it is known.
        options: further options of `SequenceModel.generate`.

    Raises:
        ValueError: the run is not of a text, or a prompt or an option cannot be used; tells the remedy.
    """
    corpus = run.corpus()
    ids = [_encode(corpus, prompt, f"prompt {number}") for number, prompt in enumerate(prompts)]
    streams = [_Stream(corpus, prompt_ids) for prompt_ids in ids]

    def show(sample: int, piece: str) -> None:
        if on_text is not None and piece:
            on_text(sample, piece)

    def on_token(sample: int, token: int, log_prob: float) -> None:
        if not streams[sample].num_new:
            show(sample, streams[sample].prompt)
        show(sample, streams[sample].add(token))

    written = run.model.generate(
        ids,
        max_tokens=max_tokens,
        stop=() if stop is None else (_stop_token(corpus, stop),),
        context=trained_context(run) if context is None else context,
        on_token=on_token,
        **{"depth": _trained_depth(run), **options},
    )
    for sample, stream in enumerate(streams):
        show(sample, stream.finish())
    return [
        WrittenText(
            prompt=stream.prompt,
            text=stream.text,
            tokens=tuple(tokens.tolist()),
            log_probs=tuple(log_probs.tolist()),
            num_evals=tuple(num_evals.tolist()),
            num_failed=num_failed,
        )
        for stream, tokens, log_probs, num_evals, num_failed in zip(
            streams, written.tokens, written.log_probs, written.num_evals, written.num_failed, strict=True
        )
    ]


def trained_context(run: LoadedRun) -> int | None:
    """How far back training let a position look at most, itself included; None for a cell without attention."""
    model = run.config.model
    return run.config.data.length + model.mem_len if isinstance(model.cell, TransformerConfig) else None


def _trained_depth(run: LoadedRun) -> int | None:
    """The depth of the shallow phase, if the checkpoint is of that."""
    devices = run.config.devices
    return devices.warmup_depth if 0 < run.step <= devices.warmup_steps else None


def _encode(corpus: Corpus, text: str, name: str) -> list[int]:
    try:
        ids = corpus.encode(text)
    except DataError as error:
        known = "use words of the text that the run was trained on"
        raise DataError(f"{name}: {str(error).removeprefix('the text, ')}; {known}") from error
    if not ids:
        raise ValueError(f"{name} is empty: begin with at least one word")
    return ids


def _stop_token(corpus: Corpus, text: str) -> int:
    ids = corpus.encode(text)
    if len(ids) != 1:
        raise ValueError(f"stop must be one token of the vocabulary, but {text!r} is {len(ids)}: choose a shorter one")
    return ids[0]


class _Stream:
    """The text of a growing row of tokens, piece by piece."""

    def __init__(self, corpus: Corpus, prompt: list[int]) -> None:
        self._corpus, self._ids = corpus, list(prompt)
        self.prompt, self.text, self.num_new = corpus.decode(prompt), "", 0

    def add(self, token: int) -> str:
        """What is new. A character of which a part is still to come is held back."""
        self._ids.append(token)
        self.num_new += 1
        return self._show(self._all().rstrip("\ufffd"))

    def finish(self) -> str:
        """What was held back."""
        return self._show(self._all())

    def _all(self) -> str:
        return self._corpus.decode(self._ids)[len(self.prompt) :]

    def _show(self, text: str) -> str:
        shown, self.text = len(self.text), max(self.text, text, key=len)
        return self.text[shown:]
