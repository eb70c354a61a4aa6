"""The picture of computation and copies: boxes at their times, waits in red, and a sentence with the sums."""

from __future__ import annotations

import io
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.colors import to_hex
from matplotlib.image import imread

from memsave_lib import plots
from memsave_lib.devices import Device
from memsave_lib.lanes import Lanes, Span
from memsave_lib.plots.drawing import BLUE, GREEN, PURPLE, SKY, VERMILION
from memsave_lib.plots.lanes import human_seconds, time_unit
from memsave_lib.simulation import BlockCosts, simulate
from memsave_lib.strategies import FullCheckpoint, KeepAll, Offload

MIB = 2**20
UNIT = Device("unit", flops=1, copy_out=MIB, copy_in=MIB)
COSTS = [BlockCosts(forward=4, backward=8, recompute=3, saved=(MIB, 3 * MIB), checkpoint=MIB)] * 3
BLOCKING = simulate(COSTS, Offload().plan(3), UNIT, prefetch=0)
PREFETCHED = simulate(COSTS, Offload(keep_last=0).plan(3), UNIT, prefetch=2)
KEPT = simulate(COSTS, KeepAll().plan(3), UNIT)
CHECKPOINTS = simulate(COSTS, Offload(FullCheckpoint(), keep_last=0).plan(3), UNIT)


def measured(late: float = 0.0) -> Lanes:
    """As a clock would have it: from any moment on, and with the wait inside the block's time."""
    begin = 1234.5
    return Lanes(
        (Span(begin, begin + 3 + late, "forward", 0), Span(begin + 3 + late, begin + 5 + late, "backward", 0)),
        (Span(begin + 1, begin + 2, "out", 0, 7 * MIB),),
        (Span(begin + 3 + late, begin + 4 + late, "in", 0, 7 * MIB),),
        (Span(begin + 2, begin + 2 + late, "leaving", 0, 7 * MIB),) if late else (),
    )


MANY = simulate([BlockCosts(1e12, 2e12, saved=(MIB,) * 16)] * 8, Offload().plan(8), Device("fast", 1e15, 1e12, 1e12))
FIGURES = {
    "blocking": lambda: plots.stream_lanes({"blocking": BLOCKING}),
    "four": lambda: plots.stream_lanes({"a": BLOCKING, "b": PREFETCHED, "c": KEPT, "d": CHECKPOINTS}),
    "pairs": lambda: plots.stream_lanes([("same", BLOCKING), ("same", PREFETCHED)]),
    "measured": lambda: plots.stream_lanes({"measured": measured(0.5), "simulated": PREFETCHED}, seconds=False),
    "long label": lambda: plots.stream_lanes(
        {"a label of rather more words than anybody could ever need on a plot": BLOCKING}
    ),
    "many tensors": lambda: plots.stream_lanes({"8 blocks of 16 tensors": MANY}),
    "copies only": lambda: plots.stream_lanes({"copies": Lanes(copy_out=(Span(0, 1, "out", 0, 1),))}),
    "a moment": lambda: plots.stream_lanes({"nothing lasts": Lanes((Span(1.0, 1.0, "forward", 0),))}),
}


def colored(shown: plots.Shown, color: str) -> int:
    """How many pixels have exactly this color."""
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    pixels = imread(io.BytesIO(shown.png()))[..., :3]
    return int((np.rint(pixels * 255).astype(int) == wanted).all(axis=-1).sum())


def boxes(shown: plots.Shown, color: str, axis: int = 0) -> list[tuple[float, float]]:
    """Left and right end of every box of this color, filled or outlined, as drawn; for axis 1 upper and lower end."""
    found = []
    for collection in shown.figure.axes[0].collections:
        looks = [*collection.get_facecolor(), *collection.get_edgecolor()]
        if color.lower() in {to_hex(one) for one in looks}:
            ends = [path.vertices[:, axis] for path in collection.get_paths()]
            found += [(float(end.min()), float(end.max())) for end in ends]
    return found


