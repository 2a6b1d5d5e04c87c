"""Tokens per second of cached generation, of solving everything again, and of a stack with a cache of its own."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from deqkit.analysis.results import results_header
from deqkit.layers.checks import check_whole
from deqkit.model import SequenceModel

# B samples, T positions

MIN_SPEED_UP, MIN_AGAINST_STACK = 10.0, 1.0

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class GenerationBenchConfig:
    """Settings of `deqkit bench generate`."""

    context: int = 512
    """Positions before the tokens that are timed."""
    num_tokens: int = 64
    """Tokens written with a cache, in every repeat."""
    num_solved_again: int = 3
    """Tokens found by solving everything again, in every repeat."""
    batch: int = 1
    """Texts side by side."""
    repeats: int = 5
    """How often each way is timed, one after the other in turn."""
    depth: int = 16
    """Layers of the stack, if it is not a run of its own."""
    seed: int = 0
    """Of the tokens, where there is no text."""

    def __post_init__(self) -> None:
        check_whole(1, context=self.context, num_solved_again=self.num_solved_again, batch=self.batch)
        check_whole(1, repeats=self.repeats, depth=self.depth)
        check_whole(2, num_tokens=self.num_tokens)


def run_generation_bench(
    config: GenerationBenchConfig,
    model: SequenceModel,
    *,
    stack: SequenceModel | None = None,
    text: Tensor | None = None,
    on_progress: OnProgress,
) -> dict[str, Any]:
    """Measure a model with an equilibrium.

    Args:
        stack: a stack of layers to compare with; the model's own cell, `depth` times, if left out.
        text: at least `batch * context` ids to begin with; random ones if left out.
    """
    if model.config.depth != "equilibrium":
        raise ValueError("there is nothing to solve again in a stack of layers: name a run with an equilibrium")
    if stack is not None and stack.config.depth == "equilibrium":
        raise ValueError("the run to compare with has an equilibrium: name one with layers, such as demo-tied-12")
    prompts_BT = _prompts(config, model, text)
    depth = config.depth if stack is None else None
    ways: dict[str, Callable[[], tuple[float, float]]] = {
        "cached": lambda: _cached(model, prompts_BT, config.num_tokens, None),
        "solved again": lambda: _solved_again(model, prompts_BT, config.num_solved_again),
        "stack": lambda: _cached(stack or model, prompts_BT, config.num_tokens, depth),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    evals = {}
    for repeat in range(config.repeats):
        for name, way in ways.items():
            on_progress(f"repeat {repeat + 1}: {name}", repeat, config.repeats)
            taken, evals[name] = way()
            seconds[name].append(taken)
    return {
        **results_header(benchmark="bench generate", seed=config.seed, config=config),
        "rows": [
            {
                "way": name,
                "tokens_per_second": config.batch / statistics.median(seconds[name]),
                "milliseconds_per_step": [1e3 * taken for taken in seconds[name]],
                "evaluations_per_token": evals[name],
            }
            for name in ways
        ],
        "summary": [
            _compare("cached / solved again", seconds["cached"], seconds["solved again"], MIN_SPEED_UP),
            _compare("cached / stack with a cache", seconds["cached"], seconds["stack"], MIN_AGAINST_STACK),
        ],
    }


def _prompts(config: GenerationBenchConfig, model: SequenceModel, text: Tensor | None) -> Tensor:
    needed = config.batch * config.context
    if text is None:
        generator = torch.Generator().manual_seed(config.seed)
        text = torch.randint(model.config.vocabulary.size, (needed,), generator=generator)
    if len(text) < needed:
        raise ValueError(f"the text has {len(text):,} tokens, and {needed:,} are needed: lower batch or context")
    return text[:needed].view(config.batch, config.context)


def _cached(model: SequenceModel, prompts_BT: Tensor, num_tokens: int, depth: int | None) -> tuple[float, float]:
    """Mean time of a step and mean evaluations a token, those of the prompt left out."""
    moments: list[float] = []

    def on_token(sample: int, token: int, log_prob: float) -> None:
        if sample == 0:
            moments.append(time.perf_counter())

    written = model.generate(prompts_BT, max_tokens=num_tokens, temperature=0.0, on_token=on_token, depth=depth)
    evals = torch.stack([num_evals[1:] for num_evals in written.num_evals]).double().mean()
    return (moments[-1] - moments[0]) / (num_tokens - 1), float(evals)


@torch.no_grad()
def _solved_again(model: SequenceModel, prompts_BT: Tensor, num_tokens: int) -> tuple[float, float]:
    """The same of a model that is given the last `context` tokens every time and keeps nothing."""
    tokens_BT, evals, begin = prompts_BT, [], time.perf_counter()
    for _ in range(num_tokens):
        output = model(tokens_BT)
        chosen_B = model.softmax.log_probs(output.hidden[:, -1]).argmax(1)
        tokens_BT = torch.cat([tokens_BT[:, 1:], chosen_B.unsqueeze(1)], 1)
        evals.append(float(sum(solution.num_evals.double().mean() for solution in output.solutions)))
    return (time.perf_counter() - begin) / num_tokens, statistics.mean(evals)


def _compare(name: str, ours: list[float], theirs: list[float], bar: float) -> dict[str, Any]:
    """How many times quicker, as the median over repeats, in each of which both were timed."""
    ratio = statistics.median(b / a for a, b in zip(ours, theirs, strict=True))
    return {"name": name, "value": ratio, "bar": bar, "holds": ratio >= bar}
