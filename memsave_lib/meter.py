"""Memory over time: every storage that appears or vanishes during a step, to the byte.

    with MemoryMeter(model, optimizer) as meter:
        loss = model(x).sum()
        loss.backward()
        optimizer.step()
    print(meter.trace.peak_bytes, "at", meter.trace.peak_at)

The meter is a dispatch mode: it sees every operation in forward, recomputation, backward and optimizer, on any device
and on fake tensors. A storage counts from the operation that returns it until it is freed. Memory that an operation
takes and gives back within itself is out of its sight; ``audit=True`` asks the profiler and says how much that was.
Sparse and jagged tensors are not counted.

Saved-tensor hooks tell what autograd keeps. They are the outermost hooks, so inside a recomputed region they see its
inputs only: what is really held. Enter the meter in the thread that runs the step; ``live_bytes`` may be read from any.
"""

from __future__ import annotations

import gc
import threading
from contextlib import ExitStack
from types import TracebackType

import torch
from torch import nn
from torch.optim import Optimizer

from memsave_lib import _compat
from memsave_lib.arguments import whole_number
from memsave_lib.log import Log, Stopped
from memsave_lib.trace import Trace

__all__ = ["MemoryMeter", "Stopped", "Trace"]


class MemoryMeter:
    """Measures the memory of whatever runs inside its ``with`` block.

    Args:
        model: whose parameters, buffers and gradients are named as such; module paths in the trace come from it.
            Without it, parameters are still recognized by their class, and modules are called by theirs.
        optimizer: whose state is named as such before its first ``step()``.
        audit: also record the allocator's own events, with the profiler. Slower.
        stop: when this event is set, the next operation raises :class:`Stopped`.
    """

    def __init__(
        self,
        model: nn.Module | None = None,
        optimizer: Optimizer | None = None,
        audit: bool = False,
        stop: threading.Event | None = None,
    ) -> None:
        self.model, self.optimizer, self.audit, self.stop = model, optimizer, audit, stop
        self._log: Log | None = None
        self._profile: torch.profiler.profile | None = None
        self._trace: Trace | None = None
        self._open = ExitStack()

    def __enter__(self) -> MemoryMeter:
        if any(isinstance(mode, Log) for mode in _compat.active_dispatch_modes()):
            raise RuntimeError("a MemoryMeter is running in this thread already: use that one, meters do not nest")
        self._trace, self._profile = None, None
        self._log = Log(self.model, self.optimizer, self.stop, self.audit)
        with ExitStack() as stack:
            if self.audit:
                gc.collect()  # the allocator would see the death of garbage that has nothing to do with the step
                self._profile = _compat.start_memory_profile()
                stack.callback(_compat.stop_memory_profile, self._profile)
            self._log.listen(stack)
            self._open = stack.pop_all()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._open.close()
        self._trace = self._log.trace(self._profile)

    @property
    def trace(self) -> Trace:
        """What was measured; there once the ``with`` block has ended, also by an exception."""
        if self._trace is None:
            raise RuntimeError("the meter has nothing to show yet: read .trace after its with block has ended")
        return self._trace

    @property
    def live_bytes(self) -> int:
        """Live bytes right now; may be read from another thread while the step runs."""
        return 0 if self._log is None else self._log.live_bytes

    @property
    def position(self) -> int:
        """How many changes of live bytes there were so far: the number of a row of the trace's ``live_bytes``."""
        return 0 if self._log is None else len(self._log.history)

    def so_far(self) -> Trace:
        """What has been seen up to now; may be asked for from another thread while the step runs.

        What lives still may yet turn out to be something else: categories are those of the life up to now. And what
        was there before the step counts from its beginning, but only once an operation has taken it.
        """
        return Trace((), (), 0) if self._log is None else self._log.trace_so_far()

    def progress(self, max_points: int = 400) -> list[tuple[float, int]]:
        """(seconds, live bytes) so far, the highest of each stretch; may be read from another thread."""
        whole_number("max_points", max_points)
        history = [] if self._log is None else self._log.history[:]
        stretch = -(-len(history) // max_points) or 1
        return [max(history[i : i + stretch], key=lambda point: point[1]) for i in range(0, len(history), stretch)]
