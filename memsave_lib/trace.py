"""What a meter saw, as a history: live bytes over time, by category, and where the peak was.

The meter writes down facts while the step runs (:class:`StorageFacts`, :class:`Event`); this module decides afterwards
what each storage was, when its whole life is known. Then every figure is a sum over one table.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from memsave_lib.arguments import whole_number

if TYPE_CHECKING:
    import pandas as pd

CATEGORIES = (
    "parameter",
    "buffer",
    "gradient",
    "optimizer",
    "input",
    "activation",
    "recomputed",
    "output",
    "temporary",
)
PHASES = ("forward", "backward", "recompute", "optimizer")


@dataclass(frozen=True)
class Place:
    """A moment of the step: its phase, the module at work and the operation."""

    phase: str
    module: str
    op: str

    def __str__(self) -> str:
        return ", ".join(part for part in (self.phase, self.module, self.op) if part)

    @property
    def in_words(self) -> str:
        """Without the names of lists: ``"backward, block 5, down"``; outside of every module the operation."""
        path = self.module.split(".")
        at = next((i for i, part in enumerate(path) if part.isdecimal()), None)
        block = [] if at is None else [f"block {path[at]}"]
        within = ".".join(path if at is None else path[at + 1 :])
        return ", ".join(part for part in (self.phase, *block, within or ("" if block else self.op)) if part)


@dataclass(slots=True)
class StorageFacts:
    """What the meter noted about one storage while it lived."""

    nbytes: int
    first_bytes: int = field(init=False)  # when it was first seen; it may grow
    label: str | None = None  # parameter, buffer, gradient, optimizer: known for certain
    packed: bool = False  # autograd saved it for backward
    held: int = 0  # by how many saved tensors it is held right now
    existed_before: bool = False  # first seen as an argument of an operation
    born_in: str = "forward"
    born_epoch: int = 0
    died_in: str | None = None
    died_epoch: int = -1
    leaf_hooked: bool = False  # the gradient of the leaf that owns it is being listened for

    def __post_init__(self) -> None:
        self.first_bytes = self.nbytes

    def category(self) -> str:
        """What this storage was, told from its whole life."""
        if self.label is not None:
            return self.label
        if self.born_in == "recompute":
            return "recomputed"
        if self.packed:
            return "activation"
        if self.existed_before:
            return "input"
        if self.born_in == "forward" and self.died_epoch != self.born_epoch:
            # It outlived forward without being packed: kept on a function's ctx if backward frees it, else by others.
            return "activation" if self.died_in in ("backward", "recompute") else "output"
        return "temporary"


@dataclass(frozen=True, slots=True)
class Event:
    """A storage appears, vanishes or changes its size by ``delta`` bytes."""

    seconds: float
    storage: StorageFacts
    delta: int
    phase: str
    module: str
    op: str

    @property
    def block(self) -> int:
        """The first number in the module's path, that of a block in a list; -1 outside of every list."""
        return next((int(part) for part in self.module.split(".") if part.isdecimal()), -1)


@dataclass(frozen=True, slots=True)
class AwayEvent:
    """So many bytes more (or, negative, fewer) lie on the host or the disk."""

    seconds: float
    after: int  # number of events before it
    lane: str  # "host" or "disk"
    delta: int


@dataclass(frozen=True)
class Audit:
    """What the allocator did meanwhile: it also sees what an operation takes and returns within itself."""

    peak_bytes: int  # highest live bytes by the allocator's count, on top of what was alive before
    seconds: np.ndarray
    live_bytes: np.ndarray


