"""Every test starts from the same random state and leaves the global one as it was."""

import warnings

import pytest
import torch

torch.set_num_threads(1)  # the problems are tiny: threads would only wait for each other


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield


@pytest.fixture
def without_onednn():
    """bfloat16 products of oneDNN use AMX, which some virtual machines announce but do not have."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with torch.backends.mkldnn.flags(enabled=False):
            yield
