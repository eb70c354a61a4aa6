"""Memory against work as bare outlines, with letters instead of names: for who is to read them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from memsave_lib.plots.drawing import (
    BLACK,
    DPI,
    GREY,
    PALE,
    ROUND,
    SMALL,
    TEXT,
    WIDTH,
    Shown,
    axes_at,
    check_not_empty,
    in_own_style,
)
from memsave_lib.units import human_bytes, unit_for

ROW, FOOT, HEAD = 2.05, 0.5, 0.3  # heights in inches: a panel with its letter, the axis of time, room above the panels


@dataclass(frozen=True)
class Outline:
    """The memory of one step, without a word about why.

    Args:
        work: done at each moment, in units of a step that computes nothing twice.
        live_bytes: at each moment.
        forward_ends: work done by then.
        held_bytes: alive when forward ends.
        surges: how often memory surges again in backward.
        total_work: of the whole step, in the same units.
    """

    work: tuple[float, ...]
    live_bytes: tuple[int, ...]
    forward_ends: float
    held_bytes: int
    surges: int
    total_work: float

    @property
    def peak_bytes(self) -> int:
        return max(self.live_bytes)

    def __str__(self) -> str:
        surges = f"{self.surges} surge{'' if self.surges == 1 else 's'}"
        return (
            f"{human_bytes(self.held_bytes)} alive when forward ends, {surges} in backward, peak "
            f"{human_bytes(self.peak_bytes)}, {self.total_work:.2f} times the work of a plain step"
        )


@in_own_style
def outlines(lettered: Mapping[str, Outline]) -> Shown:
    """Outlines in two columns on equal axes; the sentence tells of each what is to be seen, and no more."""
    check_not_empty("lettered", lettered)
    rows = -(-len(lettered) // 2)
    figure = Figure(figsize=(WIDTH, rows * ROW + FOOT), dpi=DPI, facecolor="white")
    unit, size = unit_for(max(one.peak_bytes for one in lettered.values()))
    top = 1.06 * max(one.peak_bytes for one in lettered.values()) / size
    across = max(one.total_work for one in lettered.values())
    cell = (WIDTH - 0.75) / 2
    for number, (letter, one) in enumerate(lettered.items()):
        row, column = divmod(number, 2)
        axes = axes_at(figure, 0.7 + column * cell, (rows - 1 - row) * ROW + FOOT, cell - 0.25, ROW - HEAD - 0.12)
        axes.set(xlim=(0, 1.02 * across), ylim=(0, top))
        heights = [count / size for count in one.live_bytes]
        axes.fill_between(one.work, heights, step="post", facecolor=PALE, edgecolor=BLACK, linewidth=0.9)
        axes.axvline(one.forward_ends, color=GREY, linestyle=":", linewidth=1)
        axes.grid(axis="y", color=PALE, linewidth=0.6)
        axes.set_axisbelow(True)
        axes.yaxis.set_major_locator(MaxNLocator(5, steps=ROUND))
        axes.xaxis.set_major_locator(MaxNLocator(6, steps=ROUND))
        axes.set_title(letter, fontsize=TEXT + 1, loc="left", weight="bold")
        axes.set_ylabel(f"live memory, {unit}" if column == 0 else "", fontsize=TEXT)
        axes.tick_params(labelleft=column == 0, labelbottom=row == rows - 1)
        if row == rows - 1:
            axes.set_xlabel("work, in plain steps (dots: forward ends)", fontsize=SMALL)
    return Shown(figure, " ".join(f"{letter}: {one}." for letter, one in lettered.items()))
