"""Bars: bytes by category, tensor by tensor, per FLOP, predicted beside measured."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from matplotlib.patches import Patch

from memsave_lib.plots.drawing import (
    BLACK,
    GREEN,
    LOOKS,
    ORANGE,
    SKY,
    SLIVER,
    SMALL,
    TEXT,
    VERMILION,
    Shown,
    bar_figure,
    category_legend,
    check_not_empty,
    label_inches,
    labeled_pairs,
    name_rows,
)
from memsave_lib.units import exact_bytes, human_bytes, unit_for


def bytes_by_category(bars: Mapping[str, Mapping[str, int]] | Sequence[tuple[str, Mapping[str, int]]]) -> Shown:
    """One bar each, split by category: ``trace.at_peak`` of several strategies, say, or one trace's peak and end."""
    labeled = labeled_pairs(bars, "bars")
    top = max(sum(parts.values()) for _, parts in labeled)
    unit, size = unit_for(top)
    figure, axes = bar_figure(len(labeled), left=label_inches(label for label, _ in labeled), top=0.4)
    for row, (_, parts) in enumerate(labeled):
        left = 0.0
        for name, (color, hatch) in LOOKS.items():
            width = parts.get(name, 0) / size
            axes.barh(row, width, left=left, height=0.62, facecolor=color, hatch=hatch, edgecolor="white", linewidth=0)
            left += width
        axes.text(left, row, f" {human_bytes(sum(parts.values()))}", va="center", fontsize=TEXT)
    name_rows(axes, [label for label, _ in labeled])
    axes.set_xlim(0, 1.15 * top / size)
    axes.set_xlabel(unit, fontsize=TEXT)
    category_legend(figure, [name for name in LOOKS if any(parts.get(name, 0) > SLIVER * top for _, parts in labeled)])
    sentences = [
        f"{label}: {exact_bytes(sum(parts.values()))}, of which "
        + ", ".join(f"{name} {human_bytes(parts[name])}" for name in LOOKS if parts.get(name))
        for label, parts in labeled
    ]
    return Shown(figure, "; ".join(sentences) + ".")


def block_terms(terms: Mapping[str, int], unit_bytes: int | None = None, recomputed: Collection[str] = ()) -> Shown:
    """What one block saves, tensor by tensor.

    Args:
        terms: bytes of each tensor, as :func:`memsave_lib.formulas.block_terms` gives them.
        unit_bytes: bytes of one hidden state, to read each term as a multiple of it.
        recomputed: terms that a strategy gives back; drawn hollow.
    """
    if unknown := [name for name in recomputed if name not in terms]:
        raise ValueError(f"recomputed names {unknown[0]!r}; the terms are {', '.join(terms)}")
    check_not_empty("terms", terms)
    unit, size = unit_for(max(terms.values()))
    figure, axes = bar_figure(len(terms), left=label_inches(terms))
    for row, (name, count) in enumerate(terms.items()):
        face, edge, hatch = ("white", VERMILION, "///") if name in recomputed else (ORANGE, ORANGE, "")
        axes.barh(row, count / size, height=0.66, facecolor=face, edgecolor=edge, hatch=hatch, linewidth=1)
        units = "" if unit_bytes is None or count < unit_bytes / 2 else f"   {_times(count / unit_bytes)}"
        axes.text(count / size, row, f"  {human_bytes(count)}{units}", va="center", fontsize=SMALL)
    name_rows(axes, list(terms))
    axes.set_xlim(0, 1.35 * max(terms.values()) / size)
    scale = "" if unit_bytes is None else f"; 1 x is a hidden state, {human_bytes(unit_bytes)}"
    axes.set_xlabel(unit + scale, fontsize=TEXT)
    total, given_back = sum(terms.values()), sum(terms[name] for name in recomputed)
    units = "" if unit_bytes is None else f", {total / unit_bytes:.2f} hidden states"
    saved = f" Recomputing gives back {exact_bytes(given_back)}." if recomputed else ""
    largest = max(terms, key=terms.__getitem__)
    return Shown(
        figure, f"One block saves {exact_bytes(total)}{units}; the largest part is {largest}, "
        f"{human_bytes(terms[largest])}.{saved}",
    )  # fmt: skip


