"""`SequenceModel`: tokens to embeddings, embeddings to an equilibrium (or through layers), and from there to tokens."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize
from torch.utils.checkpoint import checkpoint

from deqkit._compile import Compile, compiled
from deqkit.adjoint import AbstractAdjoint
from deqkit.deq import DEQ
from deqkit.layers import (
    ConvolutionConfig,
    ConvolutionNetwork,
    Embedding,
    RecurrentConfig,
    RecurrentNetwork,
    Softmax,
    TransformerCell,
    TransformerConfig,
    TrellisCell,
    TrellisConfig,
)
from deqkit.layers.checks import check_whole
from deqkit.layers.dropout import dropped, variational_mask
from deqkit.layers.memory import check_memory
from deqkit.model.config import ModelConfig
from deqkit.model.decode import Generation, OnToken, generate
from deqkit.model.decode_sample import Sampling
from deqkit.model.decode_solve import SolveSettings
from deqkit.model.output import Equation, ModelOutput
from deqkit.model.start import LearnedStart, like_state, start_error
from deqkit.solve import AbstractSolver, Fallback, Solution, Tolerance
from deqkit.solve._fixed_point import check_settings
from deqkit.solve._packing import map_tensors

# B samples, T positions, D width

Depth = Literal["equilibrium"] | int


class SequenceModel(nn.Module):
    """A language model whose body is one cell at its equilibrium, or the same cell applied layer by layer.

    model = SequenceModel(config)
    output = model(tokens_BT, targets_BT)
    output.loss.backward()
    output = model(next_tokens_BT, next_targets_BT, memory=output.memory)
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.config = config
        num_cells = 1 if config.tied else int(config.depth)
        cells = [_make_cell(config) for _ in range(num_cells)]
        width = config.cell.width if isinstance(config.cell, TransformerConfig) else config.cell.input_width
        std = _vocabulary_std(config, width)
        self.embedding = Embedding(
            config.vocabulary,
            width,
            scale=1.0 if isinstance(config.cell, TrellisConfig) else width**0.5,
            dropout=config.embedding_dropout,
            std=std,
        )
        if config.tied:
            solver = None if config.adjoint.owns_forward else config.solver
            self.core = DEQ(
                cells[0],
                solver=solver,
                tol=config.tol,
                max_steps=config.max_steps,
                adjoint=config.adjoint,
                compile=_how_to_compile(config),
            )
        else:
            self.layers = nn.ModuleList(cells)
        self.start = LearnedStart(width, _state_width(config)) if config.start == "learned" else None
        self.softmax = _make_softmax(config, self.embedding, cells[0].output_width, std)

    @property
    def cells(self) -> Sequence[Any]:
        """The cells in order: one, or one a layer when they are not tied."""
        return [self.core.cell] if self.config.tied else list(self.layers)

    def forward(
        self,
        tokens: Tensor,
        targets: Tensor | None = None,
        memory: tuple[Any, ...] | None = None,
        *,
        tol: Tolerance | None = None,
        max_steps: int | None = None,
        solver: AbstractSolver | Fallback | None = None,
        adjoint: AbstractAdjoint | None = None,
        depth: Depth | None = None,
        layers_every: int | None = None,
    ) -> ModelOutput:
        """Score a segment.

        Args:
            tokens: token ids, (batch, length).
            targets: what follows each token; a negative target is padding.
            memory: the `memory` of the segment before; None at the start of a text.
            tol, max_steps, solver, adjoint: settings of the solve for this call. The defaults are the configuration's,
                which has a tolerance and step limit of its own for evaluation mode.
            depth: the depth for this call; a shallow one is a cheap start for training.
            layers_every: of a stack, read out every so many layers before the last as well, for auxiliary losses.
        """
        _check_ids(tokens, targets)
        x_BTD = self.embed(tokens)
        settings = {"tol": tol, "max_steps": max_steps, "solver": solver, "adjoint": adjoint}
        output = self.run_body(x_BTD, memory, depth=depth, layers_every=layers_every, **settings)
        if targets is not None:
            output.nll, output.loss = self._score(output.hidden, targets)
            output.layer_losses = tuple(self._score(hidden, targets)[1] for hidden in output.layers)
        return output

    def _score(self, hidden_BTD: Tensor, targets_BT: Tensor) -> tuple[Tensor, Tensor]:
        nll_BT = self.softmax.nll(hidden_BTD, targets_BT.long())
        return nll_BT, nll_BT.sum() / (targets_BT >= 0).sum().clamp(min=1)

    def generate(
        self,
        prompts: Any,
        *,
        max_tokens: int,
        temperature: float = 1.0,
        top_k: int | None = None,
        top_p: float | None = None,
        seed: int | Sequence[int] | None = None,
        stop: Iterable[int] = (),
        context: int | None = None,
        on_token: OnToken | None = None,
        tol: Tolerance | None = None,
        max_steps: int | None = None,
        solver: AbstractSolver | Fallback | None = None,
        depth: Depth | None = None,
    ) -> Generation:
        """Go on from prompts, token by token, as if the text so far were one segment that is solved again each time.

        Args:
            prompts: rows of token ids, which may differ in length, or a tensor (batch, length).
            max_tokens: new tokens of every text.
            temperature, top_k, top_p: see `Sampling`; temperature 0 takes the likeliest token.
            seed: of the first text; each further one has the next number. Or one seed a prompt; None for any.
            stop: tokens after which a text ends.
            context: positions that attention sees, its own included, as with `local_size`; None for all there are.
            on_token: called with sample, token and log-probability as soon as a token is known.
            tol, max_steps, solver: of every solve; those of evaluation if left out.
            depth: the depth for this call.
        """
        depth = self.config.depth if depth is None else depth
        self.config.check_depth(depth)
        check_settings(solver, tol, max_steps)
        settings = SolveSettings(
            tol=self.config.eval_tol if tol is None else tol,
            max_steps=self.config.eval_max_steps if max_steps is None else max_steps,
            solver=self.config.solver if solver is None else solver,
        )
        return generate(
            self,
            prompts,
            max_tokens=max_tokens,
            sampling=Sampling(temperature=temperature, top_k=top_k, top_p=top_p),
            seed=seed,
            stop=stop,
            context=context,
            on_token=on_token,
            depth=depth,
            settings=settings,
        )

    def with_config(self, config: ModelConfig) -> SequenceModel:
        """A model of another configuration with these weights; those it has no place for (a start) stay behind."""
        with torch.random.fork_rng():
            other = SequenceModel(config)
        weights = self.state_dict()
        other.load_state_dict({name: weights[name] for name in other.state_dict() if name in weights})
        return other

    def embed(self, tokens_BT: Tensor) -> Tensor:
        """Token ids to the input of the body, with dropout."""
        x_BTD = self.embedding(tokens_BT)
        return dropped(x_BTD, self._mask(x_BTD, self.config.input_dropout))

    def log_probs(self, output: ModelOutput) -> Tensor:
        """The distribution of the token after each position, (B, T, V)."""
        return self.softmax.log_probs(output.hidden)

    def run_body(
        self,
        x_BTD: Tensor,
        memory: tuple[Any, ...] | None = None,
        *,
        depth: Depth | None = None,
        layers_every: int | None = None,
        **settings: Any,
    ) -> ModelOutput:
        """Everything between embedding and softmax, piece by piece of a sequence that is cut into subsequences."""
        depth = self.config.depth if depth is None else depth
        self.config.check_depth(depth)
        if layers_every is not None:
            check_whole(1, layers_every=layers_every)
            if depth == "equilibrium":
                raise ValueError("an equilibrium has no layers to read out: leave out layers_every, or set depth")
        empty = tuple(cell.empty_memory(x_BTD) for cell in self.cells)
        memory = empty if memory is None else memory
        check_memory(memory, empty)
        # Normalised weights are the same for all pieces (spectral norm moves on at every reading).
        with parametrize.cached():
            return self._run_pieces(x_BTD, memory, depth, layers_every, settings)

    def _run_pieces(
        self,
        x_BTD: Tensor,
        memory: tuple[Any, ...],
        depth: Depth,
        layers_every: int | None,
        settings: dict[str, Any],
    ) -> ModelOutput:
        cells = self.cells
        noises = [cell.sample_noise(x_BTD) for cell in cells]
        states, layers, solutions, equations, start_errors = [], [], [], [], []
        *earlier, last = _pieces(x_BTD, self.config.num_pieces(x_BTD.shape[1]))
        for piece_BTD in (*earlier, last):
            # Pieces of one sequence see all that came before; from one sequence to the next mem_len positions go.
            limit = self.config.mem_len if piece_BTD is last else None
            guess_BTS = None if self.start is None else self.start(piece_BTD)
            if depth == "equilibrium":
                z, solution, equation, memory = self._solve(piece_BTD, guess_BTS, memory, noises, settings, limit)
                solutions.append(solution)
                equations.append(equation)
            else:
                z, read, memory = self._run_layers(piece_BTD, memory, noises, depth, layers_every, limit)
                layers.append(read)
            states.append(z)
            if guess_BTS is not None and self.training:
                start_errors.append(start_error(guess_BTS, z))
        z = _concatenate(states)
        hidden_BTD = cells[-1].output(z)
        mask = self._mask(hidden_BTD, self.config.output_dropout)
        return ModelOutput(
            z=z,
            hidden=dropped(hidden_BTD, mask),
            layers=tuple(dropped(torch.cat(parts, 1), mask) for parts in zip(*layers, strict=True)),
            memory=map_tensors(Tensor.detach, memory),
            solutions=tuple(solutions),
            equations=tuple(equations),
            start_error=torch.stack(start_errors).mean() if start_errors else None,
        )

    def _solve(
        self,
        x_BTD: Tensor,
        guess_BTS: Tensor | None,
        memory: tuple[Any, ...],
        noises: list[Any],
        settings: dict[str, Any],
        limit: int | None,
    ) -> tuple[Any, Solution, Equation, tuple[Any, ...]]:
        cell = self.core.cell
        u = cell.inject(x_BTD, memory[0], noises[0])
        settings = {name: value for name, value in settings.items() if value is not None}
        if not self.training:
            settings = {"tol": self.config.eval_tol, "max_steps": self.config.eval_max_steps, **settings}
        if not settings.get("adjoint", self.config.adjoint).owns_forward:
            settings = {"solver": self.config.solver, **settings}
        if guess_BTS is not None:
            settings["z0"] = like_state(guess_BTS, cell.initial_state(u))
        z, solution = self.core(u, memory[0], noises[0], return_solution=True, **settings)
        equation = Equation(partial(cell.bind, u, memory[0], noises[0]), z)
        return z, solution, equation, (cell.remember(memory[0], z, x_BTD, u, limit),)

    def _run_layers(
        self,
        x_BTD: Tensor,
        memory: tuple[Any, ...],
        noises: list[Any],
        num_layers: int,
        every: int | None,
        limit: int | None,
    ) -> tuple[Any, list[Tensor], tuple[Any, ...]]:
        """The last state, what `every` some layers before it have for the softmax, and the memory that follows.

        Tied layers all see the final states of earlier segments, untied ones those that their own layer saw.
        """
        cells = self.cells
        bound, injections = [], []
        for cell, kept, noise in zip(cells, memory, noises, strict=True):
            injections.append(cell.inject(x_BTD, kept, noise))
            f, args = cell.bind(injections[-1], kept, noise)
            bound.append((compiled(f, _how_to_compile(self.config)), args))
        z = cells[0].initial_state(injections[0]) if self.injects else x_BTD
        after, read = [], []
        tied, through = self.config.tied, _through
        if self.config.checkpoint:
            through = partial(checkpoint, _through, use_reentrant=False)
        for first in range(0, num_layers, self.config.checkpoint_every):
            group = range(first, min(first + self.config.checkpoint_every, num_layers))
            applied = [bound[layer % len(cells)] for layer in group]
            states = through(applied, z, keep=not tied or every is not None)
            if not tied:
                for layer, before in zip(group, (z, *states), strict=False):
                    after.append(cells[layer].remember(memory[layer], before, x_BTD, injections[layer], limit))
            if every is not None:
                for layer, state in zip(group, states, strict=True):
                    if (layer + 1) % every == 0 and layer + 1 < num_layers:
                        read.append(cells[layer % len(cells)].output(state))
            z = states[-1]
        if tied:
            after.append(cells[0].remember(memory[0], z, x_BTD, injections[0], limit))
        return z, read, tuple(after)

    @property
    def injects(self) -> bool:
        """Whether the cells see the input at every layer; a stack without starts from it."""
        return not isinstance(self.config.cell, TransformerConfig) or self.config.cell.inject

    def _mask(self, x_BTD: Tensor, rate: float) -> Tensor | None:
        return variational_mask(x_BTD, x_BTD.shape[-1], rate, training=self.training)

    def extra_repr(self) -> str:
        return f"depth={self.config.depth}, mem_len={self.config.mem_len}"


