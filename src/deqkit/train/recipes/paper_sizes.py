"""The paper's sizes: models from `deqkit.model.paper`, training from the authors' scripts.

What the authors gave nowhere is taken from the nearest thing they gave.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from deqkit.model.paper import PAPER_MODELS
from deqkit.train.config import DataConfig, DeviceConfig, OptimiserConfig, RegulariserConfig, TrainConfig
from deqkit.train.recipes.counterparts import layers

GPU_DAYS = "days on several GPUs (not run here)"


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


def wt103_transformer(size: str) -> TrainConfig:
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


def paper_layers(recipe: Callable[[], TrainConfig], model: str) -> Callable[[], TrainConfig]:
    """A counterpart that has sizes of its own in the paper's tables."""
    counterpart = PAPER_MODELS[model]()
    depth = int(counterpart.depth)
    return lambda: replace(layers(recipe(), depth, tied=counterpart.tied), model=counterpart)
