"""Timelines of computation and copies that follow a slider."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from matplotlib.figure import Figure

from memsave_lib.lanes import Lanes
from memsave_lib.plots.drawing import SMALL, TEXT, WIDTH, LayeredCanvas, Shown, axes_at, in_own_style, write
from memsave_lib.plots.lanes import (
    COMPUTE,
    COPY,
    GAP,
    LEFT,
    LINE,
    RIGHT,
    ROWS,
    draw_timeline,
    lanes_in_words,
    legend_of,
    time_unit,
)
from memsave_lib.plots.rulers import Ruler

PAIR = LINE + COMPUTE + 2 * COPY + GAP
FOOT, HEAD = 0.5, 0.36
#: Ends of the axis of time, in powers of ten: it stays where it is until a step leaves it.
ENDS = (1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 6.0, 8.0, 10.0)


@dataclass
class LanesPicture:
    """The timelines of :func:`~memsave_lib.plots.stream_lanes`, drawn again and again.

    Args:
        rows: how many timelines.
        dpi: pixels to the inch.
    """

    rows: int
    dpi: int = 132
    _figure: Figure = field(init=False, repr=False)

    @in_own_style
    def __post_init__(self) -> None:
        height = self.rows * PAIR
        self._figure = Figure(figsize=(WIDTH, height + FOOT + HEAD), dpi=self.dpi, facecolor="white")
        LayeredCanvas(self._figure)
        self._axes = axes_at(self._figure, LEFT, FOOT, WIDTH - LEFT - RIGHT, height)
        self._axes.set(ylim=(height, 0))
        self._axes.yaxis.set_visible(False)
        self._axes.spines["left"].set_visible(False)
        self._below = Ruler(self._axes, "x", 8)
        legend_of(self._figure, ("forward", "recompute", "backward", "stall"))
        for number in range(self.rows):
            for lane, (upper, tall) in ROWS.items():
                middle = FOOT + height - number * PAIR - LINE - upper - tall / 2
                write(self._figure, LEFT - 0.08, middle, lane, ha="right", va="center", fontsize=SMALL)
        middle = LEFT + (WIDTH - LEFT - RIGHT) / 2
        self._clock = write(self._figure, middle, 0.06, "", ha="center", va="bottom", fontsize=TEXT)

    @in_own_style
    def draw(self, timelines: Mapping[str, Lanes]) -> Shown:
        """Replace what is in the picture; good until the next call."""
        for artist in [*self._axes.lines, *self._axes.collections, *self._axes.texts]:
            artist.remove()
        longest = max(timeline.step_seconds for timeline in timelines.values())
        name, _, unit = time_unit(longest)
        end = _end_of_axis(longest / unit)
        self._axes.set_xlim(0, end)
        self._below.fit(end)
        self._clock.set_text(f"{name}; the numbers are blocks")
        for number, (label, timeline) in enumerate(timelines.items()):
            draw_timeline(self._axes, number * PAIR + LINE, label, timeline, unit)
        return Shown(self._figure, lanes_in_words(timelines.items()))


def _end_of_axis(longest: float) -> float:
    power = 10.0 ** math.floor(math.log10(longest))
    return next(end * power for end in ENDS if end * power >= longest)
