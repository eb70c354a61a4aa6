"""What all figures share: colors, a figure with its sentence, axes placed in inches, legends."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from typing import Any

import matplotlib
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.text import Text
from PIL import Image

BLACK, GREY, PALE = "#000000", "#6E6E6E", "#D9D9D9"
BLUE, ORANGE, GREEN, PURPLE = "#0072B2", "#E69F00", "#009E73", "#CC79A7"
VERMILION, SKY, YELLOW = "#D55E00", "#56B4E9", "#F0E442"
SERIES = ((BLUE, "o", "-"), (VERMILION, "s", "--"), (GREEN, "^", "-."), (PURPLE, "D", ":"), (BLACK, "v", "-"))
#: Color and hatch of each category, in the order in which they are stacked.
LOOKS = {
    "parameter": (BLUE, ""),
    "buffer": (BLUE, "xx"),
    "optimizer": (GREY, ".."),
    "gradient": (PURPLE, "\\\\\\"),
    "input": (YELLOW, ""),
    "activation": (ORANGE, ""),
    "recomputed": (VERMILION, "///"),
    "output": (GREEN, "--"),
    "temporary": (SKY, ""),
}
PHASE_TINTS = {"forward": "#E8E8E8", "backward": "#CFCFCF", "optimizer": "#B0B0B0"}
#: A palette of few colors makes white a little less than white.
ALMOST_WHITE = 250
WIDTH, DPI, PAGE_DPI = 8.0, 132, 110
TEXT, SMALL = 9.5, 8.5
POINTS = 400
ROUND = (1, 2, 2.5, 5, 10)  # steps between ticks
#: A category below this share of the largest bar or curve cannot be seen: the legend leaves it out.
SLIVER = 0.003
ON_WHITE = {"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 1}


#: What a reader's own style would change in pictures whose colors have a meaning: white words on white, say.
OWN_STYLE = {
    **dict.fromkeys(("text.color", "axes.labelcolor", "axes.edgecolor", "xtick.color", "ytick.color"), BLACK),
    "axes.grid": False,
    "axes.linewidth": 0.8,
    "figure.autolayout": False,
    "figure.constrained_layout.use": False,
    "font.family": ["sans-serif"],
    "font.sans-serif": ["DejaVu Sans"],
    "hatch.linewidth": 1.0,
    "legend.labelcolor": "None",
    "lines.linewidth": 1.5,
    "path.effects": [],
    "text.usetex": False,
}


def in_own_style(function: Callable[..., Any]) -> Callable[..., Any]:
    """Draws in the style of the course, whatever the reader has set for figures of their own."""

    @wraps(function)
    def drawing(*args: Any, **kwargs: Any) -> Any:
        with matplotlib.rc_context(OWN_STYLE):
            return function(*args, **kwargs)

    return drawing


@dataclass(frozen=True)
class Shown:
    """A figure and the sentence that says what it shows, with its numbers: for who cannot see it, and for tests."""

    figure: Figure
    sentence: str

    @in_own_style
    def quick_png(self, colors: int = 96) -> bytes:
        """The picture with the figure's own pixels and few colors: a third of the time and of the bytes of `png`."""
        canvas = self.figure.canvas
        if not isinstance(canvas, FigureCanvasAgg):
            canvas = FigureCanvasAgg(self.figure)
        canvas.draw()
        pixels = Image.frombuffer("RGBA", canvas.get_width_height(), canvas.buffer_rgba(), "raw", "RGBA", 0, 1)
        buffer = io.BytesIO()
        picture = pixels.convert("RGB").quantize(colors, Image.Quantize.FASTOCTREE, dither=Image.Dither.NONE)
        palette = picture.getpalette()
        for at in range(0, len(palette), 3):
            if min(palette[at : at + 3]) >= ALMOST_WHITE:
                palette[at : at + 3] = 255, 255, 255
        picture.putpalette(palette)
        picture.save(buffer, "png", compress_level=3)
        return buffer.getvalue()

    def png(self, dpi: int = DPI) -> bytes:
        """The picture, encoded."""
        buffer = io.BytesIO()
        self.figure.savefig(buffer, format="png", dpi=dpi, facecolor="white")
        return buffer.getvalue()

    def __repr__(self) -> str:
        return self.sentence

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> tuple[dict, dict]:
        """The picture with twice the pixels of the page, so that it is sharp on dense screens, and its width there."""
        picture = base64.b64encode(self.png(2 * PAGE_DPI)).decode("ascii")
        width = round(self.figure.get_size_inches()[0] * PAGE_DPI)
        return {"image/png": picture, "text/plain": self.sentence}, {"image/png": {"width": width}}


