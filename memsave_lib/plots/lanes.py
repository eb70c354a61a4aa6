"""Computation and copies on one clock: who waits for whom."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import fsum

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from memsave_lib.lanes import Lanes, Span
from memsave_lib.plots.drawing import (
    BLACK,
    BLUE,
    DPI,
    GREEN,
    GREY,
    PALE,
    PURPLE,
    ROUND,
    SKY,
    SMALL,
    TEXT,
    VERMILION,
    WIDTH,
    Shown,
    axes_at,
    check_not_empty,
    labeled_pairs,
)
from memsave_lib.units import exact_bytes, human_bytes

#: Name in the legend, face, hatch and color of text of each kind of span. Copies have lanes with names instead.
LOOKS = {
    "forward": ("forward", SKY, "", BLACK),
    "recompute": ("forward again", SKY, "////", BLACK),
    "backward": ("backward", BLUE, "", "white"),
    "stall": ("waiting for a copy", "white", "xxxxx", VERMILION),
    "out": ("copy out", GREEN, "", "white"),
    "in": ("copy back", PURPLE, "", BLACK),
}
EMPTY_LANE = "#F1F1F1"
LEFT, RIGHT = 0.85, 0.22  # margins, in inches
LINE, COMPUTE, COPY, GAP = 0.19, 0.3, 0.19, 0.24  # heights, in inches: a line of title, lanes, what follows them
#: Of each lane: where it begins below the title, and its height.
ROWS = {"compute": (0.0, COMPUTE), "copy out": (COMPUTE, COPY), "copy back": (COMPUTE + COPY, COPY)}
#: Inches below which a box has no room for an outline or a hatch.
NARROW = 0.06
HAIRLINE = 0.016
UNITS = (("seconds", "s", 1.0), ("milliseconds", "ms", 1e-3), ("microseconds", "us", 1e-6))


def stream_lanes(timelines: Mapping[str, Lanes] | Sequence[tuple[str, Lanes]], *, seconds: bool = True) -> Shown:
    """Computation above, copies out and back below it, and in red where computation waits for a copy.

    Several timelines stand one below the other on the same clock, each from its own start. Numbers are blocks.

    Args:
        timelines: label -> simulated or measured lanes.
        seconds: False leaves out of the sentence what differs from one measured run to the next: seconds and waits.
    """
    labeled = labeled_pairs(timelines, "timelines")
    for label, timeline in labeled:
        check_not_empty(f"the timeline {label!r}", _spans(timeline))
    sums = [_sums(timeline) for _, timeline in labeled]
    # Bold text is about a twelfth of an inch a letter, other text a fourteenth.
    longest = max(
        len(label) / 12 + (len(first) + len(second)) / 14
        for (label, _), (first, second) in zip(labeled, sums, strict=True)
    )
    lines = 1 if longest < WIDTH - LEFT - RIGHT - 0.2 else 2
    pair = lines * LINE + COMPUTE + 2 * COPY + GAP
    figure = Figure(figsize=(WIDTH, len(labeled) * pair + 0.84), dpi=DPI, facecolor="white")
    axes = axes_at(figure, LEFT, 0.48, WIDTH - LEFT - RIGHT, len(labeled) * pair)
    across = max(timeline.step_seconds for _, timeline in labeled)
    name, _, unit = time_unit(across)
    axes.set(xlim=(0, across / unit or 1.0), ylim=(len(labeled) * pair, 0))
    for number, (label, timeline) in enumerate(labeled):
        top = number * pair + lines * LINE
        draw_timeline(axes, top, label, timeline, unit, lines)
        for lane, (upper, height) in ROWS.items():
            axes.text(
                -0.08 / (WIDTH - LEFT - RIGHT), top + upper + height / 2, lane, transform=axes.get_yaxis_transform(),
                ha="right", va="center", fontsize=SMALL,
            )  # fmt: skip
    _finish(figure, axes, name, [timeline for _, timeline in labeled])
    return Shown(figure, lanes_in_words(labeled, seconds))


def draw_timeline(axes: Axes, top: float, label: str, timeline: Lanes, unit: float, lines: int = 1) -> None:
    """A timeline with its title.

    Args:
        axes: y in inches, downwards; x in units of time, from 0 on.
        top: of the lanes; the title stands above, in one or two ``lines``.
        unit: of time, in seconds.
    """
    first, second = _sums(timeline)
    axes.text(0, top - 0.05 - (lines - 1) * LINE, label, fontsize=TEXT, weight="bold", va="bottom")
    waits = axes.text(
        1, top - 0.05, second, transform=axes.get_yaxis_transform(), ha="right", va="bottom", fontsize=TEXT,
        color=VERMILION if timeline.stalls else GREY,
    )  # fmt: skip
    axes.annotate(first, (0, 0), xycoords=waits, ha="right", va="bottom", fontsize=TEXT)
    _draw_lanes(_Clock(axes, min(span.start for span in _spans(timeline)), unit), top, timeline)


@dataclass(frozen=True)
class _Clock:
    """Where a moment of a timeline lies on the axes."""

    axes: Axes
    start: float
    unit: float

    def at(self, moment: float) -> float:
        return (moment - self.start) / self.unit

    def inches(self, duration: float) -> float:
        return duration / self.unit * (WIDTH - LEFT - RIGHT) / self.axes.get_xlim()[1]

    def width(self, inches: float) -> float:
        """So many inches, on the axis."""
        return inches * self.axes.get_xlim()[1] / (WIDTH - LEFT - RIGHT)


def _draw_lanes(clock: _Clock, top: float, timeline: Lanes) -> None:
    axes, end = clock.axes, timeline.step_seconds / clock.unit
    rows = {name: (top + upper, height) for name, (upper, height) in ROWS.items()}
    axes.broken_barh([(0, end)], (top, COMPUTE + 2 * COPY), facecolor=EMPTY_LANE, linewidth=0, zorder=1)
    axes.plot([end, end], [top - 0.04, top + COMPUTE + 2 * COPY], color=BLACK, linewidth=1.3, zorder=5, clip_on=False)
    for kind in ("forward", "recompute", "backward"):
        _draw_spans(clock, *rows["compute"], kind, [span for span in timeline.compute if span.kind == kind])
    _draw_spans(clock, *rows["copy out"], "out", timeline.copy_out)
    _draw_spans(clock, *rows["copy back"], "in", timeline.copy_in)
    # Over the computation, because a measured block's time includes its waits.
    _draw_stalls(clock, *rows["compute"], timeline.stalls)


def _draw_spans(clock: _Clock, top: float, height: float, kind: str, spans: Sequence[Span]) -> None:
    """Boxes on a lane, each block's number in the longest stretch of its boxes if it has room there."""
    _, face, hatch, ink = LOOKS[kind]
    thinnest = clock.width(HAIRLINE) if kind in ("out", "in") else 0.0  # a copy shows, however short
    boxes = [(clock.at(span.start), max(span.seconds / clock.unit, thinnest)) for span in spans]
    # A line between neighbours, unless they are so narrow that it would hide them.
    roomy = all(clock.inches(span.seconds) > NARROW for span in spans if span.seconds)
    looks = {"facecolor": face, "edgecolor": "white", "hatch": hatch}
    clock.axes.broken_barh(boxes, (top, height), linewidth=0.8 if roomy else 0, zorder=2, **looks)
    longest: dict[int, tuple[float, float]] = {}
    copies = height == COPY
    # A computation goes on behind its stalls; copies are told apart by their gaps, which a number would hide.
    stretches = [(span.block, span.start, span.end) for span in spans] if copies else _stretches(spans, clock)
    for block, start, end in stretches:
        before = longest.get(block, (0.0, 0.0))
        if end - start > before[1] - before[0]:
            longest[block] = (start, end)
    # Over hatches and stalls a number needs a ground of its own.
    ground = None if copies else {"facecolor": face, "edgecolor": "none", "pad": 0.6}
    for block, (start, end) in longest.items():
        if clock.inches(end - start) > 0.05 + 0.075 * len(str(block)):
            clock.axes.text(
                clock.at((start + end) / 2), top + height / 2, block, ha="center", va="center_baseline", zorder=4,
                fontsize=SMALL - 1 if copies else SMALL, color=ink, bbox=ground,
            )  # fmt: skip


