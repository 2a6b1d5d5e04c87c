"""A trained model from its run folder."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deqkit.data import VocabularyMismatchError
from deqkit.model import SequenceModel
from deqkit.model.weights import WeightsError, load_weights
from deqkit.train.checkpoint import CheckpointError, find_checkpoint, read_checkpoint_tensors, read_state
from deqkit.train.config import TrainConfig
from deqkit.train.run_folder import RunFolder
from deqkit.train.tasks import AbstractTask, make_task


@dataclass(frozen=True, slots=True)
class LoadedRun:
    """The model of a run as it was at a checkpoint, in evaluation mode."""

    folder: RunFolder
    config: TrainConfig
    model: SequenceModel
    step: int
    vocabulary: str | None
    """Fingerprint of the vocabulary it was trained with; None if that is not known."""

    def task(self, source: str | None = None) -> AbstractTask:
        """The data of the run, or other data with the same vocabulary.

        Raises:
            ValueError: the vocabulary is another.
        """
        config = self.config if source is None else replace(self.config, data=replace(self.config.data, source=source))
        task = make_task(config)
        if self.vocabulary is not None and task.fingerprint != self.vocabulary:
            raise VocabularyMismatchError(
                f"the model of {self.folder.path} was trained with another vocabulary than that of "
                f"{config.data.source}: prepare the text with the run's tokenizer, or pass the right folder"
            )
        return task


def load_run(path: str | Path, which: str | int = "best") -> LoadedRun:
    """Load a run's model: of the "best" evaluation, the "latest", or of a step; averaged weights if it has them."""
    folder = RunFolder(path)
    config = folder.config()
    checkpoint = _find(folder, which)
    state = read_state(checkpoint)
    with torch.random.fork_rng():  # the initial weights are thrown away; the caller's random numbers are not
        # Not compiled, whatever training was: it would take minutes, and needs a compiler that may not be there.
        model = SequenceModel(replace(config.model, compile=False))
    name = "averaged.safetensors" if state.get("num_averaged") else "model.safetensors"
    try:
        load_weights(model, read_checkpoint_tensors(checkpoint, name), source=str(checkpoint / name))
    except WeightsError as error:
        raise CheckpointError(str(error)) from error
    return LoadedRun(folder, config, model.eval(), state["step"], state["vocabulary"])


def _find(folder: RunFolder, which: str | int) -> Path:
    """Before the first evaluation there is no best: then the latest."""
    latest = find_checkpoint(folder.checkpoints)
    if which == "best" and read_state(latest)["best_step"] is None:
        return latest
    return find_checkpoint(folder.checkpoints, which)
