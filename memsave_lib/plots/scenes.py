"""What the picture of a lab shows: a forecast, a step that runs or has run, earlier ones."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from memsave_lib.formulas.forecast import Forecast
from memsave_lib.lanes import Lanes
from memsave_lib.plots.drawing import POINTS
from memsave_lib.trace import Trace


@dataclass(frozen=True)
class Ghost:
    """An earlier run, drawn as an outline."""

    name: str
    seconds: np.ndarray
    live_bytes: np.ndarray

    @classmethod
    def of(cls, name: str, trace: Trace) -> Ghost:
        curve = trace.curve(POINTS)
        return cls(name, since_start(curve["seconds"].to_numpy()), curve["total"].to_numpy())


@dataclass(frozen=True)
class Scene:
    """What a picture shows: a forecast, and over it a step that runs or has run.

    ``pace`` is the seconds that a FLOP of the forecast takes; None: nobody knows yet, and time has no numbers. The axes
    have room for all of ``reach``, so that they stay where they are from one of these to the next.
    """

    forecast: Forecast | None = None
    pace: float | None = None
    trace: Trace | None = None
    running: bool = False
    ghosts: Sequence[Ghost] = ()
    budget: int | None = None
    copies: Lanes | None = None
    reach: Sequence[Forecast] = ()

    @property
    def events(self) -> bool:
        """Whether anything has been measured."""
        return self.trace is not None and bool(self.trace.events)

    @property
    def now(self) -> float:
        """Seconds measured so far."""
        return self.trace.seconds if self.trace is not None else 0.0

    def looks_like(self, other: Scene) -> bool:
        """Whether it is made of the very same things."""
        mine, theirs = ([one.forecast, one.trace, one.copies, *one.ghosts, *one.reach] for one in (self, other))
        same = len(mine) == len(theirs) and all(one is two for one, two in zip(mine, theirs, strict=True))
        return same and (self.pace, self.running, self.budget) == (other.pace, other.running, other.budget)

    @property
    def forecast_seconds(self) -> np.ndarray:
        """Where each moment of the forecast lies on the axis of time."""
        return np.array(self.forecast.work) * (self.pace or 1.0)

    @property
    def peak_seconds(self) -> float:
        """Where the words about the peak stand: of the finished step, or of the forecast."""
        if self.events and not self.running:
            return self.trace.peak_seconds
        if self.forecast is None:
            return 0.0
        live = [moment.live_bytes for moment in self.forecast.moments]
        return float(self.forecast_seconds[live.index(max(live))])

    @property
    def end(self) -> float:
        """Of the longest thing shown."""
        ends = [ghost.seconds[-1] for ghost in self.ghosts]
        if self.events:
            ends.append(self.now)
        if self.forecast is not None and (self.running or not self.events):
            ends += [one.flops * (self.pace or 1.0) for one in (self.forecast, *self.reach)]
        return max(ends, default=0.0) or 1.0

    @property
    def top(self) -> int:
        """The highest thing shown, in bytes."""
        tops = [int(ghost.live_bytes.max()) for ghost in self.ghosts]
        tops += [self.trace.peak_bytes] if self.events else []
        tops += [one.peak.live_bytes for one in (self.forecast, *self.reach) if one is not None]
        return max([*tops, self.budget or 1])


def pace_of(trace: Trace, forecast: Forecast, running: bool = False) -> float | None:
    """Seconds that a FLOP of the forecast has taken in a step, finished or still running; None before its beginning."""
    if not trace.seconds:
        return None
    if not running:
        return trace.seconds / forecast.flops
    return trace.seconds / forecast.work_done((event.phase, event.block) for event in trace.events)


def since_start(seconds: np.ndarray) -> np.ndarray:
    """What happens before the first change of memory is not part of the step."""
    return seconds - seconds[0]
