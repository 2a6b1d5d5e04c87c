"""Mistakes in a configuration are refused where it is made, by a ValueError that names the field and the value."""

import dataclasses
from typing import Any

import pytest

from deqkit.layers import TransformerConfig, TrellisConfig, VocabularyConfig

TRANSFORMER: dict[str, Any] = {"width": 8, "num_heads": 2, "hidden_width": 16}
TRELLIS: dict[str, Any] = {"input_width": 8, "hidden_width": 4, "output_width": 8}
VOCABULARY: dict[str, Any] = {"size": 20, "embedding_width": 8}

MISTAKES: list[tuple[Any, dict[str, Any], dict[str, Any], str]] = [
    *[
        (TransformerConfig, TRANSFORMER, {name: 0}, name)
        for name in ("width", "num_heads", "hidden_width", "head_width")
    ],
    *[
        (TransformerConfig, TRANSFORMER, {name: -2}, name)
        for name in ("width", "num_heads", "hidden_width", "head_width")
    ],
    (TransformerConfig, TRANSFORMER, {"width": 7, "head_width": 3}, "even.*7"),
    (TransformerConfig, TRANSFORMER, {"num_heads": 3}, "8.*3 heads.*head_width"),
    (TransformerConfig, TRANSFORMER, {"local_size": -1}, "local_size.*-1"),
    (TransformerConfig, TRANSFORMER, {"normalise": "wieght"}, "wieght"),
    (TransformerConfig, TRANSFORMER, {"init_std": -0.1}, "init_std.*-0.1"),
    (TransformerConfig, TRANSFORMER, {"width": 8.0}, "width.*8.0"),
    *[(TrellisConfig, TRELLIS, {name: 0}, name) for name in ("input_width", "output_width", "kernel_size", "dilation")],
    (TrellisConfig, TRELLIS, {"hidden_width": -1}, "hidden_width.*-1"),
    (TrellisConfig, TRELLIS, {"normalise": "wieght"}, "wieght"),
    (TrellisConfig, TRELLIS, {"init_std": float("nan")}, "init_std.*nan"),
    (TrellisConfig, TRELLIS, {"kernel_size": 2.5}, "kernel_size.*2.5"),
    *[
        (config, fields, {name: rate}, f"{name}.*{rate}")
        for config, fields, names in (
            (TransformerConfig, TRANSFORMER, ("dropout", "hidden_dropout", "attention_dropout")),
            (TrellisConfig, TRELLIS, ("hidden_dropout", "weight_dropout")),
        )
        for name in names
        for rate in (-0.1, 1.0, float("nan"))
    ],
    *[(VocabularyConfig, VOCABULARY, {name: 0}, f"{name}.*0") for name in ("size", "embedding_width", "div_val")],
    (VocabularyConfig, VOCABULARY, {"cutoffs": (5, 5)}, r"cutoffs.*20.*\(5, 5\)"),
    (VocabularyConfig, VOCABULARY, {"cutoffs": (9, 5)}, "cutoffs"),
    (VocabularyConfig, VOCABULARY, {"cutoffs": (0, 5)}, "cutoffs"),
    (VocabularyConfig, VOCABULARY, {"cutoffs": (5, 20)}, "cutoffs"),
    (VocabularyConfig, VOCABULARY, {"cutoffs": (5, 30)}, "cutoffs"),
    (VocabularyConfig, VOCABULARY, {"div_val": 2}, "div_val=2 needs cutoffs"),
    (VocabularyConfig, VOCABULARY, {"cutoffs": (5, 10), "div_val": 4}, "embedding_width 8.*3 classes.*div_val 4"),
]


@pytest.mark.parametrize(("config", "fields", "change", "message"), MISTAKES)
def test_a_mistake_is_refused_by_name(config, fields, change, message):
    config(**fields)
    with pytest.raises(ValueError, match=message):
        config(**{**fields, **change})


@pytest.mark.parametrize(
    ("config", "fields"), [(TransformerConfig, TRANSFORMER), (TrellisConfig, TRELLIS), (VocabularyConfig, VOCABULARY)]
)
def test_configs_are_frozen_values_with_keywords_only(config, fields):
    made = config(**fields)
    assert made == config(**fields) and hash(made) == hash(config(**fields))
    with pytest.raises(dataclasses.FrozenInstanceError):
        setattr(made, next(iter(fields)), 10)
    with pytest.raises(TypeError):
        config(*fields.values())
    with pytest.raises(TypeError):
        config(**fields, no_such_field=1)


def test_cutoffs_of_a_list_become_a_tuple():
    """As they come from JSON; the value stays hashable."""
    assert VocabularyConfig(**VOCABULARY, cutoffs=[5, 10]) == VocabularyConfig(**VOCABULARY, cutoffs=(5, 10))  # pyright: ignore


def test_a_wide_head_needs_no_division():
    assert TransformerConfig(width=8, num_heads=3, head_width=5, hidden_width=4).attention_width == 15
    assert TransformerConfig(width=8, num_heads=4, hidden_width=4).attention_width == 8
    assert TrellisConfig(**{**TRELLIS, "kernel_size": 3, "dilation": 4}).reach == 8
