"""What a budget costs: the fastest plan's extra time over the budgets, and what that plan does with the blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from memsave_lib.arguments import whole_number
from memsave_lib.plots.drawing import BLACK, BLUE, DPI, GREY, PALE, PURPLE, SMALL, TEXT, WIDTH, Shown, axes_at
from memsave_lib.plots.labels import Labels, dot_boxes, stair_boxes
from memsave_lib.plots.plans import LOOKS_OF_ACTIONS
from memsave_lib.units import exact_bytes, human_bytes, unit_for

if TYPE_CHECKING:
    from memsave_lib.planner import PlannedStrategy

WORDS = {"keep": "kept", "recompute": "recomputed", "offload": "sent away"}
#: Values above so many times the middle one would flatten the rest: the axis ends below them, and an arrow says so.
OUTLYING = 3.0
#: Smaller shares of a step are no costs worth a place on the axis.
NOTICEABLE = 0.005
#: Places of labels in points beside what they belong to, at the upper edge and on the floor.
AT_THE_EDGE = tuple((dx, -4 - 13 * line, side) for line in range(6) for dx, side in ((8, "left"), (-8, "right")))
ON_THE_FLOOR = ((8, 18, "left"), (8, 46, "left"), (8, 74, "left"), (-8, 18, "right"))
#: Where the names of both vertical axes stand, in widths of the axes.
LEFT_OF_AXES = -0.06


def budget_curve(
    plans: Sequence[PlannedStrategy],
    marks: Mapping[str, tuple[int, float]] | None = None,
    *,
    simulated: bool = True,
    mix: bool = True,
    floor: int | None = None,
    plain: str = "plain step",
    title: str = "",
) -> Shown:
    """The extra time of the fastest plan as a function of the budget, and below it what that plan does with the blocks.

    A plan for one budget fits all larger ones too, so it is drawn as a stair up to the next budget. A bound for one
    budget holds for all smaller ones, so its stairs run the other way. The fastest plan lies in the shade between.

    Args:
        plans: for different budgets, with certificates: :func:`memsave_lib.planner.plans_over_budgets` makes them.
            Made without a reserve: with one, their bounds are for less than the budget that they are drawn at.
        marks: named strategies beside them: ``{"keep all": (peak bytes, extra time as a share of the plain step)}``.
            From one whose name begins with "full", such as "full recomputation", a guide runs to the right.
        simulated: also show what the simulator says of the same plans.
        mix: the second panel: which share of the blocks is kept, recomputed, sent away.
        floor: the smallest budget that any plan fits, where it is not the smallest of ``plans``.
        plain: the step that 100% means, for the axis.
        title: above the picture.

    Raises:
        ValueError: fewer than two budgets, one budget twice, plans of different stacks, or one without a certificate;
            a mark that is no peak and share.
    """
    data = _Data.of(plans, marks or {}, simulated, floor)
    above, below = 0.32 + (0.27 if title else 0.0), 0.52 + (1.85 if mix else 0.0)
    height = below + 2.7 + above
    figure = Figure(figsize=(WIDTH, height), dpi=DPI, facecolor="white")
    axes = axes_at(figure, 0.7, below, WIDTH - 0.85, 2.7)
    _draw_costs(axes, data)
    axes.set_ylabel(f"extra time, % of a {plain}", fontsize=TEXT)
    axes.yaxis.set_label_coords(LEFT_OF_AXES, 0.5)
    lowest = axes
    if mix:
        axes.tick_params(labelbottom=False)
        lowest = axes_at(figure, 0.7, 0.52, WIDTH - 0.85, 1.35)
        _draw_mix(lowest, data)
        lowest.yaxis.set_label_coords(LEFT_OF_AXES, 0.5)
    lowest.set_xlabel(f"budget, {data.unit}", fontsize=TEXT)
    if title:
        figure.text(0.7 / WIDTH, 1 - 0.08 / height, title, va="top", fontsize=TEXT, weight="bold")
    return Shown(figure, _sentence(data, plain))


@dataclass(frozen=True)
class _Data:
    """What is drawn, in the units of the axes: bytes in ``unit``, shares of a step in per cent."""

    plans: tuple[PlannedStrategy, ...]
    marks: Mapping[str, tuple[int, float]]
    simulated: bool
    floor: int
    left: float
    right: float
    top: float
    unit: str
    size: int

    @classmethod
    def of(
        cls,
        plans: Sequence[PlannedStrategy],
        marks: Mapping[str, tuple[int, float]],
        simulated: bool,
        floor: int | None,
    ) -> _Data:
        plans = tuple(sorted(plans, key=lambda plan: plan.budget))
        _check(plans, marks)
        floor = plans[0].budget if floor is None else floor
        if floor > plans[0].budget:
            raise ValueError(f"the floor is {floor:,} bytes, but a plan fits {plans[0].budget:,} bytes")
        costs = [plan.certificate.overhead for plan in plans] + [cost for _, cost in marks.values()]
        costs += [plan.certificate.simulated_overhead for plan in plans if simulated]
        limit = OUTLYING * median([cost for cost in costs if cost >= NOTICEABLE] or [NOTICEABLE])
        top = (1.2 if max(costs) <= limit else 1.4) * max([cost for cost in costs if cost <= limit], default=0.0)
        budgets = [floor, plans[-1].budget, *(peak for peak, _ in marks.values())]
        margin = 0.05 * (max(budgets) - min(budgets))
        unit, size = unit_for(max(budgets))
        left, right = max(0.0, min(budgets) - margin), max(budgets) + margin
        return cls(plans, marks, simulated, floor, left / size, right / size, 100 * max(top, NOTICEABLE), unit, size)

    @property
    def edges(self) -> np.ndarray:
        """Where stairs begin, and the right edge, where the last one ends."""
        return np.array([*(plan.budget / self.size for plan in self.plans), self.right])

    def stairs(self, name: str) -> np.ndarray:
        """A figure of the certificates, for ``edges``."""
        shares = [getattr(plan.certificate, name) for plan in self.plans]
        return 100 * np.array([*shares, shares[-1]])


def _check(plans: Sequence[PlannedStrategy], marks: Mapping[str, tuple[int, float]]) -> None:
    budgets = [plan.budget for plan in plans]
    if len(set(budgets)) < max(len(budgets), 2):
        raise ValueError(f"a curve needs plans for two budgets or more, all different, got {budgets}")
    if len(blocks := sorted({len(plan.actions) for plan in plans})) > 1:
        raise ValueError(f"plans must be for one stack, these are for {' and '.join(map(str, blocks))} blocks")
    for plan in plans:
        if plan.certificate is None:
            raise ValueError(f"the plan for {human_bytes(plan.budget)} has no certificate: its time is not known")
    for name, (peak, cost) in marks.items():
        whole_number(f"the peak of {name!r}", peak, at_least=0)
        if not 0 <= cost < math.inf:
            raise ValueError(f"the extra time of {name!r} is a share of the plain step, such as 0.33, got {cost!r}")


def _draw_costs(axes: Axes, data: _Data) -> None:
    axes.set(xlim=(data.left, data.right), ylim=(-0.03 * data.top, data.top))
    axes.grid(axis="y", color=PALE, linewidth=0.6)
    axes.set_axisbelow(True)
    at, costs, bounds = data.edges, data.stairs("overhead"), data.stairs("bound")
    bounds = np.append(bounds[1:], bounds[-1])  # a bound holds to the left of its budget
    axes.fill_between(at, bounds, costs, step="post", color=BLUE, alpha=0.14, linewidth=0)
    axes.step(at, bounds, where="post", color=GREY, linewidth=1.1, linestyle="--")
    axes.step(at, costs, where="post", color=BLUE, linewidth=2.0)
    axes.plot(at[:-1], costs[:-1], "o", color=BLUE, markersize=4.5)
    axes.plot([], [], "o-", color=BLUE, markersize=4.5, linewidth=2.0, label="fastest plan, copies as a fluid")
    axes.plot([], [], color=GREY, linewidth=1.1, linestyle="--", label="no plan is faster")
    dots = list(zip(at, costs, strict=True))
    if data.simulated:
        whole = data.stairs("simulated_overhead")[:-1]
        axes.plot(
            at[:-1], whole, "D", color=PURPLE, markersize=6.5, markerfacecolor="none", markeredgewidth=1.6,
            label="same plan, simulated with whole tensors",
        )  # fmt: skip
        dots += zip(at, whole, strict=False)
    _legend_above(axes)
    dots += [(peak / data.size, 100 * cost) for peak, cost in data.marks.values()]
    dots = [(x, min(cost, data.top)) for x, cost in dots]
    taken = [*dot_boxes(axes, dots), *stair_boxes(axes, at, costs), *stair_boxes(axes, at, bounds)]
    labels = Labels(axes, taken)
    _draw_floor(axes, data)
    text = f"below {human_bytes(data.floor)}\nno plan fits"
    labels.write(text, (data.floor / data.size, 0), ON_THE_FLOOR, lead=False)
    _point_at_outlying(axes, labels, data)
    for name in sorted(data.marks, key=lambda name: 100 * data.marks[name][1] <= data.top):  # the edge first
        _draw_mark(axes, labels, data, name)


def _legend_above(axes: Axes, handles: Sequence[Patch] | None = None) -> None:
    axes.legend(
        handles=handles, loc="lower left", bbox_to_anchor=(0, 1), ncols=3, fontsize=SMALL, frameon=False,
        borderaxespad=0.2, borderpad=0.2, columnspacing=1.6,
    )  # fmt: skip


def _draw_floor(axes: Axes, data: _Data) -> None:
    """The edge of what is possible: hatched where no plan fits."""
    floor = data.floor / data.size
    axes.axvspan(data.left, floor, facecolor="#F2F2F2", edgecolor="#BDBDBD", hatch="xxx", linewidth=0)
    axes.axvline(floor, color=BLACK, linewidth=1.2)


def _point_at_outlying(axes: Axes, labels: Labels, data: _Data) -> None:
    """For plans whose costs lie above the edge: an arrow with the value."""
    for plan in data.plans:
        cost, whole = 100 * plan.certificate.overhead, 100 * plan.certificate.simulated_overhead
        said = [_percent(cost)] if cost > data.top else []
        said += [f"simulated {_percent(whole)}"] if data.simulated and whole > data.top else []
        if said:
            _arrow(axes, plan.budget / data.size, BLUE if cost > data.top else PURPLE, data.top)
            labels.write("\n".join(said), (plan.budget / data.size, data.top), AT_THE_EDGE, vertical="top")


def _draw_mark(axes: Axes, labels: Labels, data: _Data, name: str) -> None:
    peak, share = data.marks[name]
    x, cost = peak / data.size, 100 * share
    text = f"{name}: {_percent(cost)}"
    if cost > data.top:
        _arrow(axes, x, BLACK, data.top)
        labels.write(text, (x, data.top), AT_THE_EDGE, vertical="top")
        return
    if name.lower().startswith("full"):
        axes.plot([x, data.right], [cost, cost], color=BLACK, linewidth=0.9, linestyle=":")
    axes.plot(x, cost, "s", color=BLACK, markersize=6.5, markeredgecolor="white", zorder=4)
    labels.write(text, (x, cost))


def _arrow(axes: Axes, x: float, color: str, top: float) -> None:
    axes.annotate(
        "", (x, top), (0, -16), textcoords="offset points", zorder=5,
        arrowprops={"arrowstyle": "-|>", "color": color, "linewidth": 1.8, "shrinkA": 0, "shrinkB": 0},
    )  # fmt: skip


def _percent(cost: float) -> str:
    return f"{cost:.0f}%" if cost >= 10 or cost == 0 else f"{cost:.1f}%"


def _draw_mix(axes: Axes, data: _Data) -> None:
    """Shares of the blocks, stacked as stairs."""
    axes.set(xlim=(data.left, data.right), ylim=(0, 100), yticks=(0, 50, 100))
    below, handles = np.zeros(len(data.edges)), []
    for action, word in WORDS.items():
        shares = [100 * plan.actions.count(action) / len(plan.actions) for plan in data.plans]
        if any(shares):
            height = below + np.array([*shares, shares[-1]])
            axes.fill_between(data.edges, below, height, step="post", linewidth=0, **LOOKS_OF_ACTIONS[action])
            axes.step(data.edges, height, where="post", color="white", linewidth=1.2)
            handles.append(Patch(label=word, **LOOKS_OF_ACTIONS[action]))
            below = height
    _draw_floor(axes, data)
    axes.set_ylabel("% of the blocks", fontsize=TEXT)
    _legend_above(axes, handles)


def _sentence(data: _Data, plain: str) -> str:
    """The floor, five of the budgets at most, the marks."""
    parts = []
    for number in sorted({quarter * (len(data.plans) - 1) // 4 for quarter in range(5)}):
        plan = data.plans[number]
        known = plan.certificate
        whole = f", simulated {known.simulated_overhead:.1%}" if data.simulated else ""
        mix = ", ".join(f"{plan.actions.count(action)} {WORDS[action]}" for action in WORDS if action in plan.actions)
        parts.append(f"{human_bytes(plan.budget)}: {mix}, costs {known.overhead:.1%} (bound {known.bound:.1%}{whole})")
    parts += [f"{name}: peak {exact_bytes(peak)}, costs {cost:.1%}" for name, (peak, cost) in data.marks.items()]
    return f"Below {exact_bytes(data.floor)} no plan fits. Extra time in % of a {plain}: {'; '.join(parts)}."
