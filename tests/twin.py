"""An accelerator's twin: queues that are threads, copies that dawdle at random, memory that turns to poison.

Computation is the thread that runs the step. Whatever it has computed counts as computed only some time later, and a
copy that does not wait for that finds poison (NaN), as it does when its source is gone. What comes back is poison until
the copy has run. Whatever goes wrong is written down too, because wrong bytes can go unnoticed in a gradient.

It is stricter than a device in one point: where computation is told to wait for a copy, the thread waits at once, so a
source that is let go must not be read any more.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections import defaultdict
from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import Tensor

from memsave_lib.stores import HostStore
from memsave_lib.stores.streams import Copying, Mark, Streams

#: The waits that a twin can leave out. The first four are the table in memsave_lib/stores/streams.py.
COPY_AFTER_COMPUTATION = "a copy begins after what computation had queued"
SOURCE_AFTER_COPY_OUT = "a source is let go after the copy out of it"
READ_AFTER_COPY_BACK = "what came back is read after the copy back"
WRITE_AFTER_READ = "a host buffer is written again after the last copy that read it"
BACK_AFTER_OUT = "a copy back begins after the copy out"
END_AFTER_COPY = "memory of a dropped graph is freed after the copies that use it"


class _ComputeMark(Mark):
    """Passed when its time has come: computation goes on whether or not anybody looks."""

    def __init__(self, due: float) -> None:
        self.due = due

    @property
    def passed(self) -> bool:
        return time.perf_counter() >= self.due

    def wait(self) -> None:
        while (left := self.due - time.perf_counter()) > 0:
            time.sleep(left)

    def seconds(self) -> float:
        self.wait()
        return self.due


class _LaneMark(Mark):
    """Passed when a lane's thread has come by."""

    def __init__(self, back: bool) -> None:
        self.back, self.at, self._event = back, 0.0, threading.Event()

    def set(self) -> None:
        self.at = time.perf_counter()
        self._event.set()

    def wait(self) -> None:
        assert self._event.wait(timeout=60), "a lane of the twin is stuck"

    def seconds(self) -> float:
        self.wait()
        return self.at


@dataclass(frozen=True)
class _Memory:
    """One-dimensional, contiguous memory that somebody else keeps alive, or does not."""

    storage: weakref.ref[torch.UntypedStorage]
    dtype: torch.dtype

    @classmethod
    def of(cls, tensor: Tensor) -> _Memory:
        assert tensor.dim() == 1 and tensor.is_contiguous() and tensor.storage_offset() == 0
        assert tensor.nbytes == tensor.untyped_storage().nbytes()
        return cls(weakref.ref(tensor.untyped_storage()), tensor.dtype)

    @property
    def gone(self) -> bool:
        return self.storage() is None

    def tensor(self) -> Tensor:
        storage = self.storage()
        count = storage.nbytes() // self.dtype.itemsize
        return torch.empty(0, dtype=self.dtype).set_(storage, 0, (count,))


@dataclass
class _Task:
    number: int
    back: bool
    source: _Memory
    destination: _Memory
    buffer: int  # which host buffer is read or written
    computed: _ComputeMark  # where computation stood when the copy was asked for
    waits: list[Mark]
    delay: float
    started: _LaneMark
    ended: _LaneMark