class LayeredCanvas(FigureCanvasAgg):
    """Draws what belongs to the figure, such as the numbers of its rulers, only when it has changed; axes each time."""

    _layer: tuple[object, object] = (None, None)

    def draw(self) -> None:
        own = [one for one in (*self.figure.texts, *self.figure.artists) if isinstance(one, Text)]
        texts = tuple((text.get_text(), *text.get_position()) for text in own)
        state = texts, tuple(axes.viewLim.bounds for axes in self.figure.axes)
        if self._layer[0] != state:
            for axes in self.figure.axes:
                axes.set_visible(False)
            try:
                super().draw()
            finally:
                for axes in self.figure.axes:
                    axes.set_visible(True)
            self._layer = state, self.copy_from_bbox(self.figure.bbox)
        self.restore_region(self._layer[1])
        for axes in self.figure.axes:
            axes.draw(self.get_renderer())


def check_not_empty(name: str, values: Collection[object]) -> None:
    if not values:
        raise ValueError(f"{name} is empty: nothing to draw")


def labeled_pairs(values: object, name: str) -> list[tuple[str, object]]:
    pairs = list(values.items() if isinstance(values, Mapping) else values)
    check_not_empty(name, pairs)
    return pairs


def axes_at(figure: Figure, left: float, bottom: float, width: float, height: float) -> Axes:
    """Axes at a place given in inches, without the frame's upper and right side."""
    across, up = figure.get_size_inches()
    axes = figure.add_axes((left / across, bottom / up, width / across, height / up))
    axes.set_facecolor("white")
    axes.spines[["top", "right"]].set_visible(False)
    axes.tick_params(labelsize=SMALL)
    axes.xaxis.label.set_fontsize(TEXT)
    return axes


def write(figure: Figure, left: float, bottom: float, text: str, **style: object) -> Text:
    """Text at a place of the figure given in inches."""
    across, up = figure.get_size_inches()
    return figure.text(left / across, bottom / up, text, **style)


def bar_figure(
    rows: int, *, left: float, right: float = 0.25, row: float = 0.3, top: float = 0.12
) -> tuple[Figure, Axes]:
    """A figure for horizontal bars, first row on top; margins and the height of a row in inches."""
    figure = Figure(figsize=(WIDTH, rows * row + top + 0.62), dpi=DPI, facecolor="white")
    axes = axes_at(figure, left, 0.5, WIDTH - left - right, rows * row + 0.1)
    axes.set_ylim(rows - 0.45, -0.55)
    return figure, axes


def name_rows(axes: Axes, names: Sequence[str]) -> None:
    axes.set_yticks(range(len(names)), names, fontsize=TEXT)
    axes.tick_params(axis="y", length=0)
    axes.spines["left"].set_visible(False)


def label_inches(labels: Collection[str] | Iterator[str]) -> float:
    return 0.2 + 0.075 * max(map(len, labels))


def category_legend(figure: Figure, names: Sequence[str]) -> None:
    handles = [
        Patch(facecolor=LOOKS[name][0], hatch=LOOKS[name][1], edgecolor="white", linewidth=0, label=name)
        for name in names
    ]
    figure.legend(
        handles=handles, loc="upper left", ncols=len(names), fontsize=SMALL, frameon=False, borderaxespad=0.3,
        handlelength=1.4, columnspacing=1.4,
    )  # fmt: skip