def texts(shown: plots.Shown) -> list[str]:
    return [text.get_text() for text in shown.figure.axes[0].texts]


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_and_pyplot_knows_nothing(name):
    shown = FIGURES[name]()
    shown.figure.draw_without_rendering()
    width, height = shown.figure.bbox.size
    artists = [*shown.figure.axes, *shown.figure.texts, *shown.figure.legends]
    for box in (artist.get_tightbbox() for artist in artists):
        assert box.x0 > -2 and box.y0 > -2 and box.x1 < width + 2 and box.y1 < height + 2
    assert tuple(imread(io.BytesIO(shown.png()))[0, 0]) == (1, 1, 1, 1), "opaque white, also in a dark theme"
    assert "\n" not in shown.sentence and shown.sentence.endswith(".")
    assert shown.sentence == FIGURES[name]().sentence
    assert plt.get_fignums() == []


def test_a_title_gets_a_line_of_its_own_when_the_sums_need_theirs():
    def height(label: str) -> float:
        return plots.stream_lanes({label: BLOCKING}).figure.get_size_inches()[1]

    assert height("short") < height("a label that would run into the sums on the right") == height("x" * 60)


def test_boxes_lie_where_the_spans_are():
    shown = plots.stream_lanes({"blocking": BLOCKING})
    spans = {
        SKY: [span for span in BLOCKING.compute if span.kind == "forward"],
        BLUE: [span for span in BLOCKING.compute if span.kind == "backward"],
        GREEN: BLOCKING.copy_out,
        PURPLE: BLOCKING.copy_in,
        VERMILION: BLOCKING.stalls,
    }
    for color, some in spans.items():
        assert boxes(shown, color) == [(span.start, span.end) for span in some]


def test_copies_lie_below_computation_and_waits_in_it():
    shown = plots.stream_lanes({"blocking": BLOCKING, "prefetched": PREFETCHED})
    compute, waits, out, back = (sorted(set(boxes(shown, color, axis=1))) for color in (SKY, VERMILION, GREEN, PURPLE))
    assert compute == waits == sorted(set(boxes(shown, BLUE, axis=1)))
    assert len(compute) == len(out) == len(back) == 2, "a set of lanes for each timeline"
    for one, two, three in zip(compute, out, back, strict=True):
        assert one[0] < one[1] == pytest.approx(two[0]) and two[1] == pytest.approx(three[0]), "downwards"


def test_all_timelines_share_a_clock_and_start_on_it_together():
    shown = plots.stream_lanes({"measured": measured(0.5), "blocking": BLOCKING, "short": KEPT})
    assert shown.figure.axes[0].get_xlim() == (0, BLOCKING.step_seconds)
    assert len(shown.figure.axes) == 1
    assert boxes(shown, GREEN)[0] == (1, 2), "the measured copy, a second after its forward began"
    assert boxes(plots.stream_lanes({"measured": measured(0.5)}), VERMILION) == [(2, 2.5)]


def test_waits_are_red_however_short_and_nothing_else_is():
    assert colored(plots.stream_lanes({"blocking": BLOCKING}), VERMILION) > 1000
    assert colored(plots.stream_lanes({"kept": KEPT}), VERMILION) == 0
    narrow = plots.stream_lanes({"measured": measured(0.02)})
    assert boxes(narrow, VERMILION) == [pytest.approx((2, 2.02))]
    assert colored(narrow, VERMILION) > 100


def test_the_sums_stand_over_each_timeline():
    shown = plots.stream_lanes({"blocking": BLOCKING, "kept": KEPT, "measured": measured(0.5)})
    assert texts(shown)[:2] == ["blocking", "waiting 16.0 s"]
    assert {"step 52.0 s, at most 4.00 MiB held, ", "step 36.0 s, at most 12.0 MiB held, ", "no waiting"} < set(
        texts(shown)
    )
    assert {"step 5.50 s, ", "waiting 500 ms"} < set(texts(shown))
    assert shown.figure.axes[0].get_xlabel() == "seconds; the numbers are blocks"


