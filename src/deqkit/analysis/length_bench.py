"""How time and memory of a model grow with the length of its sequences."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from deqkit.analysis.memory import peak_memory
from deqkit.analysis.results import results_header
from deqkit.analysis.timing import interleaved
from deqkit.layers.checks import check_whole
from deqkit.model import ModelOutput, SequenceModel

# B samples, T positions

FLAT = 1.1
"""Time and memory per token at the longest sequences are at most so many times those at the shortest."""

OnProgress = Callable[[str, int, int], None]


@dataclass(frozen=True, kw_only=True, slots=True)
class LengthBenchConfig:
    """Settings of `deqkit bench length`."""

    lengths: tuple[int, ...] = (128, 256, 512, 1024, 2048)
    """Positions of a sequence, the shortest first."""
    batch: int = 8
    """Sequences side by side, at every length."""
    rounds: int = 3
    """How often every step is timed."""
    threads: int = 1
    """Threads torch may use."""
    clock: Literal["cpu", "wall"] = "cpu"
    """Processor time, which a busy machine disturbs least, or wall time."""
    seed: int = 0
    """Of the tokens, where there is no text."""

    def __post_init__(self) -> None:
        check_whole(1, batch=self.batch, rounds=self.rounds, threads=self.threads)
        if len(self.lengths) < 2 or list(self.lengths) != sorted(set(self.lengths)) or self.lengths[0] < 1:
            raise ValueError(f"lengths must be two or more positive numbers that grow, got {self.lengths}")

    @property
    def num_tokens(self) -> int:
        """How long a text must be, for tokens and targets at the longest length."""
        return self.batch * self.lengths[-1] + 1


def run_length_bench(
    config: LengthBenchConfig, model: SequenceModel, *, text: Tensor | None = None, on_progress: OnProgress
) -> dict[str, Any]:
    """Steps of one model on sequences of several lengths.

    Args:
        text: token ids, at least `config.num_tokens` of them; random ones if left out.
        on_progress: told what is done next, how many steps are done, and of how many.

    Returns:
        For every length the seconds per token of training and inference steps, evaluations and products, and the peak
        of a training step's tensors with one sequence; and whether they are flat, or for memory linear.
    """
    if text is None:
        generator = torch.Generator().manual_seed(config.seed)
        text = torch.randint(model.config.vocabulary.size, (config.num_tokens,), generator=generator)
    if len(text) < config.num_tokens:
        raise ValueError(f"{config.num_tokens} tokens are needed, the text has {len(text)}")
    threads_before = torch.get_num_threads()
    torch.set_num_threads(config.threads)
    try:
        timings = {
            phase: _timed(config, model, text, training=phase == "training", on_progress=partial(on_progress, phase))
            for phase in ("training", "inference")
        }
    finally:
        torch.set_num_threads(threads_before)
    rows = []
    for length in config.lengths:
        on_progress("memory", len(rows), len(config.lengths))
        peak = _peak_of_training(model, *_cut(text, config.batch, length))
        rows.append({"length": length, **{phase: timings[phase][length] for phase in timings}, "peak_bytes": peak})
    return {
        **results_header(benchmark="bench length", seed=config.seed, config=config),
        "rows": rows,
        "summary": _summarise(rows),
    }


def _timed(
    config: LengthBenchConfig, model: SequenceModel, text: Tensor, *, training: bool, on_progress: Any
) -> dict[int, dict[str, Any]]:
    outputs: dict[int, ModelOutput] = {}
    calls = {}
    for length in config.lengths:
        tokens_BT, targets_BT = _cut(text, config.batch, length)
        calls[str(length)] = partial(_step, model, tokens_BT, targets_BT, outputs, training=training)
    with torch.random.fork_rng():
        torch.manual_seed(config.seed)
        found = interleaved(calls, rounds=config.rounds, clock=config.clock, on_round=on_progress)
    model.eval()
    timed = {}
    for length in config.lengths:
        timing = found[str(length)]
        num_tokens = config.batch * length
        low, high = timing.spread
        timed[length] = {
            "seconds_per_token": timing.median / num_tokens,
            "spread": [low / num_tokens, high / num_tokens],
            **_account(outputs[length]),
        }
    return timed


def _step(
    model: SequenceModel, tokens_BT: Tensor, targets_BT: Tensor, outputs: dict[int, ModelOutput], *, training: bool
) -> None:
    model.train(training)
    with torch.set_grad_enabled(training):
        output = model(tokens_BT, targets_BT)
        if training:
            assert output.loss is not None
            (output.loss if output.start_error is None else output.loss + output.start_error).backward()
            model.zero_grad(set_to_none=True)
    outputs[tokens_BT.shape[1]] = output


def _cut(text: Tensor, batch: int, length: int) -> tuple[Tensor, Tensor]:
    """The beginning of a text as sequences, and what follows each token."""
    count = batch * length
    return text[:count].view(batch, length).long(), text[1 : count + 1].view(batch, length).long()


def _peak_of_training(model: SequenceModel, tokens_BT: Tensor, targets_BT: Tensor) -> int:
    """Of the tensors of a training step."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        peak = peak_memory(lambda: _step(model, tokens_BT, targets_BT, {}, training=True)).peak_bytes
    model.eval()
    return peak


def _account(output: ModelOutput) -> dict[str, float]:
    """Mean evaluations of the solves, and products where there were any."""
    mean = lambda solutions: sum(float(s.num_evals.double().mean()) for s in solutions) / len(solutions)  # noqa: E731
    backward = [s.backward for s in output.solutions if s.backward is not None]
    return {"evaluations": mean(output.solutions)} | ({"products": mean(backward)} if backward else {})


def _summarise(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """What a token costs at the longest sequences, beside the shortest."""
    first, last = rows[0], rows[-1]
    growth = {
        f"{phase}, time a token": last[phase]["seconds_per_token"] / first[phase]["seconds_per_token"]
        for phase in ("training", "inference")
    }
    # What one more token takes: gradients of parameters are part of every peak and do not grow.
    more = [
        (b["peak_bytes"] - a["peak_bytes"]) / (b["length"] - a["length"]) for a, b in zip(rows, rows[1:], strict=False)
    ]
    growth["training, memory of one more token"] = more[-1] / more[0]
    span = f"{first['length']} to {last['length']} positions"
    return [
        {"name": f"{name}, {span}", "value": value, "bar": FLAT, "holds": value <= FLAT}
        for name, value in growth.items()
    ]
