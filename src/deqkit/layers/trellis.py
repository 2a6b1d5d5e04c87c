"""The TrellisNet cell: a causal convolution with input injection and an LSTM gate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deqkit.layers.checks import check_rates, check_scale, check_weights, check_whole
from deqkit.layers.dropout import dropped, variational_mask
from deqkit.layers.linear import Normalisation, make_linear
from deqkit.layers.memory import last_positions

# B samples, T positions, D input width, H state width, S positions of history, k kernel taps


@dataclass(frozen=True, kw_only=True, slots=True)
class TrellisConfig:
    """Sizes and regularisation of a `TrellisCell`."""

    input_width: int
    """Width of the embedded input."""
    hidden_width: int
    """Channels of the state that the output does not see."""
    output_width: int
    """The last channels of h, which are the output."""
    kernel_size: int = 2
    """Taps of the convolution over positions, and of the injection."""
    dilation: int = 1
    """Distance between the taps of the convolution. The injection has none."""
    hidden_dropout: float = 0.0
    """Variational dropout of the convolution's input."""
    weight_dropout: float = 0.0
    """Dropout of single weights of all taps but the last, that is of those that look back."""
    normalise: Normalisation = "none"
    """Normalisation of the convolution and the injection."""
    init_std: float | None = 0.05
    """Weights start at N(0, init_std) as in the paper; None scales by fan-in."""
    input_scale: float = 1.0
    """The embedded input is multiplied by this: tables that the softmax shares are small, gates want inputs near 1."""

    def __post_init__(self) -> None:
        check_whole(1, input_width=self.input_width, output_width=self.output_width)
        check_whole(1, kernel_size=self.kernel_size, dilation=self.dilation)
        check_whole(0, hidden_width=self.hidden_width)
        check_weights(self.normalise, self.init_std)
        check_scale(input_scale=self.input_scale)
        check_rates(hidden_dropout=self.hidden_dropout, weight_dropout=self.weight_dropout)

    @property
    def state_width(self) -> int:
        return self.hidden_width + self.output_width

    @property
    def reach(self) -> int:
        """How many positions before its own one application of the cell sees."""
        return (self.kernel_size - 1) * self.dilation


class TrellisMemory(NamedTuple):
    """What the positions before a segment leave behind: all that the kernel reaches, so that segments are exact."""

    h_BSH: Tensor
    c_B1H: Tensor
    x_BSD: Tensor
    """Embedded inputs that the injection's taps reach."""


class TrellisNoise(NamedTuple):
    """Dropout masks of one pass; None where nothing is dropped."""

    hidden: Tensor | None = None
    conv: Tensor | None = None
    injection: Tensor | None = None


