"""Where the time of a model's step goes: a step is followed through its stages, which add up to the whole."""

from __future__ import annotations

import itertools
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor

from deqkit.analysis.timing import Timing as Timing
from deqkit.analysis.timing import compare_steps as compare_steps
from deqkit.analysis.timing import interleaved as interleaved
from deqkit.data import Batch
from deqkit.model import ModelOutput, SequenceModel
from deqkit.solve import Solution

# B samples, T positions, D width

STAGES = ("embedding", "cell", "products", "solver", "softmax", "penalty", "optimiser", "data", "rest")
"""What a step's time is divided into.

cell: evaluations of f, forward. products: vector-Jacobian products of the backward pass, the last one, with the
parameters, included; for a stack its backward pass. solver: what solves do besides these, forward and backward.
rest: injection, dropout masks, binding, memory, bookkeeping.
"""

Penalty = Callable[[ModelOutput, int], Tensor | None]
"""What training adds to the loss at a step, or None."""


class Stepper:
    """Steps of one model: each takes a batch, with the memory that the one before left."""

    def __init__(
        self,
        model: SequenceModel,
        *,
        training: bool,
        optimiser: torch.optim.Optimizer | None = None,
        clip: float = 0.0,
        penalty: Penalty | None = None,
        bf16: bool = False,
    ) -> None:
        """
        Args:
            training: forward, backward and update, with dropout; otherwise forward without gradients.
            optimiser: updates the weights in training; None leaves them as they are.
            clip: largest norm of the gradient; 0 for no limit.
            penalty: what training adds to the loss.
            bf16: run the model in bfloat16, under autocast, as training does that asks for it.
        """
        self.model, self.training, self.bf16 = model, training, bf16
        self.optimiser, self.clip, self.penalty = optimiser, clip, penalty
        self.num_steps = 0
        self._memory: Any = None

    def over(self, batches: Sequence[Batch]) -> Callable[[], ModelOutput]:
        """A call that takes one step, with the next of these batches, round and round."""
        if not batches:
            raise ValueError("there is no batch to step over")
        endless = itertools.cycle(batches)
        return lambda: self.step(next(endless))

    def step(self, batch: Batch, enter: Callable[[str], None] = lambda stage: None) -> ModelOutput:
        """One step; tells when it enters a stage that only a step as a whole has."""
        self.model.train(self.training)
        with torch.set_grad_enabled(self.training):
            memory = None if batch.new_context else self._memory
            with self._arithmetic():
                output = self.model(batch.tokens_BT, batch.targets_BT, memory)
            if self.training:
                self._learn(output, enter)
        self._memory = output.memory
        self.num_steps += 1
        return output

    def _arithmetic(self) -> torch.autocast:
        return torch.autocast(next(self.model.parameters()).device.type, torch.bfloat16, enabled=self.bf16)

    def _learn(self, output: ModelOutput, enter: Callable[[str], None]) -> None:
        assert output.loss is not None
        enter("penalty")
        with self._arithmetic():
            added = None if self.penalty is None else self.penalty(output, self.num_steps)
        if added is not None:
            added.backward(retain_graph=True)
        enter("softmax")  # the backward pass begins at the loss; hooks tell how far it has come
        (output.loss if output.start_error is None else output.loss + output.start_error).backward()
        enter("optimiser")
        if self.clip:
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        if self.optimiser is not None:
            self.optimiser.step()
        self.model.zero_grad(set_to_none=True)


def _no_seconds() -> dict[str, float]:
    return {stage: 0.0 for stage in STAGES}


class _Stopwatch:
    """Gives every moment to the stage that was entered last."""

    def __init__(self) -> None:
        self.seconds = _no_seconds()
        self.in_backward = 0.0
        """Of the cell's seconds, those of evaluations that a backward solve makes."""
        self._stage, self._since = "rest", time.perf_counter()

    def enter(self, stage: str) -> None:
        now = time.perf_counter()
        self.seconds[self._stage] += now - self._since
        self._stage, self._since = stage, now

    def arrive(self, stage: str) -> None:
        """A gradient has come this far; that of a penalty, which comes first, goes the same way and is no news."""
        if self._stage != "penalty":
            self.enter(stage)

    @contextmanager
    def inside(self, stage: str) -> Iterator[None]:
        """A stage within another; all that a penalty does is the penalty's."""
        before = self._stage
        self.enter(before if before == "penalty" else stage)
        began = self._since
        try:
            yield
        finally:
            self.enter(before)
            if before == "products":
                self.in_backward += self._since - began


