"""A corpus for all tests of training, made once."""

import pytest

from train.runs import make_corpus


@pytest.fixture(scope="session")
def corpus(tmp_path_factory):
    return make_corpus(tmp_path_factory.mktemp("corpus"))
