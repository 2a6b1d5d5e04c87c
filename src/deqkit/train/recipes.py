"""Recipes: functions that return a complete configuration. `RECIPES` lists them by the names of the command line.

Paper sizes take their models from `deqkit.model.paper` and their training from the authors' scripts. What the authors
gave nowhere is taken from the nearest thing they gave. `-mini` versions are sized for two cores and about an hour.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from deqkit.adjoint import Implicit
from deqkit.layers import ConvolutionConfig, RecurrentConfig, TransformerConfig, TrellisConfig, VocabularyConfig
from deqkit.model import ModelConfig, SequenceModel, num_parameters
from deqkit.model.paper import PAPER_MODELS, PTB_WORDS
from deqkit.solve import Anderson, Broyden, Tolerance
from deqkit.train.config import DataConfig, DeviceConfig, OptimiserConfig, RegulariserConfig, TrainConfig

WIKITEXT2_WORDS = 33_278
GPU_DAYS = "days on several GPUs (not run here)"


def copy_memory() -> TrainConfig:
    """Copy memory at T = 400 with 14 thousand parameters (table 1)."""
    cell = TransformerConfig(width=32, num_heads=4, hidden_width=76, init_std=None)
    return TrainConfig(
        recipe="copy-memory",
        model=ModelConfig(
            vocabulary=VocabularyConfig(size=10, embedding_width=32, tie_weights=False),
            cell=cell,
            solver=Broyden(memory=5, group="prefix"),
            tol=Tolerance(rtol=3e-3),
            max_steps=20,
            eval_tol=Tolerance(rtol=3e-3),
            adjoint=Implicit(solver=Anderson(), tol=Tolerance(rtol=1e-2), max_steps=20),
        ),
        data=DataConfig(source="copy-memory", batch=8, eval_batch=16),
        optimiser=OptimiserConfig(lr=3e-3, betas=(0.9, 0.98), clip=1.0, warmup_steps=100, floor=0.3),
        devices=DeviceConfig(warmup_steps=600),
        steps=1400,
        eval_every=200,
        expected_time="15 minutes on two cores",
    )


def copy_memory_mini() -> TrainConfig:
    """Copy memory at T = 50."""
    config = copy_memory()
    return replace(
        config,
        recipe="copy-memory-mini",
        data=replace(config.data, copy_T=50, copy_train=5_000, copy_test=500),
        devices=DeviceConfig(warmup_steps=250),
        steps=800,
        expected_time="1 minute on two cores",
    )


def copy_memory_lstm() -> TrainConfig:
    """An LSTM on copy memory, as large as the equilibrium model (table 1)."""
    cell = RecurrentConfig(unit="lstm", input_width=10, hidden_width=52)
    return _copy_memory_baseline(cell, "copy-memory-lstm", batch=32, expected_time="4 minutes on two cores")


def copy_memory_gru() -> TrainConfig:
    """A GRU on copy memory, as large as the equilibrium model (table 1)."""
    cell = RecurrentConfig(unit="gru", input_width=10, hidden_width=61)
    return _copy_memory_baseline(cell, "copy-memory-gru", batch=32, expected_time="7 minutes on two cores")


def copy_memory_tcn() -> TrainConfig:
    """A TCN on copy memory with 16 thousand parameters, as in the paper; it sees 3,570 positions back (table 1)."""
    cell = ConvolutionConfig(
        input_width=11, hidden_width=11, kernel_size=8, num_levels=8, init_std=None, input_scale=4.0
    )
    return _copy_memory_baseline(cell, "copy-memory-tcn", batch=16, expected_time="5 minutes on two cores")


def demo() -> TrainConfig:
    """A small DEQ-Transformer on the embedded corpus, or on any text."""
    return TrainConfig(
        recipe="demo",
        model=_mini_model(VocabularyConfig(size=2048, embedding_width=96), width=96, hidden_width=384),
        data=DataConfig(batch=16, length=64, fit_vocabulary=True),
        optimiser=OptimiserConfig(name="adamw", lr=5e-3, betas=(0.9, 0.98), clip=0.5, warmup_steps=30, floor=0.03),
        devices=DeviceConfig(warmup_steps=150),
        regulariser=RegulariserConfig(spectral=0.02),
        steps=300,
        eval_every=100,
        checkpoint_every=100,
        expected_time="1 minute on two cores",
    )


def text() -> TrainConfig:
    """A DEQ-Transformer on your own text: pass --data.source with a prepared folder or a text file."""
    config = _mini(VocabularyConfig(size=8192, embedding_width=160), "text", "")
    return replace(config, data=replace(config.data, fit_vocabulary=True))


def ptb_mini() -> TrainConfig:
    """A DEQ-Transformer with two million parameters on Penn Treebank."""
    return _mini(VocabularyConfig(size=PTB_WORDS, embedding_width=160, cutoffs=(2_000,)), "ptb-mini", "")


def wikitext_2_mini() -> TrainConfig:
    """A DEQ-Transformer with six million parameters on WikiText-2."""
    vocabulary = VocabularyConfig(size=WIKITEXT2_WORDS, embedding_width=160, cutoffs=(2_000, 10_000))
    return _mini(vocabulary, "wikitext-2-mini", "")


def ptb_mini_lstm() -> TrainConfig:
    """An LSTM on Penn Treebank, with as many parameters as ptb-mini."""
    return _mini_lstm(ptb_mini())


def wikitext_2_mini_lstm() -> TrainConfig:
    """An LSTM on WikiText-2, with as many parameters as wikitext-2-mini."""
    return _mini_lstm(wikitext_2_mini())


def wt103_transformer_mini() -> TrainConfig:
    """A DEQ-Transformer with adaptive embedding, five million parameters, on WikiText-103."""
    vocabulary = VocabularyConfig(size=267_735, embedding_width=160, cutoffs=(4_000, 40_000), div_val=4)
    return _mini(vocabulary, "wt103-deq-transformer-mini", "")


def ptb_trellis_mini() -> TrainConfig:
    """A DEQ-TrellisNet on Penn Treebank."""
    return _trellis_mini(VocabularyConfig(size=PTB_WORDS, embedding_width=160, cutoffs=(2_000,)))


def wt103_trellis_mini() -> TrainConfig:
    """A DEQ-TrellisNet on WikiText-103."""
    vocabulary = VocabularyConfig(size=267_735, embedding_width=48, cutoffs=(4_000, 40_000))
    return replace(_trellis_mini(vocabulary), recipe="wt103-deq-trellisnet-mini")


def ptb_trellis() -> TrainConfig:
    """DEQ-TrellisNet on Penn Treebank: TrellisNet's own hyperparameters, without its auxiliary loss."""
    return TrainConfig(
        recipe="ptb-deq-trellisnet",
        model=replace(PAPER_MODELS["trellis-ptb"](), subsequences=2, max_steps=45),
        data=DataConfig(source="", batch=16, length=110, eval_batch=12, eval_length=110),
        optimiser=OptimiserConfig(
            name="sgd", lr=20.0, weight_decay=1.2e-6, clip=0.225, schedule="plateau", average_after=200_000
        ),
        devices=DeviceConfig(warmup_depth=40, warmup_steps=30_000),
        regulariser=RegulariserConfig(activation=2.0, temporal=1.0),
        steps=260_000,
        eval_every=528,
        checkpoint_every=528,
        expected_time=GPU_DAYS,
    )


