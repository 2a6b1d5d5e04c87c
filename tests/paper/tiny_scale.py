"""Models small enough to check every row on: trained once for all test modules of a session."""

from __future__ import annotations

import functools
import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from deqkit.paper.claim import Outcome
from deqkit.paper.subjects import Scale, penalised, plain
from deqkit.paper.workshop import Workshop
from deqkit.train.config import TrainConfig
from deqkit.train.recipes import layers
from train.runs import TRELLIS, make_corpus, make_text, tiny


@functools.cache
def make_workshop(root: Path) -> tuple[Workshop, Scale]:
    """`root` is a folder that a session's test modules share."""
    corpus = make_corpus(root / "corpus", make_text(600))
    masks = {"dropout": 0.2, "hidden_dropout": 0.2}

    def equilibrium() -> TrainConfig:
        penalty = {"spectral": 0.02, "every": 3}
        return tiny(corpus, cell=masks, regulariser=penalty, steps=12, eval_every=6, checkpoint_every=6)

    def trellis() -> TrainConfig:
        cell = replace(TRELLIS, hidden_dropout=0.2)
        options: dict[str, Any] = {"steps": 4, "eval_every": 4, "checkpoint_every": 4}
        return replace(tiny(corpus, cell=cell, model={"mem_len": 1}, **options), recipe="tiny-trellis")

    scale = Scale(
        transformer=lambda workshop: equilibrium(),
        transformer_layers=lambda workshop: layers(equilibrium(), 3, tied=True),
        trellis=lambda workshop: trellis(),
        trellis_layers=lambda workshop: layers(trellis(), 3, tied=True),
        plain=lambda workshop: plain(equilibrium(), steps=16, batch=4),
        penalised=lambda workshop: penalised(plain(equilibrium(), steps=16, batch=4), equilibrium().regulariser),
        max_batches=2,
        num_samples=2,
        depth=12,
        rounds=2,
        lengths=(8, 16),
        long_length=64,
    )
    return Workshop(runs=root / "runs"), scale


def check_outcome(outcome: Outcome) -> dict[str, Any]:
    """What every outcome must be: told, and plain values without NaN, with figures that can be drawn."""
    assert outcome.measured and outcome.scale and outcome.holds in (True, False, None)
    assert not any(brace in outcome.measured + outcome.scale + outcome.remark for brace in "{}")
    assert "/tmp" not in outcome.scale and "nan" not in outcome.measured
    numbers = json.loads(json.dumps(outcome.numbers, allow_nan=False))
    panels = numbers.get("figures", [numbers["figure"]] if "figure" in numbers else [])
    for panel in panels:
        assert panel["x"] and panel["y"] and panel["series"]
        for series in panel["series"]:
            assert series["label"] and len(series["x"]) == len(series["y"]) > 0
            assert not panel["log_y"] or min(series["y"]) > 0
            assert not panel["log_x"] or min(series["x"]) > 0
    return numbers
