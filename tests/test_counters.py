"""The counters that notebook 01 warns of do what their names say."""

from __future__ import annotations

import tracemalloc

import pytest
import torch

from memsave_lib.course.counters import count_otherwise

MEBIBYTE = 2**20


def test_resident_memory_grows_with_a_tensor_and_tracemalloc_does_not_see_it() -> None:
    counts = count_otherwise(lambda: torch.ones(64 * MEBIBYTE, dtype=torch.uint8))
    assert 60 * MEBIBYTE < counts.resident_growth < 128 * MEBIBYTE
    assert counts.python_peak < MEBIBYTE


def test_tracemalloc_sees_python_objects() -> None:
    assert count_otherwise(lambda: bytearray(8 * MEBIBYTE)).python_peak >= 8 * MEBIBYTE


def test_tracing_ends_when_the_step_fails() -> None:
    with pytest.raises(ZeroDivisionError):
        count_otherwise(lambda: 1 / 0)
    assert not tracemalloc.is_tracing()