def wt103_trellis() -> TrainConfig:
    """DEQ-TrellisNet on WikiText-103, trained as in the authors' script."""
    return TrainConfig(
        recipe="wt103-deq-trellisnet",
        model=replace(PAPER_MODELS["trellis-wt103"](), subsequences=2, max_steps=45),
        data=DataConfig(source="", batch=49, length=100, eval_batch=4, eval_length=100),
        optimiser=OptimiserConfig(lr=1e-3, clip=0.07, schedule="plateau", plateau_factor=0.1),
        devices=DeviceConfig(warmup_depth=40, warmup_steps=30_000),
        steps=525_000,
        eval_every=5_000,
        checkpoint_every=1_000,
        expected_time=GPU_DAYS,
    )


def _wt103_transformer(size: str) -> TrainConfig:
    """The authors' script for the transformer with adaptive embedding, the only one they gave."""
    return TrainConfig(
        recipe=f"wt103-deq-transformer-{size}",
        model=replace(PAPER_MODELS[f"transformer-{size}"](), max_steps=30, subsequences=2),
        data=DataConfig(source="", batch=56, length=150, eval_batch=4, eval_length=150),
        optimiser=OptimiserConfig(lr=2.5e-4, clip=0.25, warmup_steps=16_000),
        devices=DeviceConfig(warmup_steps=16_000),
        steps=300_000,
        eval_every=5_000,
        checkpoint_every=1_000,
        expected_time=GPU_DAYS,
    )


def layers(config: TrainConfig, depth: int, *, tied: bool) -> TrainConfig:
    """The counterpart of a recipe with layers: the same training, no devices for an equilibrium."""
    cell: Any = config.model.cell
    if not tied and isinstance(cell, TransformerConfig):
        cell = replace(cell, inject=False)
    model = replace(config.model, depth=depth, tied=tied, subsequences=1, cell=cell)
    return replace(
        config,
        recipe=f"{config.recipe}-{'tied' if tied else 'untied'}-{depth}",
        model=model,
        devices=DeviceConfig(
            warmup_depth=config.devices.warmup_depth, warmup_steps=config.devices.warmup_steps if tied else 0
        ),
        regulariser=replace(config.regulariser, jacobian=0.0, spectral=0.0),
    )


