"""A file as a store."""

from __future__ import annotations

import copy
import ctypes
import os
import tempfile
import threading
import weakref
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from memsave_lib import _compat
from memsave_lib.stores.base import Deposit, Store, Trip
from memsave_lib.stores.slab import Extent, Slab
from memsave_lib.stores.streams import Copying, Moment


class DiskStore(Store):
    """A file without a name in ``directory``, written and read by threads of its own.

    The space comes back when the last deposit and the store are gone, or when the process ends, however it ends. Small
    sizes stay in the system's page cache: then a "disk" is memory that the system may take back.

    Args:
        directory: on the disk to be used; the system's place for temporary files when not given. Some systems keep
            that one in memory.

    Raises:
        OSError: the directory is missing, is none, or cannot be written to; later, from :meth:`put`: no room.
    """

    lane = "disk"

    def __init__(self, directory: str | Path | None = None) -> None:
        self.directory = Path(tempfile.gettempdir() if directory is None else directory)
        if not self.directory.is_dir():
            raise FileNotFoundError(f"DiskStore(directory={str(directory)!r}): there is no such directory")
        self._slab = Slab(self.directory)
        self._writer = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)
        self._reader = ThreadPoolExecutor(1, thread_name_prefix=_THREAD)
        self._closed = False
        self._process = os.getpid()
        self._end = weakref.finalize(self, _end_disk_store, self._process, self._slab, self._writer, self._reader)

    @property
    def stored_bytes(self) -> int:
        return self._slab.used_bytes

    @property
    def file_bytes(self) -> int:
        """Size of the file, which is as long as ``stored_bytes`` has been at most; 0 once it is gone."""
        return self._slab.file_bytes if self._end.alive else 0

    def put(self, source: Tensor) -> Deposit:
        if self._closed:
            raise RuntimeError("this DiskStore was closed: make a new one")
        if _compat.is_fake(source):
            return _FakeDeposit(source)
        self.check_process()
        extent = self._slab.reserve(source.nbytes)
        try:
            return _DiskDeposit(source, self, extent)
        except BaseException:
            self._slab.give_back(extent)
            raise

    def check_process(self) -> None:
        """RuntimeError in a process that was forked off: it shares the file with its parent, but not the threads."""
        if not self.is_here():
            raise RuntimeError("this DiskStore belongs to the process that made it: apply the strategy after the fork")

    def is_here(self) -> bool:
        """Whether this is the process that made the store."""
        return os.getpid() == self._process

    def start_write(self, extent: Extent, memory: Tensor) -> Future[Copying]:
        return self._writer.submit(_timed, self._slab.write, extent, _bytes_of(memory))

    def start_read(self, extent: Extent, memory: Tensor, after: Future[Copying]) -> Future[Copying]:
        return self._reader.submit(_read_after, after, self._slab, extent, _bytes_of(memory))

    def give_back(self, extent: Extent) -> None:
        self._slab.give_back(extent)
        self._end_if_idle()

    def close(self) -> None:
        self._closed = True
        self._end_if_idle()

    def _end_if_idle(self) -> None:
        if self._closed and self.stored_bytes == 0:
            self._end()


class _DiskDeposit(Deposit):
    def __init__(self, source: Tensor, store: DiskStore, extent: Extent) -> None:
        # The threads get addresses: a tensor must die in the thread that computes, or memory would be freed at random.
        self._source: Tensor | None = source.cpu()
        self._like = (source.shape, source.dtype)
        self._device = source.device
        self._store, self._extent = store, extent
        self._returned: Tensor | None = None
        self.out = Trip(False, source.nbytes, store.start_write(extent, self._source))

    def let_go(self) -> None:
        if self._source is not None:
            self.out.waited_from = Moment.now()
            _finish(self.out.copying)
            self._source = None

    def start_back(self) -> Tensor | None:
        if self._returned is not None:
            return None
        self._store.check_process()
        shape, dtype = self._like
        memory = torch.empty(shape, dtype=dtype)
        reading = self._store.start_read(self._extent, memory, after=self.out.copying)
        self.back, self._returned = Trip(True, memory.nbytes, reading), memory
        return memory

    def take(self) -> Tensor:
        self.start_back()
        self.back.waited_from = Moment.now()
        _finish(self.back.copying)
        returned, self._returned = self._returned, None
        return returned.to(self._device)

    def close(self) -> None:
        trips = (self.out, self.back) if self._returned is not None else (self.out,)
        # A copy that has not begun is called off; one that runs uses memory that must not be freed before it ends.
        running = [trip.copying for trip in trips if not trip.copying.cancel()]
        held = [partial(self._store.give_back, self._extent), self._source, self._returned]
        self._source = self._returned = None
        if _on_own_thread():
            # The garbage collector came by in a thread that would wait for itself: the memory lives until all is done.
            _release_after(running, held)
            return
        if not self._store.is_here():
            return
        try:
            wait(running)
        except BaseException:  # the user's Ctrl-C: the copies run on, and must find their memory
            _release_after(running, held)
            raise
        _release(held)


class _FakeDeposit(Deposit):
    """Stands for a file where tensors are fake and have no bytes that could be written.

    Like the real one it holds its source until it is let go: memory must be free when it would be, and no earlier.
    """

    def __init__(self, source: Tensor) -> None:
        self._source: Tensor | None = source
        self._like = (source.shape, source.dtype, source.device)
        self._returned: Tensor | None = None
        self.out = Trip(False, source.nbytes, Copying(Moment.now(), Moment.now()))

    def let_go(self) -> None:
        self._source = None

    def start_back(self) -> Tensor | None:
        if self._returned is not None:
            return None
        shape, dtype, device = self._like
        self._returned = torch.empty(shape, dtype=dtype, device=device)
        self.back = Trip(True, self.out.nbytes, Copying(Moment.now(), Moment.now()))
        return self._returned

    def take(self) -> Tensor:
        self.start_back()
        returned, self._returned = self._returned, None
        return returned

    def close(self) -> None:
        self._source = self._returned = None


_THREAD = "memsave-disk"


def _finish(copying: Future[Copying]) -> None:
    """Wait for a copy; raise what went wrong with it.

    Raised is a copy of the error: the original lives as long as its future, and whatever is raised here would tie all
    tensors of the interrupted step to it.
    """
    error = copying.exception()
    if error is not None:
        raise copy.copy(error) from error


def _timed(work: Callable[[Extent, memoryview], None], extent: Extent, memory: memoryview) -> Copying:
    started = Moment.now()
    work(extent, memory)
    return Copying(started, Moment.now())


def _read_after(after: Future[Copying], slab: Slab, extent: Extent, memory: memoryview) -> Copying:
    after.result()
    return _timed(slab.read, extent, memory)


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a tensor, without holding it: whoever uses this must keep the tensor alive."""
    return memoryview((ctypes.c_char * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def _on_own_thread() -> bool:
    return threading.current_thread().name.startswith(_THREAD)


def _release_after(running: list[Future[Copying]], held: list) -> None:
    if running:
        running[0].add_done_callback(lambda _: _release_after(running[1:], held))
    else:
        _release(held)


def _release(held: list) -> None:
    give_back = held[0]
    held.clear()  # a future keeps what it calls when it is done
    give_back()


def _end_disk_store(process: int, slab: Slab, *executors: ThreadPoolExecutor) -> None:
    if os.getpid() != process:  # the threads are the parent's, and so is the work that they have been given
        slab.close()
        return
    # All work is done by now. The garbage collector may come by in one of these threads, which cannot wait for itself.
    for executor in executors:
        executor.shutdown(wait=not _on_own_thread())
    slab.close()
