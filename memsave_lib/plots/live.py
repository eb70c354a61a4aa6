"""Memory against time while a step runs: the forecast first, then what is measured fills it.

One figure, drawn again and again: its axes stay, what is in them is replaced.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.text import Text

from memsave_lib.formulas.script import Moment
from memsave_lib.lanes import Lanes, Span
from memsave_lib.plots.drawing import (
    BLACK,
    GREEN,
    GREY,
    ON_WHITE,
    POINTS,
    PURPLE,
    SMALL,
    TEXT,
    VERMILION,
    LayeredCanvas,
    Shown,
    axes_at,
    in_own_style,
    write,
)
from memsave_lib.plots.rulers import Ruler
from memsave_lib.plots.scenes import Ghost, Scene, since_start
from memsave_lib.plots.timeline import draw_areas, draw_level, draw_phases, phases_at, sentence_of
from memsave_lib.units import exact_bytes, human_bytes, unit_for

LEFT, RIGHT = 0.72, 0.15  # margins, in inches
FOOT, BAND, LANES, HEAD = 0.46, 0.24, 0.36, 0.08  # heights, in inches: the axis of time, phases, copies, what is above
#: Room above the highest point for the words about it.
HEADROOM = 1.25
#: Where along a ghost its name may stand.
NAMES = (0.62, 0.74, 0.86, 0.5, 0.38)
UNDER_FORECAST, AHEAD = "#EDEDED", (0, (4, 2))


@dataclass
class MemoryPicture:
    """The picture of a lab. What :meth:`draw` returns is good until the next call: encode it at once.

    Args:
        size: width and height in inches.
        lanes: leave room for the copies of an offloaded step.
        explained: say in the picture what its marks mean, where no key stands beside it.
        dpi: pixels to the inch.
    """

    size: tuple[float, float] = (7.2, 3.4)
    lanes: bool = False
    explained: bool = False
    dpi: int = 132
    _figure: Figure = field(init=False, repr=False)
    _across: float = field(init=False, default=0.0)

    @in_own_style
    def __post_init__(self) -> None:
        self._figure = Figure(figsize=self.size, dpi=self.dpi, facecolor="white")
        LayeredCanvas(self._figure)
        width, bottom = self.size[0] - LEFT - RIGHT, FOOT
        self._lanes = self._strip(bottom, LANES) if self.lanes else None
        bottom += LANES + 0.04 if self.lanes else 0.0
        self._band = self._strip(bottom, BAND)
        height = self.size[1] - bottom - BAND - HEAD
        self._memory = axes_at(self._figure, LEFT, bottom + BAND + 0.01, width, height)
        self._memory.xaxis.set_visible(False)
        self._left, self._below = Ruler(self._memory, "y"), Ruler(self._lanes or self._band, "x", 6)
        self._unit = self._write(0.08, self.size[1] - HEAD - height / 2, rotation=90, ha="left", va="center")
        self._clock = self._write(LEFT + width / 2, 0.06, ha="center", va="bottom")
        if self.lanes:
            for name, place in (("copies out", 0.75), ("back", 0.25)):
                at = FOOT + place * LANES
                write(self._figure, LEFT - 0.06, at, name, ha="right", va="center", fontsize=SMALL - 1)

    def _strip(self, bottom: float, height: float) -> Axes:
        """Axes of the picture's width, without numbers."""
        axes = axes_at(self._figure, LEFT, bottom, self.size[0] - LEFT - RIGHT, height)
        axes.set(ylim=(0, 1))
        axes.spines[:].set_visible(False)
        axes.xaxis.set_visible(False)
        axes.yaxis.set_visible(False)
        return axes

    def _write(self, left: float, bottom: float, **style: object) -> Text:
        return write(self._figure, left, bottom, "", fontsize=TEXT, **style)

    @in_own_style
    def draw(self, scene: Scene) -> Shown:
        """Replace what is in the picture."""
        everywhere = list(filter(None, (self._memory, self._band, self._lanes)))
        unit, size = unit_for(scene.top)
        across, top = self._width_of(scene), HEADROOM * scene.top / size
        for axes in everywhere:
            for artist in [*axes.lines, *axes.collections, *axes.texts]:
                artist.remove()
            axes.set_xlim(0, across)
        self._memory.set_ylim(0, top)
        empty = scene.forecast is None and not (scene.events or scene.ghosts)
        self._left.show({}) if empty else self._left.fit(top)
        self._unit.set_text("live memory" if empty else f"live memory, {unit}")
        timed = scene.events or scene.pace is not None or bool(scene.ghosts)
        self._clock.set_text("seconds" if timed else "time" if empty else "time, by the work to be done")
        if timed:
            self._below.fit(across)
        else:
            self._below.show({})
        for number, ghost in enumerate(scene.ghosts if timed else ()):
            self._draw_ghost(ghost, size, number, scene.peak_seconds)
        if scene.forecast is not None and (scene.running or not scene.events):
            self._draw_forecast(scene, size)
        if scene.events:
            self._draw_trace(scene, size)
        if scene.forecast is None and not scene.events:
            words = "no such step has run yet"
            self._memory.text(0.5, 0.5, words, transform=self._memory.transAxes, ha="center", color=GREY, fontsize=TEXT)
        if scene.budget is not None:
            draw_level(self._memory, scene.budget, size, f"budget {human_bytes(scene.budget)}", GREEN, "left")
        if self._lanes is not None and scene.copies is not None:
            self._draw_copies(scene.copies)
        if self.explained:
            self._explain(bool(scene.forecast and scene.forecast.checkpoints))
        return Shown(self._figure, _sentence(scene))

    def _explain(self, recomputes: bool) -> None:
        """What the marks mean."""
        for legend in self._figure.legends:
            legend.remove()
        marks = {"checkpoint kept": ("^", BLACK), "forward again": ("s", VERMILION)} if recomputes else {}
        handles = [Line2D([], [], color=c, marker=m, linestyle="", label=name) for name, (m, c) in marks.items()]
        dashes = Line2D([], [], color=BLACK, linestyle=AHEAD, linewidth=1.1, label="predicted")
        self._figure.legend(
            handles=[dashes, *handles], loc="upper right", ncols=3, fontsize=SMALL, frameon=False, borderaxespad=0.2
        )

    def _width_of(self, scene: Scene) -> float:
        """Seconds across: while a step runs, the axis moves only when it must."""
        end = scene.end
        if not (scene.running and 0.8 * self._across <= 1.02 * end <= self._across):
            self._across = 1.1 * end if scene.running else 1.02 * end
        return self._across

    def _draw_ghost(self, ghost: Ghost, size: int, number: int, peak: float) -> None:
        """Its name stands away from the words about the peak, and from the names of others."""
        self._memory.step(ghost.seconds, ghost.live_bytes / size, where="post", color=GREY, linewidth=0.9, alpha=0.8)
        clear = [at for at in NAMES if abs(at * ghost.seconds[-1] - peak) > 0.28 * self._across] or NAMES
        place = np.searchsorted(ghost.seconds, clear[number % len(clear)] * ghost.seconds[-1])
        self._memory.text(
            ghost.seconds[place], ghost.live_bytes[place] / size, ghost.name, color=BLACK, fontsize=SMALL, ha="center",
            va="bottom", bbox=ON_WHITE, zorder=4,
        )  # fmt: skip

    def _draw_forecast(self, scene: Scene, size: int) -> None:
        """What lies ahead: all of it, or what is left."""
        seconds, live = scene.forecast_seconds, np.array([moment.live_bytes for moment in scene.forecast.moments])
        now = scene.now
        ahead = seconds >= now
        end = scene.forecast.flops * (scene.pace or 1.0)
        x, y = np.append(seconds[ahead], max(end, now)), live[ahead] / size
        if len(y):
            y = np.append(y, y[-1])
            self._memory.fill_between(x, y, step="post", facecolor=UNDER_FORECAST, linewidth=0)
            self._memory.step(x, y, where="post", color=BLACK, linewidth=1.1, linestyle=AHEAD)
        scale = scene.pace or 1.0
        left = [
            (stretch.phase, max(stretch.start * scale, now), stretch.end * scale)
            for stretch in scene.forecast.stretches
            if stretch.end * scale > now
        ]
        begun = {event.phase for event in scene.trace.events} if scene.events else set()
        draw_phases(self._band, left, self._inches(), begun if scene.events else None)
        if not scene.events:
            starts = {s.block: s.start * scale for s in scene.forecast.stretches if s.phase == "forward"}
            self._mark_checkpoints(starts[block] for block in scene.forecast.checkpoints)
        highest = int(live.argmax())
        if seconds[highest] >= now:
            peak = scene.forecast.peak
            words = f"predicted peak {human_bytes(peak.live_bytes)}\n{moment_place(peak)}"
            self._point_at(seconds[highest], live[highest] / size, words, hollow=True)

    def _draw_trace(self, scene: Scene, size: int) -> None:
        trace, curve = scene.trace, scene.trace.curve(POINTS)
        seconds = since_start(curve["seconds"].to_numpy())
        draw_areas(self._memory, seconds, curve, size)
        draw_phases(self._band, phases_at(seconds, curve["phase"].to_numpy()), self._inches())
        if scene.forecast is not None:
            first = {}
            for event in trace.events:
                if event.phase == "forward":
                    first.setdefault(event.block, event.seconds - trace.events[0].seconds)
            self._mark_checkpoints(first[block] for block in scene.forecast.checkpoints if block in first)
        if scene.running:
            now, live = seconds[-1], int(trace.live_bytes[-1])
            self._memory.plot(now, live / size, "o", color=BLACK, markersize=5)
            return
        total = curve["total"].to_numpy()
        right = scene.forecast is not None and scene.forecast.peak.live_bytes == trace.peak_bytes
        words = f"peak {human_bytes(trace.peak_bytes)}{', as predicted' if right else ''}\n{trace.peak_at.in_words}"
        self._point_at(seconds[total.argmax()], trace.peak_bytes / size, words)
        if scene.forecast is not None and not right:
            expected = scene.forecast.peak.live_bytes
            draw_level(self._memory, expected, size, f"predicted peak {human_bytes(expected)}")

    def _point_at(self, x: float, y: float, words: str, hollow: bool = False) -> None:
        across = self._memory.get_xlim()[1]
        side = "left" if x < 0.3 * across else "right" if x > 0.7 * across else "center"
        self._memory.plot(
            x, y, "v", markersize=7, color=BLACK, markerfacecolor="white" if hollow else BLACK, clip_on=False
        )
        self._memory.annotate(
            words, (x, y), (0, 6), textcoords="offset points", ha=side, va="bottom", fontsize=SMALL, bbox=ON_WHITE
        )

    def _mark_checkpoints(self, at: Iterable[float]) -> None:
        """Ticks on the floor, where forward lays a checkpoint down."""
        places = list(at)
        self._memory.plot(
            places, [0] * len(places), "^", color=BLACK, markersize=7, markeredgecolor="white", clip_on=False, zorder=5
        )

    def _draw_copies(self, copies: Lanes) -> None:
        for lane, color, bottom in ((copies.copy_out, GREEN, 0.53), (copies.copy_in, PURPLE, 0.03)):
            self._lanes.broken_barh(_boxes(lane, self._across), (bottom, 0.44), facecolor=color, linewidth=0)

    def _inches(self) -> float:
        """Of a second."""
        return (self.size[0] - LEFT - RIGHT) / self._across


def _boxes(lane: Sequence[Span], across: float) -> list[tuple[float, float]]:
    """A copy shows, however short."""
    return [(span.start, max(span.seconds, 0.003 * across)) for span in lane]


def moment_place(moment: Moment) -> str:
    """Where a predicted moment lies, as read on a figure."""
    return moment.phase if moment.block < 0 else f"{moment.phase}, block {moment.block}"


def _sentence(scene: Scene) -> str:
    if scene.events and scene.running:
        return f"{human_bytes(int(scene.trace.live_bytes[-1]))} live now."
    if scene.events:
        return sentence_of("", scene.trace)
    if scene.forecast is not None:
        peak = scene.forecast.peak
        return f"predicted peak {exact_bytes(peak.live_bytes)} in {moment_place(peak)}; no such step has run."
    return "no such step has run."
