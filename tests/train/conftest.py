"""A corpus for all tests of training, made once."""

import warnings

import pytest
import torch

from train.runs import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))


@pytest.fixture
def without_onednn():
    """bfloat16 products of oneDNN use AMX, which some virtual machines announce but do not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield
