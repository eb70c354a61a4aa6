"""Every figure draws, keeps its promises about size and points, and says its numbers in an exact sentence."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable
from types import SimpleNamespace

import matplotlib.pyplot as plt
import numpy as np
import pytest
from matplotlib.image import imread

import memsave_lib as ms
from memsave_lib import plots
from memsave_lib.plots.drawing import POINTS, VERMILION
from memsave_lib.strategies import Chunked, Plan, Recursive, Segment, Selective, SelectiveOps
from memsave_lib.trace import CATEGORIES, Event, StorageFacts, Trace

MIB = 2**20


def make_trace(*sizes: int, phase: str = "forward", repeats: int = 1) -> Trace:
    """Parameters of 4 MiB; storages of these sizes appear one after the other and vanish in backward, last first."""
    parameter = StorageFacts(4 * MIB, label="parameter")
    facts = [StorageFacts(size, packed=True, born_in=phase, died_in="backward", died_epoch=1) for size in sizes]
    events = []
    for _ in range(repeats):
        events += [Event(0.0, storage, storage.nbytes, phase, f"blocks.{i}", "mm") for i, storage in enumerate(facts)]
        events += [Event(0.0, storage, -storage.nbytes, "backward", "blocks.0", "mm") for storage in reversed(facts)]
    events = [
        Event(0.5 + number / 100, one.storage, one.delta, one.phase, one.module, one.op)
        for number, one in enumerate(events)
    ]
    return Trace(events, [parameter], saved_bytes=sum(sizes))


def pixels(shown: plots.Shown) -> np.ndarray:
    return imread(io.BytesIO(shown.png()))


def colored(shown: plots.Shown, color: str) -> int:
    """How many pixels have exactly this color."""
    wanted = [int(color[i : i + 2], 16) for i in (1, 3, 5)]
    return int((np.rint(pixels(shown)[..., :3] * 255).astype(int) == wanted).all(axis=-1).sum())


def texts(shown: plots.Shown) -> list[str]:
    found = [text.get_text() for axes in shown.figure.axes for text in axes.texts]
    return found + [text.get_text() for text in shown.figure.texts]


def inside(shown: plots.Shown) -> bool:
    """Whether all writing lies on the figure: nothing is cut off."""
    shown.figure.draw_without_rendering()
    width, height = shown.figure.bbox.size
    artists = [*shown.figure.axes, *shown.figure.texts, *shown.figure.legends]
    boxes = [artist.get_tightbbox() for artist in artists]
    return all(box.x0 > -2 and box.y0 > -2 and box.x1 < width + 2 and box.y1 < height + 2 for box in boxes)


TRACES = {"keep all": make_trace(8 * MIB, 8 * MIB), "full checkpoint": make_trace(MIB, 6 * MIB, phase="recompute")}
OPTIONS = [
    plots.Option("keep all", 96 * MIB, 90),
    plots.Option("free", 60 * MIB, 90),
    plots.Option("full", 6 * MIB, 110),
    plots.Option("worse", 20 * MIB, 120),
]
SINGLE = Trace([Event(0.0, StorageFacts(MIB), MIB, "forward", "", "mm")], [], saved_bytes=0)
FIGURES: dict[str, Callable[[], plots.Shown]] = {
    "timeline": lambda: plots.memory_timeline(TRACES["keep all"], title="one step"),
    "timeline of one event": lambda: plots.memory_timeline(SINGLE),
    "timelines": lambda: plots.memory_timeline(TRACES, budget=12 * MIB, x="events"),
    "four timelines": lambda: plots.memory_timeline([(str(i), TRACES["keep all"]) for i in range(4)]),
    "five timelines": lambda: plots.memory_timeline([(str(i), TRACES["keep all"]) for i in range(5)]),
    "categories": lambda: plots.bytes_by_category({label: trace.at_peak for label, trace in TRACES.items()}),
    "terms": lambda: plots.block_terms({"a": 4 * MIB, "a longer name": MIB, "crumb": 100}, MIB, ["a"]),
    "curve": lambda: plots.bytes_against(
        "seq_len", {"sdpa": {64: MIB, 1024: 16 * MIB}, "math": {64: MIB, 1024: 64 * MIB}}
    ),
    "trade-off": lambda: plots.trade_off(OPTIONS),
    "plans": lambda: plots.plan_picture({"k=3": Selective(3).plan(12), "chunks": Chunked(5).plan(12)}),
    "recursive plan": lambda: plots.plan_picture([("recursive", Recursive().plan(8))]),
    "bytes per FLOP": lambda: plots.bytes_per_flop([("norms", 6 * MIB, 0), ("a whole block", 15 * MIB, 1_610_612_736)]),
    "predicted": lambda: plots.predicted_and_measured([("keep all", 96 * MIB, 96 * MIB), ("full", 6 * MIB, 7 * MIB)]),
}


@pytest.mark.parametrize("name", FIGURES)
def test_a_figure_has_a_picture_and_a_sentence(name: str) -> None:
    shown = FIGURES[name]()
    bundle, metadata = shown._repr_mimebundle_()
    assert set(bundle) == {"image/png", "text/plain"}
    pixels_wide = imread(io.BytesIO(base64.b64decode(bundle["image/png"]))).shape[1]
    assert metadata == {"image/png": {"width": pixels_wide // 2}}, "twice the pixels of the page"
    assert base64.b64decode(bundle["image/png"])[:4] == b"\x89PNG"
    assert bundle["text/plain"] == repr(shown) == shown.sentence
    assert "\n" not in shown.sentence and shown.sentence.endswith(".")
    corner = pixels(shown)[0, 0]
    assert tuple(corner) == (1, 1, 1, 1), "the face must be opaque white, also in a dark theme"


@pytest.mark.parametrize("name", FIGURES)
def test_nothing_is_cut_off_and_pyplot_knows_nothing(name: str) -> None:
    assert inside(FIGURES[name]())
    assert plt.get_fignums() == []


@pytest.mark.parametrize("name", FIGURES)
def test_a_sentence_is_the_same_every_time_and_says_no_seconds(name: str) -> None:
    assert FIGURES[name]().sentence == FIGURES[name]().sentence
    assert "second" not in FIGURES[name]().sentence


def test_timeline_says_peak_place_and_saved_bytes() -> None:
    shown = plots.memory_timeline(TRACES, budget=12 * MIB)
    assert shown.sentence == (
        "keep all: peak 20.0 MiB (20,971,520 bytes) in forward, blocks.1; most of it is activation, 16.0 MiB; "
        "16.0 MiB saved at the end of forward. "
        "full checkpoint: peak 11.0 MiB (11,534,336 bytes) in recompute, blocks.1; most of it is recomputed, 7.00 MiB; "
        "7.00 MiB saved at the end of forward. Budget 12.0 MiB."
    )
    assert "peak 20.0 MiB\nforward, blocks.1" in texts(shown)
    assert "budget 12.0 MiB" in texts(shown)


def test_timelines_share_both_axes() -> None:
    shown = plots.memory_timeline({"short": make_trace(MIB), "long": make_trace(*[MIB] * 9)})
    limits = {axes.get_xlim() for axes in shown.figure.axes}
    heights = {axes.get_ylim() for axes in shown.figure.axes[::2]}
    assert len(limits) == len(heights) == 1
    assert limits.pop() == (0.0, pytest.approx(0.17))  # 18 events, a hundredth of a second apart, from the first one on


def test_a_curve_has_at_most_400_points_and_keeps_its_peak() -> None:
    trace = make_trace(*[MIB] * 50, repeats=20)
    shown = plots.memory_timeline(trace)
    outline = shown.figure.axes[0].lines[0]
    assert len(outline.get_xdata()) <= POINTS < len(trace.events)
    assert max(outline.get_ydata()) == 54
    assert shown.sentence.startswith("Peak 54.0 MiB")


def test_phases_are_named_and_recomputation_is_marked() -> None:
    shown = plots.memory_timeline(make_trace(MIB, MIB, MIB, MIB))
    assert {"forward", "backward"} <= set(texts(shown))
    assert colored(shown, VERMILION) == 0
    assert colored(plots.memory_timeline(TRACES["full checkpoint"]), VERMILION) > 100


def test_categories_add_up_and_crumbs_stay_out_of_the_legend() -> None:
    shown = plots.bytes_by_category({"peak": {"parameter": 4 * MIB, "activation": 60 * MIB, "output": 8}})
    assert shown.sentence == (
        "peak: 64.0 MiB (67,108,872 bytes), of which parameter 4.00 MiB, activation 60.0 MiB, output 8 B."
    )
    assert [text.get_text() for text in shown.figure.legends[0].texts] == ["parameter", "activation"]
    assert set(plots.LOOKS) == set(CATEGORIES)


def test_looks_are_told_apart_without_color() -> None:
    assert len(set(plots.LOOKS.values())) == len(plots.LOOKS)


def test_block_terms_count_in_hidden_states() -> None:
    terms = {"norm 1 input": MIB, "GELU input": 4 * MIB}
    shown = plots.block_terms(terms, unit_bytes=MIB, recomputed=["GELU input"])
    assert shown.sentence == (
        "One block saves 5.00 MiB (5,242,880 bytes), 5.00 hidden states; the largest part is GELU input, 4.00 MiB. "
        "Recomputing gives back 4.00 MiB (4,194,304 bytes)."
    )
    with pytest.raises(ValueError, match="recomputed names 'GELU'; the terms are norm 1 input, GELU input"):
        plots.block_terms(terms, recomputed=["GELU"])


def test_curves_say_ends_mark_and_difference() -> None:
    curves = {"saved": {1: 3 * MIB, 2: 2 * MIB, 3: MIB}}
    assert plots.bytes_against("k", curves).sentence == (
        "saved, predicted saved bytes: 3.00 MiB (3,145,728 bytes) at k 1, 1.00 MiB (1,048,576 bytes) at k 3."
    )
    shown = plots.bytes_against("k", curves, {"saved": {2: 2 * MIB + 5, 3: MIB}}, mark=2)
    assert shown.sentence == (
        "saved, predicted saved bytes: 2.00 MiB (2,097,152 bytes) at k 2; "
        "measured at k 2, 3, largest difference 5 bytes."
    )
    assert "2.00 MiB" in texts(shown)
    several = plots.bytes_against("k", curves, mark={2: "middle", 3: "lowest"})
    assert several.sentence.endswith("2.00 MiB (2,097,152 bytes) at k 2, 1.00 MiB (1,048,576 bytes) at k 3.")
    assert {"middle: 2.00 MiB", "lowest: 1.00 MiB"} <= set(texts(several))
    with pytest.raises(ValueError, match="measured has 'peak', the curves are 'saved'"):
        plots.bytes_against("k", curves, {"peak": {1: 1}})


def test_a_plan_says_what_is_sent_away() -> None:
    offload, both = ms.Offload().plan(3), ms.Offload(ms.Chunked(2)).plan(4)
    shown = plots.plan_picture({"all": offload, "both": both})
    assert shown.sentence == (
        "all: keeps 2, recomputes none, sends away 0, 1. "
        "both: keeps no block, recomputes 0-1, 2-3, sends away the inputs of 0."
    )
    legend = [text.get_text() for text in shown.figure.legends[0].texts]
    assert legend == ["kept", "recomputed; one outline, one region", "sent away"]
    legend = [t.get_text() for t in plots.plan_picture({"": ms.Recursive().plan(8)}).figure.legends[0].texts]
    assert legend == ["kept", "recomputed (2x: twice); one outline, one region"]


def test_pareto_front_leaves_out_what_another_option_beats() -> None:
    assert [option.label for option in plots.pareto_front(OPTIONS)] == ["free", "full"]
    twins = [plots.Option("one", 5, 1.0), plots.Option("twin", 5, 1.0)]
    assert plots.pareto_front(twins) == twins[:1]


def test_trade_off_says_flops_and_never_seconds() -> None:
    shown = plots.trade_off(OPTIONS)
    assert shown.sentence.startswith(
        "keep all: 96.0 MiB (100,663,296 bytes) at 1.0000 times the FLOPs; free: 60.0 MiB (62,914,560 bytes) at 1.0000"
    )
    assert shown.sentence.endswith("at 1.3333 times the FLOPs. Best trades: free, full.")
    measurement = SimpleNamespace(
        label="keep all", saved_bytes=MIB, peak_bytes=2 * MIB, step_flops=7, step_seconds=0.25
    )
    assert (
        plots.trade_off([measurement], memory="peak", cost="seconds").sentence
        == "keep all: 2.00 MiB (2,097,152 bytes)."
    )
    untimed = SimpleNamespace(**{**vars(measurement), "step_seconds": None})
    with pytest.raises(ValueError, match="keep all was not timed"):
        plots.trade_off([untimed], cost="seconds")
    with pytest.raises(ValueError, match="got 'saved' and 'minutes'"):
        plots.trade_off([measurement], cost="minutes")


def test_labels_of_equal_points_do_not_lie_on_each_other() -> None:
    shown = plots.trade_off([plots.Option(f"strategy {i}", 5 * MIB, 1.0) for i in range(4)])
    boxes = [text.get_window_extent() for text in shown.figure.axes[0].texts]
    assert len(boxes) == 4
    assert not any(one.overlaps(other) for i, one in enumerate(boxes) for other in boxes[:i])


def test_plans_in_words() -> None:
    every_third = Plan(6, tuple(Segment(i, i + 1, recompute=i % 3 == 0) for i in range(6)))
    shown = plots.plan_picture(
        {
            "ours": Selective(3).plan(6),
            "theirs": every_third,
            "chunks": Chunked(2, recompute_last=False).plan(6),
            "core": SelectiveOps("attention").plan(6),
        }
    )
    assert shown.sentence == (
        "ours: keeps 0, 3, recomputes 1, 2, 4, 5. theirs: keeps 1, 2, 4, 5, recomputes 0, 3. "
        "chunks: keeps 3, 4, 5, recomputes 0-2. core: all 6 blocks kept, attention recomputed inside each."
    )
    assert "4x" in texts(plots.plan_picture({"recursive": Recursive().plan(12)}))


def test_bytes_per_flop_puts_the_best_bargain_first() -> None:
    shown = plots.bytes_per_flop([("block", 16 * MIB, 2**30), ("core", MIB, 2**20), ("norms", 6 * MIB, 0)])
    assert shown.sentence == (
        "norms: 6.00 MiB (6,291,456 bytes) for 0 FLOPs (free); core: 1.00 MiB (1,048,576 bytes) for 1,048,576 FLOPs; "
        "block: 16.0 MiB (16,777,216 bytes) for 1,073,741,824 FLOPs."
    )
    assert {"free", "1,000", "15.6"} <= set(texts(shown))


def test_predicted_and_measured_says_the_difference() -> None:
    shown = plots.predicted_and_measured([("full", 6 * MIB, 7 * MIB)])
    assert shown.sentence == (
        "full: predicted 6.00 MiB (6,291,456 bytes), measured 7.00 MiB (7,340,032 bytes), difference 1,048,576 bytes."
    )


@pytest.mark.parametrize(
    ("draw", "message"),
    [
        (lambda: plots.memory_timeline({}), "traces is empty"),
        (lambda: plots.memory_timeline(TRACES, x="minutes"), "got 'minutes'"),
        (lambda: plots.memory_timeline(Trace([], [], saved_bytes=0)), "the trace is empty"),
        (lambda: plots.memory_timeline({"none": Trace([], [], saved_bytes=0)}), "the trace 'none' is empty"),
        (lambda: plots.bytes_by_category({}), "bars is empty"),
        (lambda: plots.plan_picture([]), "plans is empty"),
        (lambda: plots.trade_off([]), "options is empty"),
        (lambda: plots.block_terms({}), "terms is empty"),
        (lambda: plots.bytes_against("k", {}), "curves is empty"),
        (lambda: plots.bytes_per_flop([]), "rows is empty"),
        (lambda: plots.predicted_and_measured([]), "rows is empty"),
    ],
)
def test_nothing_to_draw_is_refused(draw: Callable[[], object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        draw()
