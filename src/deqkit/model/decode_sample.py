"""How the next token is chosen from its distribution."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from deqkit.layers.checks import check_whole

# B samples, V vocabulary, C candidates


@dataclass(frozen=True, kw_only=True, slots=True)
class Sampling:
    """Which tokens may be drawn, and with what probabilities."""

    temperature: float = 1.0
    """Log-probabilities are divided by it; 0 takes the likeliest token every time."""
    top_k: int | None = None
    """Only so many of the likeliest tokens; None for all."""
    top_p: float | None = None
    """Of those, the fewest of the likeliest whose probabilities add up to this share; None for all."""

    def __post_init__(self) -> None:
        if not (isinstance(self.temperature, int | float) and 0 <= self.temperature < float("inf")):
            raise ValueError(f"temperature must be at least 0 (0 takes the likeliest token), got {self.temperature!r}")
        if self.top_k is not None:
            check_whole(1, top_k=self.top_k)
        if self.top_p is not None and not (isinstance(self.top_p, int | float) and 0 < self.top_p <= 1):
            raise ValueError(f"top_p must be above 0 and at most 1, got {self.top_p!r}")

    def candidates(self, log_probs_BV: Tensor) -> tuple[Tensor, Tensor]:
        """Tokens that may be drawn and their probabilities, the likeliest first if they were cut: (B, C) each."""
        scores_BV = log_probs_BV.double() / self.temperature
        if self.top_k is None and self.top_p is None:
            tokens_BC = torch.arange(scores_BV.shape[1], device=scores_BV.device).expand_as(scores_BV)
            return tokens_BC, torch.softmax(scores_BV, 1)
        count = scores_BV.shape[1] if self.top_k is None else min(self.top_k, scores_BV.shape[1])
        scores_BC, tokens_BC = scores_BV.topk(count, 1)
        probs_BC = torch.softmax(scores_BC, 1)
        if self.top_p is not None:
            before_BC = probs_BC.cumsum(1) - probs_BC
            before_BC[:, 0] = 0  # the likeliest stays whatever rounding says
            probs_BC = torch.where(before_BC < self.top_p, probs_BC, 0)
        return tokens_BC, probs_BC / probs_BC.sum(1, keepdim=True)

    def choose(self, log_probs_BV: Tensor, generators: Sequence[torch.Generator]) -> Tensor:
        """One token a sample, by one number of the sample's own generator."""
        if self.temperature == 0:
            return log_probs_BV.argmax(1)
        tokens_BC, probs_BC = self.candidates(log_probs_BV)
        draws = [torch.rand(1, generator=generator, dtype=torch.float64) for generator in generators]
        upto_BC = probs_BC.cumsum(1)
        draw_B1 = torch.stack(draws).to(upto_BC.device) * upto_BC[:, -1:]
        # The first candidate at which more than the draw has been summed up: never one of probability 0.
        place_B1 = torch.searchsorted(upto_BC, draw_B1, right=True)
        last_B1 = (probs_BC > 0).sum(1, keepdim=True) - 1 if self.top_p is not None else probs_BC.shape[1] - 1
        return tokens_BC.gather(1, torch.as_tensor(last_B1).to(place_B1).minimum(place_B1)).squeeze(1)
