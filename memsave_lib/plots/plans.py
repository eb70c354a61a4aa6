"""What plans do with each block, as rows of cells."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import groupby

from matplotlib.patches import Patch, Rectangle

from memsave_lib.plan import Plan
from memsave_lib.plots.drawing import (
    ORANGE,
    SKY,
    SMALL,
    TEXT,
    VERMILION,
    Shown,
    bar_figure,
    label_inches,
    labeled_pairs,
    name_rows,
)

LOOKS_OF_ACTIONS = {
    "keep": {"facecolor": ORANGE, "edgecolor": ORANGE},
    "recompute": {"facecolor": "white", "edgecolor": VERMILION, "hatch": "////"},
    "offload": {"facecolor": SKY, "edgecolor": "white", "hatch": "..."},
}
#: More cells than this in a row are too narrow for a number of two digits each.
NARROW = 40
#: Runs of so many blocks or more are said by their ends.
LONG_RUN = 5


def plan_picture(plans: Mapping[str, Plan] | Sequence[tuple[str, Plan]]) -> Shown:
    """What each plan does with each block, one row a plan: kept, recomputed, recomputed inside, or sent away."""
    labeled = labeled_pairs(plans, "plans")
    figure, axes = bar_figure(len(labeled), left=label_inches(label for label, _ in labeled), row=0.44, top=0.4)
    blocks = max(plan.n_blocks for _, plan in labeled)
    times = "x" if blocks <= NARROW else ""
    sliver = min(0.92, max(0.16, blocks / 100))
    for row, (_, plan) in enumerate(labeled):
        for index, (action, count) in enumerate(zip(plan.actions, plan.recompute_counts(), strict=True)):
            axes.add_patch(Rectangle((index + 0.04, row - 0.36), 0.92, 0.72, linewidth=0, **LOOKS_OF_ACTIONS[action]))
            if plan.recompute_ops:
                axes.add_patch(
                    Rectangle(
                        (index + 0.33, row - 0.36), 0.34, 0.72, facecolor="white", edgecolor=VERMILION, hatch="////",
                        linewidth=0,
                    )
                )  # fmt: skip
            if count > 1:
                axes.text(
                    index + 0.5, row, f"{count}{times}", ha="center", va="center", fontsize=SMALL,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1 if times else 0},
                )  # fmt: skip
        for segment in plan.segments:
            if segment.recompute and segment.offload:
                start = (segment.start + 0.04, row - 0.36)
                axes.add_patch(Rectangle(start, sliver, 0.72, linewidth=0, **LOOKS_OF_ACTIONS["offload"]))
            if segment.recompute:
                axes.add_patch(
                    Rectangle(
                        (segment.start + 0.04, row - 0.36), segment.n_blocks - 0.08, 0.72, fill=False,
                        edgecolor=VERMILION, linewidth=1.6,
                    )
                )  # fmt: skip
    name_rows(axes, [label for label, _ in labeled])
    named = range(0, blocks, 1 if blocks <= NARROW else 5 * math.ceil(blocks / (5 * NARROW)))
    axes.set(xlim=(0, blocks), xticks=[index + 0.5 for index in named], xticklabels=named)
    axes.set_xlabel("block", fontsize=TEXT)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    again = any(count > 1 for _, plan in labeled for count in plan.recompute_counts())
    labels = {
        "keep": "kept",
        "recompute": f"recomputed{f' (2{times}: twice)' if again else ''}; one outline, one region",
        "offload": "sent away",
    }
    present = {action for _, plan in labeled for action in plan.actions}
    shown = {"keep", "recompute"} | present | {"offload" for _, plan in labeled if plan.offloads}
    handles = [Patch(label=label, **LOOKS_OF_ACTIONS[name]) for name, label in labels.items() if name in shown]
    figure.legend(handles=handles, loc="upper left", ncols=3, fontsize=SMALL, frameon=False, borderaxespad=0.3)
    return Shown(figure, " ".join(f"{label}: {_plan_in_words(plan)}." for label, plan in labeled))


def _plan_in_words(plan: Plan) -> str:
    kept = _blocks_in_words([index for index, action in enumerate(plan.actions) if action == "keep"])
    if plan.recompute_ops:
        return f"all {plan.n_blocks} blocks kept, {' and '.join(plan.recompute_ops)} recomputed inside each"
    away = _blocks_in_words([index for index, action in enumerate(plan.actions) if action == "offload"])
    inputs = _blocks_in_words([segment.start for segment in plan.segments if segment.recompute and segment.offload])
    sent = f", sends away {away}" if away else ""
    sent += f", sends away the inputs of {inputs}" if inputs else ""
    return f"keeps {kept or 'no block'}, recomputes {_regions_in_words(plan) or 'none'}{sent}"


def _regions_in_words(plan: Plan) -> str:
    """``"0-2"`` is one region of three blocks, ``"each of 0 to 5"`` are six regions of one."""
    words: list[str] = []
    regions = [segment for segment in plan.segments if segment.recompute]
    for single, group in groupby(regions, key=lambda segment: segment.n_blocks == 1):
        if single:
            words.append(_blocks_in_words([segment.start for segment in group], "each of "))
        else:
            words += [f"{segment.start}-{segment.stop - 1}" for segment in group]
    return ", ".join(words)


def _blocks_in_words(blocks: Sequence[int], before_run: str = "") -> str:
    """Ascending numbers, long runs by their ends: ``"0 to 13, 15, 17"``."""
    words: list[str] = []
    for _, numbered in groupby(enumerate(blocks), key=lambda pair: pair[1] - pair[0]):
        run = [block for _, block in numbered]
        words += [f"{before_run}{run[0]} to {run[-1]}"] if len(run) >= LONG_RUN else map(str, run)
    return ", ".join(words)
