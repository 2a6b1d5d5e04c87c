"""Taking tensors out of a foreign state dict so that none is misread and none is left over."""

from __future__ import annotations

import re
from collections.abc import Mapping

from torch import Tensor

from deqkit.layers.linear import Normalisation

# names that torch gives to the two parts of a weight-normalised weight
GAIN, DIRECTION = "parametrizations.weight.original0", "parametrizations.weight.original1"


class OriginalError(ValueError):
    """A checkpoint that does not fit; the message names the key."""


class Reader:
    """A state dict, key by key. What has not been taken at the end is an error."""

    def __init__(self, state: Mapping[str, Tensor], *, ignore: str) -> None:
        for key, value in state.items():
            if not isinstance(key, str) or not isinstance(value, Tensor):
                raise OriginalError(f"{key!s}: expected a name and a tensor, got {type(value).__name__}")
        self._state = {key: value for key, value in state.items() if not re.fullmatch(ignore, key)}
        self._spelling = {key: key for key in self._state}

    def __contains__(self, key: str) -> bool:
        return key in self._state

    def expect(self, condition: bool, key: str, problem: str) -> None:
        if not condition:
            raise OriginalError(f"{self._spelling.get(key, key)}: {problem}")

    def rename(self, pattern: str, replacement: str) -> bool:
        """Give keys another name; errors still spell them as the file does. Returns whether there were any."""
        renamed: dict[str, Tensor] = {}
        for key, value in self._state.items():
            name = re.sub(f"^{pattern}", replacement, key)
            self.expect(name not in renamed, key, "the same weight is there under two names")
            renamed[name] = value
            self._spelling[name] = self._spelling[key]
        changed = renamed.keys() != self._state.keys()
        self._state = renamed
        return changed

    def put(self, key: str, value: Tensor) -> None:
        self._state[key] = value

    def peek(self, key: str) -> Tensor:
        self.expect(key in self._state, key, "missing")
        return self._state[key]

    def take(self, key: str, shape: tuple[int, ...] | None = None, *, ndim: int | None = None) -> Tensor:
        """Take a tensor out, checked for its shape."""
        tensor = self.peek(key)
        del self._state[key]
        got = tuple(tensor.shape)
        self.expect(tensor.is_floating_point(), key, f"expected real numbers, got {tensor.dtype}")
        self.expect(shape is None or got == shape, key, f"expected shape {shape}, got {got}")
        self.expect(ndim is None or tensor.ndim == ndim, key, f"expected {ndim} dimensions, got shape {got}")
        self.expect(bool(tensor.isfinite().all()), key, "has values that are not finite")
        return tensor

    def take_all(self, *patterns: str, ndim: int) -> list[Tensor]:
        """A numbered list under any of these names."""
        found: list[Tensor] = []
        while key := next((k for p in patterns if (k := p.format(len(found))) in self._state), None):
            found.append(self.take(key, ndim=ndim))
        return found

    def linear(self, name: str, key: str, weights: dict[str, Tensor], *, bias: bool = True) -> Normalisation:
        """A linear map, stored as 2-D or as a convolution with one tap, with or without weight norm."""
        kind, taps = self.conv(name, key, weights, bias=bias)
        self.expect(taps == 1, f"{key}.weight", f"expected one tap, got {taps}")
        return kind

    def conv(self, name: str, key: str, weights: dict[str, Tensor], *, bias: bool = True) -> tuple[Normalisation, int]:
        """A convolution, as a linear map on taps side by side, oldest first. Returns the number of taps too."""
        if bias:
            weights[f"{name}.bias"] = self.take(f"{key}.bias", ndim=1)
        if f"{key}.weight_v" in self or f"{key}.weight_g" in self:
            direction, taps = self._side_by_side(f"{key}.weight_v")
            gain = self.take(f"{key}.weight_g")
            self.expect(gain.numel() == direction.shape[0], f"{key}.weight_g", f"expected {direction.shape[0]} values")
            weights[f"{name}.{GAIN}"] = gain.reshape(-1, 1)
            weights[f"{name}.{DIRECTION}"] = direction
            return "weight", taps
        weights[f"{name}.weight"], taps = self._side_by_side(f"{key}.weight")
        return "none", taps

    def _side_by_side(self, key: str) -> tuple[Tensor, int]:
        weight = self.take(key)
        self.expect(weight.ndim in (2, 3), key, f"expected 2 or 3 dimensions, got shape {tuple(weight.shape)}")
        if weight.ndim == 2:
            return weight, 1
        return weight.transpose(1, 2).flatten(1), weight.shape[2]

    def check_linears(
        self, shapes: Mapping[str, tuple[int, int]], weights: Mapping[str, Tensor], keys: Mapping[str, str]
    ) -> None:
        for name, shape in shapes.items():
            prefix = f"core.cell.{name}"
            last, ours = ("weight", "weight") if f"{prefix}.weight" in weights else ("weight_v", DIRECTION)
            got = tuple(weights[f"{prefix}.{ours}"].shape)
            self.expect(got == shape, f"{keys[name]}.{last}", f"expected {shape} given the other shapes, got {got}")
            if (bias := weights.get(f"{prefix}.bias")) is not None:
                got = bias.numel()
                self.expect(got == shape[0], f"{keys[name]}.bias", f"expected {shape[0]} values, got {got}")

    def finish(self) -> None:
        """Nothing may be left over."""
        if self._state:
            key = min(self._spelling[key] for key in self._state)
            more = f" (and {len(self._state) - 1} more)" if len(self._state) > 1 else ""
            raise OriginalError(f"{key}: not a key of a model of the original code{more}")
