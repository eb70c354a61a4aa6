"""Settings for every test: reproducible property tests, and no GPU test without a GPU."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from memsave_lib.labs.component import PRESS_RUN

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


@pytest.fixture
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture
def nobody_presses_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRESS_RUN, raising=False)
