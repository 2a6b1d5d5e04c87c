"""Runs of every kind, small enough for a second or two."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

from deqkit.adjoint import Implicit
from deqkit.data import PrepareConfig, prepare
from deqkit.layers import TransformerConfig, TrellisConfig, VocabularyConfig
from deqkit.model import ModelConfig
from deqkit.solve import Anderson, Broyden, Tolerance
from deqkit.train.config import DataConfig, DeviceConfig, OptimiserConfig, TrainConfig
from deqkit.train.loop import train
from deqkit.train.run_folder import RunFolder

WIDTH = 16
TEXT = "the equilibrium of a cell is the state that the cell leaves as it is, and no other. "
CELL = TransformerConfig(width=WIDTH, num_heads=2, hidden_width=32, init_std=None)
KINDS: dict[str, dict[str, Any]] = {
    "equilibrium": {"devices": DeviceConfig(warmup_steps=2), "steps": 8},
    "tied": {"model": {"depth": 3}},
    "untied": {"model": {"depth": 2, "tied": False, "cell": replace(CELL, inject=False)}},
    "copy": {},
}


def make_corpus(folder: Path, text: str = TEXT) -> str:
    """A corpus of bytes; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(text * (2_000 // len(text)), encoding="utf-8")
    out = folder / "corpus"
    config = PrepareConfig(
        dataset="text", source=folder / "text.txt", out=out, tokens="bytes", valid_share=0.2, test_share=0.2
    )
    prepare(config)
    return str(out)


def small(source: str, *, model: dict[str, Any] | None = None, **options: Any) -> TrainConfig:
    """Six steps of a model of width 16 on a corpus, or on "copy-memory"; every field can be changed by name."""
    copying = source == "copy-memory"
    settings: dict[str, Any] = {
        "vocabulary": VocabularyConfig(size=10 if copying else 256, embedding_width=WIDTH),
        "cell": CELL,
        "mem_len": 0 if copying else 6,
        "solver": Broyden(memory=5, group="prefix"),
        "tol": Tolerance(rtol=1e-2),
        "max_steps": 5,
        "eval_tol": Tolerance(rtol=1e-2),
        "eval_max_steps": 12,
        "adjoint": Implicit(solver=Anderson(), tol=Tolerance(rtol=1e-2), max_steps=5),
    }
    data = DataConfig(
        source=source, batch=4, length=8, eval_batch=4, eval_length=16, copy_T=5, copy_train=22, copy_test=6
    )
    chosen: dict[str, Any] = {
        "recipe": "small",
        "model": ModelConfig(**{**settings, **(model or {})}),
        "data": data,
        "optimiser": OptimiserConfig(lr=1e-2),
        "steps": 6,
        "eval_every": 3,
        "checkpoint_every": 2,
        "trackers": (),
    }
    return TrainConfig(**{**chosen, **options})


def trellis(source: str) -> TrainConfig:
    cell = TrellisConfig(input_width=WIDTH, hidden_width=8, output_width=WIDTH, init_std=None)
    return small(source, model={"cell": cell, "mem_len": 1})


def small_of(kind: str, corpus: str) -> TrainConfig:
    source = "copy-memory" if kind == "copy" else corpus
    return small(source, recipe=f"small-{kind}", **KINDS[kind])


def train_run(config: TrainConfig, path: Path, **options: Any) -> Path:
    train(config, RunFolder(path), **options)
    return path