def breakdown(
    model: SequenceModel, batches: Iterable[Batch], *, num_steps: int, training: bool, **options: Any
) -> dict[str, Any]:
    """The seconds of a model's steps by stage, in wall time, and what its solves did.

    Args:
        batches: where they come from; getting one is the stage "data". The first is for a step that does not count.
        num_steps: steps that count.
        training, options: as for `Stepper`.

    Returns:
        `seconds` by stage and their `total`, all per step; `tokens` per step; `evaluations` of f and `products` in
        solves per sample and step (None for a stack), and `cell_calls`, how often f was called in a step for any
        reason.

    Raises:
        ValueError: there are not enough batches.
    """
    source, stepper = iter(batches), Stepper(model, training=training, **options)
    watch, calls, tokens, solutions = _Stopwatch(), [0], 0, []
    with _watching(model, watch, calls):
        for number in range(-1, num_steps):
            if number == 0:
                watch.seconds, watch.in_backward, calls[0] = _no_seconds(), 0.0, 0
            watch.enter("data")
            batch = next(source, None)
            if batch is None:
                raise ValueError(f"{num_steps} steps need {num_steps + 1} batches, there are {number + 1}")
            watch.enter("rest")
            output = stepper.step(batch, watch.enter)
            watch.enter("rest")
            if number >= 0:
                tokens += batch.tokens_BT.numel()
                solutions += output.solutions
    seconds = {stage: value / num_steps for stage, value in _with_solver(watch, solutions).items()}
    return {
        "seconds": seconds,
        "total": sum(seconds.values()),
        "tokens": tokens / num_steps,
        "evaluations": _mean_evals(solutions),
        "products": _mean_evals([s.backward for s in solutions if s.backward is not None]),
        "cell_calls": calls[0] / num_steps,
    }


def _with_solver(watch: _Stopwatch, solutions: Sequence[Solution]) -> dict[str, float]:
    """Solves know how long they were outside f: forward that went to the rest, backward to the products."""
    seconds = dict(watch.seconds)
    forward = sum(s.seconds_outside_f for s in solutions)
    backward = sum(s.backward.seconds_outside_f for s in solutions if s.backward is not None) - watch.in_backward
    for stage, spent in (("rest", forward), ("products", max(backward, 0.0))):
        seconds[stage] -= spent
        seconds["solver"] += spent
    return seconds


def _mean_evals(solutions: Sequence[Solution]) -> float | None:
    return statistics.fmean(float(s.num_evals.double().mean()) for s in solutions) if solutions else None


@contextmanager
def _watching(model: SequenceModel, watch: _Stopwatch, calls: list[int]) -> Iterator[None]:
    """Tells the stopwatch when the model enters its stages, forward by its parts, backward by gradients arriving."""

    def bound(bind: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            f, inputs = bind(*args, **kwargs)

            def timed(*state_and_inputs: Any) -> Any:
                calls[0] += 1
                with watch.inside("cell"):
                    return f(*state_and_inputs)

            return timed, inputs

        return call

    def embedded(tokens_BT: Tensor) -> Tensor:
        with watch.inside("embedding"):
            x_BTD = embed(tokens_BT)
        return _noting(x_BTD, lambda: watch.arrive("embedding"))

    def scored(hidden_BTD: Tensor, targets_BT: Tensor) -> Tensor:
        hidden_BTD = _noting(hidden_BTD, lambda: watch.arrive("products"))
        with watch.inside("softmax"):
            return nll(hidden_BTD, targets_BT)

    embed, nll = model.embed, model.softmax.nll
    with ExitStack() as stack:
        for cell in model.cells:
            stack.enter_context(_replaced(cell, "bind", bound(cell.bind)))
        stack.enter_context(_replaced(model, "embed", embedded))
        stack.enter_context(_replaced(model.softmax, "nll", scored))
        yield


def _noting(tensor: Tensor, note: Callable[[], None]) -> Tensor:
    """The tensor, with a note when its gradient is there."""
    if not tensor.requires_grad:
        return tensor
    noted = tensor.view_as(tensor)
    noted.register_hook(lambda grad: note())
    return noted


@contextmanager
def _replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """A method of one object, replaced for a while."""
    before = vars(owner).get(name)  # usually nothing: the method is the class's
    setattr(owner, name, value)
    try:
        yield
    finally:
        if before is None:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def take(batches: Iterable[Batch], count: int) -> list[Batch]:
    """The first batches, as many as there are of the wanted number."""
    found = []
    for batch in batches:
        found.append(batch)
        if len(found) == count:
            break
    return found
