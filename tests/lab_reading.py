"""What a reader of a lab sees, as text."""

from __future__ import annotations

import html
import re

import ipywidgets as widgets

from memsave_lib.labs import Lab

_CELL = re.compile(r'<t[hd](?: rowspan="(\d+)")?[^>]*>(.*?)</t[hd]>')


def read(widget: widgets.HTML) -> str:
    """The text of a widget as a reader sees it."""
    return html.unescape(re.sub(r"<[^>]*>", " ", widget.value)).strip()


def alt(widget: widgets.HTML) -> str:
    """What is read out in place of the one picture of a widget."""
    (text,) = re.findall(r'<img alt="([^"]*)"', widget.value)
    return html.unescape(text)


def rows(lab: Lab) -> list[list[str]]:
    """The cells of a lab's table, row by row; one that spans several rows is in each of them."""
    table: list[list[str]] = []
    spanning: dict[int, tuple[int, str]] = {}  # column -> rows to come, and what they say
    for row in re.findall(r"<tr>(.*?)</tr>", lab.table.value):
        cells = iter(_CELL.findall(row))
        line: list[str] = []
        while True:
            left, text = spanning.get(len(line), (0, ""))
            if not left:
                cell = next(cells, None)
                if cell is None:
                    break
                left, text = int(cell[0] or 1), html.unescape(cell[1])
            spanning[len(line)] = left - 1, text
            line.append(text)
        table.append(line)
    return table
