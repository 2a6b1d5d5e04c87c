"""The learning rate through training."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from deqkit.train.config import OptimiserConfig


@dataclass(slots=True)
class Schedule:
    """The learning rate of every step; a plateau schedule also remembers how validation went."""

    config: OptimiserConfig
    num_steps: int
    factor: float = 1.0
    best: float = math.inf
    waited: int = 0

    def lr(self, step: int) -> float:
        """The learning rate of step number `step`, the first being 0."""
        config = self.config
        if step < config.warmup_steps:
            return config.lr * (step + 1) / config.warmup_steps
        return config.lr * max(config.floor, self._share(step))

    def _share(self, step: int) -> float:
        config = self.config
        if config.schedule == "cosine":
            done = (step - config.warmup_steps) / max(1, self.num_steps - config.warmup_steps)
            return config.floor + (1 - config.floor) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
        if config.schedule == "inverse-sqrt":
            return math.sqrt(max(1, config.warmup_steps) / (step + 1))
        return self.factor

    def evaluated(self, loss: float) -> None:
        """Take note of a validation loss."""
        if loss < self.best:
            self.best, self.waited = loss, 0
            return
        self.waited += 1
        if self.config.schedule == "plateau" and self.waited >= self.config.plateau_patience:
            self.factor *= self.config.plateau_factor
            self.waited = 0

    def state_dict(self) -> dict[str, Any]:
        return {"factor": self.factor, "best": None if math.isinf(self.best) else self.best, "waited": self.waited}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.factor, self.waited = state["factor"], state["waited"]
        self.best = math.inf if state["best"] is None else state["best"]
