"""What the tests of the offload engine share: stores that take notes, an independent forecast, what is left behind."""

from __future__ import annotations

import contextlib
import gc
import os
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import memsave_lib as ms
from helpers import Saved, regions_recomputed
from memsave_lib.offload import Parcel, Ticket
from memsave_lib.plan import Plan, Segment
from memsave_lib.stores import Deposit, HostStore, NullStore, Store

STORES = ("host", "disk", "null")


def a_store(kind: str) -> str | Store:
    return NullStore() if kind == "null" else kind


def offload(strategy: ms.Strategy | None = None, store: str | Store = "host", **options: object) -> ms.Offload:
    """Everything leaves: no tensor is too small, no region is last."""
    return ms.Offload(strategy or ms.KeepAll(), store, **{"keep_last": 0, "min_bytes": 1, **options})


@dataclass
class Put:
    """What a store was handed."""

    storage: weakref.ref[torch.UntypedStorage]
    address: int
    nbytes: int
    dtype: torch.dtype
    let_go: bool = False


class _Noting:
    """For stores: note every tensor that comes in, and whether it was let go."""

    puts: list[Put]

    def put(self, source: Tensor) -> Deposit | None:
        storage = source.untyped_storage()
        assert source.dim() == 1 and source.is_contiguous() and source.nbytes == storage.nbytes()
        deposit = super().put(source)
        if deposit is not None:
            put = Put(weakref.ref(storage), storage.data_ptr(), storage.nbytes(), source.dtype)
            self.puts.append(put)
            this = weakref.ref(deposit)

            def let_go() -> None:
                put.let_go = True
                type(this()).let_go(this())

            deposit.let_go = let_go
        return deposit

    @property
    def put_bytes(self) -> int:
        return sum(put.nbytes for put in self.puts)

    @property
    def alive(self) -> int:
        """Sources that still take memory."""
        return sum(put.storage() is not None for put in self.puts)


class NotingNullStore(_Noting, NullStore):
    def __init__(self) -> None:
        super().__init__()
        self.puts = []


class NotingHostStore(_Noting, HostStore):
    def __init__(self) -> None:
        super().__init__()
        self.puts = []


class NotingDiskStore(_Noting, ms.DiskStore):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory)
        self.puts = []


def forecast(model: nn.Module, blocks: nn.ModuleList, plan: Plan, x: Tensor, min_bytes: int = 1) -> Saved:
    """What offloaded units save, by PyTorch's own hooks and checkpoint: unique storages, nobody else's, not small."""
    others = (*model.parameters(), *model.buffers(), x)
    saved = Saved(frozenset(tensor.untyped_storage().data_ptr() for tensor in others))

    def run(segments: tuple[Segment, ...], x: Tensor, top: bool) -> Tensor:
        for segment in segments:
            sent = saved_tensors_hooks(saved.pack, lambda tensor: tensor) if top and segment.offload else None
            with sent or contextlib.nullcontext():
                if segment.recompute:
                    x = checkpoint(run, segment.body(), x, False, use_reentrant=False)
                else:
                    for block in blocks[segment.start : segment.stop]:
                        x = block(x)
        return x

    holder = type("Holder", (), {"blocks": blocks})
    with regions_recomputed(holder, plan.recompute_ops):
        output = run(plan.segments, x, True)
    saved.storages = {key: storage for key, storage in saved.storages.items() if storage.nbytes() >= min_bytes}
    del output
    return saved


def in_flight() -> int:
    """Tickets and parcels that exist, found without the engine's help."""
    return sum(isinstance(found, Ticket | Parcel) for found in gc.get_objects())


def threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("memsave")]


def open_files() -> list[str]:
    """What the file descriptors of this process name; a file without a name reads "... (deleted)"."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            found.append(os.readlink(link))
    return found


def nameless_files() -> list[str]:
    return [name for name in open_files() if name.endswith("(deleted)")]


@dataclass
class Before:
    """How things were, to be the same afterwards."""

    tickets: int = field(default_factory=in_flight)
    threads: list[str] = field(default_factory=threads)
    files: list[str] = field(default_factory=open_files)

    def is_now(self) -> bool:
        now = Before()
        assert now.tickets == self.tickets, f"{now.tickets - self.tickets} tickets or parcels are left"
        assert now.threads == self.threads, f"threads are left: {now.threads}"
        assert sorted(now.files) == sorted(self.files), f"files are left open: {set(now.files) - set(self.files)}"
        return True
