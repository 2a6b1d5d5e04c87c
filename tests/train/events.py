"""What TensorBoard would show of a run."""

from __future__ import annotations

from pathlib import Path

from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from train.runs import MEASURED


def scalars_of(path: Path) -> dict[str, list[tuple[int, float]]]:
    """Steps and values of every curve, without what depends on the machine."""
    accumulator = EventAccumulator(str(path / "events"), size_guidance={"scalars": 0})
    accumulator.Reload()
    tags = [tag for tag in accumulator.Tags()["scalars"] if tag.partition("/")[2] not in MEASURED]
    return {tag: [(event.step, event.value) for event in accumulator.Scalars(tag)] for tag in tags}
