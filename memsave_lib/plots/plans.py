"""What plans do with each block, as rows of cells."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

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


def plan_picture(plans: Mapping[str, Plan] | Sequence[tuple[str, Plan]]) -> Shown:
    """What each plan does with each block, one row a plan: kept, recomputed, recomputed inside, or sent away."""
    labeled = labeled_pairs(plans, "plans")
    figure, axes = bar_figure(len(labeled), left=label_inches(label for label, _ in labeled), row=0.44, top=0.4)
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
                    index + 0.5, row, f"{count}x", ha="center", va="center", fontsize=SMALL,
                    bbox={"facecolor": "white", "edgecolor": "none", "pad": 1},
                )  # fmt: skip
        for segment in plan.segments:
            if segment.recompute and segment.offload:
                start = (segment.start + 0.04, row - 0.36)
                axes.add_patch(Rectangle(start, 0.16, 0.72, linewidth=0, **LOOKS_OF_ACTIONS["offload"]))
            if segment.recompute:
                axes.add_patch(
                    Rectangle(
                        (segment.start + 0.04, row - 0.36), segment.n_blocks - 0.08, 0.72, fill=False,
                        edgecolor=VERMILION, linewidth=1.6,
                    )
                )  # fmt: skip
    name_rows(axes, [label for label, _ in labeled])
    blocks = max(plan.n_blocks for _, plan in labeled)
    axes.set(xlim=(0, blocks), xticks=[index + 0.5 for index in range(blocks)], xticklabels=range(blocks))
    axes.set_xlabel("block", fontsize=TEXT)
    axes.spines[:].set_visible(False)
    axes.tick_params(length=0)
    again = any(count > 1 for _, plan in labeled for count in plan.recompute_counts())
    labels = {
        "keep": "kept",
        "recompute": f"recomputed{' (2x: twice)' if again else ''}; one outline, one region",
        "offload": "sent away",
    }
    present = {action for _, plan in labeled for action in plan.actions}
    shown = {"keep", "recompute"} | present | {"offload" for _, plan in labeled if plan.offloads}
    handles = [Patch(label=label, **LOOKS_OF_ACTIONS[name]) for name, label in labels.items() if name in shown]
    figure.legend(handles=handles, loc="upper left", ncols=3, fontsize=SMALL, frameon=False, borderaxespad=0.3)
    return Shown(figure, " ".join(f"{label}: {_plan_in_words(plan)}." for label, plan in labeled))


def _plan_in_words(plan: Plan) -> str:
    kept = [str(index) for index, action in enumerate(plan.actions) if action == "keep"]
    if plan.recompute_ops:
        return f"all {plan.n_blocks} blocks kept, {' and '.join(plan.recompute_ops)} recomputed inside each"
    regions = [
        str(segment.start) if segment.n_blocks == 1 else f"{segment.start}-{segment.stop - 1}"
        for segment in plan.segments
        if segment.recompute
    ]
    away = [str(index) for index, action in enumerate(plan.actions) if action == "offload"]
    inputs = [str(segment.start) for segment in plan.segments if segment.recompute and segment.offload]
    sent = f", sends away {', '.join(away)}" if away else ""
    sent += f", sends away the inputs of {', '.join(inputs)}" if inputs else ""
    return f"keeps {', '.join(kept) or 'no block'}, recomputes {', '.join(regions) or 'none'}{sent}"
