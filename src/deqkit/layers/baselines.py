"""What equilibrium models are compared with: LSTM, GRU, and the TCN of Bai, Kolter and Koltun (2018).

They have the methods of a cell, so that one model, one training and one evaluation serve all. But they are whole
networks, run once: nothing of them is solved or applied again.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from deqkit.layers.checks import check_rates, check_scale, check_weights, check_whole
from deqkit.layers.dropout import dropped, variational_mask
from deqkit.layers.linear import make_linear
from deqkit.layers.memory import last_positions

# B samples, T positions, D input width, H hidden width, L layers, S width of a layer's state, R positions of history

Unit = Literal["lstm", "gru"]
Masks = tuple[Tensor | None, ...]
FORGET_BIAS = 1.0  # an LSTM that starts out forgetting half of its state at every position learns slowly


@dataclass(frozen=True, kw_only=True, slots=True)
class RecurrentConfig:
    """Sizes and regularisation of a `RecurrentNetwork`."""

    unit: Unit
    """Which recurrence."""
    input_width: int
    """Width of the embedded input."""
    hidden_width: int
    """Width of the recurrent state, h, of every layer."""
    output_width: int | None = None
    """A linear map to this width follows, so that the softmax may share the embedding's table; None for no map."""
    num_layers: int = 1
    """Recurrent layers."""
    dropout: float = 0.0
    """Variational dropout between layers."""
    forget_bias: float = FORGET_BIAS
    """Of an LSTM: where the forget gate's bias starts."""

    def __post_init__(self) -> None:
        if self.unit not in get_args(Unit):
            raise ValueError(f'unit must be "lstm" or "gru", got {self.unit!r}')
        check_whole(1, input_width=self.input_width, hidden_width=self.hidden_width, num_layers=self.num_layers)
        if self.output_width is not None:
            check_whole(1, output_width=self.output_width)
        check_rates(dropout=self.dropout)
        if not (isinstance(self.forget_bias, int | float) and math.isfinite(self.forget_bias)):
            raise ValueError(f"forget_bias must be a finite number, got {self.forget_bias!r}")
        if self.unit == "gru" and self.forget_bias != FORGET_BIAS:
            raise ValueError(f"a GRU has no forget gate: leave out forget_bias={self.forget_bias}")
        if self.num_layers == 1 and self.dropout:
            raise ValueError(f"dropout is between layers and there is one only: leave out dropout={self.dropout}")


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvolutionConfig:
    """Sizes and regularisation of a `ConvolutionNetwork`."""

    input_width: int
    """Width of the embedded input."""
    hidden_width: int
    """Channels of every level."""
    output_width: int | None = None
    """A linear map to this width follows, so that the softmax may share the embedding's table; None for no map."""
    kernel_size: int
    """Taps of every convolution."""
    num_levels: int
    """Residual blocks of two convolutions; the taps of each are twice as far apart as in the block before."""
    dropout: float = 0.0
    """Variational dropout (of whole channels, as in the paper) after every convolution."""
    init_std: float | None = 0.01
    """Weights of the convolutions start at N(0, init_std); None scales by fan-in."""
    input_scale: float = 1.0
    """Factor on the embedded input, whose numbers are of size one. On copy memory, with one seed, the loss fell sooner
    with 4 than with 1; why was not looked into."""

    def __post_init__(self) -> None:
        check_whole(1, input_width=self.input_width, hidden_width=self.hidden_width, num_levels=self.num_levels)
        check_whole(2, kernel_size=self.kernel_size)
        if self.output_width is not None:
            check_whole(1, output_width=self.output_width)
        check_rates(dropout=self.dropout)
        check_weights("weight", self.init_std)
        check_scale(input_scale=self.input_scale)

    @property
    def dilations(self) -> tuple[int, ...]:
        """Distance between the taps of every convolution, in order."""
        return tuple(2**level for level in range(self.num_levels) for _ in range(2))

    @property
    def reaches(self) -> tuple[int, ...]:
        """How many positions before its own every convolution sees."""
        return tuple((self.kernel_size - 1) * dilation for dilation in self.dilations)


class RecurrentMemory(NamedTuple):
    """What the positions before a segment leave behind: the last state, so that segments are exact."""

    states_BLS: Tensor
    """Of every layer h, for an LSTM h and c side by side."""


