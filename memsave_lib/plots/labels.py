"""Labels beside points, where they lie on nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise

import numpy as np
from matplotlib.axes import Axes
from matplotlib.text import Text

from memsave_lib.plots.drawing import GREY, ON_WHITE, SMALL

#: Places of a label beside its point: offsets in points, the side it is aligned to; the best first.
PLACES = (
    (8, 9, "left"), (-8, 9, "right"), (8, -10, "left"), (-8, -10, "right"), (10, 0, "left"), (-10, 0, "right"),
    (8, 22, "left"), (-8, 22, "right"), (8, -23, "left"), (-8, -23, "right"), (8, 36, "left"), (-8, 36, "right"),
    (8, -37, "left"), (8, 50, "left"), (-8, 50, "right"), (8, -51, "left"),
)  # fmt: skip
#: Pixels that stay free around a label, and around the middle of a dot.
CLEAR, DOT = 3, 8
#: Points from which on a thin line leads from a label to its point.
FAR = 20


class Labels:
    """Writes labels into axes whose limits are final.

    Args:
        axes: to write into.
        taken: boxes that labels must not lie on: left, lower, right and upper edge in pixels.
    """

    def __init__(self, axes: Axes, taken: Iterable[np.ndarray] = ()) -> None:
        self._axes, self._taken = axes, list(taken)

    def write(
        self,
        text: str,
        point: tuple[float, float],
        places: Sequence[tuple[float, float, str]] = PLACES,
        vertical: str = "center",
        lead: bool = True,
    ) -> Text:
        """At the first place where the label overlaps nothing; where there is none, where it overlaps least.

        Args:
            text, point: what it says, and the point in data coordinates that it belongs to.
            places: to choose from, as in ``PLACES``.
            vertical: which part of the label stands at the place's height.
            lead: draw a thin line to the point from afar.
        """
        tried = []
        for number, (dx, dy, side) in enumerate(places):
            label = self._axes.annotate(
                text, point, (dx, dy), textcoords="offset points", ha=side, va=vertical, fontsize=SMALL, zorder=6,
                linespacing=1.15, bbox=ON_WHITE,
            )  # fmt: skip
            box = pixels_of(label)
            tried.append((self._overlap(box), number, label, box))
        best = min(tried, key=lambda one: one[:2])
        for _, number, label, _ in tried:
            if number != best[1]:
                label.remove()
        self._taken.append(best[3])
        dx, dy, _ = places[best[1]]
        if lead and abs(dy) > FAR:
            line = {"arrowstyle": "-", "color": GREY, "linewidth": 0.8, "shrinkA": 0, "shrinkB": 5}
            self._axes.annotate("", point, (dx, dy), textcoords="offset points", arrowprops=line, zorder=3)
        return best[2]

    def _overlap(self, box: np.ndarray) -> float:
        """Square pixels that lie on something else, or outside of the axes."""
        outside = _area(box, box) - _area(box, pixels_of(self._axes))
        return outside + sum(_area(box + [-CLEAR, -CLEAR, CLEAR, CLEAR], other) for other in self._taken)


def pixels_of(artist: Axes | Text) -> np.ndarray:
    return np.ravel(artist.get_window_extent().get_points())


def dot_boxes(axes: Axes, dots: Iterable[tuple[float, float]]) -> Iterator[np.ndarray]:
    for dot in dots:
        center = axes.transData.transform(dot)
        yield np.concatenate([center - DOT, center + DOT])


def stair_boxes(axes: Axes, at: np.ndarray, heights: np.ndarray) -> Iterator[np.ndarray]:
    """Of each flat and each upright piece of what ``axes.step(at, heights, where="post")`` draws."""
    for (left, right), (here, there) in zip(pairwise(at), pairwise(heights), strict=True):
        for ends in (((left, here), (right, here)), ((right, here), (right, there))):
            corners = axes.transData.transform(ends)
            yield np.concatenate([corners.min(axis=0) - 1, corners.max(axis=0) + 1])


def _area(one: np.ndarray, other: np.ndarray) -> float:
    """What two boxes have in common."""
    return float(np.prod(np.maximum(0.0, np.minimum(one[2:], other[2:]) - np.maximum(one[:2], other[:2]))))
