"""The two cells written as loops over samples, heads, queries and keys, straight from the papers' formulas."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from deqkit.layers import TransformerCell, TrellisCell

# B samples, T positions, M positions of memory, K = M + T keys, D width, H heads or state width, E width of a head


def normal(*shape: int, seed: int, dtype: torch.dtype = torch.float64) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def fill(module: torch.nn.Module, *, seed: int, scale: float = 0.5) -> None:
    """Every parameter, biases too, at N(0, scale): nothing that a formula has is zero or symmetric."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(scale * torch.randn(parameter.shape, generator=generator, dtype=torch.float64))


def layer_norm(x_D: Tensor) -> Tensor:
    centred_D = x_D - x_D.mean()
    return centred_D / (centred_D.square().mean() + 1e-5).sqrt()


def code(distance: int, width: int) -> Tensor:
    """The sinusoidal code of one distance: all sines, then all cosines."""
    angles = [distance / 10_000 ** (2 * i / width) for i in range(width // 2)]
    return torch.tensor([math.sin(a) for a in angles] + [math.cos(a) for a in angles], dtype=torch.float64)


def transformer(cell: TransformerCell, z_BTD: Tensor, u_BTG: Tensor, memory: Any = None, **masks: Tensor) -> Tensor:
    """One application. `masks`: attention_out and feed_forward_out (B, D), hidden (B, F), keep (B, H, T, K)."""
    rows = []
    for b in range(z_BTD.shape[0]):
        past_z, past_u = (part[b] for part in memory) if memory is not None else (z_BTD[b, :0], u_BTG[b, :0])
        own = {name: mask[b] for name, mask in masks.items()}
        rows.append(_transformer_sample(cell, z_BTD[b], u_BTG[b], past_z, past_u, **own))
    return torch.stack(rows)


def _transformer_sample(
    cell: TransformerCell, z_TD: Tensor, u_TG: Tensor, past_z: Tensor, past_u: Tensor, **masks: Tensor
) -> Tensor:
    config, pre_norm = cell.config, cell.config.pre_norm
    width, heads = config.width, config.num_heads
    head_width = config.head_width or width // heads
    inner, past = heads * head_width, past_z.shape[0]
    seen = [layer_norm(row) if pre_norm else row for row in (*past_z, *z_TD)]
    qkv = [cell.qkv.weight @ row + u for row, u in zip(seen, (*past_u, *u_TG), strict=True)]
    outputs = []
    for i, z_D in enumerate(z_TD):
        attended = []
        for h in range(heads):
            own = slice(h * head_width, (h + 1) * head_width)
            q = qkv[past + i][:inner][own]
            exps, values = [], []
            for j in range(past + i + 1):
                distance = past + i - j
                if config.local_size and distance >= config.local_size:
                    continue
                k, v = qkv[j][inner : 2 * inner][own], qkv[j][2 * inner :][own]
                score = (q + cell.content_bias[h]) @ k / math.sqrt(head_width)
                exps.append((score + _positional(cell, q, h, distance, own)).exp())
                values.append(v * masks["keep"][h, i, j] if "keep" in masks else v)
            attended.append(sum(e * v for e, v in zip(exps, values, strict=True)) / sum(exps))
        out = cell.project.weight @ torch.cat(attended) + cell.project.bias
        h_D = z_D + out * masks.get("attention_out", torch.ones(width, dtype=torch.float64))
        h_D = layer_norm(h_D)  # post-norm: of what comes out; pre-norm: of what goes into the feed-forward
        hidden = (cell.expand.weight @ h_D + cell.expand.bias).clamp(min=0)
        out = cell.contract.weight @ (hidden * masks.get("hidden", torch.ones_like(hidden))) + cell.contract.bias
        h_D = h_D + out * masks.get("feed_forward_out", torch.ones(width, dtype=torch.float64))
        outputs.append(h_D if pre_norm else layer_norm(h_D))
    return torch.stack(outputs)


def _positional(cell: TransformerCell, q: Tensor, head: int, distance: int, own: slice) -> Tensor:
    if cell.distance_bias is not None:
        return cell.distance_bias[head, min(distance, cell.distance_bias.shape[1] - 1)]
    assert cell.position is not None and cell.position_bias is not None
    r = (cell.position.weight @ code(distance, cell.config.width))[own]
    return (q + cell.position_bias[head]) @ r / math.sqrt(len(r))


def injected(cell: TrellisCell, x_BTD: Tensor, past_x: Tensor, mask: Tensor | None = None) -> Tensor:
    """The injection as a loop over taps; `past_x` are the inputs before the segment, zeros before those."""
    taps, width = cell.config.kernel_size, cell.config.input_width
    weight = cell.injection.weight * (1 if mask is None else mask)
    rows = []
    for b in range(x_BTD.shape[0]):
        known = torch.cat([past_x[b], x_BTD[b]])
        for t in range(x_BTD.shape[1]):
            out = cell.injection.bias
            for s in range(taps):
                place = past_x.shape[1] + t - (taps - 1 - s)
                if place >= 0:
                    out = out + weight[:, s * width : (s + 1) * width] @ known[place]
            rows.append(out)
    return torch.stack(rows).view(*x_BTD.shape[:2], -1)


def trellis(
    cell: TrellisCell, state: tuple[Tensor, Tensor], u_BTG: Tensor, past: tuple[Tensor, Tensor], **masks: Tensor
) -> tuple[Tensor, Tensor]:
    """One application. `past`: (h, c) of positions before the segment, any number; zeros before those.

    `masks`: hidden (B, H), conv of the shape of the weight.
    """
    (h_BTH, c_BTH), (past_h, past_c) = state, past
    config = cell.config
    taps, width = config.kernel_size, config.state_width
    weight = cell.conv.weight * masks.get("conv", torch.ones_like(cell.conv.weight))
    new_h, new_c = [], []
    for b in range(h_BTH.shape[0]):
        known_h, known_c = torch.cat([past_h[b], h_BTH[b]]), torch.cat([past_c[b], c_BTH[b]])
        for t in range(h_BTH.shape[1]):
            pre = u_BTG[b, t] + cell.conv.bias
            for s in range(taps):
                place = past_h.shape[1] + t - (taps - 1 - s) * config.dilation
                if place >= 0:
                    seen = known_h[place] * masks["hidden"][b] if "hidden" in masks else known_h[place]
                    pre = pre + weight[:, s * width : (s + 1) * width] @ seen
            i, o, g, f = pre.split(width)
            place = past_c.shape[1] + t - 1
            previous = known_c[place] if place >= 0 else torch.zeros_like(known_c[0])
            c = f.sigmoid() * previous + i.sigmoid() * g.tanh()
            new_c.append(c)
            new_h.append(o.sigmoid() * c.tanh())
    return torch.stack(new_h).view_as(h_BTH), torch.stack(new_c).view_as(c_BTH)
