"""What the paper says, and what a check of it found."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

from deqkit.paper.workshop import Workshop


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a check measured."""

    measured: str
    """The figures that decide, in a line."""
    scale: str
    """Model, data and length at which they were measured."""
    holds: bool | None
    """Whether the claim holds here; None where it was not measured."""
    numbers: dict[str, Any] = field(default_factory=dict)
    """Everything that was measured, as plain values."""
    remark: str = ""
    """What was tried where the claim does not hold, or what limits the check."""

    def plain(self) -> dict[str, Any]:
        return asdict(self)


Check = Callable[[Workshop], Outcome]


@dataclass(frozen=True, kw_only=True, slots=True)
class Claim:
    """A table, figure, theorem or remark of the paper as something one can run."""

    row: str
    """Its name on the command line."""
    where: str
    """Where the paper says it."""
    claim: str
    """What it says, in our words."""
    paper: str
    """The paper's own figure; a dash where it gives none."""
    quick: Check
    """Minutes at most, on what deqkit carries with it."""
    full: Check | None = None
    """At full length; None where the quick check is all there is to it."""
    full_time: str = ""
    """How long that takes on two cores."""
    elsewhere: tuple[str, ...] = ()
    """If no check can measure it here: the commands that would, one after the other, on machines that can."""
    source: str = ""
    """If no command of ours could: where its figures come from."""

    @property
    def is_checked(self) -> bool:
        """Whether a check measures something; else it only says what there is to say."""
        return not (self.elsewhere or self.source)


def unmeasured(reason: str, *, scale: str = "") -> Outcome:
    """The outcome of a check that lacks what it needs."""
    return Outcome(measured="not measured", scale=scale, holds=None, remark=reason)
