"""What a reader of a lab sees, as text."""

from __future__ import annotations

import html
import re

import ipywidgets as widgets

from memsave_lib.labs.component import Lab


def read(widget: widgets.HTML) -> str:
    """The text of a widget as a reader sees it."""
    return html.unescape(re.sub(r"<[^>]*>", " ", widget.value)).strip()


def rows(lab: Lab) -> list[list[str]]:
    """The cells of a lab's table, row by row."""
    table = re.findall(r"<tr>(.*?)</tr>", lab.table.value)
    return [[html.unescape(cell) for cell in re.findall(r"<t[hd][^>]*>(.*?)</t[hd]>", row)] for row in table]
