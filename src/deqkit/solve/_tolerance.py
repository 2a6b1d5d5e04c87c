"""When a solve counts as done: the norm, its scale and the patience of the loop."""

from __future__ import annotations

import dataclasses
import math
import numbers

from torch import Tensor

# B samples, P positions that are judged one by one (1 if a sample is judged as a whole)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Tolerance:
    """A sample is solved when `||f(z) - z|| <= atol + rtol * ||f(z)||`, in the 2-norm over that sample alone.

    The paper's forward tolerance, `eps = sqrt(T) * 1e-5`, is `Tolerance(rtol=0, atol=1e-5, per_token=True)`.
    With `rtol=0, atol=0` a solve runs its full budget unless it hits the fixed point exactly.
    """

    rtol: float = 1e-3
    """Allowed residual relative to the size of f(z). Below the dtype's rounding the verdict will be STALLED."""
    atol: float = 0.0
    """Allowed residual in absolute terms; needed only where the fixed point itself may be zero."""
    per_token: bool = False
    """Read `atol` as a norm per token: it is multiplied by sqrt(T), T the length of axis 1 of the state."""
    patience: int = 50
    """Evaluations without a new best residual (by a tenth of a percent) before a sample is called STALLED."""

    def __post_init__(self) -> None:
        for name in ("rtol", "atol"):
            value = getattr(self, name)
            if not (isinstance(value, numbers.Real) and 0 <= float(value) < math.inf):
                raise ValueError(f"{name} must be a finite number >= 0, got {value!r}")
            object.__setattr__(self, name, float(value))  # NumPy's numbers could not be read from a file
        if not isinstance(self.patience, int) or self.patience < 2:
            raise ValueError(f"patience must be a whole number of at least 2, got {self.patience!r}")

    def bound(self, scale_BP: Tensor, num_tokens: Tensor | float) -> Tensor:
        """The residual norm at or below which a sample counts as solved, given `||f(z)||` and its length."""
        atol = self.atol * num_tokens**0.5 if self.per_token else self.atol
        return atol + self.rtol * scale_BP

    def resolved(self, num_tokens: int) -> Tolerance:
        """The same demand on samples of this length, without `per_token`."""
        if not self.per_token:
            return self
        return dataclasses.replace(self, atol=self.atol * num_tokens**0.5, per_token=False)
