"""Texts that are being written: what is kept of their positions, and how further ones are read."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from deqkit.layers.memory import join_samples, select_samples
from deqkit.model.decode_solve import Solved, SolveSettings, solve_position, solve_positions
from deqkit.model.start import like_state
from deqkit.solve._packing import map_tensors, select

if TYPE_CHECKING:
    from deqkit.model.sequence import SequenceModel

# B samples, T positions, D width

MAX_PIECE = 512
"""Positions of a prompt that are read at once: scores of attention grow with their square."""


class Reading(NamedTuple):
    """What came of reading some tokens."""

    hidden_BD: Tensor
    """What the softmax sees at the last of them."""
    evals_B: Tensor
    """Evaluations of the cell; for a stack its layers."""
    failed_B: Tensor
    """Whether a solve ended without converging."""


@dataclass(slots=True)
class _Past:
    """One cache a layer (for an equilibrium there is one layer), and the last position's state."""

    caches: list[Any]
    z: Any = None


class Decoder:
    """A batch of texts that grow together, position by position.

    The model is causal: the equilibrium of a position does not change when later ones come, nor do its keys and
    values. So they are kept, and only new positions are solved for. In a stack every layer keeps its own.
    """

    def __init__(self, model: SequenceModel, *, depth: Any, context: int | None, settings: SolveSettings) -> None:
        self._model, self._depth, self._context, self._settings = model, depth, context, settings
        self._past = _Past([])

    def start(self, prompts: Sequence[Tensor]) -> Reading:
        """Read the prompts, those of one length together: no sample then depends on how long others are."""
        groups: dict[int, list[int]] = defaultdict(list)
        for index, prompt in enumerate(prompts):
            groups[len(prompt)].append(index)
        pasts, readings = [], []
        for members in groups.values():
            readings.append(self._read_prompts(torch.stack([prompts[index] for index in members])))
            pasts.append(self._past)
        if len(groups) > 1:
            layers = zip(*(past.caches for past in pasts), strict=True)
            z = None if pasts[0].z is None else _joined([past.z for past in pasts])
            self._past = _Past([join_samples(layer) for layer in layers], z)
        position = {sample: place for place, sample in enumerate(i for members in groups.values() for i in members)}
        order_B = torch.tensor([position[i] for i in range(len(prompts))], device=prompts[0].device)
        self.keep(order_B)
        return select(Reading(*map(torch.cat, zip(*readings, strict=True))), order_B)

    def keep(self, index_B: Tensor) -> None:
        """Go on with these samples only."""
        self._past.caches = [select_samples(cache, index_B) for cache in self._past.caches]
        self._past.z = select(self._past.z, index_B)

    def read(self, tokens_BT: Tensor) -> Reading:
        """Take in the tokens that follow."""
        x_BTD = self._model.embed(tokens_BT)
        solved = self._solve(x_BTD) if self._depth == "equilibrium" else self._run_layers(x_BTD)
        hidden_BD = self._model.cells[-1].output(solved.z)[:, -1]
        return Reading(hidden_BD, solved.evals_B, solved.failed_B)

    def _read_prompts(self, tokens_BT: Tensor) -> Reading:
        x_BTD = self._model.embed(tokens_BT[:, :1])
        cells = self._model.cells
        num_layers = 1 if self._depth == "equilibrium" else self._depth
        self._past = _Past([self._empty(cells[layer % len(cells)], x_BTD) for layer in range(num_layers)])
        *before, last = (self.read(piece_BT) for piece_BT in tokens_BT.split(MAX_PIECE, 1))
        evals_B = sum((reading.evals_B for reading in before), last.evals_B)
        failed_B = torch.stack([reading.failed_B for reading in (*before, last)]).any(0)
        return Reading(last.hidden_BD, evals_B, failed_B)

    def _empty(self, cell: Any, x_BTD: Tensor) -> Any:
        """Other cells than the transformer's need no more than their memory."""
        return cell.empty_cache(x_BTD, self._context) if hasattr(cell, "empty_cache") else cell.empty_memory(x_BTD)

    def _solve(self, x_BTD: Tensor) -> Solved:
        cell, past = self._model.cells[0], self._past
        u = cell.inject(x_BTD, past.caches[0])
        bound, args = cell.bind(u, past.caches[0])

        def f(z: Any) -> Any:
            return bound(z, *args)

        if x_BTD.shape[1] == 1 and past.z is not None:
            solved = solve_position(f, past.z, self._settings)
        else:
            solved = solve_positions(f, self._start(x_BTD, cell.initial_state(u)), self._settings)
        past.caches = [cell.remember(past.caches[0], solved.z, x_BTD, u)]
        past.z = map_tensors(lambda state_BTD: state_BTD[:, -1:], solved.z)
        return solved

    def _start(self, x_BTD: Tensor, zeros: Any) -> Any:
        start = self._model.start
        return zeros if start is None else like_state(start(x_BTD), zeros)

    def _run_layers(self, x_BTD: Tensor) -> Solved:
        model, caches = self._model, self._past.caches
        layers = []
        for number, cell in enumerate(model.cells):
            own = caches if len(model.cells) == 1 else caches[number : number + 1]
            u = cell.inject(x_BTD, own[0])
            bound = cell.bind_each(u, own) if hasattr(cell, "bind_each") else [cell.bind(u, c) for c in own]
            layers += [(cell, u, f, args) for f, args in bound]
        z = model.cells[0].initial_state(layers[0][1]) if model.injects else x_BTD
        for number, (cell, u, f, args) in enumerate(layers):
            before, z = z, f(z, *args)
            caches[number] = cell.remember(caches[number], before, x_BTD, u)
        evals_B = torch.full((x_BTD.shape[0],), len(layers), device=x_BTD.device)
        return Solved(z, evals_B, torch.zeros_like(evals_B, dtype=torch.bool))


def _joined(states: list[Any]) -> Any:
    return torch.cat(states) if isinstance(states[0], Tensor) else tuple(map(torch.cat, zip(*states, strict=True)))
