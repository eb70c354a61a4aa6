"""What a budget costs, drawn: stairs and bounds at their places, outlying costs named, no label on another."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import matplotlib.pyplot as plt
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure

import memsave_lib as ms
from memsave_lib import plots
from memsave_lib.costs import BlockCosts
from memsave_lib.planner import (
    BelowTheFloor,
    Certificate,
    PlannedStrategy,
    plan_under_budget,
    plans_over_budgets,
)
from memsave_lib.plots.drawing import BLACK, BLUE, GREY, PURPLE
from memsave_lib.plots.labels import Labels, pixels_of
from memsave_lib.plots.plans import LOOKS_OF_ACTIONS

GIB = 2**30


def planned(budget: int, actions: str, extra: float, bound: float, simulated: float) -> PlannedStrategy:
    """For ``budget`` GiB; one letter a block; times as shares of a step."""
    names = {action[0]: action for action in ("keep", "recompute", "offload")}
    known = Certificate(10 * extra, 10.0, 10 * bound, ("dynamic programme",), 10 * simulated)
    return PlannedStrategy(
        tuple(names[letter] for letter in actions), budget=budget * GIB, peak_bytes=budget * GIB, certificate=known
    )


PLANS = (
    planned(2, "oooo", 1.25, 1.125, 1.5),
    planned(4, "korr", 0.25, 0.1875, 0.3125),
    planned(6, "kkor", 0.125, 0.0625, 0.125),
    planned(10, "kkkk", 0.0, 0.0, 0.0),
)
TAME = PLANS[1:]
MARKS = {"keep all": (10 * GIB, 0.0), "full recomputation": (3 * GIB, 0.25), "everything sent away": (2 * GIB, 1.25)}
CROWD = {f"strategy number {number}": (5 * GIB, 0.25) for number in range(4)}
FIGURES: dict[str, Callable[[], plots.Shown]] = {
    "bare": lambda: plots.budget_curve(PLANS),
    "marks and title": lambda: plots.budget_curve(PLANS, MARKS, title="a stack of four"),
    "one panel": lambda: plots.budget_curve(TAME, simulated=False, mix=False),
    "crowd": lambda: plots.budget_curve(TAME, CROWD),
    "nothing costs anything": lambda: plots.budget_curve(
        [planned(1, "k", 0.0, 0.0, 0.0), planned(2, "k", 0.0, 0.0, 0.0)]
    ),
}


def line(axes: Axes, color: str, style: str) -> list[list[float]]:
    """Of the line of this look: where it stands, and how high."""
    (found,) = (
        one for one in axes.lines
        if to_hex(one.get_color()) == color.lower() and one.get_linestyle() == style and len(one.get_xdata()) > 1
    )  # fmt: skip
    return [list(found.get_xdata()), list(found.get_ydata())]


def dots(axes: Axes, marker: str) -> list[tuple[float, float]]:
    return [
        point
        for one in axes.lines
        if one.get_marker() == marker and one.get_linestyle() == "None"
        for point in zip(one.get_xdata(), one.get_ydata(), strict=True)
    ]


def written(shown: plots.Shown) -> list[str]:
    return [text.get_text() for text in shown.figure.axes[0].texts if text.get_text()]


@pytest.mark.parametrize("name", FIGURES)
def test_a_budget_curve_lies_on_its_page_and_says_the_same_every_time(name: str) -> None:
    shown = FIGURES[name]()
    shown.figure.draw_without_rendering()
    width, height = shown.figure.bbox.size
    for artist in (*shown.figure.axes, *shown.figure.texts):
        box = artist.get_tightbbox()
        assert box.x0 > -1 and box.y0 > -1 and box.x1 < width + 1 and box.y1 < height + 1
    assert shown.png()[:4] == b"\x89PNG"
    assert plt.get_fignums() == []
    assert shown.sentence == FIGURES[name]().sentence and "second" not in shown.sentence


def test_a_budget_curve_says_its_numbers() -> None:
    assert plots.budget_curve(PLANS, MARKS).sentence == (
        "Below 2.00 GiB (2,147,483,648 bytes) no plan fits. Extra time in % of a plain step: "
        "2.00 GiB: 4 sent away, costs 125.0% (bound 112.5%, simulated 150.0%); "
        "4.00 GiB: 1 kept, 2 recomputed, 1 sent away, costs 25.0% (bound 18.8%, simulated 31.2%); "
        "6.00 GiB: 2 kept, 1 recomputed, 1 sent away, costs 12.5% (bound 6.2%, simulated 12.5%); "
        "10.0 GiB: 4 kept, costs 0.0% (bound 0.0%, simulated 0.0%); "
        "keep all: peak 10.0 GiB (10,737,418,240 bytes), costs 0.0%; "
        "full recomputation: peak 3.00 GiB (3,221,225,472 bytes), costs 25.0%; "
        "everything sent away: peak 2.00 GiB (2,147,483,648 bytes), costs 125.0%."
    )
    shown = plots.budget_curve(TAME, simulated=False, plain="step of ours", floor=3 * GIB)
    assert shown.sentence.startswith(
        "Below 3.00 GiB (3,221,225,472 bytes) no plan fits. Extra time in % of a step of ours: "
        "4.00 GiB: 1 kept, 2 recomputed, 1 sent away, costs 25.0% (bound 18.8%); "
    )
    assert shown.figure.axes[0].get_ylabel() == "extra time, % of a step of ours"


def test_of_many_budgets_five_are_said() -> None:
    many = [planned(number, "k", 0.5 - number / 100, 0.0, 0.0) for number in range(1, 18)]
    said = plots.budget_curve(many).sentence
    assert re.findall(r"(\S+) GiB: ", said) == ["1.00", "5.00", "9.00", "13.0", "17.0"]


def test_a_plan_holds_for_larger_budgets_and_a_bound_for_smaller_ones() -> None:
    axes = plots.budget_curve(TAME).figure.axes[0]
    right = axes.get_xlim()[1]
    assert line(axes, BLUE, "-") == [[4.0, 6.0, 10.0, right], [25.0, 12.5, 0.0, 0.0]]
    assert line(axes, GREY, "--") == [[4.0, 6.0, 10.0, right], [6.25, 0.0, 0.0, 0.0]]
    assert {one.get_drawstyle() for one in axes.lines if one.get_linestyle() in ("-", "--")} >= {"steps-post"}
    assert dots(axes, "o") == [(4.0, 25.0), (6.0, 12.5), (10.0, 0.0)]
    assert dots(axes, "D") == [(4.0, 31.25), (6.0, 12.5), (10.0, 0.0)]
    assert dots(plots.budget_curve(TAME, simulated=False).figure.axes[0], "D") == []


def test_plans_are_drawn_by_budget_in_whatever_order_they_come() -> None:
    shown = plots.budget_curve(PLANS[::-1], MARKS)
    assert shown.sentence == plots.budget_curve(PLANS, MARKS).sentence
    assert line(shown.figure.axes[0], BLUE, "-")[1] == [125.0, 25.0, 12.5, 0.0, 0.0]


def test_outlying_costs_do_not_flatten_the_rest_and_are_named_at_the_edge() -> None:
    shown = plots.budget_curve(PLANS)
    axes = shown.figure.axes[0]
    assert axes.get_ylim()[1] == pytest.approx(1.4 * 31.25)
    assert plots.budget_curve(TAME).figure.axes[0].get_ylim()[1] == pytest.approx(1.2 * 31.25)
    assert "125%\nsimulated 150%" in written(shown)
    arrows = [text for text in axes.texts if text.arrow_patch is not None and text.xy[1] == axes.get_ylim()[1]]
    assert [(text.xy[0], to_hex(text.arrow_patch.get_edgecolor())) for text in arrows] == [(2.0, BLUE.lower())]
    only_simulated = [*TAME[:2], replace(TAME[2], certificate=replace(TAME[2].certificate, simulated_seconds=9.0))]
    shown = plots.budget_curve(only_simulated)
    assert [text for text in written(shown) if "%" in text] == ["simulated 90%"]
    arrows = [text.arrow_patch for text in shown.figure.axes[0].texts if text.arrow_patch is not None]
    assert [to_hex(arrow.get_edgecolor()) for arrow in arrows] == [PURPLE.lower()]
    assert not [text for text in written(plots.budget_curve(only_simulated, simulated=False)) if "%" in text]
    assert not [text for text in written(plots.budget_curve(TAME)) if "%" in text], "all costs are on the axis"


def test_marks_stand_at_their_peaks_and_a_guide_runs_from_full_recomputation() -> None:
    shown = plots.budget_curve(PLANS, MARKS)
    axes = shown.figure.axes[0]
    assert dots(axes, "s") == [(10.0, 0.0), (3.0, 25.0)]
    assert {"keep all: 0%", "full recomputation: 25%", "everything sent away: 125%"} <= set(written(shown))
    assert line(axes, BLACK, ":") == [[3.0, axes.get_xlim()[1]], [25.0, 25.0]]
    others = plots.budget_curve(PLANS, {"half": (3 * GIB, 0.25)}).figure.axes[0]
    assert not [one for one in others.lines if one.get_linestyle() == ":"]


def test_the_floor_is_a_line_with_its_value() -> None:
    for floor, text, place in ((None, "below 4.00 GiB\nno plan fits", 4.0), (GIB, "below 1.00 GiB\nno plan fits", 1.0)):
        shown = plots.budget_curve(TAME, floor=floor)
        assert text in written(shown)
        for axes in shown.figure.axes:
            assert line(axes, BLACK, "-")[0] == [place, place]


def test_the_floor_is_the_planners_floor() -> None:
    costs = [BlockCosts(1e12, 2e12, None, (64 * 2**20, 32 * 2**20), 16 * 2**20)] * 5
    plans = plans_over_budgets(costs, ms.devices.A100, 4, actions=("keep", "recompute"))
    with pytest.raises(BelowTheFloor) as below:
        plan_under_budget(costs, 1, ms.devices.A100, actions=("keep", "recompute"))
    floor = below.value.floor_bytes
    assert plots.budget_curve(plans).sentence.startswith(f"Below {ms.units.exact_bytes(floor)} no plan fits.")


def test_the_mix_is_stacked_to_a_hundred_in_the_colors_of_plans() -> None:
    costs, mix = plots.budget_curve(PLANS).figure.axes
    assert costs.get_xlim() == mix.get_xlim()
    edges = [list(one.get_ydata()) for one in mix.lines if to_hex(one.get_color()) == "#ffffff"]
    assert edges == [[0, 25, 50, 100, 100], [0, 75, 75, 100, 100], [100, 100, 100, 100, 100]]
    looks = [(to_hex(area.get_facecolor()[0]), area.get_hatch()) for area in mix.collections]
    expected = [LOOKS_OF_ACTIONS[action] for action in ("keep", "recompute", "offload")]
    assert looks == [(to_hex(look["facecolor"]), look.get("hatch")) for look in expected]
    assert [text.get_text() for text in mix.get_legend().texts] == ["kept", "recomputed", "sent away"]
    never_sent = plots.budget_curve([replace(plan, actions=("keep", "recompute")) for plan in PLANS])
    mix = never_sent.figure.axes[1]
    assert [text.get_text() for text in mix.get_legend().texts] == ["kept", "recomputed"]
    edges = [list(one.get_ydata()) for one in mix.lines if to_hex(one.get_color()) == "#ffffff"]
    assert edges == [[50] * 5, [100] * 5], "two blocks are a hundred per cent too"
    assert len(plots.budget_curve(PLANS, mix=False).figure.axes) == 1


@pytest.mark.parametrize("marks", [MARKS, CROWD], ids=["marks", "crowd"])
def test_no_label_lies_on_another(marks: dict[str, tuple[int, float]]) -> None:
    shown = plots.budget_curve(PLANS, marks)
    boxes = [pixels_of(text) for text in shown.figure.axes[0].texts if text.get_text()]
    assert len(boxes) == 2 + len(marks)
    for number, box in enumerate(boxes):
        for other in boxes[:number]:
            assert (box[2:] <= other[:2]).any() or (other[2:] <= box[:2]).any()


def test_a_label_takes_the_first_free_place_and_leads_to_its_point_from_afar() -> None:
    axes = Figure(figsize=(4, 4)).add_axes((0, 0, 1, 1))
    labels = Labels(axes)
    places = ((0, 0, "left"), (0, 15, "left"), (0, 40, "left"))
    found = [labels.write("label", (0.3, 0.3), places) for _ in range(3)]
    assert [text.xyann for text in found] == [(0, 0), (0, 15), (0, 40)]
    assert [text.xyann for text in axes.texts if text.arrow_patch is not None] == [(0, 40)]
    crowded = labels.write("a long label", (0.3, 0.3), ((0, 0, "left"), (0, 34, "left")))
    assert crowded.xyann == (0, 34), "where it overlaps least"
    assert labels.write("out", (1.0, 0.9), ((5, 0, "left"), (-5, 0, "right"))).xyann == (-5, 0), "inside of the axes"
    labels.write("no line", (0.7, 0.7), ((0, 40, "left"),), lead=False)
    assert len([text for text in axes.texts if text.arrow_patch is not None]) == 2


@pytest.mark.parametrize(
    ("draw", "error", "message"),
    [
        (lambda: plots.budget_curve([]), ValueError, r"two budgets or more, all different, got \[\]"),
        (lambda: plots.budget_curve(PLANS[:1]), ValueError, r"all different, got \[2147483648\]"),
        (lambda: plots.budget_curve([PLANS[0], PLANS[0]]), ValueError, r"got \[2147483648, 2147483648\]"),
        (
            lambda: plots.budget_curve([PLANS[0], planned(3, "kk", 0.0, 0.0, 0.0)]),
            ValueError,
            "plans must be for one stack, these are for 2 and 4 blocks",
        ),
        (
            lambda: plots.budget_curve([PLANS[0], replace(PLANS[1], certificate=None)]),
            ValueError,
            "the plan for 4.00 GiB has no certificate",
        ),
        (
            lambda: plots.budget_curve(PLANS, floor=3 * GIB),
            ValueError,
            "the floor is 3,221,225,472 bytes, but a plan fits 2,147,483,648 bytes",
        ),
        (lambda: plots.budget_curve(PLANS, {"mixed up": (0.3, GIB)}), TypeError, "the peak of 'mixed up' must be"),
        (lambda: plots.budget_curve(PLANS, {"gain": (GIB, -0.1)}), ValueError, "the extra time of 'gain' is a share"),
        (lambda: plots.budget_curve(PLANS, {"no": (GIB, float("inf"))}), ValueError, "such as 0.33, got inf"),
    ],
    ids=["none", "one", "twice", "two stacks", "no certificate", "floor", "mixed up", "negative", "infinite"],
)
def test_what_makes_no_curve_is_refused(draw: Callable[[], plots.Shown], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        draw()


def test_blocks_of_a_long_row_are_named_where_there_is_room() -> None:
    named = {}
    for blocks in (40, 41, 80, 240):
        axes = plots.plan_picture({"": ms.FullCheckpoint().plan(blocks)}).figure.axes[0]
        named[blocks] = [label.get_text() for label in axes.get_xticklabels()]
        assert list(axes.get_xticks()) == [int(name) + 0.5 for name in named[blocks]]
    assert named[40] == [str(block) for block in range(40)]
    assert named[41] == named[80][:9] == ["0", "5", "10", "15", "20", "25", "30", "35", "40"]
    assert named[80][-1] == "75"
    assert named[240][:3] == ["0", "10", "20"]


def test_counts_of_a_long_row_go_without_their_sign() -> None:
    for blocks, mark in ((40, "6x"), (64, "6")):
        shown = plots.plan_picture({"": ms.Recursive().plan(blocks)})
        most = max(ms.Recursive().plan(blocks).recompute_counts())
        assert most == 6
        assert mark in [text.get_text() for text in shown.figure.axes[0].texts]
        legend = [text.get_text() for text in shown.figure.legends[0].texts]
        assert legend == ["kept", f"recomputed (2{mark[1:]}: twice); one outline, one region"]


def test_long_runs_of_blocks_are_said_by_their_ends() -> None:
    actions = ("offload",) * 6 + ("recompute", "keep") * 2 + ("recompute",) * 5 + ("keep",) * 4
    shown = plots.plan_picture({"mixed": ms.PerBlock(actions).plan(19)})
    assert shown.sentence == (
        "mixed: keeps 7, 9, 15, 16, 17, 18, recomputes 6, 8, each of 10 to 14, sends away 0 to 5."
    )


def test_sent_inputs_are_seen_in_a_long_row_too() -> None:
    widths = {}
    for blocks in (12, 80):
        axes = plots.plan_picture({"": ms.Offload(ms.Chunked(4)).plan(blocks)}).figure.axes[0]
        sent = [patch for patch in axes.patches if patch.get_hatch() == "..."]
        assert len(sent) == 3, "the last region keeps its input"
        widths[blocks] = sent[0].get_width()
    assert widths == {12: 0.16, 80: 0.8}
