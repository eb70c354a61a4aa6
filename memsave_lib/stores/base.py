"""What every store has in common, and the store that moves nothing."""

from __future__ import annotations

from abc import ABC, abstractmethod
from concurrent.futures import Future
from dataclasses import dataclass

import torch
from torch import Tensor

from memsave_lib.stores.streams import Copying, Mark, Moment


@dataclass
class Trip:
    """One way of one tensor: when its copy ran, and since when computation was waiting for it."""

    back: bool
    nbytes: int
    copying: Future[Copying] | Copying
    waited_from: Mark | None = None

    def failed(self) -> bool:
        """Whether the copy was called off or ended with an error; waits for its end."""
        return isinstance(self.copying, Future) and (self.copying.cancelled() or self.copying.exception() is not None)

    def seconds(self) -> tuple[float, float]:
        """Start and end of the copy on the clock of ``time.perf_counter``; waits for its end."""
        copying = self.copying.result() if isinstance(self.copying, Future) else self.copying
        return copying.started.seconds(), copying.ended.seconds()


class Deposit(ABC):
    """The bytes of one tensor in a store."""

    out: Trip
    back: Trip | None = None

    @abstractmethod
    def let_go(self) -> None:
        """Drop the source, once its copy does not need it any more; raises what went wrong with the copy."""

    @abstractmethod
    def start_back(self) -> Tensor | None:
        """Begin to bring the bytes back; the memory that they will fill, unless that had begun already."""

    @abstractmethod
    def take(self) -> Tensor:
        """A tensor equal to the one that was put: one-dimensional, in new memory, safe to read."""

    @abstractmethod
    def close(self) -> None:
        """Give the space back. Copies that still run are waited for."""


class Store(ABC):
    """Takes tensors in and gives them back."""

    lane: str | None  # "host" or "disk"; None: where they are

    def __repr__(self) -> str:
        return f"{type(self).__name__}()"

    @abstractmethod
    def put(self, source: Tensor) -> Deposit | None:
        """Start to copy a one-dimensional, contiguous tensor; comes back at once. None when there is no room for it."""

    def mark(self, device: torch.device) -> Mark:
        """Where the computation of ``device`` stands, for timelines."""
        return Moment.now()

    @property
    @abstractmethod
    def stored_bytes(self) -> int:
        """Bytes of all open deposits."""

    @abstractmethod
    def close(self) -> None:
        """Refuse further tensors and give back what is not needed by open deposits."""


class NullStore(Store):
    """Leaves every tensor where it is: all of the engine's work but no copy. For tests and for measuring overheads."""

    lane = None

    def __init__(self) -> None:
        self._sizes: dict[int, int] = {}

    @property
    def stored_bytes(self) -> int:
        return sum(tuple(self._sizes.values()))

    def put(self, source: Tensor) -> Deposit:
        return _NullDeposit(source, self._sizes)

    def close(self) -> None:
        pass


class _NullDeposit(Deposit):
    def __init__(self, source: Tensor, sizes: dict[int, int]) -> None:
        self._source, self._sizes, self._on_its_way = source, sizes, False
        self.out = Trip(False, source.nbytes, Copying(Moment.now(), Moment.now()))
        sizes[id(self)] = source.nbytes

    def let_go(self) -> None:
        pass

    def start_back(self) -> Tensor | None:
        if self._on_its_way:
            return None
        self._on_its_way = True
        self.back = Trip(True, self._source.nbytes, Copying(Moment.now(), Moment.now()))
        return self._source

    def take(self) -> Tensor:
        self.start_back()
        self._on_its_way = False
        self.back.waited_from = Moment.now()
        return self._source

    def close(self) -> None:
        self._sizes.pop(id(self), None)