@dataclass(frozen=True)
class Trace:
    """The memory history of a step (or of several, one after the other).

    All byte counts are of whole storages, each counted once however many tensors share it.
    """

    events: Sequence[Event]
    initial: Sequence[StorageFacts]  # alive when the step began
    saved_bytes: int  # held by saved tensors at the end of forward; the largest figure if there were several
    audit: Audit | None = None
    away: Sequence[AwayEvent] = ()  # what was sent away: none of it is in the figures of live bytes
    _history: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        """Live bytes of each category (column) before the step (row 0) and after each event."""
        column = {category: number for number, category in enumerate(CATEGORIES)}
        changes = np.zeros((len(self.events) + 1, len(CATEGORIES)), dtype=np.int64)
        for storage in self.initial:
            changes[0, column[storage.category()]] += storage.first_bytes
        for row, event in enumerate(self.events, start=1):
            changes[row, column[event.storage.category()]] += event.delta
        object.__setattr__(self, "_history", changes.cumsum(axis=0))

    @cached_property
    def _peak_row(self) -> int:
        return int(self._history.sum(axis=1).argmax())

    @property
    def start_bytes(self) -> int:
        """Live bytes when the step began: parameters, inputs, and whatever earlier steps left."""
        return int(self._history[0].sum())

    @property
    def seconds(self) -> float:
        """From the first change of memory to the last."""
        return self.events[-1].seconds - self.events[0].seconds if self.events else 0.0

    @property
    def live_bytes(self) -> np.ndarray:
        """Live bytes before the step (first entry) and after each event."""
        return self._history.sum(axis=1)

    @property
    def peak_bytes(self) -> int:
        """The largest number of live bytes during the step; see :attr:`peak_at` for when that was."""
        return int(self._history[self._peak_row].sum())

    @property
    def peak_at(self) -> Place:
        if self._peak_row == 0:
            return Place("before the step", "", "")
        event = self.events[self._peak_row - 1]
        return Place(event.phase, event.module, event.op)

    @property
    def peak_seconds(self) -> float:
        """When the peak was, in seconds since the first change of memory."""
        return self.events[self._peak_row - 1].seconds - self.events[0].seconds if self._peak_row else 0.0

    @property
    def at_peak(self) -> dict[str, int]:
        """Bytes of each category at the moment of the peak; they add up to :attr:`peak_bytes`."""
        return dict(zip(CATEGORIES, map(int, self._history[self._peak_row]), strict=True))

    @property
    def at_end(self) -> dict[str, int]:
        """Bytes of each category that are still alive after the last event."""
        return dict(zip(CATEGORIES, map(int, self._history[-1]), strict=True))

    @property
    def host_peak_bytes(self) -> int:
        """The most that lay on the host at once; without an accelerator that is the same memory, counted apart."""
        return int(self._away_level("host").max())

    @property
    def disk_peak_bytes(self) -> int:
        """The most that was stored on disk at once."""
        return int(self._away_level("disk").max())

    def _away_level(self, lane: str) -> np.ndarray:
        """Bytes in a lane before the first change and after each."""
        return np.cumsum([0, *(event.delta for event in self.away if event.lane == lane)], dtype=np.int64)

    def _away_column(self, lane: str) -> np.ndarray:
        """Bytes in a lane at each event: what was sent or brought back before the next one counts already."""
        changes = np.zeros(len(self.events) + 1, dtype=np.int64)
        for event in self.away:
            if event.lane == lane:
                changes[event.after] += event.delta
        return changes.cumsum()[1:]

    @property
    def explained_share(self) -> float | None:
        """The part of the true peak that the meter saw; the rest is workspace inside operations. None without audit."""
        return None if self.audit is None else self.peak_bytes / (self.start_bytes + self.audit.peak_bytes)

    def peak_of(self, *categories: str) -> int:
        """The largest sum of these categories over the step (not always at the moment of the whole peak)."""
        unknown = [category for category in categories if category not in CATEGORIES]
        if unknown or not categories:
            raise ValueError(f"peak_of({', '.join(map(repr, categories))}): name some of {', '.join(CATEGORIES)}")
        columns = [CATEGORIES.index(category) for category in categories]
        return int(self._history[:, columns].sum(axis=1).max())

    @property
    def phases(self) -> list[tuple[str, float, float]]:
        """The phases in turn: (phase, first second, last second). A recomputation shows as a phase of its own."""
        spans: list[tuple[str, float, float]] = []
        for event in self.events:
            if spans and spans[-1][0] == event.phase:
                spans[-1] = (event.phase, spans[-1][1], event.seconds)
            else:
                if spans:
                    spans[-1] = (*spans[-1][:2], event.seconds)
                spans.append((event.phase, event.seconds, event.seconds))
        return spans

    def frame(self) -> pd.DataFrame:
        """One row an event: seconds since the start, phase, module, op, total bytes, and bytes of each category.

        ``host`` and ``disk`` are what has been sent away; the total does not hold them.
        """
        import pandas as pd

        rows = self._history[1:]
        columns = {
            "seconds": [event.seconds for event in self.events],
            "phase": [event.phase for event in self.events],
            "module": [event.module for event in self.events],
            "op": [event.op for event in self.events],
            "total": rows.sum(axis=1),
        }
        columns |= {name: rows[:, number] for number, name in enumerate(CATEGORIES)}
        return pd.DataFrame(columns | {lane: self._away_column(lane) for lane in ("host", "disk")})

    def curve(self, max_points: int = 400) -> pd.DataFrame:
        """The frame thinned for drawing: the highest row of each of ``max_points`` stretches, so no peak is lost.

        The index keeps the number of each event.
        """
        whole_number("max_points", max_points)
        frame = self.frame()
        if len(frame) <= max_points:
            return frame
        stretches = np.array_split(np.arange(len(frame)), max_points)
        total = frame["total"].to_numpy()
        return frame.iloc[[rows[total[rows].argmax()] for rows in stretches]]
