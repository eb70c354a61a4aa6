"""The pieces of a lab as HTML: pictures as ``<img>`` with their numbers in words, sentences, the table of runs."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from memsave_lib import plots
from memsave_lib.labs.config import LabConfig, Run
from memsave_lib.units import human_bytes

#: Of the categories on a picture: what may be alive in a step without an optimizer.
CATEGORIES = ("parameter", "gradient", "input", "activation", "recomputed", "temporary")
#: Stripes in place of the hatches of the pictures.
STRIPES = {
    "gradient": "repeating-linear-gradient(45deg, transparent 0 3px, white 3px 4px)",
    "recomputed": "repeating-linear-gradient(-45deg, transparent 0 3px, white 3px 4px)",
}


def image(png: bytes, inches: float, alt: str) -> str:
    """As wide as it was drawn, or as the page where that is narrower."""
    data = base64.b64encode(png).decode("ascii")
    return (
        f'<img alt="{html.escape(alt)}" style="width: 100%; max-width: {round(100 * inches)}px; height: auto; '
        f'display: block; border-radius: 6px" src="data:image/png;base64,{data}">'
    )


def key(recomputes: bool, lanes: bool) -> str:
    """What colors and marks mean, once for all pictures of a lab."""
    items = [(_swatch(name), name) for name in CATEGORIES if recomputes or name != "recomputed"]
    items += [] if lanes else [(_line("dashed", "currentColor"), "predicted")]
    items += [(_line("solid", plots.drawing.GREY), "earlier run")]
    items += [("&#9650;", "checkpoint kept")] if recomputes and not lanes else []
    items += [(_line("solid", plots.drawing.VERMILION, 5), "forward again")] if recomputes else []
    if lanes:
        items += [
            (_line("solid", plots.drawing.GREEN, 7), "copy out"),
            (_line("solid", plots.drawing.PURPLE, 7), "back"),
        ]
    style = "margin-right: 0.7em; white-space: nowrap; display: inline-block"
    spans = "".join(f'<span style="{style}">{mark} {name}</span>' for mark, name in items)
    return f'<div style="line-height: 1.5; font-size: 90%">{spans}</div>'


def _swatch(name: str) -> str:
    look = f"background-color: {plots.LOOKS[name][0]}; background-image: {STRIPES.get(name, 'none')}"
    return f'<span style="display: inline-block; width: 1.3em; height: 0.75em; {look}"></span>'


def _line(kind: str, color: str, width: int = 2) -> str:
    look = f"border-top: {width}px {kind} {color}"
    return f'<span style="display: inline-block; width: 1.5em; vertical-align: 0.25em; {look}"></span>'


def paragraph(sentence: str, alarm: bool = False, lines: int = 1) -> str:
    """Room for so many lines is there whether they are needed or not, so that nothing below jumps."""
    style = f"margin: 0.3em 0; line-height: 1.4; min-height: {1.4 * lines}em" + (
        "; border-left: 4px solid #D55E00; padding-left: 0.6em" if alarm else ""
    )
    return f'<p role="{"alert" if alarm else "status"}" style="{style}">{html.escape(sentence)}</p>'


def table(runs: Sequence[Run], config: LabConfig) -> str:
    """What was predicted and measured: one row for each number, several rows a run."""
    rows = [_row("th", ["run", "with", "", "predicted", "measured", "error, bytes", "the peak is in", "seconds"])]
    for run in runs:
        own = [str(run.number), config.say_step(run.values)], [run.trace.peak_at.in_words, f"{run.trace.seconds:.2f}"]
        count = len(run.comparisons)
        for place, (what, expected, found) in enumerate(run.comparisons):
            sizes = [what, human_bytes(expected), human_bytes(found), f"{found - expected:,}"]
            first, last = own if place == 0 else ((), ())
            cells = [_cell("td", text, count) for text in first]
            cells += [_cell("td", text) for text in sizes]
            cells += [_cell("td", text, count) for text in last]
            rows.append(f"<tr>{''.join(cells)}</tr>")
    look = "border-collapse: collapse; font-size: 92%"
    return f'<div style="overflow-x: auto"><table style="{look}">{"".join(rows)}</table></div>'


def _row(tag: str, texts: Sequence[str]) -> str:
    return f"<tr>{''.join(_cell(tag, text) for text in texts)}</tr>"


def _cell(tag: str, text: str, rows: int = 1) -> str:
    style = "text-align: left; vertical-align: top; line-height: 1.3; padding: 0.15em 0.6em"
    return f'<{tag} rowspan="{rows}" style="{style}">{html.escape(text)}</{tag}>'
