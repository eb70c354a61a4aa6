"""The host's memory as a store."""

from __future__ import annotations

import os
from dataclasses import dataclass

import torch
from torch import Tensor

from memsave_lib.stores.base import Deposit, Store, Trip
from memsave_lib.stores.streams import Mark, Streams, streams_of
from memsave_lib.units import parse_bytes


class HostStore(Store):
    """The host's memory, through a pool of buffers and streams of their own.

    On a machine without an accelerator the "device" is the same memory: a plain copy, good for learning and for tests.

    Args:
        max_bytes: the most that the pool may hold, a number or a string such as ``"4 GiB"``; what does not fit stays on
            the device. None: no limit of its own.
        pin: page-lock the buffers, which accelerators need to copy beside the computation. Locking takes milliseconds
            each time and cannot be swapped out, so buffers are kept for the next step, and locked up to half of the
            memory that is free. None: where there is an accelerator.
    """

    lane = "host"

    def __init__(self, max_bytes: int | str | None = None, pin: bool | None = None) -> None:
        if pin is not None and not isinstance(pin, bool):
            raise TypeError(f"pin is True, False or None, got {pin!r}")
        if pin and not torch.accelerator.is_available():
            raise ValueError("pin=True needs an accelerator, and this machine has none: leave pin out, or pin=False")
        limit = None if max_bytes is None else parse_bytes(max_bytes)
        self._pool = _Pool(limit, torch.accelerator.is_available() if pin is None else pin)
        self._streams: dict[torch.device, Streams] = {}

    @property
    def stored_bytes(self) -> int:
        return self._pool.used_bytes

    @property
    def pool_bytes(self) -> int:
        """All that the pool holds, in use or not."""
        return self._pool.total_bytes

    @property
    def pool_hits(self) -> int:
        """How often a buffer could be used again."""
        return self._pool.hits

    @property
    def pool_misses(self) -> int:
        """How often a buffer had to be made."""
        return self._pool.misses

    def put(self, source: Tensor) -> Deposit | None:
        """None when ``max_bytes`` leaves no room."""
        buffer = self._pool.take(source)
        if buffer is None:
            return None
        try:
            return _HostDeposit(source, buffer, self._streams_of(source.device), self._pool)
        except BaseException:
            self._pool.give_back(buffer)
            raise

    def mark(self, device: torch.device) -> Mark:
        return self._streams_of(device).mark()

    def close(self) -> None:
        self._pool.close()

    def _streams_of(self, device: torch.device) -> Streams:
        if device not in self._streams:
            self._streams[device] = streams_of(device)
        return self._streams[device]


@dataclass
class _Buffer:
    memory: Tensor
    cost: int  # bytes that it takes from the host
    last_read: Mark | None = None


class _Pool:
    """Buffers of a host store, by size and type, to be used again: in training every step wants the same ones."""

    def __init__(self, max_bytes: int | None, pin: bool) -> None:
        self._max_bytes, self._closed = max_bytes, False
        self._pinned_limit = _free_host_bytes() // 2 if pin else 0
        self._free: dict[tuple, list[_Buffer]] = {}
        # By id, not as a sum: the garbage collector may give a buffer back in the middle of an addition.
        self._used: dict[int, _Buffer] = {}
        self.hits = self.misses = 0

    @property
    def used_bytes(self) -> int:
        return sum(buffer.memory.nbytes for buffer in tuple(self._used.values()))

    @property
    def total_bytes(self) -> int:
        spare = [buffer for buffers in tuple(self._free.values()) for buffer in tuple(buffers)]
        return sum(buffer.cost for buffer in (*spare, *tuple(self._used.values())))

    def take(self, like: Tensor) -> _Buffer | None:
        """A buffer of the size and type of ``like``, whose own memory has its size too."""
        if self._closed:
            raise RuntimeError("this HostStore was closed: make a new one")
        try:
            # Asking first would not do: another thread may take the last one in between.
            buffer = self._free[_kind(like)].pop()
            self.hits += 1
        except (KeyError, IndexError):
            buffer = self._make(like)
            if buffer is None:
                return None
            self.misses += 1
        self._used[id(buffer)] = buffer
        return buffer

    def give_back(self, buffer: _Buffer) -> None:
        del self._used[id(buffer)]
        if not self._closed:
            self._free.setdefault(_kind(buffer.memory), []).append(buffer)

    def close(self) -> None:
        self._closed = True
        self._free.clear()

    def _make(self, like: Tensor) -> _Buffer | None:
        pinned_cost = 1 << (like.nbytes - 1).bit_length()  # PyTorch rounds pinned memory up to powers of two
        pin = self.total_bytes + pinned_cost <= self._pinned_limit
        cost = pinned_cost if pin else like.nbytes
        if self._max_bytes is not None and self.total_bytes + cost > self._max_bytes:
            self._free.clear()  # buffers of other sizes make room first
            if self.total_bytes + cost > self._max_bytes:
                return None
        return _Buffer(torch.empty(like.shape, dtype=like.dtype, device="cpu", pin_memory=pin), cost)


def _kind(tensor: Tensor) -> tuple:
    return type(tensor), tensor.dtype, tensor.numel()


def _free_host_bytes() -> int:
    return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


class _HostDeposit(Deposit):
    """Makes the waits that :mod:`memsave_lib.stores.streams` lists."""

    def __init__(self, source: Tensor, buffer: _Buffer, streams: Streams, pool: _Pool) -> None:
        self._source: Tensor | None = source
        self._like = (source.shape, source.dtype, source.device)
        self._buffer, self._streams, self._pool = buffer, streams, pool
        self._returned: Tensor | None = None
        copying = streams.start_copy(False, source, buffer.memory, after=buffer.last_read)
        self.out = Trip(False, source.nbytes, copying)

    def let_go(self) -> None:
        if self._source is not None:
            self.out.waited_from = self._streams.mark()
            self._streams.compute_waits_for(self.out.copying.ended)
            self._source = None

    def start_back(self) -> Tensor | None:
        if self._returned is not None:
            return None
        shape, dtype, device = self._like
        memory = torch.empty(shape, dtype=dtype, device=device)
        copying = self._streams.start_copy(True, self._buffer.memory, memory, after=self.out.copying.ended)
        self.back, self._returned = Trip(True, memory.nbytes, copying), memory
        self._buffer.last_read = copying.ended
        return memory

    def take(self) -> Tensor:
        self.start_back()
        self.back.waited_from = self._streams.mark()
        self._streams.compute_waits_for(self.back.copying.ended)
        returned, self._returned = self._returned, None
        return returned

    def close(self) -> None:
        # A graph may die in any thread: memory that a copy still uses must not be left to others before it ends.
        if self._source is not None:
            self._streams.thread_waits_for(self.out.copying.ended)
        if self._returned is not None:
            self._streams.thread_waits_for(self.back.copying.ended)
        self._source = self._returned = None
        self._pool.give_back(self._buffer)
