"""Where checks find data and keep the models they train: a model that several checks need is trained once."""

from __future__ import annotations

import hashlib
import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from deqkit._plain import unknown
from deqkit.train.config import TrainConfig, to_plain
from deqkit.train.evaluate import evaluate
from deqkit.train.load import LoadedRun, load_run
from deqkit.train.loop import train
from deqkit.train.recipes import RECIPES
from deqkit.train.run_folder import RunFolder, read_metrics
from deqkit.train.tasks import BUILT_IN, make_task, resolve


@dataclass(frozen=True, kw_only=True)
class Workshop:
    """A folder of runs, a folder of prepared corpora, and somebody to tell how far things are."""

    runs: Path
    """Trained models, one folder each; what is there is used again, what is half done goes on."""
    data: Path | None = None
    """A folder with the corpora `ptb`, `wikitext-2` and so on as `deqkit data prepare` made them."""
    tell: Callable[[str], None] = field(default=lambda line: None)
    """Called with a line about what is being done."""
    seeds: tuple[int, ...] | None = None
    """Train no other seeds than these, and where one model will do, the first of them; what a comparison finds of
    others is reported as well. None for all that it asks."""
    reusable: Mapping[str, dict[str, Any]] = field(default_factory=dict)
    """Models that comparisons have measured before, by `training_hash`: such are not trained again."""
    kept: dict[Any, Any] = field(default_factory=dict)
    """What was measured in this session, for rows that need the same."""
    used: dict[str, float | None] = field(default_factory=dict)
    """Runs that were asked for, by name, and the processor seconds that their training took, whenever that was; None
    where nobody counted them."""

    def corpus(self, name: str) -> str:
        """The folder of a prepared corpus.

        Raises:
            ValueError: it is not there; says how to prepare it.
        """
        where = (self.data or Path("data")) / name
        if not (where / "manifest.json").exists():
            # Kept in results where nobody asked for the row: no folder of one machine belongs there.
            missing, target = ("data", f"data/{name}") if self.data is None else ("--data", f"DATA/{name}")
            raise ValueError(
                f"{name} is needed, and {missing} has no folder {name}: run `deqkit data prepare {name} --from RAW "
                f"--out {target}`, where RAW is a folder with train.txt, valid.txt and test.txt"
                + ("" if self.data is None else ", and pass --data DATA")
            )
        return str(where)

    def recipe(self, name: str, *, corpus: str | None = None) -> TrainConfig:
        """A recipe by name, with the corpus it needs and the first seed that may be trained.

        Raises:
            ValueError: there is no such recipe, or the corpus is not there.
        """
        if name not in RECIPES:
            raise ValueError(unknown("recipe", name, RECIPES))
        config = replace(RECIPES[name](), seed=self.first_seed)
        return config if corpus is None else replace(config, data=replace(config.data, source=self.corpus(corpus)))

    @property
    def first_seed(self) -> int:
        return self.seeds[0] if self.seeds else 0

    def seeds_of(self, config: TrainConfig, seeds: tuple[int, ...]) -> Iterator[TrainConfig]:
        """The configuration with each seed that is to be reported: those that may be trained, and those that are."""
        for seed in seeds:
            with_seed = replace(config, seed=seed)
            allowed = self.seeds is None or seed in self.seeds
            if allowed or self.has(with_seed) or self.measured_before(with_seed) is not None:
                yield with_seed

    def has(self, config: TrainConfig, name: str | None = None) -> bool:
        """Whether a training is there, to its end."""
        folder = self._folder(config, name)
        if not (folder.path / "config.json").exists() or not _finished(folder, config):
            return False
        return not _difference(_what_matters(folder.config()), _what_matters(resolve(config)))

    def measured_before(self, config: TrainConfig) -> dict[str, Any] | None:
        """What an earlier comparison found of the same training, if that counts and the training is not here."""
        if not self.reusable or self.has(config):
            return None
        found = self.reusable.get(training_hash(config))
        if found is not None:
            self.used[f"{config.recipe}-seed-{config.seed}"] = None
        return found

    def trained(self, config: TrainConfig, name: str | None = None) -> LoadedRun:
        """The model of a training, best evaluation; trained now unless it is there.

        Raises:
            ValueError: there is a run of that name with another configuration, or on other data.
            KeyboardInterrupt: a signal stopped the training, which has kept what it did.
        """
        config = replace(resolve(config), trackers=())
        folder = self._folder(config, name)
        begun = (folder.path / "config.json").exists()
        if begun:
            _require_same(folder, config)
        if not (begun and _finished(folder, config)):
            last = train(config, folder, resume=begun, on_record=self._teller(folder.path.name, config.steps))
            if not last["finished"]:  # or a half-trained model would pass for a result
                where = f"{folder.path.name}, step {last['step']} of {config.steps}"
                raise KeyboardInterrupt(f"interrupted at {where}; the same command goes on there")
        # The data may have another place than when the run was trained.
        run = replace(load_run(folder.path), config=config)
        records = self.metrics(run)
        counted = all("processor_seconds" in record for record in records)
        self.used[folder.path.name] = sum(r["processor_seconds"] for r in records) if counted else None
        return run

    def tested(self, run: LoadedRun, split: str = "test", **settings: Any) -> dict[str, Any]:
        """The figures of a run on a split, with the seconds it took."""
        self.tell(f"{run.folder.path.name}: {split}")
        began = time.perf_counter()
        figures = evaluate(run.model, run.task(), split, **settings)
        return {**figures, "seconds": time.perf_counter() - began}

    def metrics(self, run: LoadedRun, kind: str = "train") -> list[dict[str, Any]]:
        """The records that a training wrote."""
        return [record for record in read_metrics(run.folder.metrics) if record["kind"] == kind]

    def _folder(self, config: TrainConfig, name: str | None) -> RunFolder:
        return RunFolder(self.runs / (name or f"{config.recipe}-seed-{config.seed}"))

    def _teller(self, name: str, steps: int) -> Callable[[dict[str, Any]], None]:
        def on_record(record: dict[str, Any]) -> None:
            if record["step"] % 10 == 0 or record["step"] == steps:
                self.tell(f"{name}: step {record['step']} of {steps}")

        return on_record


