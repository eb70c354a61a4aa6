"""Send saved tensors away in forward, and have them back in time for backward.

Autograd hands every tensor that it saves to a *pack hook* and holds what the hook returns; in backward it hands that
to an *unpack hook*. Here it holds a :class:`Ticket`. The ticket owns a share in a :class:`Parcel`, the bytes of one
storage in a store. Nothing else owns a parcel: when the graph dies, by backward, by an exception or by being dropped,
tickets, parcels and their space in the store die with it. So there is nothing to reset between steps, and several
graphs may be alive at once.

What does not travel: parameters and buffers (by storage: they arrive as views), tensors that the first block was handed
and a user's own leaves (somebody else holds them anyway), and what is smaller than ``min_bytes``. A storage travels
once however many saved tensors share it, whole, as it lies in memory: expanded tensors stay small, views keep their
strides.

At most ``prefetch`` tensors are on their way out: before the next one leaves, computation waits until the oldest has
arrived and lets its memory go, no earlier and no later, so that the peak is the same in every run. The first
``prefetch`` parcels start back when backward reaches the stack; whenever one is asked for, so do the next, in the
reverse order of leaving.
"""

from __future__ import annotations

import threading
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from memsave_lib import _compat, held
from memsave_lib.held import Held
from memsave_lib.stores import Deposit, Store, open_store
from memsave_lib.strategies import Offloading
from memsave_lib.traffic import Journey, Traffic


class Parcel:
    """The bytes of one storage, away from the device. Comes back once for all tickets that share it."""

    def __init__(self, deposit: Deposit, journey: Journey, block: int, prefetch: int, traffic: Traffic) -> None:
        self.deposit, self._journey, self._block = deposit, journey, block
        self._prefetch, self._traffic = prefetch, traffic
        self._place = len(journey.parcels)
        journey.parcels.append(weakref.ref(self))
        journey.trips.append((block, deposit.out))
        # By id: a set of the tickets themselves would be a cycle.
        self._tickets: set[int] = set()
        self._waiting: set[int] = set()  # for the bytes that are here
        self._here: Tensor | None = None
        self._done_in = 0  # the last backward in which every ticket was served
        # Several threads may run backward through one graph. Never held while another parcel's is asked for.
        self._lock = threading.RLock()
        self._listener = held.listener()
        self._stored(deposit.out.nbytes)

    def add(self, ticket: Ticket) -> None:
        self._tickets.add(id(ticket))

    def remove(self, ticket: Ticket) -> None:
        self._tickets.discard(id(ticket))
        self._serve(ticket)

    def bring_back(self, ticket: Ticket) -> Tensor:
        """The bytes as a one-dimensional tensor. They stay until each ticket of today has been served once."""
        if self._here is None:
            with _aside():
                # Who asks again for what everybody has had is the next backward through a retained graph.
                self._traffic.count_asked(on_its_way=not self.start_back(new_backward=True))
                for ahead in self._journey.before(self._place, self._prefetch):
                    ahead.start_back()
        with self._lock, _aside():
            if self._here is None:
                self.start_back(new_backward=True)  # unless another thread has taken it meanwhile, it has begun
                self._here = self.deposit.take()
                self._waiting = set(self._tickets)
            here = self._here
            self._serve(ticket)
        return here

    def start_back(self, new_backward: bool = False) -> bool:
        """Begin to bring the bytes back; False if that has begun, or nobody is waiting for them any more.

        Args:
            new_backward: whoever was served has been served by an earlier backward.
        """
        with self._lock:
            if new_backward and self._done_in == self._journey.backward:
                self._journey.backward += 1
            if self._here is not None or self._done_in == self._journey.backward:
                return False
            memory = self.deposit.start_back()
        if memory is None:
            return False
        listener = held.listener()
        if listener is not None:
            listener.came_back(memory)
        self._journey.trips.append((self._block, self.deposit.back))
        self._traffic.returned.add(self.deposit.out.nbytes)
        return True

    def _serve(self, ticket: Ticket) -> None:
        with self._lock:
            self._waiting.discard(id(ticket))
            if self._here is not None and not self._waiting:
                self._here = None
                self._done_in = self._journey.backward

    def _stored(self, nbytes: int) -> None:
        if self._listener is not None and self._traffic.lane is not None:
            self._listener.stored(self._traffic.lane, nbytes)

    def __del__(self) -> None:
        self._here = None
        self.deposit.close()
        self._stored(-self.deposit.out.nbytes)