class ConvolutionMemory(NamedTuple):
    """What the positions before a segment leave behind: all that the kernels reach, so that segments are exact."""

    x_BRD: Tensor
    """Embedded inputs that the first convolution reaches."""
    h_BRH: Tensor
    """Inputs that each of the other convolutions reaches, one convolution's after the other's."""


class Passed(NamedTuple):
    """A network's whole work on a segment."""

    hidden_BTH: Tensor
    memory: Any
    """For the next segment."""


class AbstractNetwork(nn.Module, abc.ABC):
    """A network with the methods of a cell. All its work is done in `inject`; `f` then gives the result for any state.

    So it is exact at depth 1, whatever the start, and has nothing to be solved for.
    """

    def __init__(self, hidden_width: int, output_width: int | None) -> None:
        super().__init__()
        self.output_width = hidden_width if output_width is None else output_width
        self.project = None if output_width is None else make_linear(hidden_width, output_width)

    @abc.abstractmethod
    def sample_noise(self, x_BTD: Tensor) -> Masks:
        """Draw the masks of one pass; all None in evaluation mode."""

    @abc.abstractmethod
    def empty_memory(self, x_BTD: Tensor) -> Any:
        """The memory before the first position: zeros."""

    @abc.abstractmethod
    def run(self, x_BTD: Tensor, memory: Any, masks: Masks) -> Passed:
        """The hidden states of the last layer, and the memory after the segment."""

    def inject(self, x_BTD: Tensor, memory: Any = None, noise: Masks | None = None) -> Passed:
        """The network's output on a segment, (B, T, output width), and what it leaves to the next."""
        memory = self.empty_memory(x_BTD) if memory is None else memory
        hidden_BTH, memory = self.run(x_BTD, memory, self.sample_noise(x_BTD) if noise is None else noise)
        return Passed(hidden_BTH if self.project is None else self.project(hidden_BTH), memory)

    def initial_state(self, u: Passed, *_: Any) -> Tensor:
        return torch.zeros_like(u.hidden_BTH)

    def bind(
        self, u: Passed, memory: Any = None, noise: Masks | None = None
    ) -> tuple[Callable[..., Tensor], tuple[Tensor]]:
        return _result, (u.hidden_BTH,)

    def forward(self, z_BTH: Tensor, *inputs: Any) -> Tensor:
        """With the arguments of `bind`."""
        f, args = self.bind(*inputs)
        return f(z_BTH, *args)

    def output(self, z_BTH: Tensor) -> Tensor:
        return z_BTH

    def remember(self, memory: Any, z_BTH: Tensor, x_BTD: Tensor, u: Passed, limit: int | None = None) -> Any:
        """The memory after a segment; nothing if the limit is 0."""
        return self.empty_memory(x_BTD) if limit == 0 else u.memory


class RecurrentNetwork(AbstractNetwork):
    """Layers of torch's LSTM or GRU."""

    def __init__(self, config: RecurrentConfig) -> None:
        super().__init__(config.hidden_width, config.output_width)
        self.config = config
        kind = nn.LSTM if config.unit == "lstm" else nn.GRU
        widths = [config.input_width] + [config.hidden_width] * (config.num_layers - 1)
        self.layers = nn.ModuleList(kind(width, config.hidden_width, batch_first=True) for width in widths)
        if config.unit == "lstm":
            self._set_forget_bias()

    @torch.no_grad()
    def _set_forget_bias(self) -> None:
        """torch's gates are i, f, g, o, with two biases each that are added."""
        forget = slice(self.config.hidden_width, 2 * self.config.hidden_width)
        for layer in self.layers:
            layer.bias_ih_l0[forget] = self.config.forget_bias  # pyright: ignore
            layer.bias_hh_l0[forget] = 0.0  # pyright: ignore

    def sample_noise(self, x_BTD: Tensor) -> Masks:
        config = self.config
        return tuple(
            variational_mask(x_BTD, config.hidden_width, config.dropout, training=self.training)
            for _ in range(config.num_layers - 1)
        )

    def empty_memory(self, x_BTD: Tensor) -> RecurrentMemory:
        width = self.config.hidden_width * (2 if self.config.unit == "lstm" else 1)
        return RecurrentMemory(x_BTD.new_zeros(x_BTD.shape[0], self.config.num_layers, width))

    def run(self, x_BTD: Tensor, memory: RecurrentMemory, masks: Masks) -> Passed:
        h_BTH, lasts = x_BTD, []
        for layer, state_BS, mask in zip(self.layers, memory.states_BLS.unbind(1), (None, *masks), strict=True):
            h_BTH, last_BS = self._run_layer(layer, dropped(h_BTH, mask), state_BS)
            lasts.append(last_BS)
        return Passed(h_BTH, RecurrentMemory(torch.stack(lasts, 1)))

    def _run_layer(self, layer: nn.Module, x_BTD: Tensor, state_BS: Tensor) -> tuple[Tensor, Tensor]:
        state_1BS = state_BS.unsqueeze(0).to(x_BTD.dtype)
        if self.config.unit == "gru":
            h_BTH, last_1BS = layer(x_BTD, state_1BS)
            return h_BTH, last_1BS[0]
        h_1BH, c_1BH = state_1BS.chunk(2, -1)
        h_BTH, last = layer(x_BTD, (h_1BH.contiguous(), c_1BH.contiguous()))
        return h_BTH, torch.cat(last, -1)[0]


