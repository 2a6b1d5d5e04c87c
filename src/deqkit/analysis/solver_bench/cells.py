"""The cells `deqkit bench solvers` measures on: small, weight-tied, causal, and the same for every library.

They are written here rather than taken from `deqkit.layers` so that the benchmark stays the same when the
layers change: a row of `results/bench_solvers.json` can be compared with the same row of last year.
"""

# B batch, T positions, D width, E = D + 1, H heads, K width of a head, C channels, G = 4 C

from __future__ import annotations

import importlib.util
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F

WEIGHT_STD = 0.05
"""The paper's initialisation, N(0, 0.05), for every weight of every cell of the default size; biases start at zero.
At another size it is scaled to keep the gain of a matrix, or the cell would approach the identity or diverge."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CellSize:
    """The size of the benchmark's own cells."""

    batch: int = 8
    """Samples in the batch."""
    length: int = 128
    """Positions of a sample."""
    width: int = 256
    """Width of the transformer cell."""
    heads: int = 4
    """Attention heads; must divide `width`."""
    hidden: int = 128
    """Channels of the trellis cell."""

    def __post_init__(self) -> None:
        for name in ("batch", "length", "width", "heads", "hidden"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name} must be at least 1, got {getattr(self, name)}")
        if self.width % self.heads:
            raise ValueError(f"heads must divide width, got heads {self.heads} and width {self.width}")


class TransformerBlock(nn.Module):
    """A post-LN causal transformer block with the input injected into queries, keys and values.

    f(z, x) = LN(u + W2 relu(W1 u)),  u = LN(z + W_o Attention(z W_qkv + x W_x)),  LN without affine parameters.
    """

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = nn.Linear(width, 3 * width)
        self.inject = nn.Linear(width, 3 * width, bias=False)
        self.project = nn.Linear(width, width)
        self.feed_in = nn.Linear(width, 4 * width)
        self.feed_out = nn.Linear(4 * width, width)

    def forward(self, z_BTD: Tensor, x_BTD: Tensor) -> Tensor:
        shape_D = z_BTD.shape[-1:]
        qkv_BT3D = self.qkv(z_BTD) + self.inject(x_BTD)
        q_BHTK, k_BHTK, v_BHTK = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in qkv_BT3D.chunk(3, dim=-1)
        )
        mixed_BHTK = F.scaled_dot_product_attention(q_BHTK, k_BHTK, v_BHTK, is_causal=True)
        u_BTD = F.layer_norm(z_BTD + self.project(mixed_BHTK.transpose(1, 2).flatten(2)), shape_D)
        return F.layer_norm(u_BTD + self.feed_out(F.relu(self.feed_in(u_BTD))), shape_D)


