"""What the offload engine counts and when things happened."""

from __future__ import annotations

import weakref
from collections import defaultdict
from dataclasses import dataclass, field, replace
from itertools import groupby, islice
from typing import TYPE_CHECKING

from memsave_lib.lanes import Lanes, Span
from memsave_lib.units import exact_bytes

if TYPE_CHECKING:
    from memsave_lib.offload import Parcel
    from memsave_lib.stores.base import Trip
    from memsave_lib.stores.streams import Mark


@dataclass
class Tally:
    """Tensors and their bytes; bytes are those of whole storages."""

    tensors: int = 0
    bytes: int = 0

    def add(self, nbytes: int) -> None:
        self.tensors += 1
        self.bytes += nbytes


@dataclass
class Journey:
    """One forward of the stack and its backward: what left, in which order, and when. Holds no tensor and no parcel."""

    backward: int = 1  # which backward through the graph this is: more than one where the graph is retained
    parcels: list[weakref.ref[Parcel]] = field(default_factory=list)
    trips: list[tuple[int, Trip]] = field(default_factory=list)  # (block, trip)
    forwards: list[tuple[int, Mark, Mark]] = field(default_factory=list)  # (block, start, end)

    def before(self, place: int, count: int) -> list[Parcel]:
        """The last ``count`` parcels that left before the one at ``place`` and are still wanted."""
        alive = (parcel for ref in reversed(self.parcels[:place]) if (parcel := ref()) is not None)
        return list(islice(alive, count))

    def lanes(self) -> Lanes:
        """The timeline so far, in seconds since forward began.

        Backward is seen through what it asks for: a block's part begins with its first tensor and ends when another
        block asks; the last one's ends with its last tensor.
        """
        if not self.forwards:
            return Lanes()
        zero = self.forwards[0][1].seconds()
        compute = [Span(a.seconds() - zero, b.seconds() - zero, "forward", block) for block, a, b in self.forwards]
        out, back, stalls, asked = [], [], [], []
        for block, trip in list(self.trips):
            if trip.failed():
                continue
            start, end = (seconds - zero for seconds in trip.seconds())
            (back if trip.back else out).append(Span(start, end, "in" if trip.back else "out", block, trip.nbytes))
            if trip.waited_from is None:
                continue
            waiting = trip.waited_from.seconds() - zero
            if trip.back:
                asked.append((waiting, block))
            if end > waiting:
                stalls.append(Span(waiting, end, "returning" if trip.back else "leaving", block, trip.nbytes))
        for block, moments in groupby(sorted(asked), key=lambda moment: moment[1]):
            times = [at for at, _ in moments]
            if compute[-1].kind == "backward":
                compute[-1] = replace(compute[-1], end=times[0])
            compute.append(Span(times[0], times[-1], "backward", block))
        return Lanes(tuple(compute), tuple(out), tuple(back), tuple(stalls))


@dataclass
class Traffic:
    """What went where, since the strategy was applied.

    ``packed`` is every tensor that autograd saved in an offloaded segment: ``moved`` ones, those ``deduplicated``
    because their storage was away already, and those ``skipped``, by reason.
    """

    lane: str | None
    packed: Tally = field(default_factory=Tally)
    moved: Tally = field(default_factory=Tally)
    deduplicated: Tally = field(default_factory=Tally)
    skipped: defaultdict[str, Tally] = field(default_factory=lambda: defaultdict(Tally))
    returned: Tally = field(default_factory=Tally)
    prefetch_hits: int = 0  # asked for when on its way back already
    prefetch_misses: int = 0
    last: Journey = field(default_factory=Journey, repr=False)

    def snapshot(self) -> Traffic:
        """The counts as they are now."""
        skipped = defaultdict(Tally, {reason: replace(tally) for reason, tally in self.skipped.items()})
        tallies = {name: replace(getattr(self, name)) for name in ("packed", "moved", "deduplicated", "returned")}
        return replace(self, skipped=skipped, **tallies)

    @property
    def lanes(self) -> Lanes:
        """The timeline of the newest forward and its backward."""
        return self.last.lanes()

    @property
    def stalls(self) -> int:
        """How often computation waited for a copy in that step."""
        return len(self.lanes.stalls)

    @property
    def to_host(self) -> Tally:
        return self.moved if self.lane == "host" else Tally()

    @property
    def to_disk(self) -> Tally:
        return self.moved if self.lane == "disk" else Tally()

    def __str__(self) -> str:
        skipped = [f"{tally.tensors} skipped ({reason})" for reason, tally in self.skipped.items()]
        return (
            f"of {self.packed.tensors} saved tensors {self.moved.tensors} went to {self.lane or 'the null store'} "
            f"[{exact_bytes(self.moved.bytes)}], {self.deduplicated.tensors} shared their storage with those, "
            f"{', '.join(skipped) or 'none skipped'}; {self.returned.tensors} came back, {self.prefetch_hits} of them "
            f"ahead of use"
        )

    def count_asked(self, on_its_way: bool) -> None:
        if on_its_way:
            self.prefetch_hits += 1
        else:
            self.prefetch_misses += 1
