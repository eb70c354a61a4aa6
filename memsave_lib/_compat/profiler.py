"""The profiler's own record of allocations."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import torch


def start_memory_profile() -> torch.profiler.profile:
    """A running profiler that records allocations.

    It warns, once in a process, when a tensor dies that is older than the profile. That is no news here, so let one die
    while nobody listens.
    """
    profile = torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True)
    older = torch.empty(1)
    with _quiet_standard_error():
        profile.start()
        del older
    return profile


def stop_memory_profile(profile: torch.profiler.profile) -> None:
    with _quiet_standard_error():
        profile.stop()


@contextmanager
def _quiet_standard_error() -> Iterator[None]:
    """Send file descriptor 2 nowhere for a moment.

    The profiler of torch 2.13 announces its start and stop there, whatever the log level, and a notebook would show it.
    """
    sys.stderr.flush()
    kept = os.dup(2)
    with open(os.devnull, "wb") as nowhere:
        os.dup2(nowhere.fileno(), 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)


def allocation_events(profile: torch.profiler.profile) -> list[tuple[int, int, int]]:
    """(nanoseconds, address, ± bytes) of each allocation in a profile with ``profile_memory=True``, in order.

    The public tables add these up per operator and lose the order, and with it the peak.
    """
    found: list[tuple[int, int, int]] = []
    pending = list(profile.profiler.kineto_results.experimental_event_tree())
    while pending:
        event = pending.pop()
        pending.extend(event.children)
        if event.tag == torch._C._profiler._EventType.Allocation:
            found.append((event.start_time_ns, event.extra_fields.ptr, event.extra_fields.alloc_size))
    return sorted(found, key=lambda allocation: allocation[0])
