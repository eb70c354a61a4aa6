"""A training step as lanes on one clock, measured or simulated: what computes, what is copied, who waits for whom."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import pandas as pd


@dataclass(frozen=True)
class Span:
    """Something that lasts from ``start`` to ``end``, in seconds.

    ``kind`` is ``"forward"``, ``"recompute"`` or ``"backward"`` for computation, ``"out"`` or ``"in"`` for a copy, and
    for a stall what computation waits for: ``"leaving"`` (an earlier copy out), ``"drain"`` (the last copies out, at
    the end of forward) or ``"returning"`` (a copy back). ``nbytes`` is what is copied or waited for.
    """

    start: float
    end: float
    kind: str
    block: int
    nbytes: int = 0

    @property
    def seconds(self) -> float:
        return self.end - self.start


@dataclass(frozen=True)
class Lanes:
    """A step as lanes on one clock: computation, copies out, copies back, and when computation waits for a copy."""

    compute: tuple[Span, ...] = ()
    copy_out: tuple[Span, ...] = ()
    copy_in: tuple[Span, ...] = ()
    stalls: tuple[Span, ...] = ()

    @property
    def step_seconds(self) -> float:
        """From the start of the first span to the end of the last."""
        spans = self._spans()
        return max(span.end for span in spans) - min(span.start for span in spans) if spans else 0.0

    @property
    def compute_seconds(self) -> float:
        return math.fsum(span.seconds for span in self.compute)

    @property
    def stall_seconds(self) -> float:
        return math.fsum(span.seconds for span in self.stalls)

    def frame(self) -> pd.DataFrame:
        """One row a span, in the order of their starts: lane, kind, block, start, seconds, bytes."""
        import pandas as pd

        names = ("compute", "copy out", "copy in", "stall")
        lanes = zip(names, (self.compute, self.copy_out, self.copy_in, self.stalls), strict=True)
        rows = [
            (name, span.kind, span.block, span.start, span.seconds, span.nbytes)
            for name, lane in lanes
            for span in lane
        ]
        rows.sort(key=lambda row: row[3])
        return pd.DataFrame(rows, columns=["lane", "kind", "block", "start", "seconds", "bytes"])

    def _spans(self) -> tuple[Span, ...]:
        return (*self.compute, *self.copy_out, *self.copy_in, *self.stalls)


@dataclass(frozen=True)
class StreamTimeline(Lanes):
    """What :func:`~memsave_lib.simulation.simulate` finds.

    ``memory`` holds, after each change, the second and the bytes of saved activations on the device: kept, leaving or
    back again. ``prefetch_hits`` counts tensors that were on their way back when backward asked for them.
    """

    memory: tuple[tuple[float, int], ...] = ()
    prefetch_hits: int = 0

    @property
    def peak_bytes(self) -> int:
        """The most that is held at once."""
        return max((held for _, held in self.memory), default=0)
