"""Copies beside the computation: everything that depends on the kind of device.

An accelerator works through queues ("streams"). Computation fills one of them; copies out and copies back get one each,
so that they run while the device computes. What one queue does is in order by itself. Between queues nothing is, unless
one waits for a *mark* that another has set. All such waits of the library are in this module and where it is used:

===================================  ============================================================================
a copy reads or writes memory ...    only after everything that computation had queued before the copy was asked for
a source is let go ...               once computation waits for the end of the copy out of it
what came back is read ...           once computation waits for the end of the copy back
a host buffer is written again ...   after the last copy that read it
===================================  ============================================================================

A machine without an accelerator has one queue, its own thread: copies happen at once and nothing waits.
Not yet run on a GPU; the tests run the same engine over threads that delay every copy at random.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor


class Mark(ABC):
    """A place in a queue; passed when everything before it is done."""

    @abstractmethod
    def seconds(self) -> float:
        """When it was passed, on the clock of ``time.perf_counter``; waits until it is."""


class Moment(float, Mark):
    """A mark in this thread's own work: passed when it is set."""

    @classmethod
    def now(cls) -> Moment:
        return cls(time.perf_counter())

    def seconds(self) -> float:
        return float(self)


@dataclass(frozen=True)
class Copying:
    """A copy on its way."""

    started: Mark
    ended: Mark


class Streams(ABC):
    """The queues of one device: its computation, copies out and copies back."""

    @abstractmethod
    def mark(self) -> Mark:
        """Where computation stands: everything that it has queued so far."""

    @abstractmethod
    def start_copy(self, back: bool, source: Tensor, destination: Tensor, after: Mark | None = None) -> Copying:
        """Queue ``destination.copy_(source)`` behind what computation has queued so far, and behind ``after``."""

    @abstractmethod
    def compute_waits_for(self, mark: Mark) -> None:
        """Computation that is queued from now on starts after ``mark``; the calling thread goes on."""

    @abstractmethod
    def thread_waits_for(self, mark: Mark) -> None:
        """Come back when ``mark`` is passed."""


class OneQueue(Streams):
    """A machine without an accelerator: its "device" is the same memory, and copies happen at once."""

    def mark(self) -> Moment:
        return Moment.now()

    def start_copy(self, back: bool, source: Tensor, destination: Tensor, after: Mark | None = None) -> Copying:
        started = Moment.now()
        destination.copy_(source)
        return Copying(started, Moment.now())

    def compute_waits_for(self, mark: Mark) -> None:
        pass

    def thread_waits_for(self, mark: Mark) -> None:
        pass


class _EventMark(Mark):
    def __init__(self, event: torch.Event, origin: _EventMark | None, origin_seconds: float = 0.0) -> None:
        self.event, self.origin, self.origin_seconds = event, origin, origin_seconds

    def seconds(self) -> float:
        self.event.synchronize()
        if self.origin is None:
            return self.origin_seconds
        return self.origin.origin_seconds + self.origin.event.elapsed_time(self.event) / 1000


class SideStreams(Streams):
    """An accelerator of any make, through ``torch.accelerator``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._out, self._back = torch.Stream(device), torch.Stream(device)
        self._origin: _EventMark | None = None
        self._origin = self.mark()
        self._origin.event.synchronize()
        self._origin.origin_seconds = time.perf_counter()

    def mark(self) -> _EventMark:
        # Whoever runs the step may change its stream at any time, so ask at each use.
        return self._mark_on(torch.accelerator.current_stream(self.device))

    def _mark_on(self, stream: torch.Stream) -> _EventMark:
        event = torch.Event(self.device, enable_timing=True)
        event.record(stream)
        return _EventMark(event, self._origin)

    def start_copy(self, back: bool, source: Tensor, destination: Tensor, after: Mark | None = None) -> Copying:
        stream = self._back if back else self._out
        stream.wait_event(self.mark().event)
        if after is not None:
            stream.wait_event(after.event)
        computing = torch.accelerator.current_stream(self.device)
        started = self._mark_on(stream)
        # A stream as a context manager came only after torch 2.6.
        torch.accelerator.set_stream(stream)
        try:
            destination.copy_(source, non_blocking=True)
        finally:
            torch.accelerator.set_stream(computing)
        return Copying(started, self._mark_on(stream))

    def compute_waits_for(self, mark: Mark) -> None:
        torch.accelerator.current_stream(self.device).wait_event(mark.event)

    def thread_waits_for(self, mark: Mark) -> None:
        mark.event.synchronize()


def streams_of(device: torch.device) -> Streams:
    """The queues of ``device``."""
    return OneQueue() if device.type == "cpu" else SideStreams(device)
