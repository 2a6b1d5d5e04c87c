"""The models of the paper's tables and of the authors' run scripts, as configurations.

`PAPER_MODELS` lists them. Sizes that the authors published are used as they are; where they published none, sizes that
give the paper's parameter counts are used (marked "fitted"). The vocabulary is WikiText-103's unless it says PTB.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from deqkit.adjoint import Implicit
from deqkit.layers import TransformerConfig, TrellisConfig, VocabularyConfig
from deqkit.model.config import ModelConfig
from deqkit.solve import Anderson, Broyden

WT103_WORDS, PTB_WORDS = 267_735, 10_000
WT103_CUTOFFS = (20_000, 40_000, 200_000)
WT103_SPLITS = (2_800, 20_000, 76_000)
# A trellis state travels along the sequence through its cell memory, which quasi-Newton pairs hardly speed up: more of
# them save no evaluation, and each costs two states of memory.
TRELLIS_SOLVE: dict[str, Any] = {
    "solver": Broyden(memory=2, group="prefix"),
    "adjoint": Implicit(solver=Anderson(memory=1)),
}


def transformer_released() -> ModelConfig:
    """DEQ-Transformer of the released script and checkpoints: 97.7M parameters, 71.2M outside the embedding."""
    return _adaptive(width=700, num_heads=10, hidden_width=48_000, embedding_width=700)


def transformer_adaptive() -> ModelConfig:
    """DEQ-Transformer medium with adaptive embedding, 110M / 70M (fitted)."""
    return _adaptive(width=1024, num_heads=16, hidden_width=30_000, embedding_width=1024)


def transformer_medium() -> ModelConfig:
    """DEQ-Transformer medium, 172M / 43M (fitted)."""
    return _plain(width=480, num_heads=10, hidden_width=43_000)


def transformer_small() -> ModelConfig:
    """DEQ-Transformer small, 138M / 4.5M (fitted)."""
    return _plain(width=500, num_heads=10, hidden_width=2_500)


def transformer_small_tied_16() -> ModelConfig:
    """16 tied layers of the small transformer's cell, 138M / 4.5M."""
    return replace(transformer_small(), depth=16)


def transformer_small_untied_4() -> ModelConfig:
    """4 layers in the manner of Transformer-XL, 139M / 4.9M (fitted)."""
    return _layers(_plain(width=500, num_heads=10, head_width=35, hidden_width=350), 4)


def transformer_medium_untied_16() -> ModelConfig:
    """16 layers in the manner of Transformer-XL, 165M / 44M (fitted)."""
    return _layers(_plain(width=450, num_heads=10, hidden_width=1_925), 16)


def transformer_adaptive_untied_18() -> ModelConfig:
    """18 layers in the manner of Transformer-XL with adaptive embedding, 110M / 72M (fitted)."""
    config = _adaptive(width=640, num_heads=10, hidden_width=1_525, embedding_width=1_000)
    return _layers(replace(config, cell=replace(config.cell, normalise="none")), 18)


def trellis_released() -> ModelConfig:
    """DEQ-TrellisNet of the released script, 174.2M / 40.0M."""
    return _trellis(input_width=500, hidden_width=1_500)


def trellis_wt103() -> ModelConfig:
    """DEQ-TrellisNet on WikiText-103, which the paper gives as 180M / 45M: the sizes of TrellisNet's own code."""
    return _trellis(input_width=512, hidden_width=1_600)


def trellis_wt103_tied_70() -> ModelConfig:
    """The 70-layer TrellisNet that the paper compares with."""
    return replace(trellis_wt103(), depth=70)


def trellis_ptb() -> ModelConfig:
    """DEQ-TrellisNet on Penn Treebank, 24M / 20M: the sizes and dropout of TrellisNet's own code."""
    return ModelConfig(
        vocabulary=VocabularyConfig(size=PTB_WORDS, embedding_width=400),
        cell=TrellisConfig(
            input_width=400, hidden_width=1_000, output_width=400, hidden_dropout=0.28, weight_dropout=0.5
        ),
        mem_len=1,
        embedding_dropout=0.1,
        input_dropout=0.45,
        output_dropout=0.45,
        **TRELLIS_SOLVE,
    )


def trellis_ptb_tied_60() -> ModelConfig:
    """The 60-layer TrellisNet that the paper compares with."""
    return replace(trellis_ptb(), depth=60)


PAPER_MODELS: dict[str, Callable[[], ModelConfig]] = {
    "transformer-released": transformer_released,
    "transformer-adaptive": transformer_adaptive,
    "transformer-adaptive-untied-18": transformer_adaptive_untied_18,
    "transformer-medium": transformer_medium,
    "transformer-medium-untied-16": transformer_medium_untied_16,
    "transformer-small": transformer_small,
    "transformer-small-tied-16": transformer_small_tied_16,
    "transformer-small-untied-4": transformer_small_untied_4,
    "trellis-released": trellis_released,
    "trellis-wt103": trellis_wt103,
    "trellis-wt103-tied-70": trellis_wt103_tied_70,
    "trellis-ptb": trellis_ptb,
    "trellis-ptb-tied-60": trellis_ptb_tied_60,
}


def _plain(*, width: int, num_heads: int, hidden_width: int, head_width: int | None = None) -> ModelConfig:
    return ModelConfig(
        vocabulary=VocabularyConfig(size=WT103_WORDS, embedding_width=width),
        cell=TransformerConfig(
            width=width,
            num_heads=num_heads,
            head_width=head_width,
            hidden_width=hidden_width,
            dropout=0.05,
            hidden_dropout=0.05,
        ),
        mem_len=150,
        input_dropout=0.05,
        output_dropout=0.05,
    )


def _adaptive(*, width: int, num_heads: int, hidden_width: int, embedding_width: int) -> ModelConfig:
    config = _plain(width=width, num_heads=num_heads, hidden_width=hidden_width)
    vocabulary = VocabularyConfig(size=WT103_WORDS, embedding_width=embedding_width, cutoffs=WT103_CUTOFFS, div_val=4)
    return replace(config, vocabulary=vocabulary, cell=replace(config.cell, normalise="weight"))


def _layers(config: ModelConfig, depth: int) -> ModelConfig:
    """The same sizes as an untied stack that starts from the embedding, as Transformer-XL does."""
    return replace(config, cell=replace(config.cell, inject=False), depth=depth, tied=False)


def _trellis(*, input_width: int, hidden_width: int) -> ModelConfig:
    return ModelConfig(
        vocabulary=VocabularyConfig(size=WT103_WORDS, embedding_width=input_width, cutoffs=WT103_SPLITS),
        cell=TrellisConfig(
            input_width=input_width,
            hidden_width=hidden_width,
            output_width=input_width,
            hidden_dropout=0.1,
            normalise="weight",
        ),
        mem_len=1,
        input_dropout=0.1,
        output_dropout=0.1,
        **TRELLIS_SOLVE,
    )
