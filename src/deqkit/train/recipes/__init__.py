"""Recipes: functions that return a complete configuration. `RECIPES` lists them by the names of the command line."""

from __future__ import annotations

from collections.abc import Callable

from deqkit.train.config import TrainConfig
from deqkit.train.recipes.copy_memory import (
    copy_memory,
    copy_memory_gru,
    copy_memory_long,
    copy_memory_lstm,
    copy_memory_mini,
    copy_memory_tcn,
)
from deqkit.train.recipes.counterparts import layers
from deqkit.train.recipes.mini import (
    KEEP_SOLVES_SHORT,
    demo,
    ptb_mini,
    ptb_mini_long,
    ptb_mini_lstm,
    ptb_mini_lstm_long,
    ptb_trellis_mini,
    text,
    untied,
    wikitext_2_mini,
    wikitext_2_mini_long,
    wikitext_2_mini_lstm,
    wikitext_2_mini_lstm_long,
    wt103_transformer_mini,
    wt103_trellis_mini,
)
from deqkit.train.recipes.paper_sizes import paper_layers, ptb_trellis, wt103_transformer, wt103_trellis

__all__ = ["KEEP_SOLVES_SHORT", "RECIPES", "demo", "layers", "untied"]

RECIPES: dict[str, Callable[[], TrainConfig]] = {
    "demo": demo,
    "demo-tied-12": lambda: layers(demo(), 12, tied=True),
    "text": text,
    "copy-memory": copy_memory,
    "copy-memory-mini": copy_memory_mini,
    "copy-memory-long": copy_memory_long,
    "copy-memory-lstm": copy_memory_lstm,
    "copy-memory-gru": copy_memory_gru,
    "copy-memory-tcn": copy_memory_tcn,
    "ptb-mini": ptb_mini,
    "ptb-mini-tied-16": lambda: layers(ptb_mini(), 16, tied=True),
    "ptb-mini-untied-4": lambda: untied(ptb_mini(), 4, lr=3e-3),
    "ptb-mini-lstm": ptb_mini_lstm,
    "wikitext-2-mini": wikitext_2_mini,
    "wikitext-2-mini-tied-16": lambda: layers(wikitext_2_mini(), 16, tied=True),
    "wikitext-2-mini-untied-4": lambda: untied(wikitext_2_mini(), 4, lr=3e-3),
    "wikitext-2-mini-lstm": wikitext_2_mini_lstm,
    "ptb-mini-long": ptb_mini_long,
    "ptb-mini-lstm-long": ptb_mini_lstm_long,
    "wikitext-2-mini-long": wikitext_2_mini_long,
    "wikitext-2-mini-lstm-long": wikitext_2_mini_lstm_long,
    "ptb-deq-trellisnet-mini": ptb_trellis_mini,
    "ptb-deq-trellisnet-mini-tied-60": lambda: layers(ptb_trellis_mini(), 60, tied=True),
    "wt103-deq-transformer-mini": wt103_transformer_mini,
    "wt103-deq-trellisnet-mini": wt103_trellis_mini,
    "ptb-deq-trellisnet": ptb_trellis,
    "ptb-deq-trellisnet-tied-60": paper_layers(ptb_trellis, "trellis-ptb-tied-60"),
    "wt103-deq-trellisnet": wt103_trellis,
    "wt103-deq-trellisnet-tied-70": paper_layers(wt103_trellis, "trellis-wt103-tied-70"),
    "wt103-deq-transformer-small": lambda: wt103_transformer("small"),
    "wt103-deq-transformer-small-tied-16": paper_layers(
        lambda: wt103_transformer("small"), "transformer-small-tied-16"
    ),
    "wt103-deq-transformer-small-untied-4": paper_layers(
        lambda: wt103_transformer("small"), "transformer-small-untied-4"
    ),
    "wt103-deq-transformer-medium": lambda: wt103_transformer("medium"),
    "wt103-deq-transformer-medium-untied-16": paper_layers(
        lambda: wt103_transformer("medium"), "transformer-medium-untied-16"
    ),
    "wt103-deq-transformer-adaptive": lambda: wt103_transformer("adaptive"),
    "wt103-deq-transformer-adaptive-untied-18": paper_layers(
        lambda: wt103_transformer("adaptive"), "transformer-adaptive-untied-18"
    ),
}
