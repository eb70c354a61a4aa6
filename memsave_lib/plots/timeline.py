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
    LOOKS,
    ON_WHITE,
    PHASE_TINTS,
    POINTS,
    SLIVER,
    SMALL,
    TEXT,
    VERMILION,
    WIDTH,
    Shown,
    axes_at,
    category_legend,
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
    curves = [trace.curve(POINTS) for _, trace in labeled]
    columns = 2 if len(labeled) == 4 else min(len(labeled), 3)
    rows = -(-len(labeled) // columns)
    height = 3.2 if rows == 1 else 2.5
    headroom = 0.55 if any(label for label, _ in labeled) else 0.3
    figure = Figure(figsize=(WIDTH, rows * height + headroom), dpi=DPI, facecolor="white")
    top = max([trace.peak_bytes for _, trace in labeled] + [budget or 0])
    unit, size = unit_for(top)
    across = max(float(_positions(curve, x)[-1]) for curve in curves)
    cell, width = (WIDTH - 0.75) / columns, (WIDTH - 0.75) / columns - 0.25
    for number, ((label, trace), curve) in enumerate(zip(labeled, curves, strict=True)):
        row, column = divmod(number, columns)
        bottom = (rows - 1 - row) * height
        axes = axes_at(figure, 0.7 + column * cell, bottom + 0.72, width, height - 0.97)
        band = axes_at(figure, 0.7 + column * cell, bottom + 0.47, width, 0.24)
        _draw_memory(axes, curve, x, size)
        _draw_phases(band, curve, x, width / across)
        axes.set(xlim=(0, across), ylim=(0, (1.2 if rows == 1 else 1.32) * top / size))
        axes.tick_params(labelbottom=False, bottom=False, labelleft=column == 0)
        band.set_xlim(0, across)
        band.tick_params(labelbottom=x == "seconds", bottom=x == "seconds")
        band.xaxis.set_major_locator(MaxNLocator(5))
        if row == rows - 1:
            band.set_xlabel("seconds" if x == "seconds" else "changes of memory, in order", fontsize=TEXT)
        if label:
            axes.set_title(label, fontsize=TEXT, loc="left", weight="bold")
        if column == 0:
            axes.set_ylabel(f"live memory, {unit}", fontsize=TEXT)
        if budget is not None:
            axes.axhline(budget / size, color=BLACK, linestyle="--", linewidth=1)
        if budget is not None and column == 0:
            axes.text(
                0.01 * across,
                budget / size,
                f"budget {human_bytes(budget)}",
                va="center",
                fontsize=SMALL,
                bbox=ON_WHITE,
            )
        _mark_peak(axes, trace, curve, x, size, across)
    category_legend(figure, [name for name in LOOKS if any(curve[name].max() > SLIVER * top for curve in curves)])
    return Shown(figure, " ".join(_timeline_sentence(label, trace) for label, trace in labeled) + _budget(budget))


def _positions(curve: pd.DataFrame, x: str) -> np.ndarray:
    if x == "events":
        return np.arange(len(curve), dtype=float)
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
        if (right - left) * inches > 0.08 * len(phase):
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


def _timeline_sentence(label: str, trace: Trace) -> str:
    name, held = max(trace.at_peak.items(), key=lambda item: item[1])
    subject = f"{label}: peak" if label else "Peak"
    return (
        f"{subject} {exact_bytes(trace.peak_bytes)} in {place(trace)}; most of it is {name}, {human_bytes(held)}; "
        f"{human_bytes(trace.saved_bytes)} saved at the end of forward."
    )


def _budget(budget: int | None) -> str:
    return "" if budget is None else f" Budget {human_bytes(budget)}."
