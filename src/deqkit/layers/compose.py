"""Two theorems of the paper as constructions: one equilibrium holds many, and tied weights are no restriction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import Tensor, nn


def stack(first: nn.Module, second: nn.Module) -> Stacked:
    """One cell whose equilibrium holds that of `first` and that of `second` fed with it (Theorem 2).

        first(z1, *args) -> z1          second(z2, z1) -> z2

    The state is the tuple (z1, z2) and the cell maps it to (first(z1, *args), second(z2, z1)).
    """
    return Stacked(first, second)


class Stacked(nn.Module):
    """See `stack`."""

    def __init__(self, first: nn.Module, second: nn.Module) -> None:
        super().__init__()
        self.first, self.second = first, second

    def initial_state(self, *args: Any) -> tuple[Any, Any]:
        """Zeros: those of each cell where it says so, else like the first argument and like z1."""
        z1 = _start(self.first, *args)
        return z1, _start(self.second, z1)

    def bind(self, *args: Any) -> tuple[Callable[..., tuple[Any, Any]], tuple[Any, ...]]:
        """What the first cell does once per solve. The second cannot: its input changes with z1."""
        bind: Any = getattr(self.first, "bind", None)
        first, args = (self.first, args) if bind is None else bind(*args)

        def f(state: tuple[Any, Any], *args: Any) -> tuple[Any, Any]:
            return first(state[0], *args), self.second(state[1], state[0])

        return f, args

    def forward(self, state: tuple[Any, Any], *args: Any) -> tuple[Any, Any]:
        z1, z2 = state
        return self.first(z1, *args), self.second(z2, z1)


def tie(layers: Sequence[nn.Module]) -> Tied:
    """The weight-tied, input-injected network that computes what `layers` compute (Theorem 3, appendix C).

    Its state holds the outputs of all layers; one application moves each on by one layer. Applied L times from any
    start, where L is the number of layers, the last entry is the network's output, and the state is an equilibrium.
    """
    return Tied(layers)


class Tied(nn.Module):
    """See `tie`."""

    def __init__(self, layers: Sequence[nn.Module]) -> None:
        super().__init__()
        if not layers:
            raise ValueError("tie needs at least one layer")
        self.layers = nn.ModuleList(layers)

    def initial_state(self, x: Tensor) -> tuple[Tensor, ...]:
        """Zeros of the shapes that the layers give for this input."""
        state = []
        for layer in self.layers:
            x = layer(x)
            state.append(x.new_zeros(x.shape))
        return tuple(state)

    def forward(self, state: tuple[Tensor, ...], x: Tensor) -> tuple[Tensor, ...]:
        return tuple(layer(z) for layer, z in zip(self.layers, (x, *state[:-1]), strict=True))


def _start(cell: nn.Module, *args: Any) -> Any:
    if callable(initial_state := getattr(cell, "initial_state", None)):
        return initial_state(*args)
    if args and isinstance(args[0], Tensor):
        return args[0].new_zeros(args[0].shape)
    raise ValueError(f"give {type(cell).__name__} a method initial_state(*args), or a tensor as its first argument")