def _draw_stalls(clock: _Clock, top: float, height: float, stalls: Sequence[Span]) -> None:
    _, face, hatch, ink = LOOKS["stall"]
    for narrow in (False, True):
        some = [stall for stall in stalls if (clock.inches(stall.seconds) <= NARROW) == narrow]
        boxes = [(clock.at(stall.start), stall.seconds / clock.unit) for stall in some]
        looks = (
            {"facecolor": ink, "linewidth": 0}
            if narrow
            else {"facecolor": face, "hatch": hatch, "edgecolor": ink, "linewidth": 0.9}
        )
        clock.axes.broken_barh(boxes, (top, height), zorder=3, **looks)


def _stretches(spans: Sequence[Span], clock: _Clock) -> Iterator[tuple[int, float, float]]:
    """Spans of one block that follow each other without a gap that can be seen: (block, start, end)."""
    for block, members in groupby(spans, key=lambda span: span.block):
        first, *others = members
        start, end = first.start, first.end
        for span in others:
            if clock.inches(span.start - end) > NARROW / 2:
                yield block, start, end
                start = span.start
            end = span.end
        yield block, start, end


def _finish(figure: Figure, axes: Axes, unit: str, timelines: Sequence[Lanes]) -> None:
    """The axis of time, and a legend of the kinds that occur."""
    axes.xaxis.set_major_locator(MaxNLocator(8, steps=ROUND))
    axes.grid(axis="x", color=PALE, linewidth=0.6, zorder=0)
    axes.set_axisbelow(True)
    axes.set_yticks([])
    axes.spines["left"].set_visible(False)
    axes.set_xlabel(f"{unit}; the numbers are blocks", fontsize=TEXT)
    present = {span.kind for timeline in timelines for span in timeline.compute}
    present |= {"stall" for timeline in timelines if timeline.stalls}
    legend_of(figure, present)


