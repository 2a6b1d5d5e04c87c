"""Does the future change the past? Measured on outputs per token."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

# B samples, T positions


def causality_leak(
    model: Callable[[Tensor], Tensor],
    x_BT: Tensor,
    *,
    position: int | None = None,
    generator: torch.Generator | None = None,
) -> Tensor:
    """The largest change of the output at every position before `position` when all inputs from there on change.

    Exactly zero for a strictly causal model. A truncated solve whose inner products run over the whole sequence is
    not: compare `Anderson()` with `Anderson(group="prefix")`. Perplexity hardly shows this, outputs per token do.

    Args:
        model: maps x (B, T, ...) to outputs (B, T, ...) per position; run without gradients.
        x_BT: integer tokens or real inputs. Later ones are replaced by random other tokens, or by normal noise.
        position: the first position that changes; half the length if left out.

    Returns:
        A tensor of length `position`: the largest absolute change at each position, over the batch.
    """
    length = x_BT.shape[1]
    position = length // 2 if position is None else position
    if not 0 < position < length:
        raise ValueError(f"position must be between 1 and {length - 1}, got {position}")
    future_BT = x_BT[:, position:]
    if x_BT.is_floating_point():
        noise = torch.randn(future_BT.shape, generator=generator, dtype=x_BT.dtype)
        changed_BT = future_BT + noise.to(x_BT.device)
    else:
        num_tokens = max(int(x_BT.max()) + 1, 2)
        shift_BT = torch.randint(1, num_tokens, future_BT.shape, generator=generator).to(x_BT.device)
        changed_BT = (future_BT + shift_BT) % num_tokens
    with torch.no_grad():
        before = model(x_BT)[:, :position]
        after = model(torch.cat((x_BT[:, :position], changed_BT), dim=1))[:, :position]
    return (after - before).abs().transpose(0, 1).flatten(1).amax(1)