class ConvolutionNetwork(AbstractNetwork):
    """The TCN: blocks `relu(x + conv(conv(x)))` of causal, dilated convolutions with weight norm, each followed by relu
    and dropout. A linear map takes the place of x where its width differs.

    Positions before the first come from the memory, exactly as if the segments were one sequence.
    """

    def __init__(self, config: ConvolutionConfig) -> None:
        super().__init__(config.hidden_width, config.output_width)
        self.config = config
        widths = [config.input_width] + [config.hidden_width] * (2 * config.num_levels - 1)
        self.convolutions = nn.ModuleList(
            _make_convolution(width, dilation, config) for width, dilation in zip(widths, config.dilations, strict=True)
        )
        differs = config.input_width != config.hidden_width
        self.shortcut = make_linear(config.input_width, config.hidden_width) if differs else None

    def sample_noise(self, x_BTD: Tensor) -> Masks:
        config = self.config
        return tuple(
            variational_mask(x_BTD, config.hidden_width, config.dropout, training=self.training)
            for _ in self.convolutions
        )

    def empty_memory(self, x_BTD: Tensor) -> ConvolutionMemory:
        config, (first, *others) = self.config, self.config.reaches
        return ConvolutionMemory(
            x_BTD.new_zeros(x_BTD.shape[0], first, config.input_width),
            x_BTD.new_zeros(x_BTD.shape[0], sum(others), config.hidden_width),
        )

    def run(self, x_BTD: Tensor, memory: ConvolutionMemory, masks: Masks) -> Passed:
        reaches = self.config.reaches
        pasts = [memory.x_BRD, *memory.h_BRH.split(reaches[1:], 1)]
        layers = list(zip(self.convolutions, pasts, reaches, masks, strict=True))
        h_BTH, kept = self.config.input_scale * x_BTD, []
        for first in range(0, len(layers), 2):
            block_BTH = h_BTH
            for convolution, past_BRH, reach, mask in layers[first : first + 2]:
                kept.append(last_positions(past_BRH, block_BTH, reach))
                seen_BHT = torch.cat([past_BRH, block_BTH], 1).mT
                block_BTH = dropped(F.relu(convolution(seen_BHT).mT), mask)
            shortcut_BTH = self.shortcut(h_BTH) if first == 0 and self.shortcut is not None else h_BTH
            h_BTH = F.relu(shortcut_BTH + block_BTH)
        return Passed(h_BTH, ConvolutionMemory(kept[0], torch.cat(kept[1:], 1)))


def _make_convolution(width: int, dilation: int, config: ConvolutionConfig) -> nn.Module:
    """Drawn before weight norm is put on, or the draw would not reach the weight that is used."""
    convolution = nn.Conv1d(width, config.hidden_width, config.kernel_size, dilation=dilation)
    fan_in_std = (width * config.kernel_size) ** -0.5
    nn.init.normal_(convolution.weight, std=fan_in_std if config.init_std is None else config.init_std)
    nn.init.zeros_(convolution.bias)  # pyright: ignore[reportArgumentType]
    return parametrizations.weight_norm(convolution, dim=0)


def _result(z_BTH: Tensor, hidden_BTH: Tensor) -> Tensor:
    return hidden_BTH