def legend_of(figure: Figure, kinds: Collection[str]) -> None:
    """What the boxes of computation mean; copies have lanes with names."""
    handles = [
        Patch(
            facecolor=face, hatch=hatch, label=name, edgecolor=VERMILION if kind == "stall" else "white",
            linewidth=0.9 if kind == "stall" else 0,
        )
        for kind, (name, face, hatch, _) in LOOKS.items() if kind in kinds
    ]  # fmt: skip
    figure.legend(
        handles=handles, loc="upper left", ncols=max(len(handles), 1), fontsize=SMALL, frameon=False,
        borderaxespad=0.3, handlelength=1.6, columnspacing=1.4,
    )  # fmt: skip


def time_unit(longest: float) -> tuple[str, str, float]:
    """Name, sign and size of the unit in which so many seconds read well."""
    return next((unit for unit in UNITS if longest >= 0.9995 * unit[2]), UNITS[-1])  # 999.9 ms read 1.00 s


def human_seconds(duration: float) -> str:
    """Three digits: ``"1.50 s"``, ``"41.2 ms"``, ``"312 us"``."""
    _, sign, size = time_unit(duration)
    value = duration / size
    return f"{value:.{0 if value >= 99.95 else 1 if value >= 9.995 else 2}f} {sign}"


def _spans(timeline: Lanes) -> tuple[Span, ...]:
    return (*timeline.compute, *timeline.copy_out, *timeline.copy_in, *timeline.stalls)


def _sums(timeline: Lanes) -> tuple[str, str]:
    """What stands over a timeline: its step, and how long it waits."""
    peak = getattr(timeline, "peak_bytes", 0)  # a measured step has none: ask the meter
    held = f", at most {human_bytes(peak)} held" if peak else ""
    waits = f"waiting {human_seconds(_waiting(timeline))}" if timeline.stalls else "no waiting"
    return f"step {human_seconds(timeline.step_seconds)}{held}, ", waits


def _waiting(timeline: Lanes) -> float:
    return fsum(stall.seconds for stall in timeline.stalls)


def lanes_in_words(labeled: Iterable[tuple[str, Lanes]], seconds: bool = True) -> str:
    """Copies, bytes and waits of each timeline."""
    return " ".join(_sentence(label, timeline, seconds) for label, timeline in labeled)


def _sentence(label: str, timeline: Lanes, seconds: bool) -> str:
    out, back = ([span.nbytes for span in lane] for lane in (timeline.copy_out, timeline.copy_in))
    copies = f"{_count(len(out), 'copy', 'copies')} out, {exact_bytes(sum(out))}"
    facts = [f"{copies}, and {len(back)} back, {exact_bytes(sum(back))}" if out or back else "no copies"]
    if peak := getattr(timeline, "peak_bytes", 0):
        facts.append(f"at most {exact_bytes(peak)} of saved activations held")
    if seconds:
        waits = f"{human_seconds(_waiting(timeline))} in {_count(len(timeline.stalls), 'wait', 'waits')}"
        step = f"step {human_seconds(timeline.step_seconds)}"
        facts.insert(0, f"{step}, of which {waits}" if timeline.stalls else f"{step}, without a wait")
    return f"{label}: {'; '.join(facts)}."


def _count(number: int, one: str, many: str) -> str:
    return f"{number} {one if number == 1 else many}"