class Ticket:
    """What autograd holds in place of a tensor that has left: what it looked like, and a share in its parcel."""

    __slots__ = ("_parcel", "_witness", "_version", "_dtype", "_shape", "_stride", "_offset")

    def __init__(self, parcel: Parcel, tensor: Tensor) -> None:
        self._parcel = parcel
        self._witness, self._version = held.witness(tensor), tensor._version
        self._dtype, self._shape = tensor.dtype, tensor.shape
        self._stride, self._offset = tensor.stride(), tensor.storage_offset()
        parcel.add(self)

    def unpack(self) -> Tensor:
        held.check_version(self._witness, self._version, self._shape)
        flat = self._parcel.bring_back(self)
        with _aside():
            return flat.view(self._dtype).as_strided(self._shape, self._stride, self._offset)

    def __del__(self) -> None:
        self._parcel.remove(self)


@dataclass
class _Known:
    """A storage that has left, for as long as it lives."""

    storage: weakref.ref[torch.UntypedStorage]
    witness: Tensor  # of the tensor that was sent
    version: int
    parcel: weakref.ref[Parcel]

    def is_current(self, tensor: Tensor, storage: torch.UntypedStorage) -> bool:
        """Whether what was sent is what ``tensor`` holds now."""
        unchanged = self.storage() is storage and self.version == tensor._version
        return unchanged and _compat.shares_version(tensor, self.witness)


@dataclass
class _Road(threading.local):
    """Where one thread's forward stands."""

    journey: Journey = field(default_factory=Journey)
    block: int = -1
    # Storages that do not travel, by id, and why; a dead one's number may belong to another by now.
    stay: dict[int, tuple[weakref.ref[torch.UntypedStorage], str]] = field(default_factory=dict)
    leaving: deque[weakref.ref[Parcel]] = field(default_factory=deque)
    known: dict[int, _Known] = field(default_factory=dict)  # by id of the storage


