"""The paper's models have the paper's parameter counts; built without memory, on the meta device."""

import pytest
import torch

from deqkit.model import SequenceModel, num_parameters
from deqkit.model.paper import PAPER_MODELS

# From REFERENCE.md 2.7, made by instantiating the original's code: in all, and outside embedding and softmax.
EXACT = {
    "transformer-released": (97_691_888, 71_225_100),
    "transformer-small": (138_641_235, 4_506_000),
    "transformer-small-tied-16": (138_641_235, 4_506_000),
    "transformer-medium": (171_950_095, 43_169_560),
    "trellis-released": (174_168_738, 40_032_000),
    "trellis-wt103": (181_716_951 + 1_539, 44_368_896),
    "trellis-wt103-tied-70": (181_716_951 + 1_539, 44_368_896),
    "trellis-ptb": (24_181_200, 20_171_200),
    "trellis-ptb-tied-60": (24_181_200, 20_171_200),
}
# Millions as the paper's tables print them, where no sizes were published.
ROUNDED = {
    "transformer-small-untied-4": ("139", "4.9"),
    "transformer-medium-untied-16": ("165", "44"),
    "transformer-adaptive-untied-18": ("110", "72"),
    "transformer-adaptive": ("110", "70"),
}


def count(name: str) -> tuple[int, int]:
    with torch.device("meta"):
        counted = num_parameters(SequenceModel(PAPER_MODELS[name]()))
    assert counted.total == counted.embedding + counted.rest
    return counted.total, counted.rest


def test_every_model_is_listed_here():
    assert sorted((*EXACT, *ROUNDED)) == sorted(PAPER_MODELS)


@pytest.mark.parametrize("name", EXACT)
def test_counts_are_the_originals(name):
    assert count(name) == EXACT[name]


@pytest.mark.parametrize("name", ROUNDED)
def test_counts_round_to_the_papers(name):
    for number, printed in zip(count(name), ROUNDED[name], strict=True):
        digits = len(printed.partition(".")[2])
        assert f"{number / 1e6:.{digits}f}" == printed
