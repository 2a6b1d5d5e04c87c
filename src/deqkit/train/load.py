"""A trained model from its run folder."""

from __future__ import annotations

import shlex
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from deqkit.data import Corpus, DataError, VocabularyMismatchError, check_vocabulary, open_corpus
from deqkit.model import SequenceModel
from deqkit.model.weights import WeightsError, load_weights
from deqkit.train.checkpoint import CheckpointError, find_checkpoint, read_checkpoint_tensors, read_state
from deqkit.train.config import TrainConfig
from deqkit.train.run_folder import RunFolder
from deqkit.train.tasks import AbstractTask, TextTask, make_task, open_task


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
            ValueError: it is not there, or the vocabulary is another.
        """
        config = self.config if source is None else replace(self.config, data=replace(self.config.data, source=source))
        where = config.data.source
        try:
            task = make_task(config) if self.vocabulary is None else open_task(config)
        except DataError as error:
            if source is not None or Path(where).exists():
                raise
            raise DataError(
                f"{where}, the data of {self.folder.path}, is not there any more: pass its place now with --data"
            ) from error
        if self.vocabulary is not None and task.fingerprint != self.vocabulary:
            run = shlex.quote(str(self.folder.path))
            raise VocabularyMismatchError(
                f"the model of {self.folder.path} was trained with another vocabulary than that of {where}: prepare "
                f"the text with the run's, deqkit data prepare text --vocabulary {run} --from TEXT --out DIR, or pass "
                "the right folder"
            )
        return task

    def text_task(self) -> TextTask:
        """The text that the run was trained on.

        Raises:
            ValueError: it was trained on something else.
        """
        task = self.task()
        if not isinstance(task, TextTask):
            raise ValueError(
                f"{self.folder.path} was trained on {self.config.data.source}, which is no text: call model.generate "
                "with token ids, or name a run that was trained on text"
            )
        return task

    def corpus(self) -> Corpus:
        """What encodes and decodes for the model: the run's own copy, or the data of a run that has none.

        Raises:
            ValueError: the run was trained on something else than text, or the vocabulary is another.
        """
        if not self.folder.vocabulary.exists():
            return self.text_task().corpus
        corpus = open_corpus(self.folder.vocabulary)
        if self.vocabulary is not None:
            check_vocabulary(corpus, self.vocabulary)
        return corpus


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