def bytes_per_flop(rows: Sequence[tuple[str, int, int]]) -> Shown:
    """What recomputing gives back and what it costs: (name, bytes given back, additional FLOPs), best bargain first."""
    check_not_empty("rows", rows)
    ordered = sorted(rows, key=lambda row: (row[2] / row[1] if row[1] else float("inf"), -row[1]))
    unit, size = unit_for(max(given_back for _, given_back, _ in ordered))
    figure, axes = bar_figure(len(ordered), left=label_inches(name for name, _, _ in ordered), right=3.1, top=0.4)
    top = max(given_back for _, given_back, _ in ordered) / size
    axes.set_xlim(0, 1.3 * top)
    # Two columns of text to the right of the bars; their right edges in inches from the figure's right edge.
    across = figure.get_size_inches()[0]

    def write(edge: float, row: float, text: str, weight: str = "normal") -> None:
        at = figure.transFigure.inverted().transform(axes.transData.transform((0, row)))[1]
        figure.text(1 - edge / across, at, text, ha="right", va="center", fontsize=SMALL, weight=weight)

    for row, (_, given_back, flops) in enumerate(ordered):
        axes.barh(row, given_back / size, height=0.6, color=GREEN if flops == 0 else ORANGE, linewidth=0)
        axes.text(given_back / size, row, f" {human_bytes(given_back)}", va="center", fontsize=SMALL)
        write(1.75, row, f"{flops:,}")
        if flops:
            ratio = 1000 * given_back / flops
            write(0.15, row, f"{ratio:,.0f}" if ratio >= 100 else f"{ratio:.3g}")
        else:
            write(0.15, row, "free", "bold")
    write(1.75, -0.85, "additional FLOPs", "bold")
    write(0.15, -0.85, "bytes per 1000 FLOPs", "bold")
    name_rows(axes, [name for name, _, _ in ordered])
    axes.set_xlabel(f"given back, {unit}", fontsize=TEXT)
    said = [
        f"{name}: {exact_bytes(given_back)} for {flops:,} FLOPs" + (" (free)" if flops == 0 else "")
        for name, given_back, flops in ordered
    ]
    return Shown(figure, "; ".join(said) + ".")


def predicted_and_measured(rows: Sequence[tuple[str, int, int]]) -> Shown:
    """(label, predicted bytes, measured bytes): the prediction as a bar, the measurement as a line across its end."""
    check_not_empty("rows", rows)
    unit, size = unit_for(max(max(predicted, measured) for _, predicted, measured in rows))
    figure, axes = bar_figure(len(rows), left=label_inches(label for label, _, _ in rows), right=2.2, top=0.4)
    top = max(max(predicted, measured) for _, predicted, measured in rows) / size
    for row, (_, predicted, measured) in enumerate(rows):
        axes.barh(row, predicted / size, height=0.6, color=SKY, linewidth=0)
        axes.plot([measured / size] * 2, [row - 0.4, row + 0.4], color=BLACK, linewidth=2.2, solid_capstyle="butt")
        axes.text(
            1.02, row, f"{human_bytes(measured)}, difference {measured - predicted:,} B",
            transform=axes.get_yaxis_transform(), va="center", fontsize=SMALL,
        )  # fmt: skip
    name_rows(axes, [label for label, _, _ in rows])
    axes.set_xlim(0, 1.05 * top)
    axes.set_xlabel(unit, fontsize=TEXT)
    line = axes.plot([], [], color=BLACK, linewidth=2.2)[0]
    figure.legend(
        [Patch(color=SKY), line], ["predicted", "measured"], loc="upper left", ncols=2, fontsize=SMALL, frameon=False
    )
    said = [
        f"{label}: predicted {exact_bytes(predicted)}, measured {exact_bytes(measured)}, "
        f"difference {measured - predicted:,} bytes"
        for label, predicted, measured in rows
    ]
    return Shown(figure, "; ".join(said) + ".")


def _times(value: float) -> str:
    return f"{round(value)} x" if abs(value - round(value)) < 0.005 else f"{value:.2g} x"
