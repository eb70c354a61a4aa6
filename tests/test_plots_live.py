"""Pictures that are drawn again and again: what they say, where marks stand, and that nothing is left over."""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import replace

import matplotlib
import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from PIL import Image

import memsave_lib as ms
from helpers import build_input, build_stack
from memsave_lib import plots
from memsave_lib.formulas import BlockShape, Forecast, block_parameters, stack_forecast
from memsave_lib.lanes import Lanes, Span
from memsave_lib.plots.drawing import BLACK, GREEN, GREY, POINTS, PURPLE, VERMILION, LayeredCanvas, axes_at
from memsave_lib.plots.rulers import Ruler
from memsave_lib.trace import Trace
from memsave_lib.units import exact_bytes, human_bytes

SHAPE, L = BlockShape(2, 24, 32, 2), 4
FLOOR = 4 * L * block_parameters(SHAPE.hidden)
COPIES = Lanes(
    copy_out=(Span(0.0, 0.001, "out", 0), Span(0.001, 0.002, "out", 1)), copy_in=(Span(0.002, 0.004, "in", 1),)
)


def forecast(strategy: ms.Strategy) -> Forecast:
    options = {"loss": "sum", "input_requires_grad": False, "new_gradients": True}
    return stack_forecast(strategy.plan(L), SHAPE, FLOOR, **options)


def metered(strategy: ms.Strategy) -> Trace:
    stack, x = build_stack(SHAPE, L), build_input(SHAPE, requires_grad=False)
    with ms.apply(stack, strategy), ms.MemoryMeter(stack) as meter:
        stack(x).sum().backward()
    return evenly_timed(meter.trace)


def evenly_timed(trace: Trace) -> Trace:
    """The same events, a fixed time apart: where a mark meets a tick must not depend on the machine."""
    events = (replace(event, seconds=1e-4 * number) for number, event in enumerate(trace.events))
    return replace(trace, events=tuple(events))