def _through(applied: Sequence[tuple[Any, tuple[Any, ...]]], z: Any, *, keep: bool) -> list[Any]:
    """The states after each of these layers, or after the last alone."""
    states = []
    for f, args in applied:
        z = f(z, *args)
        states = [*states, z] if keep else [z]
    return states


def _make_cell(config: ModelConfig) -> TransformerCell | TrellisCell | RecurrentNetwork | ConvolutionNetwork:
    match config.cell:
        case TransformerConfig():
            return TransformerCell(config.cell)
        case TrellisConfig():
            return TrellisCell(config.cell)
        case RecurrentConfig():
            return RecurrentNetwork(config.cell)
        case ConvolutionConfig():
            return ConvolutionNetwork(config.cell)


def _how_to_compile(config: ModelConfig) -> Compile:
    """Without Inductor's search for attention, which takes heads that come before the samples for samples."""
    return {"options": {"pattern_matcher": False}} if config.compile else False


def _state_width(config: ModelConfig) -> int:
    """Numbers in the state of a position."""
    if isinstance(config.cell, TransformerConfig):
        return config.cell.width
    assert isinstance(config.cell, TrellisConfig), config.cell
    return 2 * config.cell.state_width


def _vocabulary_std(config: ModelConfig, width: int) -> float:
    """The networks to compare with have the transformer's embedding, of size one, whatever their own weights are."""
    std = config.cell.init_std if isinstance(config.cell, TransformerConfig | TrellisConfig) else None
    return width**-0.5 if std is None else std