class TrellisBlock(nn.Module):
    """A causal convolution of kernel 2 with LSTM gates i, o, g, f; the state is the pair (h, c).

    a = W [h_{t-1}, h_t] + V [x_{t-1}, x_t];  c'_t = s(f) c_{t-1} + s(i) tanh(g);  h'_t = s(o) tanh(c'_t).
    """

    def __init__(self, *, channels: int) -> None:
        super().__init__()
        self.conv = nn.Linear(2 * channels, 4 * channels)
        self.inject = nn.Linear(2 * channels, 4 * channels, bias=False)

    def initial_state(self, x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        return torch.zeros_like(x_BTC), torch.zeros_like(x_BTC)

    def forward(self, z: tuple[Tensor, Tensor], x_BTC: Tensor) -> tuple[Tensor, Tensor]:
        h_BTC, c_BTC = z
        gates_BTG = self.conv(_with_previous(h_BTC)) + self.inject(_with_previous(x_BTC))
        i_BTC, o_BTC, g_BTC, f_BTC = gates_BTG.chunk(4, dim=-1)
        c_new_BTC = f_BTC.sigmoid() * _previous(c_BTC) + i_BTC.sigmoid() * g_BTC.tanh()
        return o_BTC.sigmoid() * c_new_BTC.tanh(), c_new_BTC


def _previous(y_BTC: Tensor) -> Tensor:
    """Every position sees its left neighbour; the first one sees zeros."""
    return F.pad(y_BTC, (0, 0, 1, 0))[:, :-1]


def _with_previous(y_BTC: Tensor) -> Tensor:
    return torch.cat([_previous(y_BTC), y_BTC], dim=-1)


class GainedBlock(nn.Module):
    """A transformer block whose difficulty is a per-sample input: f(z, [x, g]) = g block(z, x) + (1 - g) x.

    The gain g is the last channel of the input, so it leaves the batch with its sample: a gain near 0 contracts
    at once, a gain of 1 is the block itself.
    """

    def __init__(self, *, width: int, heads: int) -> None:
        super().__init__()
        self.block = TransformerBlock(width=width, heads=heads)

    def initial_state(self, x_BTE: Tensor) -> Tensor:
        return torch.zeros_like(x_BTE[..., :-1])

    def forward(self, z_BTD: Tensor, x_BTE: Tensor) -> Tensor:
        x_BTD, gain_BT1 = x_BTE[..., :-1], x_BTE[..., -1:]
        return torch.lerp(x_BTD, self.block(z_BTD, x_BTD), gain_BT1)


def transformer_problem(size: CellSize, generator: torch.Generator) -> tuple[nn.Module, Tensor]:
    """The transformer block and its input, x ~ N(0, 1)."""
    cell = _normal_weights(
        TransformerBlock(width=size.width, heads=size.heads), size.width / CellSize().width, generator
    )
    return cell, torch.randn(size.batch, size.length, size.width, generator=generator)


def trellis_problem(size: CellSize, generator: torch.Generator) -> tuple[nn.Module, Tensor]:
    """The trellis block and its input, x ~ N(0, 1)."""
    cell = _normal_weights(TrellisBlock(channels=size.hidden), size.hidden / CellSize().hidden, generator)
    return cell, torch.randn(size.batch, size.length, size.hidden, generator=generator)


def mixed_problem(
    size: CellSize, generator: torch.Generator, *, easy_gain: float = 0.3, hard_gain: float = 1.0
) -> tuple[nn.Module, Tensor]:
    """The gained block on a batch whose last sample is hard and all others easy (7 and 1 at batch 8)."""
    cell = _normal_weights(GainedBlock(width=size.width, heads=size.heads), size.width / CellSize().width, generator)
    x_BTD = torch.randn(size.batch, size.length, size.width, generator=generator)
    gain_BT1 = torch.full((size.batch, size.length, 1), easy_gain)
    gain_BT1[-1] = hard_gain
    return cell, torch.cat([x_BTD, gain_BT1], dim=-1)


CELLS = {"transformer": transformer_problem, "trellis": trellis_problem, "mixed": mixed_problem}


def load_cell(spec: str) -> tuple[nn.Module, Tensor]:
    """A user's cell and input, from "file.py:make" where make() returns (cell, x).

    Raises:
        ValueError: The file or function is missing, cannot be loaded, or returns something else.
    """
    file, separator, function = spec.rpartition(":")
    if not separator or not file or not function:
        raise ValueError(f"cell must be written file.py:function, got {spec!r}")
    if not Path(file).is_file():
        raise ValueError(f"cell file {file!r} does not exist")
    module_spec = importlib.util.spec_from_file_location("deqkit_bench_cell", file)
    if module_spec is None or module_spec.loader is None:
        raise ValueError(f"cell file {file!r} is not a Python file")
    module = importlib.util.module_from_spec(module_spec)
    try:
        module_spec.loader.exec_module(module)
    except (ImportError, SyntaxError) as error:
        raise ValueError(f"cell file {file!r} cannot be loaded: {error}") from error
    make = getattr(module, function, None)
    if not callable(make):
        raise ValueError(f"cell file {file!r} has no function {function!r}")
    made = make()
    if not isinstance(made, tuple) or len(made) != 2:
        raise ValueError(f"{spec} must return (cell, x), got {type(made).__name__}")
    cell, x = made
    if not isinstance(cell, nn.Module) or not any(p.requires_grad for p in cell.parameters()):
        raise ValueError(f"{spec}: the cell must be an nn.Module with parameters, got {type(cell).__name__}")
    if not isinstance(x, Tensor):
        raise ValueError(f"{spec}: x must be a tensor, batch first, got {type(x).__name__}")
    return cell, x


def _normal_weights(cell: nn.Module, scale: float, generator: torch.Generator) -> nn.Module:
    with torch.no_grad():
        for name, parameter in cell.named_parameters():
            if name.endswith("bias"):
                parameter.zero_()
            else:
                parameter.normal_(0.0, WEIGHT_STD / scale**0.5, generator=generator)
    return cell
