"""Tiny runs: configurations, what they leave behind, and when two of them are the same."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from deqkit.adjoint import Implicit
from deqkit.data import PrepareConfig, prepare
from deqkit.layers import TransformerConfig, TrellisConfig, VocabularyConfig
from deqkit.model import ModelConfig, SequenceModel
from deqkit.model.weights import read_tensors
from deqkit.solve import Anderson, Broyden, Tolerance
from deqkit.train import state
from deqkit.train.checkpoint import find_checkpoint
from deqkit.train.config import DataConfig, DeviceConfig, OptimiserConfig, RegulariserConfig, TrainConfig
from deqkit.train.loop import train
from deqkit.train.run_folder import RunFolder, read_metrics

WIDTH = 16
BYTES = 256
MEASURED = ("seconds", "processor_seconds", "tokens_per_second", "memory_mib")
"""Fields that say how the machine did, not what was computed."""
TIGHT = Tolerance(rtol=1e-6, patience=200)
EXACT: dict[str, Any] = {
    # Apart from the large embeddings of `enlarge`, or Adam would make steps of gradients that are mere rounding.
    "vocabulary": VocabularyConfig(size=BYTES, embedding_width=WIDTH, tie_weights=False),
    "tol": TIGHT,
    "max_steps": 200,
    "eval_tol": TIGHT,
    "eval_max_steps": 200,
    "adjoint": Implicit(solver=Anderson(), tol=TIGHT, max_steps=200),
}
"""Solves as exact as float32 allows, for comparisons where their errors would differ."""
EXACT_COPY = {**EXACT, "vocabulary": VocabularyConfig(size=10, embedding_width=WIDTH, tie_weights=False)}
TRELLIS = TrellisConfig(input_width=WIDTH, hidden_width=8, output_width=WIDTH, init_std=None)


def make_text(num_words: int = 72) -> str:
    generator = torch.Generator().manual_seed(0)
    words = ("the", "equilibrium", "of", "a", "cell")
    return " ".join(words[i] for i in torch.randint(len(words), (num_words,), generator=generator))


def make_corpus(folder: Path, text: str | None = None) -> str:
    """A corpus of bytes, whose training part is an epoch of five batches with `tiny`; returns its folder."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "text.txt").write_text(make_text() if text is None else text, encoding="utf-8")
    config = PrepareConfig(
        dataset="text",
        source=folder / "text.txt",
        out=folder / "corpus",
        tokens="bytes",
        valid_share=0.3,
        test_share=0.3,
    )
    prepare(config)
    return str(config.out)


def tiny(
    source: str,
    *,
    cell: dict[str, Any] | TrellisConfig | None = None,
    model: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    optimiser: dict[str, Any] | None = None,
    devices: dict[str, Any] | None = None,
    regulariser: dict[str, Any] | None = None,
    **options: Any,
) -> TrainConfig:
    """Six steps of a model of width 16 on a corpus, or on "copy-memory"; every part can be changed by name."""
    if not isinstance(cell, TrellisConfig):
        sizes: dict[str, Any] = {"width": WIDTH, "num_heads": 2, "hidden_width": 32, "init_std": None}
        cell_config = TransformerConfig(**{**sizes, **(cell or {})})
    else:
        cell_config = cell
    copying = source == "copy-memory"
    vocabulary = VocabularyConfig(size=10 if copying else BYTES, embedding_width=WIDTH)
    settings: dict[str, Any] = {
        "vocabulary": vocabulary,
        "cell": cell_config,
        "mem_len": 0 if copying else 6,
        "solver": Broyden(memory=5, group="prefix"),
        "tol": Tolerance(rtol=1e-2),
        "max_steps": 12,
        "eval_tol": Tolerance(rtol=1e-2),
        "eval_max_steps": 12,
        "adjoint": Implicit(solver=Anderson(), tol=Tolerance(rtol=1e-2), max_steps=10),
    }
    sizes = {"batch": 4, "length": 8, "eval_batch": 4, "eval_length": 16}
    copy = {"copy_T": 5, "copy_train": 22, "copy_test": 6}
    return TrainConfig(
        **{
            "recipe": "tiny",
            "model": ModelConfig(**{**settings, **(model or {})}),
            "data": DataConfig(**{"source": source, **sizes, **copy, **(data or {})}),
            "optimiser": OptimiserConfig(**{"lr": 1e-2, **(optimiser or {})}),
            "devices": DeviceConfig(**(devices or {})),
            "regulariser": RegulariserConfig(**(regulariser or {})),
            "steps": 6,
            "eval_every": 3,
            "checkpoint_every": 2,
            "trackers": (),
            **options,
        }
    )