def _make_softmax(config: ModelConfig, embedding: Embedding, width: int, std: float) -> Softmax:
    vocabulary = config.vocabulary
    if vocabulary.tie_weights:
        return Softmax(vocabulary, width, embedding=embedding, std=std)
    if not isinstance(config.cell, TransformerConfig):  # its untied table is as wide as its output
        vocabulary = replace(vocabulary, embedding_width=width)
    return Softmax(vocabulary, width, std=std)


def _pieces(x_BTD: Tensor, count: int) -> Sequence[Tensor]:
    """As equal as they can be. `tensor_split` has a slice for each, whose gradients are as long as the sequence."""
    length, longer = divmod(x_BTD.shape[1], count)
    return x_BTD.split([length + 1] * longer + [length] * (count - longer), dim=1)


def _concatenate(states: list[Any]) -> Any:
    if len(states) == 1:
        return states[0]
    if isinstance(states[0], Tensor):
        return torch.cat(states, 1)
    return tuple(torch.cat(parts, 1) for parts in zip(*states, strict=True))


def _check_ids(tokens: Any, targets: Any) -> None:
    for name, ids in (("tokens", tokens), ("targets", targets)):
        if ids is not None and (not isinstance(ids, Tensor) or ids.dtype not in (torch.int32, torch.int64)):
            got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise ValueError(f"{name} must be a tensor of int64 or int32 ids, got {got}")
    if tokens.ndim != 2 or tokens.numel() == 0:
        raise ValueError(f"tokens must have shape (batch, length), both at least 1, got {tuple(tokens.shape)}")
    if targets is not None and targets.shape != tokens.shape:
        raise ValueError(
            f"targets must have the shape of the tokens, {tuple(tokens.shape)}, got {tuple(targets.shape)}"
        )
