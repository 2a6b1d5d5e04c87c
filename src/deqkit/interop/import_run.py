"""A run folder from a checkpoint of the original code."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from deqkit.data import open_corpus
from deqkit.interop.original import load_original
from deqkit.model import SequenceModel
from deqkit.model.weights import weights_of
from deqkit.train.checkpoint import CheckpointWriter
from deqkit.train.config import DataConfig, TrainConfig, to_plain
from deqkit.train.run_folder import RunFolder


def import_original(checkpoint: str | Path, out: str | Path, *, data: str = "", **options: Any) -> SequenceModel:
    """Make a run of a checkpoint, to evaluate, sample from and report on. It has no optimiser to resume with.

    Args:
        data: a prepared folder with the checkpoint's vocabulary, for evaluation; it can be given later.
        options: those of `load_original`.
    """
    fingerprint, size = None, options.pop("vocabulary", None)
    if data:
        corpus = open_corpus(Path(data))
        fingerprint, size = corpus.fingerprint, corpus.vocab_size
    model = load_original(checkpoint, vocabulary=size, **options).float()
    folder = RunFolder(out)
    config = TrainConfig(recipe="imported", model=model.config, data=DataConfig(source=data, length=150), trackers=())
    folder.create(config, data_hash="")
    writer = CheckpointWriter(folder.checkpoints, 0)
    writer.begin()
    try:
        writer.add_tensors("model.safetensors", weights_of(model))
        state = {"step": 0, "best_step": 0, "num_averaged": None, "vocabulary": fingerprint, "optimiser": None}
        writer.add_json(
            "state.json", {**state, "imported_from": Path(checkpoint).name, "model": to_plain(model.config)}
        )
        writer.commit()
    except BaseException:
        writer.abandon()
        raise
    return model
