"""What the usual counters say about a step: the process's resident memory, and Python's own allocations.

Neither counts tensors. They are here to be compared with the meter, not to be trusted.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class OtherCounts:
    """Bytes by which the process's resident memory (RSS) grew, and the peak that ``tracemalloc`` saw."""

    resident_growth: int
    python_peak: int


def count_otherwise(run: Callable[[], object]) -> OtherCounts:
    """Look at both counters around ``run()``, while its result is still alive.

    The same call may give another answer each time: the system keeps and reuses pages as it likes.
    """
    import psutil  # comes with the notebook's kernel

    process = psutil.Process()
    before = process.memory_info().rss
    tracemalloc.start()
    try:
        result = run()
        growth = process.memory_info().rss - before
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    del result
    return OtherCounts(growth, peak)