def test_blocks_are_numbered_where_there_is_room():
    numbers = [text for text in texts(plots.stream_lanes({"kept": KEPT})) if text.isdigit()]
    assert numbers == ["0", "1", "2", "2", "1", "0"]
    tiny = Lanes((Span(0, 1, "forward", 0), Span(1, 1.001, "forward", 1), Span(1.001, 2, "backward", 0)))
    assert [text for text in texts(plots.stream_lanes({"tiny": tiny})) if text.isdigit()] == ["0", "0"]
    # One number for the tensors of a block that follow each other: 8 blocks, 7 of them sent, 16 tensors each.
    copies = [text for text in texts(plots.stream_lanes({"many": MANY})) if text.isdigit()]
    assert 0 < len(copies) <= 4 * 8


def test_the_legend_names_the_kinds_that_occur():
    def legend(timeline: Lanes) -> list[str]:
        return [text.get_text() for text in plots.stream_lanes({"": timeline}).figure.legends[0].texts]

    assert legend(KEPT) == ["forward", "backward"]
    assert legend(CHECKPOINTS) == ["forward", "forward again", "backward", "waiting for a copy"]


def test_the_sentence_holds_the_sums():
    shown = plots.stream_lanes({"blocking": BLOCKING, "kept": KEPT, "checkpoints": CHECKPOINTS})
    assert shown.sentence == (
        "blocking: step 52.0 s, of which 16.0 s in 8 waits; "
        "4 copies out, 8.00 MiB (8,388,608 bytes), and 4 back, 8.00 MiB (8,388,608 bytes); "
        "at most 4.00 MiB (4,194,304 bytes) of saved activations held. "
        "kept: step 36.0 s, without a wait; no copies; "
        "at most 12.0 MiB (12,582,912 bytes) of saved activations held. "
        "checkpoints: step 46.0 s, of which 1.00 s in 1 wait; "
        "3 copies out, 3.00 MiB (3,145,728 bytes), and 3 back, 3.00 MiB (3,145,728 bytes); "
        "at most 6.00 MiB (6,291,456 bytes) of saved activations held."
    )


def test_without_seconds_two_measured_runs_say_the_same():
    slow, fast = (plots.stream_lanes({"measured": measured(late)}, seconds=False).sentence for late in (0.7, 0.0))
    assert slow == fast == ("measured: 1 copy out, 7.00 MiB (7,340,032 bytes), and 1 back, 7.00 MiB (7,340,032 bytes).")
    assert plots.stream_lanes({"measured": measured(0.7)}).sentence.startswith(
        "measured: step 5.70 s, of which 700 ms in 1 wait; "
    )


def test_anything_with_the_four_lanes_can_be_drawn():
    lanes = ("compute", "copy_out", "copy_in", "stalls", "step_seconds")
    other = SimpleNamespace(**{name: getattr(BLOCKING, name) for name in lanes})
    assert boxes(plots.stream_lanes({"other": other}), GREEN) == boxes(plots.stream_lanes({"x": BLOCKING}), GREEN)


@pytest.mark.parametrize(
    ("seconds", "text", "unit"),
    [
        (61.25, "61.2 s", "seconds"),
        (1.0, "1.00 s", "seconds"),
        (0.99949, "999 ms", "milliseconds"),
        (0.9996, "1.00 s", "seconds"),
        (0.0412, "41.2 ms", "milliseconds"),
        (0.00999, "9.99 ms", "milliseconds"),
        (0.000312, "312 us", "microseconds"),
        (2e-9, "0.00 us", "microseconds"),
        (0, "0.00 us", "microseconds"),
    ],
)
def test_seconds_as_people_read_them(seconds, text, unit):
    assert human_seconds(seconds) == text
    assert time_unit(seconds)[0] == unit


def test_nothing_to_draw_is_an_error():
    with pytest.raises(ValueError, match="timelines is empty: nothing to draw"):
        plots.stream_lanes({})
    with pytest.raises(ValueError, match="the timeline 'nothing' is empty: nothing to draw"):
        plots.stream_lanes({"blocking": BLOCKING, "nothing": Lanes()})
