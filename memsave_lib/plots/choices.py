"""Predicted bytes for every choice on a slider, where the slider stands, and what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from matplotlib.figure import Figure

from memsave_lib.plots.drawing import (
    BLACK,
    GREY,
    SERIES,
    SMALL,
    TEXT,
    LayeredCanvas,
    Shown,
    axes_at,
    in_own_style,
    write,
)
from memsave_lib.plots.rulers import Ruler
from memsave_lib.units import human_bytes, unit_for

LEFT, RIGHT, FOOT, HEAD = 0.72, 0.6, 0.5, 0.28  # margins, in inches
#: Of the values at the slider's choice, in widths of the axes.
PLACES = (-0.2, 0.22, 0.64)


@dataclass
class ChoicePicture:
    """Curves over a slider, drawn again and again. What :meth:`draw` returns is good until the next call.

    Args:
        name: of the slider.
        size: width and height in inches.
        dpi: pixels to the inch.
    """

    name: str
    size: tuple[float, float] = (3.8, 3.4)
    dpi: int = 132
    _figure: Figure = field(init=False, repr=False)

    @in_own_style
    def __post_init__(self) -> None:
        self._figure = Figure(figsize=self.size, dpi=self.dpi, facecolor="white")
        LayeredCanvas(self._figure)
        width, height = self.size[0] - LEFT - RIGHT, self.size[1] - FOOT - HEAD
        self._axes = axes_at(self._figure, LEFT, FOOT, width, height)
        self._below, self._left = Ruler(self._axes, "x"), Ruler(self._axes, "y")
        write(self._figure, LEFT + width / 2, 0.08, self.name, ha="center", va="bottom", fontsize=TEXT)
        middle = FOOT + height / 2
        self._unit = write(self._figure, 0.08, middle, "", rotation=90, ha="left", va="center", fontsize=TEXT)

    @in_own_style
    def draw(
        self,
        curves: Mapping[str, Mapping[int, int]],
        here: int,
        measured: Mapping[str, Mapping[int, int]],
        top: int = 1,
    ) -> Shown:
        """Replace what is in the picture.

        Args:
            curves: label -> {choice: predicted bytes}; a curve may leave choices out.
            here: the choice that the slider stands at; each curve says its value there.
            measured: label -> {choice: measured bytes}, drawn as rings.
            top: bytes that there must be room for.
        """
        axes = self._axes
        for artist in [*axes.lines, *axes.texts]:
            artist.remove()
        choices = sorted({choice for curve in curves.values() for choice in curve} | {here})
        top = max([top, *(size for curve in (*curves.values(), *measured.values()) for size in curve.values())])
        at = _places(choices)
        unit, size = unit_for(top)
        self._unit.set_text(f"predicted memory, {unit}")
        first, last = at[choices[0]], at[choices[-1]]
        space = 0.04 * (last - first) or 0.5
        axes.set(xlim=(first - space, last + space), ylim=(0, 1.12 * top / size))
        self._left.fit(1.12 * top / size)
        self._below.show({at[choice]: str(choice) for choice in _uncrowded(choices, at)})
        axes.plot([at[here]] * 2, [0, 1], ":", color=GREY, linewidth=1, transform=axes.get_xaxis_transform())
        heights: list[float] = []
        for (label, curve), (color, marker, line), place in zip(curves.items(), SERIES, PLACES, strict=False):
            if not curve:
                continue
            x, y = [at[choice] for choice in curve], [count / size for count in curve.values()]
            axes.plot(x, y, line, color=color, marker=marker, markersize=3.5, linewidth=1.6)
            found = measured.get(label, {})
            rings = [at[choice] for choice in found], [count / size for count in found.values()]
            axes.plot(*rings, "o", color=color, markersize=11, markerfacecolor="none", markeredgewidth=1.8)
            height = _free(y[-1], heights, top / size)
            axes.text(last + 1.5 * space, height, label, color=color, fontsize=TEXT, va="center")
            if here in curve:
                axes.plot(at[here], curve[here] / size, "o", color=BLACK, markersize=6)
                # Above all curves: beside its dot a value would lie on one of them.
                words = f"{label} {human_bytes(curve[here])}"
                axes.text(place, 1.03, words, color=color, fontsize=SMALL, transform=axes.transAxes)
        said = (f"{label} {human_bytes(curve[here])}" for label, curve in curves.items() if here in curve)
        return Shown(self._figure, "; ".join(said))


def _places(choices: Sequence[int]) -> dict[int, float]:
    """Where each of the sorted choices stands: those that double from one to the next at even distances."""
    doubling = len(choices) > 2 and choices[0] > 0 and choices[-1] >= 8 * choices[0]
    even = doubling and all(2 * before >= after for before, after in pairwise(choices)) and not _evenly(choices)
    return {choice: math.log2(choice) if even else float(choice) for choice in choices}


def _evenly(choices: Sequence[int]) -> bool:
    return len({after - before for before, after in pairwise(choices)}) == 1


def _uncrowded(choices: Sequence[int], at: Mapping[int, float]) -> list[int]:
    """Of sorted choices those whose names fit side by side, the largest first."""
    shown = [choices[-1]]
    for choice in reversed(choices):
        if at[shown[-1]] - at[choice] > 0.09 * (at[choices[-1]] - at[choices[0]]):
            shown.append(choice)
    return shown


def _free(height: float, taken: list[float], top: float) -> float:
    """The height for a label, moved up where another one stands."""
    while any(abs(height - other) < 0.08 * top for other in taken):
        height += 0.02 * top
    taken.append(height)
    return height
