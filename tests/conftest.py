"""Settings for every test: reproducible property tests, and no GPU test without a GPU."""

from __future__ import annotations

import pytest
import torch
from hypothesis import settings

# Derandomized: a red run is the same run on every machine. No deadline: nothing here is timed.
settings.register_profile("course", derandomize=True, deadline=None)
settings.load_profile("course")

# Tests use tiny tensors, for which threads only wait for each other.
torch.set_num_threads(1)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if torch.cuda.is_available():
        return
    for item in items:
        if "gpu" in item.keywords:
            item.add_marker(pytest.mark.skip(reason="needs a GPU, this machine has none"))
