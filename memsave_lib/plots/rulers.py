"""Numbers along an axis, from few plain artists.

Matplotlib's own axis measures every tick label several times: half of the time of a small figure. A picture that
follows a slider has none to spare.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

from matplotlib.axes import Axes
from matplotlib.lines import Line2D
from matplotlib.markers import TICKDOWN, TICKLEFT
from matplotlib.text import Text
from matplotlib.ticker import MaxNLocator

from memsave_lib.plots.drawing import BLACK, ROUND, SMALL

#: Between an axis and its numbers, in inches.
GAP = 0.07


class Ruler:
    """The numbers at the left or below axes; takes the place of matplotlib's own.

    Args:
        axes: whose size does not change.
        side: ``"x"`` below, ``"y"`` at the left.
        most: how many numbers there may be.
    """

    def __init__(self, axes: Axes, side: Literal["x", "y"], most: int = 5) -> None:
        self._axes, self._side = axes, side
        self._locator = MaxNLocator(most, steps=ROUND)
        across, up = axes.get_position().size * axes.figure.get_size_inches()
        self._off = -GAP / (up if side == "x" else across)
        (axes.xaxis if side == "x" else axes.yaxis).set_visible(False)
        self._transform = axes.get_xaxis_transform() if side == "x" else axes.get_yaxis_transform()
        self._numbers: dict[float, str] = {}
        self._artists: list[Line2D | Text] = []

    def fit(self, top: float) -> None:
        """Round numbers from 0 to ``top``."""
        values = [value for value in self._locator.tick_values(0, top) if value <= top]
        digits = max(len(f"{value:.6f}".rstrip("0").partition(".")[2]) for value in values)
        self.show({value: f"{value:.{digits}f}" for value in values})

    def show(self, numbers: Mapping[float, str]) -> None:
        """These, and no others."""
        if numbers == self._numbers:
            return
        for artist in self._artists:
            artist.remove()
        self._numbers, self._artists = dict(numbers), []
        if not numbers:
            return
        places, zeros = list(numbers), [0.0] * len(numbers)
        x, y, marker = (places, zeros, TICKDOWN) if self._side == "x" else (zeros, places, TICKLEFT)
        style = {"color": BLACK, "marker": marker, "markersize": 3.5, "markeredgewidth": 0.8, "linestyle": ""}
        ticks = Line2D(x, y, transform=self._transform, clip_on=False, **style)
        texts = [self._text(place, word) for place, word in numbers.items()]
        # The figure's and not the axes', which are emptied for each new picture.
        self._artists = [self._axes.figure.add_artist(artist) for artist in (ticks, *texts)]

    def _text(self, place: float, word: str) -> Text:
        x, y = (place, self._off) if self._side == "x" else (self._off, place)
        sides = {"ha": "center", "va": "top"} if self._side == "x" else {"ha": "right", "va": "center_baseline"}
        return Text(x, y, word, transform=self._transform, fontsize=SMALL, clip_on=False, **sides)
