"""Copy memory (the paper's table 1), with the networks it is compared with."""

from __future__ import annotations

from dataclasses import replace

from deqkit.adjoint import Implicit
from deqkit.layers import ConvolutionConfig, RecurrentConfig, TransformerConfig, VocabularyConfig
from deqkit.model import ModelConfig
from deqkit.solve import Anderson, Broyden, Tolerance
from deqkit.train.config import DataConfig, DeviceConfig, OptimiserConfig, TrainConfig
from deqkit.train.recipes.counterparts import baseline


def copy_memory() -> TrainConfig:
    """Copy memory at T = 400 with 14 thousand parameters (table 1).

    The learning rate rises slowly: the symbols are told apart all at once, and with a full rate by then some seeds keep
    two of them confused for good.
    """
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
        optimiser=OptimiserConfig(lr=3e-3, betas=(0.9, 0.98), clip=1.0, warmup_steps=300, floor=0.3),
        devices=DeviceConfig(warmup_steps=600),
        steps=1_600,
        eval_every=800,
        expected_time="10 minutes on two cores",
    )


def copy_memory_mini() -> TrainConfig:
    """Copy memory at T = 50."""
    config = copy_memory()
    return replace(
        config,
        recipe="copy-memory-mini",
        data=replace(config.data, copy_T=50, copy_train=5_000, copy_test=500),
        optimiser=replace(config.optimiser, warmup_steps=100),
        devices=DeviceConfig(warmup_steps=250),
        steps=800,
        eval_every=200,
        expected_time="1 minute on two cores",
    )


def copy_memory_long() -> TrainConfig:
    """Copy memory at T = 800, twice the paper's: T grows from 50 in the first 600 steps."""
    config = copy_memory()
    return replace(
        config,
        recipe="copy-memory-long",
        data=replace(config.data, copy_T=800, copy_first_T=50, copy_first_steps=300, copy_test=1_000),
        devices=DeviceConfig(warmup_steps=750),
        steps=1_400,
        eval_every=500,
        expected_time="half an hour on two cores",
    )


def copy_memory_lstm() -> TrainConfig:
    """An LSTM on copy memory, as large as the equilibrium model (table 1)."""
    cell = RecurrentConfig(unit="lstm", input_width=10, hidden_width=52)
    return _copy_memory_baseline(cell, "copy-memory-lstm", batch=32, steps=8_000)


def copy_memory_gru() -> TrainConfig:
    """A GRU on copy memory, as large as the equilibrium model (table 1)."""
    cell = RecurrentConfig(unit="gru", input_width=10, hidden_width=61)
    return _copy_memory_baseline(cell, "copy-memory-gru", batch=32, steps=4_000)


def copy_memory_tcn() -> TrainConfig:
    """A TCN on copy memory with 16 thousand parameters, as in the paper; it sees 3,570 positions back (table 1)."""
    cell = ConvolutionConfig(
        input_width=11, hidden_width=11, kernel_size=8, num_levels=8, init_std=None, input_scale=4.0
    )
    return _copy_memory_baseline(cell, "copy-memory-tcn", batch=16, steps=6_000)


def _copy_memory_baseline(
    cell: RecurrentConfig | ConvolutionConfig, name: str, *, batch: int, steps: int
) -> TrainConfig:
    """As many steps as take about the time of the equilibrium model's training."""
    config = copy_memory()
    return baseline(
        config,
        cell,
        name,
        data=replace(config.data, batch=batch),
        optimiser=OptimiserConfig(lr=2e-3, clip=1.0, schedule="constant"),
        steps=steps,
        eval_every=steps // 2,
    )