def training_hash(config: TrainConfig) -> str:
    """The same for trainings with the same configuration, seed and data. Of which code they were it does not tell."""
    config = resolve(config)
    what = [_what_matters(config), make_task(config).data_hash]
    return hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()[:16]


def _finished(folder: RunFolder, config: TrainConfig) -> bool:
    steps = [record["step"] for record in read_metrics(folder.metrics) if record["kind"] == "valid"]
    return bool(steps) and steps[-1] >= config.steps


def _require_same(folder: RunFolder, config: TrainConfig) -> None:
    """The same training on the same data; where the data lies, how often it was saved and who else was told of it
    makes no difference."""
    if difference := _difference(_what_matters(folder.config()), _what_matters(config)):
        raise ValueError(
            f"{folder.path.name} was trained with another configuration than this row asks for ({difference}): move it "
            "away"
        )
    if config.data.source not in BUILT_IN and folder.read().get("data_sha256") != make_task(config).data_hash:
        raise ValueError(f"{folder.path.name} was trained on other data than this row asks for: move it away")


def _what_matters(config: TrainConfig) -> Any:
    data = config.data if config.data.source in BUILT_IN else replace(config.data, source="")
    config = replace(config, data=data, checkpoint_every=1, keep=1, trackers=(), expected_time="")
    plain = to_plain(config)
    if config.model.depth != "equilibrium":  # how an equilibrium would be solved for
        for name in ("solver", "tol", "max_steps", "eval_tol", "eval_max_steps", "adjoint"):
            del plain["model"][name]
    # Settings that came later: what was trained before has its hash without.
    if not config.regulariser.auxiliary:
        for name in ("auxiliary", "auxiliary_every"):
            del plain["regulariser"][name]
    if config.model.checkpoint_every == 1:
        del plain["model"]["checkpoint_every"]
    return plain


def _difference(found: Any, asked: Any, where: str = "") -> str:
    """The first place where two plain values differ; empty if they are the same."""
    if found == asked:
        return ""
    if isinstance(found, dict) and isinstance(asked, dict):
        names = [*asked, *(name for name in found if name not in asked)]
        parts = (_difference(found.get(n), asked.get(n), f"{where}.{n}".lstrip(".")) for n in names)
        return next(part for part in parts if part)
    return f"{where} is {found!r} there and {asked!r} here"