def _untied_mini(config: TrainConfig, depth: int) -> TrainConfig:
    """Untied layers that together have the parameters of the one cell: narrower heads and hidden layers."""
    untied = layers(config, depth, tied=False)
    cell: Any = replace(untied.model.cell, head_width=16, hidden_width=1)
    size = _num_cell_parameters(config.model)
    smallest = _num_cell_parameters(replace(untied.model, cell=cell))
    one_more = depth * (2 * cell.width + 1)  # a hidden unit in every layer: a row, a column and a bias
    cell = replace(cell, hidden_width=1 + round((size - smallest) / one_more))
    return replace(untied, model=replace(untied.model, cell=cell))


def _num_cell_parameters(model: ModelConfig) -> int:
    with torch.device("meta"):
        return num_parameters(SequenceModel(model)).rest


def _paper_layers(recipe: Callable[[], TrainConfig], model: str) -> Callable[[], TrainConfig]:
    """A counterpart that has sizes of its own in the paper's tables."""
    counterpart = PAPER_MODELS[model]()
    depth = int(counterpart.depth)
    return lambda: replace(layers(recipe(), depth, tied=counterpart.tied), model=counterpart)


def _mini_model(vocabulary: VocabularyConfig, *, width: int, hidden_width: int) -> ModelConfig:
    return ModelConfig(
        vocabulary=vocabulary,
        cell=TransformerConfig(
            width=width,
            num_heads=4,
            hidden_width=hidden_width,
            positions="learned",
            num_distances=128,
            dropout=0.1,
            hidden_dropout=0.1,
            init_std=None,
        ),
        mem_len=64,
        input_dropout=0.1,
        output_dropout=0.1,
        solver=Broyden(memory=5, group="prefix"),
        tol=Tolerance(rtol=2e-2),
        max_steps=14,
        eval_tol=Tolerance(rtol=2e-2),
        eval_max_steps=30,
        adjoint=Implicit(solver=Anderson(), tol=Tolerance(rtol=5e-2), max_steps=10),
    )


def _mini(vocabulary: VocabularyConfig, name: str, source: str) -> TrainConfig:
    return TrainConfig(
        recipe=name,
        model=_mini_model(vocabulary, width=160, hidden_width=800),
        data=DataConfig(source=source, batch=32, length=64, eval_batch=32),
        optimiser=OptimiserConfig(name="adamw", lr=4e-3, betas=(0.9, 0.98), clip=0.5, warmup_steps=60, floor=0.03),
        devices=DeviceConfig(warmup_steps=1_500),
        regulariser=RegulariserConfig(spectral=0.02),
        steps=2_400,
        eval_every=300,
        checkpoint_every=100,
        expected_time="half an hour on two cores",
    )


def _trellis_mini(vocabulary: VocabularyConfig) -> TrainConfig:
    """Solved in short pieces: the state travels one position per application, so a piece of 8 positions needs some 15
    evaluations where all 64 at once need 70, and both give the same equilibrium."""
    width = vocabulary.embedding_width
    config = _mini(vocabulary, "ptb-deq-trellisnet-mini", "")
    model = replace(
        config.model,
        cell=TrellisConfig(
            input_width=width, hidden_width=40, output_width=width, hidden_dropout=0.1, normalise="weight"
        ),
        mem_len=1,
        subsequences=8,
        solver=Broyden(memory=2, group="prefix"),
        max_steps=30,
        adjoint=Implicit(solver=Anderson(memory=2), tol=Tolerance(rtol=5e-2), max_steps=20),
    )
    devices = DeviceConfig(warmup_depth=10, warmup_steps=700)
    return replace(config, model=model, devices=devices, regulariser=RegulariserConfig(), steps=1_000, eval_every=200)


def _long(config: TrainConfig) -> TrainConfig:
    """The best that two cores reach in about two hours: five times the steps, against which dropout must hold."""
    model = config.model
    if isinstance(model.cell, TransformerConfig):
        cell = replace(model.cell, dropout=0.2, hidden_dropout=0.2)
        model = replace(model, cell=cell, input_dropout=0.3, output_dropout=0.3)
    else:
        model = replace(model, input_dropout=0.5, output_dropout=0.4)
    devices = replace(config.devices, warmup_steps=5 * config.devices.warmup_steps)
    return replace(
        config,
        recipe=f"{config.recipe}-long",
        model=model,
        devices=devices,
        steps=5 * config.steps,
        eval_every=5 * config.eval_every,
        expected_time="2 hours on two cores",
    )


