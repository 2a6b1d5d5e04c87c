"""The configuration of a sequence model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from deqkit.adjoint import AbstractAdjoint, Implicit
from deqkit.layers import ConvolutionConfig, RecurrentConfig, TransformerConfig, TrellisConfig, VocabularyConfig
from deqkit.layers.checks import check_rates, check_whole
from deqkit.solve import AbstractSolver, Anderson, Broyden, Fallback, Tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that makes a `SequenceModel`: vocabulary, cell, depth, memory, dropout and how it is solved."""

    vocabulary: VocabularyConfig
    """Tokens, their embedding and their softmax."""
    cell: TransformerConfig | TrellisConfig | RecurrentConfig | ConvolutionConfig
    """The function f; or a network to compare with, which has depth 1 and no equilibrium."""
    depth: Literal["equilibrium"] | int = "equilibrium"
    """Solve for the equilibrium of f, or apply it this many times."""
    tied: bool = True
    """One cell for all layers of a stack; False gives every layer its own."""
    checkpoint: bool = False
    """Keep only the states between the layers of a stack, and compute the rest again in the backward pass."""
    checkpoint_every: int = 1
    """Layers from one kept state to the next. With larger groups there are fewer states and more of one group's
    intermediate results: which needs less depends on the cell."""
    compile: bool = False
    """Evaluate what `torch.compile` makes of the cell, in training. The first steps then take minutes, and on a CPU the
    others are slower too; for GPUs, where it was not tried."""
    mem_len: int = 0
    """Positions of earlier segments that a segment sees. A trellis cell needs, and keeps, only what its kernel
    reaches, as a convolution network does, and a recurrent one keeps its state; for them any number but 0 means
    that."""
    subsequences: int = 1
    """Solve a sequence in so many pieces, one after the other, with gradients across them."""
    subsequence_length: int | None = None
    """Pieces of at most so many positions instead, however long the sequence: time per token then stays the same for
    a trellis cell, whose state moves one position an evaluation."""
    start: Literal["zeros", "learned"] = "zeros"
    """Where solves begin: at zeros, or at a guess from the embedded input that is trained with the model."""
    embedding_dropout: float = 0.0
    """Dropout of whole words."""
    input_dropout: float = 0.0
    """Variational dropout of the embedded input."""
    output_dropout: float = 0.0
    """Variational dropout of what the softmax sees."""
    solver: AbstractSolver | Fallback = field(default_factory=lambda: Broyden(memory=10, group="prefix"))
    """Forward solver. With group="prefix" a position never depends on later ones, not even in an unfinished solve."""
    tol: Tolerance = field(default_factory=Tolerance)
    """Forward tolerance in training."""
    max_steps: int = 40
    """Upper bound on the evaluations of f in a forward solve in training."""
    eval_tol: Tolerance = field(default_factory=lambda: Tolerance(rtol=1e-2))
    """Forward tolerance in evaluation; the paper relaxes it."""
    eval_max_steps: int = 40
    """Upper bound on the evaluations of f in evaluation."""
    adjoint: AbstractAdjoint = field(default_factory=lambda: Implicit(solver=Anderson()))
    """How gradients pass through the equilibrium."""

    def __post_init__(self) -> None:
        check_rates(
            embedding_dropout=self.embedding_dropout,
            input_dropout=self.input_dropout,
            output_dropout=self.output_dropout,
        )
        self._check_kinds()
        self.check_depth(self.depth)
        self.adjoint.check_solver(self.solver)
        if self.depth == "equilibrium" and self.checkpoint:
            raise ValueError("an equilibrium keeps no layers that checkpointing could save; set depth, or drop it")
        check_whole(1, checkpoint_every=self.checkpoint_every)
        if self.checkpoint_every > 1 and not self.checkpoint:
            raise ValueError(f"checkpoint_every {self.checkpoint_every} needs checkpoint=True")
        if self.start not in ("zeros", "learned"):
            raise ValueError(f'start must be "zeros" or "learned", got {self.start!r}')
        if self.start == "learned" and self.is_baseline:
            raise ValueError("a network to compare with has no solve that could start anywhere: leave out start")
        check_whole(0, mem_len=self.mem_len)
        check_whole(1, subsequences=self.subsequences, max_steps=self.max_steps, eval_max_steps=self.eval_max_steps)
        if self.subsequence_length is not None:
            check_whole(1, subsequence_length=self.subsequence_length)
            if self.subsequences != 1:
                raise ValueError(
                    f"a sequence is cut by number or by length: leave out subsequences={self.subsequences} or "
                    f"subsequence_length={self.subsequence_length}"
                )
        if not isinstance(self.cell, TransformerConfig):
            self._check_widths(self.cell)
        if self.is_baseline and (not self.tied or self.checkpoint or self.compile):
            raise ValueError(
                "a network to compare with is run once: there are no layers to untie, to checkpoint or to compile"
            )

    @property
    def is_baseline(self) -> bool:
        """Whether the body is a network that is run once: not a cell, and without an equilibrium."""
        return isinstance(self.cell, RecurrentConfig | ConvolutionConfig)

    def num_pieces(self, length: int) -> int:
        """Solves that a sequence of this length takes; never more than it has positions."""
        if self.subsequence_length is not None:
            return -(-length // self.subsequence_length)
        return min(self.subsequences, length)

    def check_depth(self, depth: Any) -> None:
        """Raise a ValueError unless the cells can be used at this depth."""
        if self.is_baseline:
            if depth != 1 or isinstance(depth, bool):
                kind = "recurrent" if isinstance(self.cell, RecurrentConfig) else "convolution"
                raise ValueError(f"a {kind} network is run once and has no equilibrium: depth must be 1, got {depth!r}")
            return
        if depth == "equilibrium":
            if not self.tied:
                raise ValueError("untied cells have no equilibrium: set tied=True, or depth to a number of layers")
            if isinstance(self.cell, TransformerConfig) and not self.cell.inject:
                raise ValueError("an equilibrium without injection would not depend on the input: set cell.inject=True")
            return
        if not isinstance(depth, int) or isinstance(depth, bool) or depth < 1:
            raise ValueError(f'depth must be "equilibrium" or a whole number of at least 1, got {depth!r}')
        if not self.tied and depth != self.depth:
            raise ValueError(f"untied cells make a network of depth {self.depth}; it cannot have {depth}")

    def _check_kinds(self) -> None:
        kinds: dict[str, Any] = {
            "vocabulary": VocabularyConfig,
            "cell": (TransformerConfig, TrellisConfig, RecurrentConfig, ConvolutionConfig),
            "solver": (AbstractSolver, Fallback),
            "tol": Tolerance,
            "eval_tol": Tolerance,
            "adjoint": AbstractAdjoint,
        }
        for name, kind in kinds.items():
            value = getattr(self, name)
            if not isinstance(value, kind):
                example = kind[0] if isinstance(kind, tuple) else kind
                raise ValueError(f"{name} must be a {example.__name__}, got {value!r}")

    def _check_widths(self, cell: TrellisConfig | RecurrentConfig | ConvolutionConfig) -> None:
        """Only the transformer cell's embedding has maps between tables and cell."""
        vocabulary, kind = self.vocabulary, type(cell).__name__.removesuffix("Config").lower()
        if vocabulary.embedding_width != cell.input_width:
            raise ValueError(
                f"embedding_width {vocabulary.embedding_width} and the {kind} cell's input_width "
                f"{cell.input_width} must be the same"
            )
        if vocabulary.div_val > 1:
            raise ValueError(f"a {kind} model has one table for all classes: set div_val=1")
        output_width = cell.hidden_width if cell.output_width is None else cell.output_width
        if vocabulary.tie_weights and output_width != cell.input_width:
            raise ValueError(
                f"tied weights need output_width {output_width} and input_width {cell.input_width} to be the same"
            )
