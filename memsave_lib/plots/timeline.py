"""Memory against time: stacked by category, with the phases of the step below and the peak marked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memsave_lib.plots.drawing import (
    BLACK,
    DPI,
    GREY,
    LOOKS,
    ON_WHITE,
    PHASE_TINTS,
    POINTS,
    ROUND,
    SKY,
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
        _draw_memory(axes, curve, x, size)
        _draw_phases(band, curve, x, box[2] / across)
        _mark_peak(axes, trace, curve, x, size, across)
        axes.set_title(label, fontsize=TEXT, loc="left", weight="bold")
        axes.tick_params(labelleft=column == 0)
        axes.set_ylabel(f"live memory, {unit}" if column == 0 else "", fontsize=TEXT)
        band.tick_params(labelbottom=x == "seconds", bottom=x == "seconds")
        if row == rows - 1:
            band.set_xlabel("seconds" if x == "seconds" else "changes of memory, in order", fontsize=TEXT)
        if budget is not None:
            _draw_level(axes, budget, size, f"budget {human_bytes(budget)}" if column == 0 else "")
    _legend_of(figure, curves, top)
    limit = "" if budget is None else f" Budget {human_bytes(budget)}."
    return Shown(figure, " ".join(_sentence(label, trace) for label, trace in labeled) + limit)


def memory_run(
    points: Sequence[tuple[float, int]] = (),
    *,
    trace: Trace | None = None,
    ghosts: Sequence[tuple[str, Sequence[tuple[float, int]]]] = (),
    predicted: int | None = None,
    size: tuple[float, float] = (6.0, 3.0),
) -> Shown:
    """Memory against time of a step that may still be running, over the outlines of earlier ones.

    Args:
        points: (seconds, live bytes) so far, as :meth:`memsave_lib.MemoryMeter.progress` gives them.
        trace: of the finished step; takes the place of ``points``.
        ghosts: earlier runs, label and points.
        predicted: the peak that a formula expects, drawn as a line.
        size: of the figure, in inches.
    """
    curve = None if trace is None else trace.curve(POINTS)
    lines = [(label, _from_zero(ghost)) for label, ghost in ghosts if ghost]
    now = _from_zero(points) if trace is None and points else np.zeros((1, 2))
    top = max(line[:, 1].max() for _, line in (*lines, ("", now)))
    top = max(int(top), predicted or 1, 0 if trace is None else trace.peak_bytes)
    # A running step needs room to grow into; it gets more whenever it arrives at the right edge.
    ends = [1.25 * now[-1, 0], *(line[-1, 0] for _, line in lines)]
    across = max([*ends, 0 if curve is None else _positions(curve, "seconds")[-1]]) or 1.0
    unit, scale = unit_for(top)
    figure = Figure(figsize=size, dpi=DPI, facecolor="white")
    box = (0.7, 0.5, size[0] - 0.85, size[1] - 0.82)
    axes, band = _panel(figure, box, across, 1.25 * top / scale)
    axes.set_ylabel(f"live memory, {unit}", fontsize=TEXT)
    band.set(xlabel="seconds", yticks=[])
    band.spines["left"].set_visible(False)
    if curve is not None:
        _draw_memory(axes, curve, "seconds", scale)
        _draw_phases(band, curve, "seconds", box[2] / across)
        _legend_of(figure, [curve], trace.peak_bytes)
    for label, line in lines:
        axes.step(line[:, 0], line[:, 1] / scale, where="post", color=GREY, linewidth=0.9)
        x, y = line[line[:, 1].argmax()]
        axes.text(x, y / scale, label, color=GREY, fontsize=SMALL, ha="center", va="bottom", bbox=ON_WHITE)
    if predicted is not None:
        late = curve is not None and curve["total"].argmax() > len(curve) / 2
        _draw_level(axes, predicted, scale, f"predicted peak {human_bytes(predicted)}", "left" if late else "right")
    if trace is not None:
        _mark_peak(axes, trace, curve, "seconds", scale, across)
        return Shown(figure, _sentence("", trace))
    if points:
        axes.fill_between(now[:, 0], now[:, 1] / scale, step="post", facecolor=SKY, linewidth=0)
        axes.step(now[:, 0], now[:, 1] / scale, where="post", color=BLACK, linewidth=0.9)
        axes.plot(now[-1, 0], now[-1, 1] / scale, "o", color=BLACK, markersize=5)
        return Shown(figure, f"{human_bytes(int(now[-1, 1]))} live now.")
    if not lines:
        axes.set(yticks=[], ylabel="live memory")
        axes.text(0.5, 0.5, "no step has run yet", transform=axes.transAxes, ha="center", color=GREY, fontsize=TEXT)
        band.set_xticks([])
    return Shown(figure, "No step is running.")


def _panel(figure: Figure, box: tuple[float, float, float, float], across: float, top: float) -> tuple[Axes, Axes]:
    """Axes for memory and, right below, a band for phases; ``box`` is left, bottom, width and height in inches."""
    left, bottom, width, height = box
    axes = axes_at(figure, left, bottom + 0.25, width, height - 0.25)
    band = axes_at(figure, left, bottom, width, 0.24)
    axes.set(xlim=(0, across), ylim=(0, top))
    axes.tick_params(labelbottom=False, bottom=False)
    axes.yaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
    band.set_xlim(0, across)
    band.xaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
    return axes, band


def _from_zero(points: Sequence[tuple[float, int]]) -> np.ndarray:
    line = np.array(points, dtype=float)
    line[:, 0] -= line[0, 0]
    return line


def _draw_level(axes: Axes, count: int, size: int, label: str, side: str = "right") -> None:
    axes.axhline(count / size, color=BLACK, linestyle="--", linewidth=1)
    if label:
        at = (0.99 if side == "right" else 0.01, count / size)
        axes.text(*at, label, transform=axes.get_yaxis_transform(), ha=side, va="center", fontsize=SMALL, bbox=ON_WHITE)


def _legend_of(figure: Figure, curves: Sequence[pd.DataFrame], top: int) -> None:
    category_legend(figure, [name for name in LOOKS if any(curve[name].max() > SLIVER * top for curve in curves)])


def _positions(curve: pd.DataFrame, x: str) -> np.ndarray:
    if x == "events":
        return curve.index.to_numpy(dtype=float)
    seconds = curve["seconds"].to_numpy()
    return seconds - seconds[0]  # what happens before the first change of memory is not part of the step


def _draw_memory(axes: Axes, curve: pd.DataFrame, x: str, size: int) -> None:
    positions, lower = _positions(curve, x), np.zeros(len(curve))
    for name, (color, hatch) in LOOKS.items():
        upper = lower + curve[name].to_numpy() / size
        if curve[name].any():
            axes.fill_between(
                positions, lower, upper, step="post", facecolor=color, hatch=hatch, edgecolor="white", linewidth=0
            )
        lower = upper
    axes.step(positions, lower, where="post", color=BLACK, linewidth=0.9)


def _draw_phases(band: Axes, curve: pd.DataFrame, x: str, inches: float) -> None:
    positions, phases = _positions(curve, x), curve["phase"].to_numpy()
    edges = np.append(positions, positions[-1])
    # Recomputation happens inside backward: a mark at the upper edge of its band.
    for phase, start, stop in _stretches(np.where(phases == "recompute", "backward", phases)):
        left, right = edges[start], edges[stop]
        band.axvspan(left, right, color=PHASE_TINTS[phase], linewidth=0)
        band.axvline(left, color="white", linewidth=1.5)
        if (right - left) * inches > 0.068 * len(phase):
            band.text((left + right) / 2, 0.34, phase, ha="center", va="center", fontsize=SMALL)
    for phase, start, stop in _stretches(phases):
        if phase == "recompute":
            band.axvspan(edges[start], edges[stop], 0.72, 1, color=VERMILION, linewidth=0)
    band.set(yticks=[], ylim=(0, 1))
    band.spines[:].set_visible(False)


def _stretches(values: np.ndarray) -> Iterator[tuple[str, int, int]]:
    """Runs of equal values: (value, first index, index behind the last)."""
    for value, members in groupby(range(len(values)), key=lambda index: values[index]):
        indices = list(members)
        yield str(value), indices[0], indices[-1] + 1


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


def _sentence(label: str, trace: Trace) -> str:
    name, held = max(trace.at_peak.items(), key=lambda item: item[1])
    subject = f"{label}: peak" if label else "Peak"
    return (
        f"{subject} {exact_bytes(trace.peak_bytes)} in {place(trace)}; most of it is {name}, {human_bytes(held)}; "
        f"{human_bytes(trace.saved_bytes)} saved at the end of forward."
    )
