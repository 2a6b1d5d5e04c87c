"""`SequenceModel.generate`: tokens that go on from prompts, with everything past cached."""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from deqkit.layers import TransformerConfig
from deqkit.layers.checks import check_whole
from deqkit.model.decode_sample import Sampling
from deqkit.model.decode_solve import SolveSettings
from deqkit.model.decode_state import Decoder, Reading
from deqkit.model.mode import evaluating

if TYPE_CHECKING:
    from deqkit.model.sequence import SequenceModel

# B samples still being written, V vocabulary

OnToken = Callable[[int, int, float], None]
"""Called with the sample, its new token and the token's log-probability, as soon as they are known."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """What a model wrote: one entry a prompt, in the order of the prompts."""

    tokens: list[Tensor]
    """The new tokens, without the prompt; a stop token is the last of them."""
    log_probs: list[Tensor]
    """The model's log-probability of each, whatever temperature, top_k and top_p made of it."""
    num_evals: list[Tensor]
    """Evaluations of the cell for each; those of the first are the prompt's. For a stack: its layers."""
    num_failed: list[int]
    """Solves that ended without converging."""


@dataclass(slots=True)
class _Written:
    generator: torch.Generator
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    num_evals: list[int] = field(default_factory=list)
    num_failed: int = 0


@torch.no_grad()
def generate(
    model: SequenceModel,
    prompts: Any,
    *,
    max_tokens: int,
    sampling: Sampling,
    seed: int | Sequence[int] | None,
    stop: Iterable[int],
    context: int | None,
    on_token: OnToken | None,
    depth: Any,
    settings: SolveSettings,
) -> Generation:
    """`SequenceModel.generate` documents the arguments."""
    check_whole(1, max_tokens=max_tokens)
    if context is not None:
        check_whole(1, context=context)
        if not isinstance(model.config.cell, TransformerConfig):
            raise ValueError(f"context={context} limits what attention sees; this model has none: leave it out")
    prompts = _check_prompts(prompts, model)
    texts = [_Written(generator) for generator in _generators(seed, len(prompts))]
    decoder = Decoder(model, depth=depth, context=context, settings=settings)
    stops = frozenset(stop)
    with evaluating(model), parametrize.cached():  # normalised weights are computed once
        _write(model, decoder, prompts, texts, max_tokens, sampling, stops, on_token)
    dtype, device = next(model.parameters()).dtype, prompts[0].device
    return Generation(
        tokens=[torch.tensor(text.tokens, device=device) for text in texts],
        log_probs=[torch.tensor(text.log_probs, dtype=dtype, device=device) for text in texts],
        num_evals=[torch.tensor(text.num_evals) for text in texts],
        num_failed=[text.num_failed for text in texts],
    )


def _write(
    model: SequenceModel,
    decoder: Decoder,
    prompts: list[Tensor],
    texts: list[_Written],
    max_tokens: int,
    sampling: Sampling,
    stops: frozenset[int],
    on_token: OnToken | None,
) -> None:
    """Token by token, until every text has stopped or is long enough; texts that have stopped leave the batch."""
    open_samples, reading = list(range(len(texts))), decoder.start(prompts)
    while True:
        log_probs_BV = model.softmax.log_probs(reading.hidden_BD)
        tokens_B = sampling.choose(log_probs_BV, [texts[sample].generator for sample in open_samples])
        chosen_B = log_probs_BV.gather(1, tokens_B.unsqueeze(1)).squeeze(1)
        _record(texts, open_samples, tokens_B, chosen_B, reading, on_token)
        if len(texts[open_samples[0]].tokens) == max_tokens:
            return
        going = [place for place, sample in enumerate(open_samples) if texts[sample].tokens[-1] not in stops]
        if not going:
            return
        if len(going) < len(open_samples):
            open_samples = [open_samples[place] for place in going]
            index_B = torch.tensor(going, device=tokens_B.device)
            decoder.keep(index_B)
            tokens_B = tokens_B[index_B]
        reading = decoder.read(tokens_B.unsqueeze(1))


def _record(
    texts: list[_Written],
    samples: list[int],
    tokens_B: Tensor,
    log_probs_B: Tensor,
    reading: Reading,
    on_token: OnToken | None,
) -> None:
    columns = (tokens_B, log_probs_B, reading.evals_B, reading.failed_B)
    for sample, token, log_prob, num_evals, failed in zip(samples, *(c.tolist() for c in columns), strict=True):
        text = texts[sample]
        if not math.isfinite(log_prob):
            raise ValueError(
                f"prompt {sample}: the model's probabilities are not finite after {len(text.tokens)} new tokens; its "
                "weights are damaged or have diverged: load another checkpoint"
            )
        text.tokens.append(token)
        text.log_probs.append(log_prob)
        text.num_evals.append(num_evals)
        text.num_failed += failed
        if on_token is not None:
            on_token(sample, token, log_prob)


def _generators(seed: int | Sequence[int] | None, count: int) -> list[torch.Generator]:
    """One a sample, so that its text does not depend on the others."""
    if seed is None:
        seed = secrets.randbits(62)
    seeds = [seed + sample for sample in range(count)] if isinstance(seed, int) else list(seed)
    if len(seeds) != count:
        raise ValueError(f"seed must be one number, or one for each of the {count} prompts, got {len(seeds)}")
    return [torch.Generator().manual_seed(number) for number in seeds]


def _check_prompts(prompts: Any, model: SequenceModel) -> list[Tensor]:
    size, device = model.config.vocabulary.size, next(model.parameters()).device
    checked: list[Tensor] = []
    for number, prompt in enumerate(prompts):
        ids = prompt if isinstance(prompt, Tensor) else torch.tensor(prompt, dtype=None if len(prompt) else torch.int64)
        if ids.ndim != 1 or ids.is_floating_point() or ids.dtype == torch.bool:
            raise ValueError(
                f"prompt {number} must be a row of token ids, got {ids.dtype} of shape {tuple(ids.shape)}; "
                "prompts are a list of rows, or a tensor (batch, length)"
            )
        if not len(ids):
            raise ValueError(f"prompt {number} is empty: begin with at least one token")
        if not 0 <= int(ids.min()) <= int(ids.max()) < size:
            raise ValueError(
                f"prompt {number}: token ids go from 0 to {size - 1}, got {int(ids.min())} to {int(ids.max())}"
            )
        checked.append(ids.to(device=device, dtype=torch.int64))
    if not checked:
        raise ValueError("there is no prompt: give at least one")
    return checked