class TrellisCell(nn.Module):
    """`f((h, c); x)`: gates i, o, g, f from a convolution over h plus the injected input, then an LSTM cell.

        pre = injection(x) + conv(h)
        c'  = sigmoid(f) c_(t-1) + sigmoid(i) tanh(g)
        h'  = sigmoid(o) tanh(c')

    The state is the pair (h, c), each (B, T, H). Positions before the first come from the memory, exactly as if the
    segments were one sequence, for every kernel size and dilation.
    """

    independent_samples = True

    def __init__(self, config: TrellisConfig) -> None:
        super().__init__()
        self.config = config
        taps, width = config.kernel_size, config.state_width
        options: dict[str, Any] = {"normalise": config.normalise, "std": config.init_std}
        self.conv = make_linear(taps * width, 4 * width, **options)
        self.injection = make_linear(taps * config.input_width, 4 * width, **options)

    @property
    def output_width(self) -> int:
        return self.config.output_width

    def sample_noise(self, x_BTD: Tensor) -> TrellisNoise:
        """Draw the masks of one pass; all None in evaluation mode."""
        config = self.config
        hidden = variational_mask(x_BTD, config.state_width, config.hidden_dropout, training=self.training)
        if not self.training or config.weight_dropout == 0:
            return TrellisNoise(hidden)
        masks = [self._weight_mask(x_BTD, width) for width in (config.state_width, config.input_width)]
        return TrellisNoise(hidden, *masks)

    def _weight_mask(self, like: Tensor, width: int) -> Tensor:
        rows, taps = 4 * self.config.state_width, self.config.kernel_size
        back = torch.rand(rows, (taps - 1) * width, device=like.device) >= self.config.weight_dropout
        return torch.cat([back, back.new_ones(rows, width)], 1)

    def _dropped_weight(self, weight: Tensor, mask: Tensor | None) -> Tensor:
        """A boolean mask is a quarter of the weight's size; taps that look back are scaled, so that the mean stays."""
        if mask is None:
            return weight
        back = weight.shape[1] * (self.config.kernel_size - 1) // self.config.kernel_size
        scale = weight.new_ones(weight.shape[1])
        scale[:back] = 1 / (1 - self.config.weight_dropout)
        return weight * scale * mask

    def empty_memory(self, x_BTD: Tensor) -> TrellisMemory:
        """The memory before the first position: zeros."""
        config, batch = self.config, x_BTD.shape[0]
        return TrellisMemory(
            x_BTD.new_zeros(batch, config.reach, config.state_width),
            x_BTD.new_zeros(batch, 1, config.state_width),
            x_BTD.new_zeros(batch, config.kernel_size - 1, config.input_width),
        )

    def inject(self, x_BTD: Tensor, memory: TrellisMemory | None = None, noise: TrellisNoise | None = None) -> Tensor:
        """The part of the gates that depends on the input alone, (B, T, 4H)."""
        history_BSD = (memory or self.empty_memory(x_BTD)).x_BSD
        weight = self._dropped_weight(self.injection.weight, noise.injection if noise else None)
        taps = _taps(x_BTD, history_BSD, dilation=1)
        if self.config.input_scale != 1:
            taps = taps * self.config.input_scale
        return F.linear(taps, weight, self.injection.bias)

    def initial_state(self, u_BTG: Tensor, *_: Any) -> tuple[Tensor, Tensor]:
        shape = (*u_BTG.shape[:2], self.config.state_width)
        return u_BTG.new_zeros(shape), u_BTG.new_zeros(shape)

    def bind(
        self, u_BTG: Tensor, memory: TrellisMemory | None = None, noise: TrellisNoise | None = None
    ) -> tuple[Callable[..., tuple[Tensor, Tensor]], tuple[Any, ...]]:
        """f of the state alone, with everything that does not depend on the state computed."""
        if memory is None:
            memory = self.empty_memory(u_BTG)
        noise = self.sample_noise(u_BTG) if noise is None else noise
        dilation = self.config.dilation
        weight = self._dropped_weight(self.conv.weight, noise.conv)
        past_h_BSH = dropped(memory.h_BSH, noise.hidden)

        def f(
            state: tuple[Tensor, Tensor], u_BTG: Tensor, past_h_BSH: Tensor, past_c_B1H: Tensor, mask: Tensor | None
        ) -> tuple[Tensor, Tensor]:
            h_BTH, c_BTH = state
            taps = _taps(dropped(h_BTH, mask), past_h_BSH, dilation=dilation)
            gates_BTG = F.linear(taps, weight, self.conv.bias) + u_BTG
            i_BTH, o_BTH, g_BTH, f_BTH = gates_BTG.chunk(4, -1)
            previous_BTH = torch.cat([past_c_B1H, c_BTH], 1)[:, :-1]
            c_BTH = torch.sigmoid(f_BTH) * previous_BTH + torch.sigmoid(i_BTH) * torch.tanh(g_BTH)
            return torch.sigmoid(o_BTH) * torch.tanh(c_BTH), c_BTH

        return f, (u_BTG, past_h_BSH, memory.c_B1H, noise.hidden)

    def forward(self, state: tuple[Tensor, Tensor], *inputs: Any) -> tuple[Tensor, Tensor]:
        """One application, with the arguments of `bind`."""
        f, args = self.bind(*inputs)
        return f(state, *args)

    def output(self, state: tuple[Tensor, Tensor]) -> Tensor:
        return state[0][..., self.config.hidden_width :]

    def remember(
        self,
        memory: TrellisMemory,
        state: tuple[Tensor, Tensor],
        x_BTD: Tensor,
        u_BTG: Tensor,
        limit: int | None = None,
    ) -> TrellisMemory:
        """The memory after a segment: what the kernel reaches from the next position; nothing if the limit is 0."""
        if limit == 0:
            return self.empty_memory(x_BTD)
        return TrellisMemory(
            last_positions(memory.h_BSH, state[0], self.config.reach),
            last_positions(memory.c_B1H, state[1], 1),
            last_positions(memory.x_BSD, x_BTD, self.config.kernel_size - 1),
        )


def _taps(x_BTD: Tensor, history_BSD: Tensor, *, dilation: int) -> Tensor:
    """At every position the kernel's inputs side by side, oldest first: (B, T, k D)."""
    length = x_BTD.shape[1]
    padded = torch.cat([history_BSD, x_BTD], 1)
    starts = range(0, history_BSD.shape[1] + 1, dilation)
    return torch.cat([padded[:, start : start + length] for start in starts], -1)
