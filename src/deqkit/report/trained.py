"""The model of a run at its best checkpoint, ready to be looked at."""

from __future__ import annotations

from dataclasses import dataclass

from deqkit.data import VocabularyMismatchError
from deqkit.model import SequenceModel
from deqkit.report.history import History
from deqkit.train.checkpoint import find_checkpoint, list_checkpoints, read_state
from deqkit.train.load import load_run
from deqkit.train.tasks import AbstractTask


@dataclass(frozen=True, kw_only=True)
class Trained:
    """A model in evaluation mode, with what it was trained on."""

    model: SequenceModel
    task: AbstractTask
    step: int
    is_best: bool
    window: int
    """Positions of a segment in evaluation."""
    depth: int | None
    """The depth that it was trained with so far, if that is not the configuration's: the shallow phase was not over."""

    @property
    def description(self) -> str:
        which = "best" if self.is_best else "latest"
        shallow = "" if self.depth is None else f", when it was still a network of {self.depth} layers"
        return f"the {which} checkpoint, of step {self.step:,}{shallow}"


def load_trained(history: History, task: AbstractTask) -> Trained:
    """The model of a run: the best that is kept, or else the latest.

    Raises:
        ValueError: there is no checkpoint, or it is damaged or of other data.
    """
    is_best = _keeps_best(history)
    loaded = load_run(history.folder.path, "best" if is_best else "latest")
    if loaded.vocabulary is not None and loaded.vocabulary != task.fingerprint:
        raise VocabularyMismatchError(
            f"the model was trained with another vocabulary than that of {history.config.data.source}"
        )
    devices, step = history.config.devices, loaded.step
    depth = devices.warmup_depth if history.is_shallow(step) else None
    window = history.config.data.eval_length
    return Trained(model=loaded.model, task=task, step=step, is_best=is_best, window=window, depth=depth)


def _keeps_best(history: History) -> bool:
    """Not before the first evaluation, nor if no checkpoint was written at that step."""
    folder = history.folder.checkpoints
    return read_state(find_checkpoint(folder))["best_step"] in dict(list_checkpoints(folder))
