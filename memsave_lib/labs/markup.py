"""The pieces of a lab as HTML: pictures as ``<img>`` with their numbers in words, sentences, the table of runs."""

from __future__ import annotations

import base64
import html
from collections.abc import Sequence

from memsave_lib import plots
from memsave_lib.labs.config import Run, Values
from memsave_lib.units import human_bytes

SHARPNESS = 150  # pixels to the inch; shown at 100


def setting(values: Values) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


def image(shown: plots.Shown, alt: str) -> str:
    width, height = (round(100 * inches) for inches in shown.figure.get_size_inches())
    data = base64.b64encode(shown.png(SHARPNESS)).decode("ascii")
    return (
        f'<img alt="{html.escape(alt)}" width="{width}" height="{height}" style="max-width: 100%; height: auto" '
        f'src="data:image/png;base64,{data}">'
    )


def paragraph(sentence: str, alarm: bool = False) -> str:
    style = "margin: 0.3em 0; line-height: 1.4" + (
        "; border-left: 4px solid #D55E00; padding-left: 0.6em" if alarm else ""
    )
    return f'<p role="{"alert" if alarm else "status"}" style="{style}">{html.escape(sentence)}</p>'


def table(runs: Sequence[Run]) -> str:
    """What was predicted and measured, one row a run."""
    heads = ["run", *runs[0].values]
    for what, _, _ in runs[0].comparisons:
        heads += [f"{what}, predicted", f"{what}, measured", "error, bytes"]
    rows = [_row("th", [*heads, "the peak is in"])]
    for number, run in enumerate(runs, start=1):
        texts = [str(number), *map(str, run.values.values())]
        for _, expected, found in run.comparisons:
            texts += [human_bytes(expected), human_bytes(found), f"{found - expected:,}"]
        rows.append(_row("td", [*texts, plots.place(run.trace)]))
    return f'<div style="overflow-x: auto"><table style="border-collapse: collapse">{"".join(rows)}</table></div>'


def _row(tag: str, texts: Sequence[str]) -> str:
    style = "text-align: right; vertical-align: bottom; line-height: 1.2; padding: 0.2em 0.6em"
    style += "; white-space: nowrap" if tag == "td" else ""
    cells = "".join(f'<{tag} style="{style}">{html.escape(text)}</{tag}>' for text in texts)
    return f"<tr>{cells}</tr>"
