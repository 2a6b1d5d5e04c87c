"""The transformer cell: relative self-attention over memory and segment with input injection, then a feed-forward."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deqkit.layers.attention import LearnedDistances, Padded, Positions, RelativePositions, attend, sinusoids
from deqkit.layers.checks import check_rates, check_weights, check_whole
from deqkit.layers.dropout import dropped, variational_mask
from deqkit.layers.feed_forward import FeedForward
from deqkit.layers.linear import Normalisation, make_linear
from deqkit.layers.memory import KeyCache, last_positions

# B samples, T positions, M positions of memory, D width, H heads, E width of a head, G = 3 H E

STATE_GAIN, CONTRACT_GAIN = 0.1, 0.3  # of fan-in initialisation; with gains of 1 no solver converges at the start


@dataclass(frozen=True, kw_only=True, slots=True)
class TransformerConfig:
    """Sizes and regularisation of a `TransformerCell`."""

    width: int
    """Width of the state and of the embedded input."""
    num_heads: int
    """Attention heads."""
    head_width: int | None = None
    """Width of a head; width / num_heads if left out."""
    hidden_width: int
    """Width of the feed-forward's hidden layer."""
    pre_norm: bool = False
    """Normalise what goes into a sub-layer instead of what comes out."""
    local_size: int = 0
    """How many positions a query sees, its own included; 0 for all."""
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    """Products of queries with sinusoidal codes of the distance as in the paper, or a learned number per head and
    distance: cheaper to solve with and quicker to learn on small data."""
    num_distances: int = 256
    """Learned positions: how many distances have a number of their own; those beyond share the last."""
    inject: bool = True
    """Add the input to queries, keys and values. Without it the input is the state that a stack starts from."""
    dropout: float = 0.0
    """Variational dropout of what the attention and the feed-forward add."""
    hidden_dropout: float = 0.0
    """Variational dropout of the feed-forward's hidden layer."""
    attention_dropout: float = 0.0
    """Dropout of attention probabilities, drawn once per solve."""
    normalise: Normalisation = "none"
    """Normalisation of all weights of the cell but the injection's."""
    init_std: float | None = 0.05
    """Weights start at N(0, init_std) as in the paper; None scales by fan-in, small where they act on the state."""

    def __post_init__(self) -> None:
        check_whole(1, width=self.width, num_heads=self.num_heads, hidden_width=self.hidden_width)
        check_whole(0, local_size=self.local_size)
        check_whole(1, num_distances=self.num_distances)
        check_weights(self.normalise, self.init_std)
        if self.positions not in ("sinusoidal", "learned"):
            raise ValueError(f'positions must be "sinusoidal" or "learned", got {self.positions!r}')
        if self.width % 2:
            raise ValueError(f"width must be even, for sines and cosines of the positions, got {self.width}")
        if self.head_width is None and self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} does not divide into {self.num_heads} heads; change one or set head_width"
            )
        if self.head_width is not None:
            check_whole(1, head_width=self.head_width)
        check_rates(dropout=self.dropout, hidden_dropout=self.hidden_dropout, attention_dropout=self.attention_dropout)

    @property
    def attention_width(self) -> int:
        """All heads together."""
        return self.num_heads * (self.head_width or self.width // self.num_heads)


class TransformerMemory(NamedTuple):
    """States and injections of the positions before a segment."""

    z_BMD: Tensor
    u_BMG: Tensor


class TransformerNoise(NamedTuple):
    """Dropout masks of one pass; None where nothing is dropped."""

    attention_out: Tensor | None = None
    hidden: Tensor | None = None
    feed_forward_out: Tensor | None = None
    attention_seed: int | None = None
    """Of the mask on attention probabilities, which is drawn in `bind`, where its size is known."""


class TransformerCell(nn.Module):
    """`f(z; x) = LN(h + FF(h))` with `h = LN(z + Attention(z W_qkv + x W_x))`, LN without parameters.

    With `pre_norm`: h = z + Attention(LN(z) W_qkv + x W_x), n = LN(h), f = n + FF(n). The state is (B, T, D).
    """

    independent_samples = True

    def __init__(self, config: TransformerConfig) -> None:
        super().__init__()
        self.config = config
        width, inner, std = config.width, config.attention_width, config.init_std
        options: dict[str, Any] = {"normalise": config.normalise, "std": std}
        # The gains are those under which untrained cells converge; N(0, std) is the paper's and has none.
        state_gain, contract_gain = (STATE_GAIN, CONTRACT_GAIN) if std is None else (1.0, 1.0)
        self.qkv = make_linear(width, 3 * inner, bias=False, gain=state_gain, **options)
        learned = config.positions == "learned"
        self.position = None if learned else make_linear(width, inner, bias=False, **options)
        self.project = make_linear(inner, width, **options)
        self.expand = make_linear(width, config.hidden_width, **options)
        self.contract = make_linear(config.hidden_width, width, gain=contract_gain, **options)
        biases = torch.randn(2, config.num_heads, inner // config.num_heads) * (0.05 if std is None else std)
        self.content_bias = nn.Parameter(biases[0].clone())
        self.position_bias = None if learned else nn.Parameter(biases[1].clone())
        self.distance_bias = nn.Parameter(_first_distances(config.num_heads, config.num_distances)) if learned else None
        self.injection = make_linear(width, 3 * inner, std=std) if config.inject else None

    @property
    def output_width(self) -> int:
        return self.config.width

    def sample_noise(self, x_BTD: Tensor) -> TransformerNoise:
        """Draw the masks of one pass; all None in evaluation mode."""
        config, training = self.config, self.training
        return TransformerNoise(
            variational_mask(x_BTD, config.width, config.dropout, training=training),
            variational_mask(x_BTD, config.hidden_width, config.hidden_dropout, training=training),
            variational_mask(x_BTD, config.width, config.dropout, training=training),
            int(torch.randint(2**62, ())) if training and config.attention_dropout else None,
        )

    def empty_memory(self, x_BTD: Tensor) -> TransformerMemory:
        """The memory before the first position: of length zero."""
        batch = x_BTD.shape[0]
        return TransformerMemory(
            x_BTD.new_zeros(batch, 0, self.config.width), x_BTD.new_zeros(batch, 0, 3 * self.config.attention_width)
        )

    def inject(self, x_BTD: Tensor, memory: Any = None, noise: Any = None) -> Tensor:
        """What the input adds to queries, keys and values, (B, T, 3 H E)."""
        if self.injection is None:
            return x_BTD.new_zeros(1).expand(*x_BTD.shape[:2], 3 * self.config.attention_width)
        return self.injection(x_BTD)

    def initial_state(self, u_BTG: Tensor, *_: Any) -> Tensor:
        return u_BTG.new_zeros(*u_BTG.shape[:2], self.config.width)

    def empty_cache(self, x_BTD: Tensor, window: int | None = None) -> KeyCache:
        """What stands in for the memory while a text is written. A query sees `window` positions, its own included."""
        config = self.config
        window = min(filter(None, (window, config.local_size)), default=None)
        head_width = config.attention_width // config.num_heads
        return KeyCache.empty(x_BTD, num_heads=config.num_heads, head_width=head_width, window=window)

    def bind(
        self, u_BTG: Tensor, memory: TransformerMemory | KeyCache | None = None, noise: TransformerNoise | None = None
    ) -> tuple[Callable[..., Tensor], tuple[Any, ...]]:
        """f of the state alone: keys and values of the memory, positions, weights and masks are computed here."""
        memory = self.empty_memory(u_BTG) if memory is None else memory
        noise = self.sample_noise(u_BTG) if noise is None else noise
        weights = _Weights.of(self)
        length, inner = u_BTG.shape[1], self.config.attention_width
        if isinstance(memory, KeyCache):
            num_keys, past = memory.begin(length), memory
            positions = self._cached_positions(u_BTG, num_keys, memory)
        else:
            num_keys = memory.z_BMD.shape[1] + length
            positions = self._positions(u_BTG, num_keys, self.config.local_size)
            past = F.linear(self._normalised(memory.z_BMD), weights.qkv[inner:]) + memory.u_BMG[..., inner:]
        content = torch.cat([self.content_bias.flatten(), self.content_bias.new_zeros(2 * inner)])
        keep = self._attention_mask(u_BTG, num_keys, noise.attention_seed)

        def f(z: Tensor, u: Tensor, past: Tensor | KeyCache, noise: TransformerNoise, keep: Tensor | None) -> Tensor:
            qkv = F.linear(self._normalised(z), weights.qkv, content) + u
            out = F.linear(self._attention(qkv, past, positions, keep), weights.project, self.project.bias)
            h = z + dropped(out, noise.attention_out)
            h = F.layer_norm(h, h.shape[-1:])
            h = h + dropped(weights.feed_forward(h, noise.hidden), noise.feed_forward_out)
            return h if self.config.pre_norm else F.layer_norm(h, h.shape[-1:])

        return f, (u_BTG, past, noise, keep)

    def bind_each(
        self, u_BTG: Tensor, caches: Sequence[KeyCache]
    ) -> list[tuple[Callable[..., Tensor], tuple[Any, ...]]]:
        """`bind` for layers with these weights and a cache each, of the same positions."""
        f, (u_BTG, _, *rest) = self.bind(u_BTG, caches[0])
        for cache in caches[1:]:
            cache.begin(u_BTG.shape[1])
        return [(f, (u_BTG, cache, *rest)) for cache in caches]

    def forward(self, z_BTD: Tensor, *inputs: Any) -> Tensor:
        """One application, with the arguments of `bind`."""
        f, args = self.bind(*inputs)
        return f(z_BTD, *args)

    def output(self, z_BTD: Tensor) -> Tensor:
        return z_BTD

    def remember(
        self,
        memory: TransformerMemory | KeyCache,
        z_BTD: Tensor,
        x_BTD: Tensor,
        u_BTG: Tensor,
        limit: int | None = None,
    ) -> TransformerMemory | KeyCache:
        """The last `limit` positions of memory and segment, or all of them. A cache has a window of its own, and keeps
        the keys and values of the last evaluation, which must have been at z."""
        if isinstance(memory, KeyCache):
            memory.advance(z_BTD.shape[1])
            return memory
        return TransformerMemory(last_positions(memory.z_BMD, z_BTD, limit), last_positions(memory.u_BMG, u_BTG, limit))

    def _cached_positions(self, u_BTG: Tensor, num_keys: int, cache: KeyCache) -> Positions | Padded:
        """For a single query they are part of a table that is made once, and again when the cache has grown."""
        if u_BTG.shape[1] > 1:
            positions = self._positions(u_BTG, num_keys, cache.window or 0)
        else:
            if cache.table is None or cache.table.num_keys < num_keys:
                cache.table = self._positions(u_BTG, cache.capacity, 0)
            positions = cache.table.nearest(num_keys)
        return positions if cache.hidden_B1K is None else Padded(positions, cache.hidden_B1K)

    def _positions(self, u_BTG: Tensor, num_keys: int, local_size: int) -> Positions:
        sizes = {"num_queries": u_BTG.shape[1], "local_size": local_size}
        if self.distance_bias is not None:
            return LearnedDistances.of(self.distance_bias, num_keys=num_keys, **sizes)
        assert self.position is not None and self.position_bias is not None
        codes = F.linear(sinusoids(num_keys, self.config.width, u_BTG), self.position.weight)
        return RelativePositions.of(codes, self.content_bias, self.position_bias, **sizes)

    def _normalised(self, z_BTD: Tensor) -> Tensor:
        return F.layer_norm(z_BTD, z_BTD.shape[-1:]) if self.config.pre_norm else z_BTD

    def _attention(
        self, qkv_BTG: Tensor, past: Tensor | KeyCache, positions: Positions | Padded, keep: Tensor | None
    ) -> Tensor:
        batch, length, _ = qkv_BTG.shape
        inner = self.config.attention_width
        q = self._heads(qkv_BTG[..., :inner])
        kv = qkv_BTG[..., inner:]
        if isinstance(past, KeyCache):
            k, v = past.write(*(self._heads(part) for part in kv.chunk(2, -1)))
        else:  # memory and segment side by side, keys and values at once
            k, v = (self._heads(part) for part in torch.cat([past, kv], 1).chunk(2, -1))
        keep = None if keep is None else keep.transpose(0, 1)
        out_HBTE = attend(q, k, v, positions, keep)
        if keep is not None:
            out_HBTE = out_HBTE / (1 - self.config.attention_dropout)
        return out_HBTE.permute(1, 2, 0, 3).reshape(batch, length, inner)

    def _heads(self, x_BTE: Tensor) -> Tensor:
        """(B, T, H E) to (H, B, T, E): heads first, so that all samples share one product with the positions."""
        return x_BTE.unflatten(-1, (self.config.num_heads, -1)).permute(2, 0, 1, 3)

    def _attention_mask(self, u_BTG: Tensor, num_keys: int, seed: int | None) -> Tensor | None:
        """Which probabilities are kept: a boolean, a quarter of the size of what it masks."""
        if seed is None:
            return None
        shape = (u_BTG.shape[0], self.config.num_heads, u_BTG.shape[1], num_keys)
        generator = torch.Generator(u_BTG.device).manual_seed(seed)
        return torch.rand(shape, device=u_BTG.device, generator=generator) >= self.config.attention_dropout


def _first_distances(num_heads: int, num_distances: int) -> Tensor:
    """How learned distances begin: every head at a distance of its own, the first at the query's position, the next one
    before it and so on; the last sees all positions, near ones a little more."""
    away_HN = (torch.arange(num_distances) - torch.arange(num_heads).unsqueeze(1)).abs().float()
    bias_HN = -3.0 * away_HN
    bias_HN[-1] = -0.05 * torch.arange(num_distances)
    return bias_HN


class _Weights(NamedTuple):
    """The weights in use, read once: a normalised weight is computed at every reading."""

    qkv: Tensor
    project: Tensor
    feed_forward: FeedForward

    @classmethod
    def of(cls, cell: TransformerCell) -> _Weights:
        expand, contract = cell.expand, cell.contract
        feed_forward = FeedForward(expand.weight, expand.bias, contract.weight, contract.bias)
        return cls(cell.qkv.weight, cell.project.weight, feed_forward)
