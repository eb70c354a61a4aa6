"""Timelines that follow a slider: the same words and boxes as the picture that is made once, and nothing piles up."""

from __future__ import annotations

import numpy as np
import pytest
from matplotlib.figure import Figure

from memsave_lib import formulas, plots
from memsave_lib.labs.offload import simulated
from memsave_lib.lanes import Lanes, Span
from memsave_lib.plots.live_lanes import LanesPicture

SHAPE = formulas.BlockShape(2, 256, 128, 2)
SLOW, FAST = (simulated(SHAPE, 4, bandwidth, 2) for bandwidth in (125, 8000))


def boxes(figure: Figure) -> list[np.ndarray]:
    """Corners of everything that is drawn as a box, in seconds and inches."""
    return [path.vertices for collection in figure.axes[0].collections for path in collection.get_paths()]


def step_of(seconds: float) -> dict[str, Lanes]:
    return {name: Lanes(compute=(Span(0.0, seconds, "forward", 0),)) for name in ("one", "other")}


@pytest.mark.parametrize("timelines", [SLOW, FAST], ids=["slow link", "fast link"])
def test_words_and_boxes_are_those_of_the_picture_that_is_made_once(timelines: dict[str, Lanes]) -> None:
    live, once = LanesPicture(2).draw(timelines), plots.stream_lanes(timelines)
    assert live.sentence == once.sentence
    # Copies have a least width, which depends on the axis; so the boxes of computation and stalls are compared.
    found, expected = boxes(live.figure), boxes(once.figure)
    assert len(found) == len(expected)
    widths = [[corners[:, 0].max() - corners[:, 0].min() for corners in some] for some in (found, expected)]
    assert np.allclose(*widths, atol=0.02 * live.figure.axes[0].get_xlim()[1])


def test_nothing_of_the_picture_before_is_left() -> None:
    picture = LanesPicture(2)
    first = picture.draw(FAST).figure
    counts = [len(first.axes[0].texts), len(first.axes[0].collections), len(first.texts), len(first.artists)]
    picture.draw(SLOW)
    again = picture.draw(FAST).figure
    assert again is first
    assert [len(again.axes[0].texts), len(again.axes[0].collections), len(again.texts), len(again.artists)] == counts
    assert picture.draw(FAST).quick_png() == LanesPicture(2).draw(FAST).quick_png()


@pytest.mark.parametrize(
    ("seconds", "end"),
    [(0.343, 400), (0.4, 400), (0.401, 500), (0.999, 1000), (1.0, 1.0), (1.01, 1.5), (7.0, 8.0), (8.5, 10.0)],
)
def test_the_axis_of_time_ends_at_a_round_number(seconds: float, end: float) -> None:
    figure = LanesPicture(2).draw(step_of(seconds)).figure
    assert figure.axes[0].get_xlim() == (0, pytest.approx(end))
