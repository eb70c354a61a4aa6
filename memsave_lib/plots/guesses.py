"""Predictions of a learner beside what was measured."""

from __future__ import annotations

import math
from collections.abc import Mapping

from memsave_lib.plots.drawing import (
    BLACK,
    BLUE,
    GREY,
    PALE,
    SMALL,
    TEXT,
    Shown,
    bar_figure,
    check_not_empty,
    label_inches,
    name_rows,
)

#: The axis reaches from an eighth of what was measured to eight times it; what lies beyond stands at its end.
REACH = 8.0


def predictions(answers: Mapping[str, tuple[float | None, float | None, float]]) -> Shown:
    """Each prediction as a multiple of what was measured, on a logarithmic axis: a ring the first, a dot the newest.

    Args:
        answers: a name, and its first prediction, its newest one (None where there is none), and the number measured.
    """
    check_not_empty("answers", answers)
    figure, axes = bar_figure(len(answers), left=label_inches(answers), right=1.3, row=0.34)
    axes.set_xscale("log", base=2)
    axes.set_xlim(1 / REACH / 1.15, REACH * 1.15)
    axes.set_xticks([1 / 8, 1 / 4, 1 / 2, 1, 2, 4, 8], ["1/8", "1/4", "1/2", "1", "2", "4", "8"])
    axes.minorticks_off()
    axes.axvline(1, color=BLACK, linewidth=1.2)
    said = []
    for row, (name, (first, newest, found)) in enumerate(answers.items()):
        axes.axhline(row, color=PALE, linewidth=1, zorder=0)
        for value, face in ((first, "white"), (newest, BLUE)):
            if value is not None:
                axes.plot(_place(value, found), row, "o", color=BLUE, markerfacecolor=face, markersize=7, clip_on=False)
        shown = newest if newest is not None else first
        note = "not predicted" if shown is None else _note(shown, found)
        axes.text(REACH * 1.4, row, note, va="center", fontsize=TEXT, color=GREY if shown is None else BLACK)
        said.append(f"{name}: {note}")
    name_rows(axes, list(answers))
    axes.set_xlabel("prediction / measurement  (ring: your first, dot: your newest)", fontsize=SMALL)
    count = sum(newest is not None for _, newest, _ in answers.values())
    return Shown(figure, f"{count} of {len(answers)} numbers predicted. " + "; ".join(said) + ".")


def _place(predicted: float, found: float) -> float:
    """Where a prediction stands: at an end of the axis when it is further away, or has another sign."""
    if predicted == found:
        return 1.0
    ratio = predicted / found if found else math.inf
    return min(max(ratio, 1 / REACH), REACH)


def _note(predicted: float, found: float) -> str:
    if predicted == found:
        return "exact"
    if not found or predicted / found <= 0:
        return "another sign" if found and predicted else "zero is not it" if found else "it is zero"
    ratio = predicted / found
    if not 0.01 <= ratio < 100:
        return "far below" if ratio < 1 else "far above"
    return f"{ratio:.2f} times" if ratio < 10 else f"{ratio:.0f} times"
