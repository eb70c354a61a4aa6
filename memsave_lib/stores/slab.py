"""One file that holds many tensors and has no name.

The file is unlinked as it is created (or never had a name, where the system can do that), with mode 0600: whatever ends
the process, the system takes the space back. Space given back by one tensor is used for the next.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
from collections import deque
from dataclasses import dataclass
from pathlib import Path

from memsave_lib.units import exact_bytes


@dataclass(frozen=True)
class Extent:
    """A stretch of the file."""

    offset: int
    nbytes: int

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes


class Slab:
    """Extents are reserved and written by one thread at a time each; any thread may give one back.

    Raises:
        OSError: the directory does not exist or cannot be written to.
    """

    def __init__(self, directory: Path) -> None:
        if not hasattr(os, "preadv"):
            raise OSError("a DiskStore needs os.preadv and os.pwrite, which this system lacks: use store='host'")
        self._directory = directory
        self._file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - lives as long as the slab
        self._lock = threading.Lock()
        self._free: list[Extent] = []  # in the order of their offsets, never two that touch
        self._end = 0
        self._reserved = 0
        # Tensors may be given back by the garbage collector, in the middle of anything: appending needs no lock.
        self._given_back: deque[Extent] = deque()

    @property
    def used_bytes(self) -> int:
        return self._reserved - sum(extent.nbytes for extent in tuple(self._given_back))

    @property
    def file_bytes(self) -> int:
        """Size of the file, by the system's own account."""
        return os.fstat(self._file.fileno()).st_size

    def reserve(self, nbytes: int) -> Extent:
        """A stretch of the file that is nobody else's; OSError when the disk has no room for it."""
        with self._lock:
            while self._given_back:
                self._merge(self._given_back.popleft())
            place = min((e for e in self._free if e.nbytes >= nbytes), key=lambda e: e.nbytes, default=None)
            if place is None:
                place = self._grow(nbytes)
            else:
                self._free.remove(place)
            if place.nbytes > nbytes:
                self._merge(Extent(place.offset + nbytes, place.nbytes - nbytes), counted=False)
            self._reserved += nbytes
        return Extent(place.offset, nbytes)

    def give_back(self, extent: Extent) -> None:
        self._given_back.append(extent)

    def write(self, extent: Extent, memory: memoryview) -> None:
        done = 0
        while done < extent.nbytes:
            done += os.pwrite(self._file.fileno(), memory[done:], extent.offset + done)

    def read(self, extent: Extent, memory: memoryview) -> None:
        done = 0
        while done < extent.nbytes:
            count = os.preadv(self._file.fileno(), [memory[done:]], extent.offset + done)
            if count == 0:
                raise OSError(
                    errno.EIO,
                    f"the file of offloaded activations ended early: {done} of {extent.nbytes} bytes could be read",
                )
            done += count

    def close(self) -> None:
        self._file.close()

    def _grow(self, nbytes: int) -> Extent:
        # A free stretch at the end of the file is made longer instead of left behind.
        last = self._free[-1] if self._free and self._free[-1].stop == self._end else Extent(self._end, 0)
        missing = nbytes - last.nbytes
        room = os.fstatvfs(self._file.fileno())
        # What was reserved but is not written yet is still counted as free by the system.
        pending = self._end - self.file_bytes
        free = room.f_bavail * room.f_frsize - pending
        if missing > free:
            raise OSError(
                errno.ENOSPC,
                f"offloading needs {exact_bytes(missing)} more on this disk, {exact_bytes(max(free, 0))} are free: "
                f"choose another with DiskStore(directory=...), or offload less",
                str(self._directory),
            )
        if last.nbytes:
            self._free.remove(last)
        self._end += missing
        return Extent(last.offset, nbytes)

    def _merge(self, extent: Extent, counted: bool = True) -> None:
        if counted:
            self._reserved -= extent.nbytes
        merged = extent
        for neighbor in [e for e in self._free if e.stop == extent.offset or e.offset == extent.stop]:
            self._free.remove(neighbor)
            merged = Extent(min(merged.offset, neighbor.offset), merged.nbytes + neighbor.nbytes)
        self._free.append(merged)
        self._free.sort(key=lambda e: e.offset)
