"""The configuration of a sequence model."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

from deqkit.adjoint import AbstractAdjoint, Implicit
from deqkit.layers import TransformerConfig, TrellisConfig, VocabularyConfig
from deqkit.layers.dropout import check_rates
from deqkit.solve import AbstractSolver, Anderson, Broyden, Tolerance


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelConfig:
    """Everything that makes a `SequenceModel`: vocabulary, cell, depth, memory, dropout and how it is solved."""

    vocabulary: VocabularyConfig
    """Tokens, their embedding and their softmax."""
    cell: TransformerConfig | TrellisConfig
    """The function f."""
    depth: Literal["equilibrium"] | int = "equilibrium"
    """Solve for the equilibrium of f, or apply it this many times."""
    tied: bool = True
    """One cell for all layers of a stack; False gives every layer its own."""
    checkpoint: bool = False
    """Keep only the states between the layers of a stack, and compute the rest again in the backward pass."""
    mem_len: int = 0
    """Positions of earlier segments that a segment sees. A trellis cell needs, and keeps, only what its kernel
    reaches; for it any number but 0 means that."""
    subsequences: int = 1
    """Solve a sequence in so many pieces, one after the other, with gradients across them."""
    embedding_dropout: float = 0.0
    """Dropout of whole words."""
    input_dropout: float = 0.0
    """Variational dropout of the embedded input."""
    output_dropout: float = 0.0
    """Variational dropout of what the softmax sees."""
    solver: AbstractSolver = field(default_factory=lambda: Broyden(memory=10, group="prefix"))
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
        if self.depth != "equilibrium" and (not isinstance(self.depth, int) or self.depth < 1):
            raise ValueError(f'depth must be "equilibrium" or a whole number of at least 1, got {self.depth!r}')
        if self.depth == "equilibrium":
            self._check_equilibrium()
        if self.mem_len < 0:
            raise ValueError(f"mem_len must be at least 0, got {self.mem_len}")
        for name in ("subsequences", "max_steps", "eval_max_steps"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if isinstance(self.cell, TrellisConfig):
            self._check_trellis(self.cell)

    def _check_equilibrium(self) -> None:
        if not self.tied:
            raise ValueError("untied cells have no equilibrium: set tied=True, or depth to a number of layers")
        if self.checkpoint:
            raise ValueError("an equilibrium keeps no layers that checkpointing could save; set depth, or drop it")
        if isinstance(self.cell, TransformerConfig) and not self.cell.inject:
            raise ValueError("an equilibrium without injection would not depend on the input; set cell.inject=True")

    def _check_trellis(self, cell: TrellisConfig) -> None:
        vocabulary = self.vocabulary
        if vocabulary.embedding_width != cell.input_width:
            raise ValueError(
                f"embedding_width {vocabulary.embedding_width} and the trellis cell's input_width "
                f"{cell.input_width} must be the same"
            )
        if vocabulary.div_val > 1:
            raise ValueError("a trellis model has one table for all classes: set div_val=1")
        if vocabulary.tie_weights and cell.output_width != cell.input_width:
            raise ValueError(
                f"tied weights need output_width {cell.output_width} and input_width {cell.input_width} to be the same"
            )
