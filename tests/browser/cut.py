"""Find the labs of a built notebook, and cut the notebook down to what they need."""

from __future__ import annotations

import symtable
from collections.abc import Iterable, Iterator

from nbformat import NotebookNode

#: How a lab's output begins in a committed notebook, where no widget is alive.
LAB_OUTPUT = "A lab with"


def lab_cells(notebook: NotebookNode) -> list[int]:
    """Positions of the cells whose result is a lab."""
    return [
        position
        for position, cell in enumerate(notebook.cells)
        if cell.cell_type == "code" and any(_text(output).startswith(LAB_OUTPUT) for output in cell.outputs)
    ]


def cut_to(notebook: NotebookNode, cells: Iterable[int]) -> NotebookNode:
    """A notebook of these cells and of those before that define what they use: imports, parameters, setup, functions.

    A cell that only changes what another one has made is left out.
    """
    wanted = set(cells)
    kept: list[NotebookNode] = []
    missing: set[str] = set()
    for position in range(max(wanted), -1, -1):
        cell = notebook.cells[position]
        if cell.cell_type != "code":
            continue
        assigned, used = _names(cell.source)
        if position in wanted or assigned & missing:
            kept.insert(0, cell)
            missing = (missing - assigned) | used
    return NotebookNode({**notebook, "cells": kept})


def _text(output: NotebookNode) -> str:
    return output.get("data", {}).get("text/plain", "")


def _names(source: str) -> tuple[set[str], set[str]]:
    """Names that a cell assigns at its top level, and global names that it uses anywhere."""
    top = symtable.symtable(source, "cell", "exec")
    assigned = {one.get_name() for one in top.get_symbols() if one.is_assigned() or one.is_imported()}
    used = {one.get_name() for one in top.get_symbols() if one.is_referenced()}
    for table in _inner(top):
        used |= {one.get_name() for one in table.get_symbols() if one.is_global()}
    return assigned, used


def _inner(table: symtable.SymbolTable) -> Iterator[symtable.SymbolTable]:
    for child in table.get_children():
        yield child
        yield from _inner(child)
