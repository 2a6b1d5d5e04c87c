"""Every test starts from the same random state and leaves the global one as it was."""

import pytest
import torch

torch.set_num_threads(1)  # the problems are tiny: threads would only wait for each other


@pytest.fixture(autouse=True)
def seeded():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        yield
