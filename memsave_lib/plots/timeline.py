"""Memory of steps that have run: stacked by category, with the phases of the step below and the peak marked."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memsave_lib.plots.drawing import (
    BLACK,
    DPI,
    LOOKS,
    ON_WHITE,
    PHASE_TINTS,
    POINTS,
    ROUND,
    SLIVER,
    SMALL,
    TEXT,
    VERMILION,
    WIDTH,
    Shown,
    axes_at,
    category_legend,
    check_not_empty,
    labeled_pairs,
)
from memsave_lib.trace import Trace
from memsave_lib.units import exact_bytes, human_bytes, unit_for

if TYPE_CHECKING:
    import pandas as pd


def memory_timeline(
    traces: Trace | Mapping[str, Trace] | Sequence[tuple[str, Trace]],
    *,
    x: str = "seconds",
    budget: int | None = None,
    title: str = "",
) -> Shown:
    """Memory during a step, by category, with its phases and its peak; several traces side by side on equal axes.

    Args:
        traces: one trace, or several with their labels.
        x: ``"seconds"`` since the start, or ``"events"``: equal room for each change of memory, however short.
        budget: bytes, drawn as a line.
        title: for a single trace.
    """
    if x not in ("seconds", "events"):
        raise ValueError(f'x is "seconds" or "events", got {x!r}')
    labeled = labeled_pairs({title: traces} if isinstance(traces, Trace) else traces, "traces")
    for label, trace in labeled:
        check_not_empty(f"the trace {label!r}" if label else "the trace", trace.events)
    curves = [trace.curve(POINTS) for _, trace in labeled]
    columns = 2 if len(labeled) == 4 else min(len(labeled), 3)
    rows = -(-len(labeled) // columns)
    height = 3.2 if rows == 1 else 2.5
    headroom = 0.5 if any(label for label, _ in labeled) else 0.3
    foot = 0.47 if x == "seconds" else 0.3  # without the numbers of seconds
    figure = Figure(figsize=(WIDTH, rows * height + headroom), dpi=DPI, facecolor="white")
    top = max([trace.peak_bytes for _, trace in labeled] + [budget or 0])
    unit, size = unit_for(top)
    across = max(float(_positions(curve, x)[-1]) for curve in curves) or 1.0
    cell = (WIDTH - 0.75) / columns
    for number, ((label, trace), curve) in enumerate(zip(labeled, curves, strict=True)):
        row, column = divmod(number, columns)
        box = (0.7 + column * cell, (rows - 1 - row) * height + foot, cell - 0.25, height - 0.25 - foot)
        axes, band = _panel(figure, box, across, (1.2 if rows == 1 else 1.32) * top / size)
        draw_areas(axes, _positions(curve, x), curve, size)
        draw_phases(band, phases_at(_positions(curve, x), curve["phase"].to_numpy()), box[2] / across)
        _mark_peak(axes, trace, curve, x, size, across)
        axes.set_title(label, fontsize=TEXT, loc="left", weight="bold")
        axes.tick_params(labelleft=column == 0)
        axes.set_ylabel(f"live memory, {unit}" if column == 0 else "", fontsize=TEXT)
        band.tick_params(labelbottom=x == "seconds", bottom=x == "seconds")
        if row == rows - 1:
            band.set_xlabel("seconds" if x == "seconds" else "changes of memory, in order", fontsize=TEXT)
        if budget is not None:
            draw_level(axes, budget, size, f"budget {human_bytes(budget)}" if column == 0 else "")
    _legend_of(figure, curves, top)
    limit = "" if budget is None else f" Budget {human_bytes(budget)}."
    return Shown(figure, " ".join(sentence_of(label, trace) for label, trace in labeled) + limit)


def _panel(figure: Figure, box: tuple[float, float, float, float], across: float, top: float) -> tuple[Axes, Axes]:
    """Axes for memory and, right below, a band for phases; ``box`` is left, bottom, width and height in inches."""
    left, bottom, width, height = box
    axes = axes_at(figure, left, bottom + 0.25, width, height - 0.25)
    band = axes_at(figure, left, bottom, width, 0.24)
    axes.set(xlim=(0, across), ylim=(0, top))
    axes.tick_params(labelbottom=False, bottom=False)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    band.set(xlim=(0, across), yticks=[], ylim=(0, 1))
    band.spines[:].set_visible(False)
    band.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
    return axes, band


def draw_level(axes: Axes, count: int, size: int, label: str, color: str = BLACK, side: str = "right") -> None:
    axes.axhline(count / size, color=color, linestyle="--", linewidth=1)
    if label:
        at = (0.99 if side == "right" else 0.01, count / size)
        axes.text(
            *at, label, transform=axes.get_yaxis_transform(), ha=side, va="center", fontsize=SMALL, bbox=ON_WHITE,
            color=color,
        )  # fmt: skip


def _legend_of(figure: Figure, curves: Sequence[pd.DataFrame], top: int) -> None:
    category_legend(figure, [name for name in LOOKS if any(curve[name].max() > SLIVER * top for curve in curves)])


def _positions(curve: pd.DataFrame, x: str) -> np.ndarray:
    if x == "events":
        return curve.index.to_numpy(dtype=float)
    seconds = curve["seconds"].to_numpy()
    return seconds - seconds[0]  # what happens before the first change of memory is not part of the step


def draw_areas(axes: Axes, positions: np.ndarray, curve: pd.DataFrame, size: int) -> None:
    """Categories, stacked, and their sum as a line."""
    lower = np.zeros(len(curve))
    for name, (color, hatch) in LOOKS.items():
        if curve[name].any():
            upper = lower + curve[name].to_numpy() / size
            axes.fill_between(
                positions, lower, upper, step="post", facecolor=color, hatch=hatch, edgecolor="white", linewidth=0
            )
            lower = upper
    axes.step(positions, lower, where="post", color=BLACK, linewidth=0.9)


def draw_phases(
    band: Axes, phases: Sequence[tuple[str, float, float]], inches: float, begun: Collection[str] | None = None
) -> None:
    """Phases of a step as a band; recomputation, which happens inside backward, as a mark at its upper edge.

    Args:
        band: axes with y from 0 to 1.
        phases: name, start and end, in order.
        inches: of a unit of the x axis.
        begun: for what has not happened yet: the phases that have begun, and have their names.
    """
    alpha = 1.0 if begun is None else 0.4
    outer = list(_joined([("backward" if name == "recompute" else name, start, end) for name, start, end in phases]))
    again = [(start, end - start) for name, start, end in _joined(phases) if name == "recompute"]
    colors = [PHASE_TINTS[name] for name, _, _ in outer]
    bars = [(start, end - start) for _, start, end in outer]
    band.broken_barh(bars, (0, 1), facecolors=colors, edgecolor="white", linewidth=1.5, alpha=alpha)
    band.broken_barh(again, (0.72, 0.28), facecolor=VERMILION, linewidth=0, alpha=alpha)
    for name, start, end in outer:
        if name not in (begun or ()) and (end - start) * inches > 0.068 * len(name):
            band.text((start + end) / 2, 0.34, name, ha="center", va="center", fontsize=SMALL)


def _joined(phases: Sequence[tuple[str, float, float]]) -> Iterator[tuple[str, float, float]]:
    """Neighbours of one name as one."""
    for name, members in groupby(phases, key=lambda phase: phase[0]):
        parts = list(members)
        yield name, parts[0][1], parts[-1][2]


def phases_at(positions: np.ndarray, phases: np.ndarray) -> list[tuple[str, float, float]]:
    """Each phase from its position to the next."""
    ends = np.append(positions[1:], positions[-1])
    return list(zip(map(str, phases), map(float, positions), map(float, ends), strict=True))


def _mark_peak(axes: Axes, trace: Trace, curve: pd.DataFrame, x: str, size: int, across: float) -> None:
    total = curve["total"].to_numpy()
    at, height = float(_positions(curve, x)[total.argmax()]), trace.peak_bytes / size
    side = "left" if at < 0.3 * across else "right" if at > 0.7 * across else "center"
    axes.plot(at, height, marker="v", markersize=6, color=BLACK, clip_on=False)
    text = f"peak {human_bytes(trace.peak_bytes)}\n{place(trace)}"
    axes.annotate(
        text, (at, height), (0, 5), textcoords="offset points", ha=side, va="bottom", fontsize=SMALL, bbox=ON_WHITE
    )


def place(trace: Trace) -> str:
    """Where the peak is, as read on a figure: phase and module, or the operation outside every module."""
    at = trace.peak_at
    return ", ".join(part for part in (at.phase, at.module or at.op) if part)


def sentence_of(label: str, trace: Trace) -> str:
    name, held = max(trace.at_peak.items(), key=lambda item: item[1])
    subject = f"{label}: peak" if label else "Peak"
    return (
        f"{subject} {exact_bytes(trace.peak_bytes)} in {place(trace)}; most of it is {name}, {human_bytes(held)}; "
        f"{human_bytes(trace.saved_bytes)} saved at the end of forward."
    )