class Offloader:
    """The hooks of one applied strategy.

    Args:
        options: of the strategy.
        weights: gives the parameters and buffers that never travel.
    """

    def __init__(self, options: Offloading, weights: Callable[[], Iterable[Tensor]]) -> None:
        self._store: Store | None = open_store(options.store)
        self._options, self._weights = options, weights
        self._road = _Road()
        self.traffic = Traffic(self._store.lane)

    @contextmanager
    def unit(self, index: int, offload: bool, last: bool, arguments: Sequence[object]) -> Iterator[None]:
        """Around the forward of a block, or of a region that starts with it.

        Args:
            index: of the block. Whatever is not behind the one before is the first of another forward.
            offload: whether it sends away what it saves.
            last: whether no other follows: wait for what is still leaving.
            arguments: leaves of what the block is called with.
        """
        if _compat.inside_function_transform():
            raise RuntimeError(
                "offloading does not work inside torch.func transforms (vmap, grad, ...): their tensors have no memory "
                "of their own that could be sent away"
            )
        tensors, store = [leaf for leaf in arguments if isinstance(leaf, Tensor)], self._store
        if index <= self._road.block or self._road.block < 0:
            self._begin(tensors)
        self._road.block = index
        device = tensors[0].device if tensors else torch.device("cpu")
        started = store.mark(device)
        with saved_tensors_hooks(self._pack, _unpack) if offload else nullcontext():
            yield
        self._road.journey.forwards.append((index, started, store.mark(device)))
        if last:
            self.end_forward()

    def end_forward(self) -> None:
        """Wait for what is still leaving."""
        self._let_go(0)
        self._road.block = -1

    def watch(self, output: Any) -> None:
        """Begin to bring back as soon as backward reaches the stack: its ``output`` gets a gradient.

        The regions that stay give the first parcels the time to come back.
        """
        tensors = (leaf for leaf in _compat.tree_flatten(output)[0] if isinstance(leaf, Tensor))
        # A leaf that is handed through is the caller's own, and would keep its hook for good.
        last = next((tensor for tensor in tensors if tensor.grad_fn is not None), None)
        if last is not None and self._options.prefetch:
            start_first = partial(_start_first, self._road.journey, self._options.prefetch)
            start_first.__torch_unserializable__ = True  # torch.save leaves it out without a warning
            last.register_hook(start_first)

    def close(self) -> None:
        """Let the store end with its last parcel."""
        self._store = None

    def _begin(self, tensors: Iterable[Tensor]) -> None:
        """Another forward: nothing of the one before is waited for any more."""
        self.traffic.last = self._road.journey = Journey()
        self._road.leaving.clear()
        # What the first block is handed is held by whoever made it; the output of an operation dies with the graph.
        inputs = (tensor for tensor in tensors if tensor.grad_fn is None)
        self._road.stay = {id(storage): (weakref.ref(storage), "input") for storage in _storages(inputs)} | {
            id(storage): (weakref.ref(storage), "parameter") for storage in _storages(self._weights())
        }

    def _pack(self, tensor: Tensor) -> Ticket | Held:
        with _aside():
            nbytes = tensor.untyped_storage().nbytes() if tensor.layout is torch.strided else 0
            self.traffic.packed.add(nbytes)
            reason = self._reason_to_stay(tensor, nbytes)
            parcel = None if reason else self._parcel_of(tensor, nbytes)
            if parcel is not None:
                ticket = Ticket(parcel, tensor)
                self._let_go(self._options.prefetch)
                return ticket
        reason = reason or ("strategy was removed" if self._store is None else "store is full")
        self.traffic.skipped[reason].add(nbytes)
        return held.keep(tensor)

    def _reason_to_stay(self, tensor: Tensor, nbytes: int) -> str | None:
        plain = type(tensor) in (Tensor, nn.Parameter) or _compat.is_fake(tensor)
        strided = tensor.layout is torch.strided and not tensor.is_nested
        if not plain or not strided or tensor.is_conj() or tensor.is_neg() or tensor._is_zerotensor():
            return "kind of tensor"
        owner = tensor if tensor._base is None else tensor._base
        if isinstance(owner, nn.Parameter):
            return "parameter"
        storage = tensor.untyped_storage()
        named, reason = self._road.stay.get(id(storage), (lambda: None, None))
        if named() is not storage:
            reason = None
        if reason is None and owner.is_leaf and owner.requires_grad:
            reason = "input"
        if reason is None and (nbytes < self._options.min_bytes or nbytes == 0):
            reason = "small"
        if reason is None and nbytes % tensor.itemsize:
            reason = "kind of tensor"
        return reason

    def _parcel_of(self, tensor: Tensor, nbytes: int) -> Parcel | None:
        """The parcel of a tensor's storage, sent now if need be; None when the store is full, or gone."""
        storage, store, road = tensor.untyped_storage(), self._store, self._road
        known = road.known.get(id(storage))
        parcel = None if known is None else known.parcel()
        if parcel is not None and known.is_current(tensor, storage):
            self.traffic.deduplicated.add(nbytes)
            return parcel
        if store is None:
            return None
        deposit = store.put(tensor.detach().as_strided((nbytes // tensor.itemsize,), (1,), 0))
        if deposit is None:
            return None
        self.traffic.moved.add(nbytes)
        parcel = Parcel(deposit, road.journey, road.block, self._options.prefetch, self.traffic)
        reference = weakref.ref(storage, partial(_forget, road.known, id(storage)))
        road.known[id(storage)] = _Known(reference, held.witness(tensor), tensor._version, weakref.ref(parcel))
        road.leaving.append(weakref.ref(parcel))
        return parcel

    def _let_go(self, under_way: int) -> None:
        """Wait for the oldest copies out, until no more than ``under_way`` are left, and free their sources."""
        while len(self._road.leaving) > under_way:
            parcel = self._road.leaving.popleft()()
            if parcel is not None:
                parcel.deposit.let_go()


def _start_first(journey: Journey, prefetch: int, gradient: Tensor) -> None:
    with _aside():
        for parcel in journey.before(len(journey.parcels), prefetch):
            parcel.start_back(new_backward=True)


def _unpack(saved: Ticket | Held) -> Tensor:
    return saved.unpack()


def _forget(known: dict[int, _Known], key: int, storage: weakref.ref[torch.UntypedStorage]) -> None:
    # The number of a dead storage may belong to a new one by now.
    if key in known and known[key].storage is storage:
        del known[key]


def _storages(tensors: Iterable[Tensor]) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in tensors if tensor.layout is torch.strided)


def _aside() -> AbstractContextManager[None]:
    """Copies are not operations of the step: a meter hears of them from the engine."""
    listener = held.listener()
    return nullcontext() if listener is None else listener.aside()
