"""Curves and points: bytes against a number, and bytes against what they cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from memsave_lib.plots.drawing import (
    BLACK,
    BLUE,
    DPI,
    GREY,
    ON_WHITE,
    PALE,
    SERIES,
    SMALL,
    TEXT,
    WIDTH,
    Shown,
    axes_at,
    check_not_empty,
    label_inches,
)
from memsave_lib.plots.labels import Labels, dot_boxes
from memsave_lib.units import exact_bytes, human_bytes, unit_for

if TYPE_CHECKING:
    from memsave_lib.comparison import Measurement


def bytes_against(
    name: str,
    curves: Mapping[str, Mapping[int, int]],
    measured: Mapping[str, Mapping[int, int]] | None = None,
    mark: int | Mapping[int, str] | None = None,
    what: str = "saved bytes",
    size: tuple[float, float] = (WIDTH, 3.3),
) -> Shown:
    """Bytes as a function of one number: predicted as lines, measured as rings on them.

    Args:
        name: of that number: ``"seq_len"``, ``"checkpoint_every"``.
        curves: label -> {number: predicted bytes}.
        measured: label -> {number: measured bytes}; labels as in ``curves``.
        mark: a number to point at, with its bytes; or several, each with a word for it.
        what: the bytes meant, for the axis and the sentence.
        size: of the figure, in inches.
    """
    check_not_empty("curves", curves)
    measured = measured or {}
    if unknown := sorted(set(measured) - set(curves)):
        raise ValueError(f"measured has {unknown[0]!r}, the curves are {', '.join(map(repr, curves))}")
    marks = mark if isinstance(mark, Mapping) else {} if mark is None else {mark: ""}
    figure = Figure(figsize=size, dpi=DPI, facecolor="white")
    axes = axes_at(figure, 0.7, 0.5, size[0] - 0.7 - label_inches(curves), size[1] - 0.62)
    _draw_against(axes, name, curves, measured, marks, what)
    return Shown(figure, _against_sentence(name, curves, measured, marks, what))


def _draw_against(
    axes: Axes,
    name: str,
    curves: Mapping[str, Mapping[int, int]],
    measured: Mapping[str, Mapping[int, int]],
    marks: Mapping[int, str],
    what: str,
) -> None:
    """Each curve carries its name at its right end."""
    top = max(max(curve.values()) for curve in (*curves.values(), *measured.values()) if curve)
    unit, size = unit_for(top)
    ends = []
    for (label, curve), (color, marker, line) in zip(curves.items(), SERIES, strict=False):
        numbers = sorted(curve)
        axes.plot(
            numbers, [curve[n] / size for n in numbers], line, color=color, marker=marker, markersize=3.5, linewidth=1.6
        )
        points = measured.get(label, {})
        axes.plot(
            list(points), [count / size for count in points.values()], marker, color=color, markersize=12,
            markerfacecolor="none", markeredgewidth=1.8,
        )  # fmt: skip
        ends.append((curve[numbers[-1]] / size, label, color))
        for mark, word in marks.items():
            if mark not in curve:
                continue
            axes.plot(mark, curve[mark] / size, marker="o", markersize=6, color=BLACK)
            # Beside the curve, not on it: what is free depends on the other curves, and on whether this one rises.
            highest = curve[mark] == max(other.get(mark, 0) for other in curves.values())
            above = highest or curve[mark] < 0.15 * top
            rises = curve[numbers[-1]] > curve[numbers[0]]
            at = (mark - numbers[0]) / max(numbers[-1] - numbers[0], 1)
            right = at < 0.25 or (rises != above and at < 1)
            text = f"{word}: {human_bytes(curve[mark])}" if word else human_bytes(curve[mark])
            # At the end of a flat curve the words lie along it, and need more room.
            height = (18 if at == 1 and not rises else 10) if above else -11
            axes.annotate(
                text, (mark, curve[mark] / size), (7 if right else -7, height),
                textcoords="offset points", fontsize=TEXT, ha="left" if right else "right", va="center",
                bbox=ON_WHITE, zorder=3,
            )  # fmt: skip
    axes.set(ylim=(0, 1.15 * top / size))
    right = max(max(curve) for curve in curves.values())
    for height, label, color in _spread(ends, 0.075 * 1.15 * top / size):
        axes.annotate(
            label, (right, height), (10, 0), textcoords="offset points", color=color, va="center", fontsize=TEXT
        )
    for mark in marks:
        axes.axvline(mark, color=BLACK, linewidth=0.8, linestyle=":")
    if measured:
        falls = all(curve[min(curve)] >= curve[max(curve)] for curve in curves.values())
        ring = axes.plot([], [], "o", color=BLACK, markersize=10, markerfacecolor="none", label="measured")[0]
        axes.legend(handles=[ring], loc="upper right" if falls else "upper left", fontsize=SMALL, frameon=False)
    axes.set_xticks(_uncrowded(sorted({number for curve in curves.values() for number in curve})))
    axes.set_xlabel(name, fontsize=TEXT)
    axes.set_ylabel(f"{what}, {unit}", fontsize=TEXT)


def _against_sentence(
    name: str,
    curves: Mapping[str, Mapping[int, int]],
    measured: Mapping[str, Mapping[int, int]],
    marks: Mapping[int, str],
    what: str,
) -> str:
    parts = []
    for label, curve in curves.items():
        numbers = [mark for mark in marks if mark in curve] or [min(curve), max(curve)]
        parts.append(
            f"{label}, predicted {what}: " + ", ".join(f"{exact_bytes(curve[n])} at {name} {n}" for n in numbers)
        )
        if points := measured.get(label):
            worst = max(abs(count - curve[n]) for n, count in points.items() if n in curve)
            parts.append(f"measured at {name} {', '.join(map(str, points))}, largest difference {worst:,} bytes")
    return "; ".join(parts) + "."


@dataclass(frozen=True)
class Option:
    """A point of the trade-off plot: what a strategy holds, and what it costs in ``FLOPs`` or ``seconds``."""

    label: str
    nbytes: int
    cost: float


def trade_off(
    options: Sequence[Option] | Sequence[Measurement], *, memory: str = "saved", cost: str = "FLOPs"
) -> Shown:
    """Memory against cost, each relative to nothing but the first option's cost; the best trades are joined by a line.

    An option is worth having when no other one is at most as large and at most as expensive (the Pareto front).

    Args:
        options: points of your own, or measurements of :func:`memsave_lib.compare`. The first is cost 1.
        memory: of measurements, ``"saved"`` or ``"peak"`` bytes.
        cost: ``"FLOPs"`` or ``"seconds"`` of a step. Seconds are drawn, but never said: they differ from run to run.
    """
    points = [_option(option, memory, cost) for option in options]
    check_not_empty("options", points)
    base = points[0].cost
    unit, size = unit_for(max(point.nbytes for point in points))
    best = pareto_front(points)
    figure = Figure(figsize=(WIDTH, 3.9), dpi=DPI, facecolor="white")
    axes = axes_at(figure, 0.75, 0.55, WIDTH - 1.0, 3.15)
    axes.step(
        [point.cost / base for point in best],
        [point.nbytes / size for point in best],
        where="post",
        color=BLUE,
        linewidth=1.2,
    )
    for point in points:
        axes.plot(
            point.cost / base, point.nbytes / size, "o", markersize=8, color=BLUE if point in best else GREY,
            markerfacecolor=BLUE if point in best else "white", markeredgewidth=1.5,
        )  # fmt: skip
    costs = [point.cost / base for point in points]
    spread = max(max(costs) - min(costs), 0.05)
    axes.set(xlim=(min(costs) - 0.06 * spread, max(costs) + 0.3 * spread))
    axes.set_ylim(0, 1.15 * max(point.nbytes for point in points) / size)
    places = [(point.cost / base, point.nbytes / size) for point in points]
    labels = Labels(axes, dot_boxes(axes, places))
    for point, place in zip(points, places, strict=True):
        labels.write(point.label, place)
    axes.set_xlabel(f"{cost} of a step ({points[0].label} = 1)", fontsize=TEXT)
    axes.set_ylabel(f"{memory} bytes, {unit}", fontsize=TEXT)
    filled = axes.plot([], [], "o-", markersize=8, color=BLUE, label="best trades: no other is as small and as cheap")[
        0
    ]
    axes.legend(
        handles=[filled], loc="upper right", fontsize=SMALL, facecolor="white", edgecolor="white", framealpha=1.0
    )
    axes.grid(color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    said = [
        f"{point.label}: {exact_bytes(point.nbytes)}"
        + (f" at {point.cost / base:.4f} times the FLOPs" if cost == "FLOPs" else "")
        for point in points
    ]
    front = f" Best trades: {', '.join(point.label for point in best)}." if cost == "FLOPs" else ""
    return Shown(figure, "; ".join(said) + "." + front)


def pareto_front(options: Sequence[Option]) -> list[Option]:
    """Options that no other one beats in bytes without costing more, or in cost without being larger; by cost."""
    front: list[Option] = []
    for option in sorted(options, key=lambda option: (option.cost, option.nbytes)):
        if not front or option.nbytes < front[-1].nbytes:
            front.append(option)
    return front


def _option(option: Option | Measurement, memory: str, cost: str) -> Option:
    if memory not in ("saved", "peak") or cost not in ("FLOPs", "seconds"):
        raise ValueError(f'memory is "saved" or "peak" and cost "FLOPs" or "seconds", got {memory!r} and {cost!r}')
    if isinstance(option, Option):
        return option
    price = option.step_flops if cost == "FLOPs" else option.step_seconds
    if price is None:
        raise ValueError(f"{option.label} was not timed: measure it with repeats=5 to plot seconds")
    return Option(option.label, getattr(option, f"{memory}_bytes"), price)


def _uncrowded(numbers: Sequence[int]) -> list[int]:
    """Of sorted numbers those whose names fit side by side on an axis, the largest first."""
    ticks = [numbers[-1]]
    for number in reversed(numbers):
        if ticks[-1] - number > 0.06 * (numbers[-1] - numbers[0]):
            ticks.append(number)
    return ticks


def _spread(ends: list[tuple[float, str, str]], gap: float) -> list[tuple[float, str, str]]:
    """Labels at their heights, moved up where they would lie on each other."""
    placed: list[tuple[float, str, str]] = []
    for height, label, color in sorted(ends):
        lowest = placed[-1][0] + gap if placed else height
        placed.append((max(height, lowest), label, color))
    return placed