def _baseline(config: TrainConfig, cell: RecurrentConfig | ConvolutionConfig, name: str, **changes: Any) -> TrainConfig:
    """A recipe with a network to compare with in the place of its model: the same data and evaluation, no devices."""
    vocabulary = replace(config.model.vocabulary, embedding_width=cell.input_width)
    model = replace(config.model, vocabulary=vocabulary, cell=cell, depth=1, subsequences=1)
    regulariser = replace(config.regulariser, jacobian=0.0, spectral=0.0)
    return replace(config, recipe=name, model=model, devices=DeviceConfig(), regulariser=regulariser, **changes)


def _copy_memory_baseline(
    cell: RecurrentConfig | ConvolutionConfig, name: str, *, batch: int, expected_time: str
) -> TrainConfig:
    config = copy_memory()
    return _baseline(
        config,
        cell,
        name,
        data=replace(config.data, batch=batch),
        optimiser=OptimiserConfig(lr=2e-3, clip=1.0, schedule="constant"),
        steps=2_000,
        expected_time=expected_time,
    )


def _mini_lstm(config: TrainConfig) -> TrainConfig:
    """One layer, as wide as leaves the number of parameters as it is."""
    width = config.model.vocabulary.embedding_width
    num_rest = _num_cell_parameters(config.model)
    # 4 h (width + h) weights and 8 h biases of the gates, then a map back to the width of the table: (h + 1) width
    half = (5 * width + 8) / 8
    hidden_width = round(math.sqrt(half**2 + (num_rest - width) / 4) - half)
    cell = RecurrentConfig(unit="lstm", input_width=width, hidden_width=hidden_width, output_width=width)
    lstm = _baseline(
        config,
        cell,
        f"{config.recipe}-lstm",
        optimiser=replace(config.optimiser, lr=6e-3),
        expected_time="15 minutes on two cores",
    )
    return replace(lstm, model=replace(lstm.model, mem_len=1, input_dropout=0.25, output_dropout=0.2))


RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "demo": demo,
    "demo-tied-12": lambda: layers(demo(), 12, tied=True),
    "text": text,
    "copy-memory": copy_memory,
    "copy-memory-mini": copy_memory_mini,
    "copy-memory-lstm": copy_memory_lstm,
    "copy-memory-gru": copy_memory_gru,
    "copy-memory-tcn": copy_memory_tcn,
    "ptb-mini": ptb_mini,
    "ptb-mini-tied-16": lambda: layers(ptb_mini(), 16, tied=True),
    "ptb-mini-untied-4": lambda: _untied_mini(ptb_mini(), 4),
    "ptb-mini-lstm": ptb_mini_lstm,
    "wikitext-2-mini": wikitext_2_mini,
    "wikitext-2-mini-tied-16": lambda: layers(wikitext_2_mini(), 16, tied=True),
    "wikitext-2-mini-untied-4": lambda: _untied_mini(wikitext_2_mini(), 4),
    "wikitext-2-mini-lstm": wikitext_2_mini_lstm,
    "ptb-mini-long": lambda: _long(ptb_mini()),
    "ptb-mini-lstm-long": lambda: _long(ptb_mini_lstm()),
    "wikitext-2-mini-long": lambda: _long(wikitext_2_mini()),
    "wikitext-2-mini-lstm-long": lambda: _long(wikitext_2_mini_lstm()),
    "ptb-deq-trellisnet-mini": ptb_trellis_mini,
    "ptb-deq-trellisnet-mini-tied-60": lambda: layers(ptb_trellis_mini(), 60, tied=True),
    "wt103-deq-transformer-mini": wt103_transformer_mini,
    "wt103-deq-trellisnet-mini": wt103_trellis_mini,
    "ptb-deq-trellisnet": ptb_trellis,
    "ptb-deq-trellisnet-tied-60": _paper_layers(ptb_trellis, "trellis-ptb-tied-60"),
    "wt103-deq-trellisnet": wt103_trellis,
    "wt103-deq-trellisnet-tied-70": _paper_layers(wt103_trellis, "trellis-wt103-tied-70"),
    "wt103-deq-transformer-small": lambda: _wt103_transformer("small"),
    "wt103-deq-transformer-small-tied-16": _paper_layers(
        lambda: _wt103_transformer("small"), "transformer-small-tied-16"
    ),
    "wt103-deq-transformer-small-untied-4": _paper_layers(
        lambda: _wt103_transformer("small"), "transformer-small-untied-4"
    ),
    "wt103-deq-transformer-medium": lambda: _wt103_transformer("medium"),
    "wt103-deq-transformer-medium-untied-16": _paper_layers(
        lambda: _wt103_transformer("medium"), "transformer-medium-untied-16"
    ),
    "wt103-deq-transformer-adaptive": lambda: _wt103_transformer("adaptive"),
    "wt103-deq-transformer-adaptive-untied-18": _paper_layers(
        lambda: _wt103_transformer("adaptive"), "transformer-adaptive-untied-18"
    ),
}