CHUNKS, KEEP = ms.Chunked(2), ms.KeepAll()
FORECAST, TRACE = forecast(CHUNKS), metered(CHUNKS)
KEPT, KEPT_TRACE = forecast(KEEP), metered(KEEP)
PEAK, KEPT_PEAK = FORECAST.peak.live_bytes, KEPT.peak.live_bytes
GHOST = plots.Ghost.of("run 1", KEPT_TRACE)
HALF = Trace(TRACE.events[: len(TRACE.events) // 2], TRACE.initial, 0)
SCENES = {
    "nothing": plots.Scene(),
    "forecast": plots.Scene(FORECAST),
    "forecast, paced": plots.Scene(FORECAST, 1e-9, ghosts=[GHOST], budget=KEPT_PEAK, reach=[KEPT]),
    "running": plots.Scene(FORECAST, 1e-9, HALF, True, [GHOST], reach=[KEPT]),
    "run": plots.Scene(FORECAST, 1e-9, TRACE, ghosts=[GHOST], budget=PEAK),
    "run off the prediction": plots.Scene(KEPT, None, TRACE),
    "run without a forecast": plots.Scene(trace=TRACE, copies=COPIES),
}
EVERY_SCENE = pytest.mark.parametrize("scene", SCENES.values(), ids=SCENES)


def texts(figure: Figure) -> list[str]:
    return [text.get_text() for axes in figure.axes for text in axes.texts]


def pixels(shown: plots.Shown) -> np.ndarray:
    shown.figure.canvas.draw()
    return np.array(shown.figure.canvas.buffer_rgba())


def memory(figure: Figure) -> Axes:
    """The axes of memory: the highest."""
    return max(figure.axes, key=lambda axes: axes.get_position().height)


def band(figure: Figure) -> Axes:
    """The axes of phases, right below."""
    return sorted(figure.axes, key=lambda axes: axes.get_position().y0)[-2]


def boxes(axes: Axes, color: str) -> list[tuple[float, float]]:
    """Start and end of each bar of this color."""
    found = []
    for collection in axes.collections:
        paths, faces = collection.get_paths(), collection.get_facecolors()
        for number, path in enumerate(paths):
            if to_hex(faces[number % len(faces)]) == color.lower():
                found.append((float(path.vertices[:, 0].min()), float(path.vertices[:, 0].max())))
    return found


def triangles(figure: Figure) -> list[float]:
    """Where checkpoints are marked."""
    return [float(x) for line in memory(figure).lines if line.get_marker() == "^" for x in line.get_xdata()]


@EVERY_SCENE
@pytest.mark.parametrize("lanes", [False, True])
def test_a_picture_drawn_over_another_is_that_of_a_fresh_one(scene: plots.Scene, lanes: bool) -> None:
    used = plots.MemoryPicture(lanes=lanes)
    for other in SCENES.values():
        used.draw(other).quick_png()
    used._across = 0.0  # an axis of a running step stays where it was, a fresh one has not been anywhere
    again, fresh = used.draw(scene), plots.MemoryPicture(lanes=lanes).draw(scene)
    assert again.sentence == fresh.sentence
    assert np.array_equal(pixels(again), pixels(fresh))
    assert np.array_equal(pixels(again), pixels(fresh)), "the layer that is kept is the layer that was drawn"


def off_a_full_drawing(shown: plots.Shown) -> int:
    """Pixels that differ: the mark at the origin lies on the first number's tick, not under it."""
    layered = pixels(shown)
    plain = FigureCanvasAgg(shown.figure)
    plain.draw()
    return int((layered != np.array(plain.buffer_rgba())).any(axis=-1).sum())


@EVERY_SCENE
@pytest.mark.parametrize("lanes", [False, True])
def test_layers_give_the_pixels_of_a_full_drawing(scene: plots.Scene, lanes: bool) -> None:
    assert off_a_full_drawing(plots.MemoryPicture(lanes=lanes).draw(scene)) <= 9


@EVERY_SCENE
def test_a_quick_picture_opens_and_has_its_size(scene: plots.Scene) -> None:
    shown = plots.MemoryPicture((6.0, 3.0), dpi=100).draw(scene)
    image = Image.open(io.BytesIO(shown.quick_png()))
    assert image.size == (600, 300) and image.format == "PNG"
    assert min(image.convert("RGB").getpixel((0, 0))) >= 254, "white, within what a palette of few colors can say"
    assert plt.get_fignums() == []


def test_a_forecast_says_its_peak_and_marks_what_it_keeps() -> None:
    shown = plots.MemoryPicture().draw(SCENES["forecast"])
    place = f"{FORECAST.peak.phase}, block {FORECAST.peak.block}"
    assert f"predicted peak {human_bytes(PEAK)}\n{place}" in texts(shown.figure)
    assert shown.sentence == f"predicted peak {exact_bytes(PEAK)} in {place}; no such step has run."
    assert FORECAST.checkpoints == (0, 2)
    starts = [one.start for one in FORECAST.stretches if one.phase == "forward" and one.block in (0, 2)]
    assert triangles(shown.figure) == starts
    again = boxes(band(shown.figure), VERMILION)
    runs = [one for one in FORECAST.stretches if one.phase == "recompute"]
    assert again == [(runs[0].start, runs[1].end), (runs[2].start, runs[3].end)], "two regions of two blocks"
    assert "time, by the work to be done" in [text.get_text() for text in shown.figure.texts]
    assert {"forward", "backward"} <= set(texts(shown.figure))


@pytest.mark.parametrize(
    ("strategy", "regions"),
    [(KEEP, 0), (ms.FullCheckpoint(), 4), (ms.Selective(2), 2), (CHUNKS, 2), (ms.Chunked(1), 1)],
    ids=str,
)
def test_each_region_that_runs_again_has_its_mark(strategy: ms.Strategy, regions: int) -> None:
    assert strategy.plan(L).region_runs() == regions
    for scene in (plots.Scene(forecast(strategy)), plots.Scene(forecast(strategy), trace=metered(strategy))):
        shown = plots.MemoryPicture().draw(scene)
        assert len(boxes(band(shown.figure), VERMILION)) == regions
        assert len(triangles(shown.figure)) == regions


def test_a_run_says_its_peak_as_predicted_or_with_what_was() -> None:
    shown = plots.MemoryPicture().draw(SCENES["run"])
    where = TRACE.peak_at.in_words
    assert TRACE.peak_bytes == PEAK != KEPT_PEAK
    assert f"peak {human_bytes(PEAK)}, as predicted\n{where}" in texts(shown.figure)
    assert not any(text.startswith("predicted peak") for text in texts(shown.figure))
    assert f"budget {human_bytes(PEAK)}" in texts(shown.figure) and "run 1" in texts(shown.figure)
    assert shown.sentence.startswith(f"Peak {exact_bytes(PEAK)} in {plots.place(TRACE)}; ")
    first = {}
    for event in TRACE.events:
        first.setdefault((event.phase, event.block), event.seconds - TRACE.events[0].seconds)
    assert triangles(shown.figure) == [first["forward", 0], first["forward", 2]]

    off = plots.MemoryPicture().draw(SCENES["run off the prediction"])
    assert f"peak {human_bytes(PEAK)}\n{where}" in texts(off.figure)
    assert f"predicted peak {human_bytes(KEPT_PEAK)}" in texts(off.figure)
    levels = [line.get_ydata()[0] for line in memory(off.figure).lines if line.get_linestyle() == "--"]
    assert levels == [pytest.approx(KEPT_PEAK / 1024)]

    unpredicted = plots.MemoryPicture().draw(SCENES["run without a forecast"])
    assert f"peak {human_bytes(PEAK)}\n{where}" in texts(unpredicted.figure)
    assert triangles(unpredicted.figure) == []


def test_a_running_step_shows_what_is_measured_and_what_lies_ahead() -> None:
    shown = plots.MemoryPicture().draw(SCENES["running"])
    live = int(HALF.live_bytes[-1])
    assert shown.sentence == f"{human_bytes(live)} live now."
    (dot,) = [line for line in memory(shown.figure).lines if line.get_marker() == "o"]
    assert (dot.get_xdata()[0], dot.get_ydata()[0]) == (HALF.seconds, live / 1024)
    assert not any("as predicted" in text for text in texts(shown.figure))


def test_where_nothing_is_known_that_is_said() -> None:
    shown = plots.MemoryPicture().draw(plots.Scene())
    assert texts(shown.figure) == ["no such step has run yet"]
    assert shown.sentence == "no such step has run."


def test_copies_have_lanes_of_their_own() -> None:
    shown = plots.MemoryPicture(lanes=True).draw(SCENES["run without a forecast"])
    lane = min(shown.figure.axes, key=lambda axes: axes.get_position().y0)
    assert boxes(lane, GREEN) == [(0.0, 0.001), (0.001, 0.002)]
    assert boxes(lane, PURPLE) == [(0.002, 0.004)]
    assert {"copies out", "back"} <= {text.get_text() for text in shown.figure.texts}
    assert len(plots.MemoryPicture().draw(SCENES["run without a forecast"]).figure.axes) == 2


def test_a_curve_has_at_most_400_points_and_keeps_its_peak() -> None:
    many = Trace([*TRACE.events] * 3, TRACE.initial, 0)
    assert len(many.events) > POINTS
    shown = plots.MemoryPicture().draw(plots.Scene(trace=many, ghosts=[plots.Ghost.of("run 1", many)]))
    outlines = [line for line in memory(shown.figure).lines if len(line.get_xdata()) > 2]
    assert [line.get_color() for line in outlines] == [GREY, BLACK]
    for line in outlines:
        assert len(line.get_xdata()) <= POINTS
        assert max(line.get_ydata()) == pytest.approx(many.peak_bytes / 1024)


def test_axes_stay_between_scenes_with_the_same_reach() -> None:
    picture, reach = plots.MemoryPicture(), [KEPT, FORECAST]
    limits = []
    for one in reach:
        shown = picture.draw(plots.Scene(one, 1e-9, reach=reach))
        limits.append((memory(shown.figure).get_xlim(), memory(shown.figure).get_ylim(), band(shown.figure).get_xlim()))
    assert limits[0] == limits[1]
    assert limits[0][1] == (0, pytest.approx(1.25 * KEPT_PEAK / 1024))
    assert limits[0][0] == (0, pytest.approx(1.02 * FORECAST.flops * 1e-9))


def test_while_a_step_runs_the_axis_of_time_moves_only_when_it_must() -> None:
    picture, across = plots.MemoryPicture(), []
    pace = 10 * HALF.seconds / FORECAST.flops  # slow enough for the forecast to be longer than what has been measured
    for share in (1.0, 1.05, 0.95, 2.0):
        shown = picture.draw(plots.Scene(FORECAST, share * pace, HALF, True))
        across.append(memory(shown.figure).get_xlim()[1])
    assert across[0] == pytest.approx(1.1 * 10 * HALF.seconds)
    assert across[0] == across[1] == across[2] and across[3] == pytest.approx(2 * across[0])


def test_a_fourth_and_fifth_ghost_have_a_place_for_their_names() -> None:
    ghosts = [plots.Ghost(f"run {number}", GHOST.seconds, GHOST.live_bytes) for number in range(1, 7)]
    shown = plots.MemoryPicture().draw(plots.Scene(trace=TRACE, ghosts=ghosts))
    assert {ghost.name for ghost in ghosts} <= set(texts(shown.figure))


def test_marks_are_explained_where_no_key_stands_beside() -> None:
    figure = plots.MemoryPicture(explained=True).draw(SCENES["forecast"]).figure
    assert [text.get_text() for text in figure.legends[0].texts] == ["predicted", "checkpoint kept", "forward again"]
    assert plots.MemoryPicture().draw(SCENES["forecast"]).figure.legends == []


CURVES = {"saved": {1: 9 * 2**20, 2: 5 * 2**20, 3: 4 * 2**20}, "peak": {1: 12 * 2**20, 2: 8 * 2**20, 3: 7 * 2**20}}


def test_choices_say_their_values_where_the_slider_stands() -> None:
    picture = plots.ChoicePicture("checkpoint_every")
    shown = picture.draw(CURVES, 2, {"saved": {1: 9 * 2**20}, "peak": {}})
    assert shown.sentence == "saved 5.00 MiB; peak 8.00 MiB"
    assert any("5.00 MiB" in text for text in texts(shown.figure))
    assert any("8.00 MiB" in text for text in texts(shown.figure))
    assert {"saved", "peak"} <= set(texts(shown.figure))
    axes = shown.figure.axes[0]
    rings = [line for line in axes.lines if line.get_markerfacecolor() == "none" and len(line.get_xdata())]
    assert [(list(line.get_xdata()), list(line.get_ydata())) for line in rings] == [([1], [9.0])]
    elsewhere = picture.draw(CURVES, 3, {})
    assert elsewhere.sentence == "saved 4.00 MiB; peak 7.00 MiB"
    assert not any("5.00 MiB" in text for text in texts(elsewhere.figure)), "nothing is left over"


@pytest.mark.parametrize("here", [1, 2, 3, 7])
def test_choices_drawn_over_others_are_those_of_a_fresh_picture(here: int) -> None:
    used = plots.ChoicePicture("k")
    used.draw({"saved": {here: 1, 40: 2000}, "peak": {}}, here, {}).quick_png()
    used.draw({}, here, {}).quick_png()
    again, fresh = (picture.draw(CURVES, here, {}) for picture in (used, plots.ChoicePicture("k")))
    assert np.array_equal(pixels(again), pixels(fresh))
    assert off_a_full_drawing(fresh) <= 9
    assert Image.open(io.BytesIO(again.quick_png())).size == (int(3.8 * 132), int(3.4 * 132))


def numbers(figure: Figure) -> list[str]:
    return [artist.get_text() for artist in figure.artists if isinstance(artist, Text)]


def ruler(side: str) -> tuple[Figure, Ruler]:
    figure = Figure(figsize=(4, 3))
    return figure, Ruler(axes_at(figure, 0.5, 0.5, 3, 2), side)


@pytest.mark.parametrize("side", ["x", "y"])
@pytest.mark.parametrize("top", [0.0003, 0.0123, 0.5, 1.0, 7.3, 10, 999.9, 1023, 123_456])
def test_numbers_of_a_ruler_end_at_or_below_the_top_and_are_told_apart(top: float, side: str) -> None:
    figure, scale = ruler(side)
    scale.fit(top)
    shown = [float(text) for text in numbers(figure)]
    assert shown[0] == 0 and shown == sorted(set(shown)) and shown[-1] <= top
    assert 3 <= len(shown) <= 6
    assert shown[-1] + (shown[1] - shown[0]) > top, "as far as they go"
    steps = {round(after - before, 9) for before, after in zip(shown, shown[1:], strict=False)}
    assert len(steps) == 1


def test_numbers_of_a_ruler_are_replaced_and_do_not_pile_up() -> None:
    figure, scale = ruler("x")

    def count(tops: Iterable[float]) -> list[tuple[int, int]]:
        found = []
        for top in tops:
            scale.fit(top)
            found.append((len(numbers(figure)), len(figure.artists) - len(numbers(figure))))
        return found

    assert count([10, 10, 10.1, 10.2, 10]) == [(6, 1), (6, 1), (5, 1), (5, 1), (6, 1)]
    assert all(lines == 1 and texts_ <= 6 for texts_, lines in count([3, 7, 11, 400, 0.2, 10]))
    kept = figure.artists[-1]
    scale.fit(10)
    assert figure.artists[-1] is kept, "the same numbers stay"
    scale.show({})
    assert figure.artists == []
    scale.show({1: "one", 2: "two"})
    assert numbers(figure) == ["one", "two"]


def test_other_numbers_at_the_same_limits_are_drawn() -> None:
    figure, scale = ruler("x")
    shown = plots.Shown(figure, "")
    LayeredCanvas(figure)
    seen = []
    for word in ("one", "two", "one"):
        scale.show({0.5: word})
        seen.append(pixels(shown))
    assert not np.array_equal(seen[0], seen[1]) and np.array_equal(seen[0], seen[2])


@EVERY_SCENE
def test_a_readers_own_style_changes_no_pixel(scene: plots.Scene) -> None:
    expected = plots.MemoryPicture(lanes=True).draw(scene).quick_png()
    own = {"text.color": "white", "axes.edgecolor": "white", "axes.grid": True, "text.usetex": True, "font.size": 20}
    with matplotlib.rc_context(own | {"figure.constrained_layout.use": True, "axes.linewidth": 4}):
        assert plots.MemoryPicture(lanes=True).draw(scene).quick_png() == expected