def everything(source: str, **options: Any) -> TrainConfig:
    """A run with every device that a checkpoint must remember something for."""
    return tiny(
        source,
        cell={"dropout": 0.2, "hidden_dropout": 0.2, "attention_dropout": 0.1},
        model={"embedding_dropout": 0.1, "input_dropout": 0.2, "output_dropout": 0.2},
        optimiser={
            "accumulate": 2,
            "average_after": 2,
            "schedule": "plateau",
            "plateau_patience": 1,
            "warmup_steps": 2,
            "lr": 0.3,  # too much, so that validation stops improving and the plateau is reached
        },
        devices={
            "warmup_steps": 1,
            "random_steps": 5,
            "early_adjoint": Implicit(max_steps=2),
            "early_adjoint_steps": 2,
        },
        regulariser={"activation": 0.1, "temporal": 0.1, "jacobian": 0.1, "spectral": 0.1, "every": 2},
        **{"eval_every": 1, **options},
    )


def enlarge(model: SequenceModel) -> None:
    """Make a model contractive: embeddings of size one steer LN away from where it is steep.

    The fixed point is then reached to rounding, and fast for all bytes but capital letters. A softmax of its own starts
    near equal probabilities.
    """
    with torch.no_grad():
        for table in model.embedding.tables:
            table.div_(table.std())
            if len(table) == BYTES:
                table[ord("A") : ord("Z") + 1].mul_(0.2)
        for table in () if model.config.vocabulary.tie_weights else model.softmax.tables:
            table.div_(20 * table.std())


@contextmanager
def contractive() -> Iterator[None]:
    """Models of runs start out as `enlarge` makes them."""

    def make(config: ModelConfig) -> SequenceModel:
        model = SequenceModel(config)
        enlarge(model)
        return model

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(state, "SequenceModel", make)
        yield


def run(config: TrainConfig, path: Path, **options: Any) -> dict[str, Any]:
    return train(config, RunFolder(path), **options)


def metrics_of(path: Path, kind: str | None = None) -> list[dict[str, Any]]:
    """The records of a run without what depends on the machine. Every line must be whole."""
    text = (path / "metrics.jsonl").read_text(encoding="utf-8")
    assert text.endswith("\n")
    records = list(read_metrics(path / "metrics.jsonl"))
    assert len(records) == text.count("\n")
    return [
        {k: v for k, v in record.items() if k not in MEASURED} for record in records if kind in (None, record["kind"])
    ]


def losses_of(path: Path) -> list[float]:
    return [record["loss"] for record in metrics_of(path, "train")]


def tensors_of(checkpoint: Path) -> dict[str, Tensor]:
    """All tensors of a checkpoint: weights, optimiser, averages, memory and random numbers."""
    found = {}
    for path in sorted(checkpoint.glob("*.safetensors")):
        found |= {f"{path.name}:{name}": tensor for name, tensor in read_tensors(path).items()}
    return found


def plain_of(checkpoint: Path) -> dict[str, Any]:
    """All that a checkpoint says in JSON, but the size of the metrics file, which has timings in it."""
    found = {path.name: json.loads(path.read_text(encoding="utf-8")) for path in sorted(checkpoint.glob("*.json"))}
    assert found["state.json"].pop("metrics_size") > 0
    assert found["sha256.json"].pop("state.json")
    return found


def latest(path: Path) -> Path:
    return find_checkpoint(path / "checkpoints")


def weights_of_run(path: Path) -> dict[str, Tensor]:
    return read_tensors(latest(path) / "model.safetensors")


def assert_same_tensors(actual: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """The same bits."""
    assert actual.keys() == expected.keys()
    different = [name for name in expected if not torch.equal(actual[name], expected[name])]
    assert not different


def assert_same_run(actual: Path, expected: Path) -> None:
    """Two runs ended the same: metrics, and all that their last checkpoints hold, to the bit."""
    assert metrics_of(actual) == metrics_of(expected)
    assert plain_of(latest(actual)) == plain_of(latest(expected))
    assert_same_tensors(tensors_of(latest(actual)), tensors_of(latest(expected)))
