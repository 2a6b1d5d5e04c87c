"""What each of two processes does: `torchrun --nproc-per-node 2 pair.py CORPUS HARD_CORPUS FOLDER`.

One start for all runs, because starting takes longer than the runs do. `SCENARIOS` is shared with the test.
"""

from __future__ import annotations

import faulthandler
import json
import os
import signal
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from deqkit.layers import VocabularyConfig
from deqkit.train import loop
from deqkit.train.config import TrainConfig
from deqkit.train.state import TrainingState
from train.runs import EXACT, EXACT_COPY, WIDTH, contractive, everything, run, tiny

RANK = int(os.environ.get("RANK", "0"))
# Two classes: in the second half of the hard text, that of the second process, no word is of the second.
CLASSES = VocabularyConfig(size=256, embedding_width=WIDTH, cutoffs=(ord("a"),), div_val=2, tie_weights=False)
PENALTIES = {"spectral": 0.5, "jacobian": 0.5, "every": 1}


def scenarios(corpus: str, hard: str) -> dict[str, TrainConfig]:
    """Runs whose losses do not depend on the number of processes."""
    optimiser = {"lr": 5e-3, "warmup_steps": 2}
    exact: dict[str, Any] = {"model": EXACT, "optimiser": optimiser, "steps": 4, "eval_every": 2}
    return {
        "text": tiny(corpus, **exact),
        "unequal": tiny(hard, **exact),
        "adaptive": tiny(hard, **{**exact, "model": {**EXACT, "vocabulary": CLASSES}}),
        "copy-memory": tiny("copy-memory", **{**exact, "model": EXACT_COPY}),
        "accumulate": tiny(corpus, **{**exact, "optimiser": {**optimiser, "accumulate": 2}}),
        "regularised": tiny(corpus, **exact, regulariser={"activation": 0.5, "temporal": 0.5}),
        "shallow": tiny(corpus, **exact, devices={"warmup_steps": 2}),
        "layers": tiny(corpus, **{**exact, "model": {**EXACT, "depth": 3}}),
    }


def refusals(corpus: str) -> dict[str, TrainConfig]:
    config = tiny(corpus)
    return {
        "batch": replace(config, data=replace(config.data, batch=3)),
        "parts": replace(config, optimiser=replace(config.optimiser, accumulate=4)),
        "eval_batch": replace(config, data=replace(config.data, eval_batch=3)),
    }


class Watch:
    """Looks into the runs of this process: evaluations of each part, and the weights at the end."""

    def __init__(self) -> None:
        self.evals: list[float] = []
        self.states: list[TrainingState] = []
        self.kill_at: int | None = None
        account, init = loop._account, TrainingState.__init__

        def watched_account(output: Any, added: Any) -> dict[str, float]:
            found = account(output, added)
            self.evals.append(found.get("evals", 0.0))
            if len(self.evals) == self.kill_at:
                os.kill(os.getpid(), signal.SIGTERM)
            return found

        def watched_init(state: TrainingState, *args: Any) -> None:
            init(state, *args)
            self.states.append(state)

        loop._account = watched_account
        setattr(TrainingState, "__init__", watched_init)  # noqa: B010  (of another signature, on purpose)

    def report(self) -> dict[str, Any]:
        weights = [float(p.detach().double().sum()) for p in self.states[-1].model.parameters()]
        found = {"evals": self.evals[:], "weights": weights}
        self.evals.clear()
        return found


def main(corpus: str, hard: str, folder: Path) -> None:
    faulthandler.dump_traceback_later(100, exit=True)  # fail, with a trace, instead of hanging
    torch.set_num_threads(1)
    watch = Watch()
    report: dict[str, Any] = {}
    with contractive():
        for name, config in scenarios(corpus, hard).items():
            run(config, folder / name)
            report[name] = watch.report()
        run(tiny(corpus, model=EXACT, regulariser=PENALTIES, steps=3), folder / "penalised")
        report["penalised"] = watch.report()
    run(everything(corpus), folder / "whole")
    run(everything(corpus), folder / "resumed", max_steps=2)
    run(everything(corpus), folder / "resumed", resume=True)
    report["resumed"] = watch.report()
    watch.kill_at = 5 if RANK == 1 else None  # in the third of its steps of two parts
    report["stopped"] = run(everything(corpus, checkpoint_every=100), folder / "stopped")
    watch.kill_at = None
    run(everything(corpus), folder / "stopped", resume=True)
    for name, config in refusals(corpus).items():
        try:
            run(config, folder / f"refused-{name}")
        except ValueError as error:
            report[f"refused-{name}"] = str(error)
    (folder / f"rank{RANK}.json").write_text(json.dumps(report))
    torch.distributed.barrier()
    # Torch 2.13 sometimes deadlocks when a gloo group and its DDP modules are torn down: leave without doing so.
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2], Path(sys.argv[3]))