class Twin(Streams):
    """Streams with two threads.

    Args:
        seed: of all delays.
        left_out: waits that are not made, to see that their absence is noticed.
        slowest: the longest delay in seconds before a copy out, before a copy back, and of computation.
        run_ahead: computation does not stop the thread where it waits, as on a device. Then what came back must not be
            read, and sources must be kept, by whoever tests.
    """

    def __init__(
        self,
        seed: int,
        left_out: Collection[str] = (),
        slowest: tuple[float, float, float] = (2e-4, 2e-4, 2e-4),
        run_ahead: bool = False,
    ) -> None:
        self.violations: list[str] = []
        self.copies = 0
        self._random, self._left_out, self.slowest = random.Random(seed), frozenset(left_out), slowest
        self._run_ahead = run_ahead
        self._due = 0.0
        self._reads: defaultdict[int, set[int]] = defaultdict(set)  # buffer -> copies back that have not ended
        self._lock = threading.Lock()
        self._queues = {back: queue.SimpleQueue() for back in (False, True)}
        self._threads = [threading.Thread(target=self._work, args=(lane,)) for lane in self._queues.values()]
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        """Let everything that is queued run, and end the threads."""
        for lane in self._queues.values():
            lane.put(None)
        for thread in self._threads:
            thread.join(timeout=60)
            assert not thread.is_alive(), "a lane of the twin is stuck"

    # What the engine asks for

    def mark(self) -> _ComputeMark:
        self._due = max(self._due, time.perf_counter() + self.delay(2))
        return _ComputeMark(self._due)

    def start_copy(self, back: bool, source: Tensor, destination: Tensor, after: Mark | None = None) -> Copying:
        computed = self.mark()
        waits: list[Mark] = [] if COPY_AFTER_COMPUTATION in self._left_out else [computed]
        if after is not None and (BACK_AFTER_OUT if back else WRITE_AFTER_READ) not in self._left_out:
            waits.append(after)
        if back:
            _poison(destination)
        buffer = id((source if back else destination).untyped_storage())
        task = _Task(
            self.copies,
            back,
            _Memory.of(source),
            _Memory.of(destination),
            buffer,
            computed,
            waits,
            self.delay(int(back)),
            _LaneMark(back),
            _LaneMark(back),
        )
        self.copies += 1
        if back:
            with self._lock:
                self._reads[buffer].add(task.number)
        self._queues[back].put(task)
        return Copying(task.started, task.ended)

    def compute_waits_for(self, mark: _LaneMark) -> None:
        if (READ_AFTER_COPY_BACK if mark.back else SOURCE_AFTER_COPY_OUT) in self._left_out or self._run_ahead:
            return
        mark.wait()

    def thread_waits_for(self, mark: _LaneMark) -> None:
        if END_AFTER_COPY not in self._left_out:
            mark.wait()

    # What its threads do

    def _work(self, lane: queue.SimpleQueue[_Task | None]) -> None:
        while (task := lane.get()) is not None:
            for mark in task.waits:
                mark.wait()
            task.started.set()
            if task.delay:
                time.sleep(task.delay)
            self._copy(task)
            if task.back:
                with self._lock:
                    self._reads[task.buffer].discard(task.number)
            task.ended.set()

    def _copy(self, task: _Task) -> None:
        way = "back" if task.back else "out"
        with self._lock:
            to_be_read = any(number < task.number for number in self._reads[task.buffer])
        if not task.back and to_be_read:
            self.violations.append("a buffer was written again before the last copy had read it")
        if task.destination.gone:
            self.violations.append(f"a copy {way} wrote into memory that was gone")
            return
        destination = task.destination.tensor()
        if not task.computed.passed:
            self.violations.append(f"a copy {way} began before computation had come that far")
            _poison(destination)
        elif task.source.gone:
            self.violations.append(f"a copy {way} read memory that was gone")
            _poison(destination)
        else:
            destination.copy_(task.source.tensor())
        del destination
        if task.destination.gone or task.source.gone:
            self.violations.append(f"memory was let go while a copy {way} used it")

    def delay(self, kind: int) -> float:
        # The order of the two lanes changes most where some copies come at once and some are slow.
        return self._random.choice((0.0, self._random.random(), 1.0)) * self.slowest[kind]


class TwinStore(HostStore):
    """A HostStore whose "device" is a twin."""

    def __init__(self, twin: Twin, max_bytes: int | None = None) -> None:
        super().__init__(max_bytes, pin=False)
        self.twin = twin

    def _streams_of(self, device: torch.device) -> Streams:
        return self.twin


def _poison(memory: Tensor) -> None:
    """All bits set: NaN where numbers have one."""
    memory.view(torch.uint8).fill_(255)
