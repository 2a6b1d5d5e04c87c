"""Counting and timing what a library does with a cell, from outside the library.

The same instrument is put on every library: the cell is wrapped, `torch.autograd.grad` is replaced while a call is
measured, and nothing relies on what the library says about itself.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

State = Any
"""A tensor, or a tuple or dict of tensors, batch first."""

CLOCKS: dict[str, Callable[[], float]] = {"cpu": time.process_time, "wall": time.perf_counter}


@dataclass(kw_only=True, slots=True)
class Tally:
    """What one measured call did. A "sample" count adds up the samples of every call, so compaction shows."""

    evals_forward: int = 0
    sample_evals_forward: int = 0
    evals_backward: int = 0
    sample_evals_backward: int = 0
    vjps: int = 0
    """Vector-Jacobian products with respect to the state: the steps of the backward solve."""
    sample_vjps: int = 0
    parameter_products: int = 0
    """Products with respect to the parameters; one is what the mathematics needs."""
    seconds: dict[str, float] = field(default_factory=lambda: {"f": 0.0, "vjp": 0.0, "parameters": 0.0})
    total_seconds: float = 0.0

    @property
    def outside_seconds(self) -> float:
        """Time spent neither in `f` nor in its products: the library's own."""
        return self.total_seconds - sum(self.seconds.values())


def initial_state(cell: nn.Module, x: Tensor) -> State:
    """The starting point deqkit takes: the cell's own, or zeros shaped like its input."""
    own = getattr(cell, "initial_state", None)
    return own(x) if own is not None else torch.zeros_like(x)


class MeasuredCell(nn.Module):
    """A cell that counts and times its evaluations and products while `measure` is running."""

    def __init__(self, cell: nn.Module, *, clock: Callable[[], float]) -> None:
        super().__init__()
        self.cell = cell
        self._clock = clock
        self._parameters_seen = {id(parameter) for parameter in cell.parameters()}
        self._tally: Tally | None = None
        self._phase: Literal["forward", "backward"] = "forward"
        self._open_sections: list[str] = []
        self._nested_seconds = 0.0
        self._parameter_start: float | None = None

    def initial_state(self, x: Tensor) -> State:
        return initial_state(self.cell, x)

    def forward(self, z: State, x: Tensor) -> State:
        if self._tally is None:
            return self.cell(z, x)
        with self._section("f"):
            result = self.cell(z, x)
        num_samples = tree_leaves(result)[0].shape[0]
        if self._phase == "forward":
            self._tally.evals_forward += 1
            self._tally.sample_evals_forward += num_samples
        else:
            self._tally.evals_backward += 1
            self._tally.sample_evals_backward += num_samples
        return tree_map(self._watch_backward, result)

    def measure(self, solve: Callable[[], State], loss: Callable[[State], Tensor]) -> tuple[State, Tally]:
        """Run one forward and backward pass and say what it did.

        Args:
            solve: Finds the equilibrium with this cell.
            loss: Maps the equilibrium to the scalar whose gradient is taken.
        """
        self._tally = tally = Tally()
        with self._counting_products():
            start = self._clock()
            self._phase = "forward"
            z = solve()
            self._phase = "backward"
            loss(z).backward()
            end = self._clock()
        tally.total_seconds = end - start
        if self._parameter_start is not None:
            tally.seconds["parameters"] += end - self._parameter_start
            tally.parameter_products += 1
        self._tally = self._parameter_start = None
        return z, tally

    @contextmanager
    def _section(self, name: str) -> Iterator[None]:
        """Add the time spent here to `name`, without the time of sections opened inside."""
        assert self._tally is not None
        self._open_sections.append(name)
        outer_nested, self._nested_seconds = self._nested_seconds, 0.0
        start = self._clock()
        try:
            yield
        finally:
            elapsed = self._clock() - start
            self._tally.seconds[name] += elapsed - self._nested_seconds
            self._nested_seconds = outer_nested + elapsed
            self._open_sections.pop()

    @contextmanager
    def _counting_products(self) -> Iterator[None]:
        original = torch.autograd.grad

        def counted(outputs: Any, inputs: Any, grad_outputs: Any = None, *args: Any, **kwargs: Any) -> Any:
            assert self._tally is not None
            targets = tree_leaves(inputs)
            if any(id(target) in self._parameters_seen for target in targets):
                self._tally.parameter_products += 1
                section = "parameters"
            else:
                self._tally.vjps += 1
                self._tally.sample_vjps += targets[0].shape[0]
                section = "vjp"
            with self._section(section):
                return original(outputs, inputs, grad_outputs, *args, **kwargs)

        torch.autograd.grad = counted
        try:
            yield
        finally:
            torch.autograd.grad = original

    def _watch_backward(self, output: Tensor) -> Tensor:
        """Notice when a backward pass that no `autograd.grad` started enters the graph of `f`.

        That is the product with the parameters when it is left to the outer `backward()`, where it comes last. The
        hook sits before a view, so that hooks a library puts on the output (torchdeq's `hook_ift` solves in one)
        have run when it fires.
        """
        if not output.requires_grad:
            return output

        def note_start(_: Tensor) -> None:
            if self._tally is not None and not self._open_sections and self._parameter_start is None:
                self._parameter_start = self._clock()

        output.register_hook(note_start)
        return output.view_as(output)
