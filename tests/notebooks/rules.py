"""What a committed notebook must be. Each rule takes a notebook and yields one sentence per fault."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from itertools import pairwise

from nbformat import NotebookNode

from build import METADATA, TAGS, Cut
from run import PARAMETERS
from teaching.minutes import EXERCISE_LINE

CELLS = range(20, 36)
WORDS = range(600, 1201)
CODE_LINES = 15
UNCOMPARED = {"nbval-ignore-output", "nbval-skip"}
#: A line of a solution shorter than this, without white space, may stand elsewhere by chance.
TELLING_LENGTH = 16

EXERCISES = range(3, 6)
MINUTES = re.compile(r"\*\*After these (\d+) minutes, and (\d+) of exercises, you can\*\*")

DETAILS = re.compile(r"<details.*?</details>", re.DOTALL)
FENCE = re.compile(r"^```.*?^```", re.DOTALL | re.MULTILINE)
COMMENT = re.compile(r"<!--.*?-->", re.DOTALL)
#: Name of a fault -> what it looks like in an output. None may be in an output that nbval compares.
VARIABLE = {
    "a path": re.compile(r"(?<![\w.)])/(?:[\w.-]+/)+[\w.-]+|[A-Z]:\\|(?:site|dist)-packages"),
    "an object's address": re.compile(r"\b0x[0-9a-f]{6,}"),
    "a time": re.compile(r"(?<![\w.])\d+(?:\.\d+)?\s?(?:ns|us|µs|ms|s|sec|seconds?|min|minutes?)(?![\w·*]| [bh]\b)"),
    "a loss or perplexity": re.compile(
        r"\b(?:loss|perplexity)(?: is| of|:| =|=)?\s?\d+\.\d+(?!\s?(?:[KMG]i?B|%|times))", re.IGNORECASE
    ),
    "a warning": re.compile(r"\b\w*Warning\b"),
}


def code_cells(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def tags(cell: NotebookNode) -> set[str]:
    return set(cell.metadata.get("tags", []))


def output_texts(cell: NotebookNode) -> Iterator[str]:
    """The texts of a cell's outputs that nbval compares and a reader sees."""
    for output in cell.outputs:
        yield output.get("text", "")
        for kind, value in output.get("data", {}).items():
            if kind.startswith("text/"):
                yield value


def prose(notebook: NotebookNode) -> str:
    """The markdown of a notebook without what is folded away, code and comments."""
    text = "\n\n".join(cell.source for cell in notebook.cells if cell.cell_type == "markdown")
    return COMMENT.sub("", FENCE.sub("", DETAILS.sub("", text)))


def headings(notebook: NotebookNode) -> list[tuple[int, str]]:
    return [(len(match[1]), match[2]) for match in re.finditer(r"^(#+) +(.+)$", prose(notebook), re.MULTILINE)]


def executed_in_order(notebook: NotebookNode) -> Iterator[str]:
    for expected, cell in enumerate(code_cells(notebook), start=1):
        if cell.execution_count != expected:
            yield f"code cell {expected} has the execution count {cell.execution_count}"


def one_title(notebook: NotebookNode) -> Iterator[str]:
    titles = [text for level, text in headings(notebook) if level == 1]
    if len(titles) != 1:
        yield f"there must be one heading of level 1, found {len(titles)}"
    if notebook.cells[0].cell_type != "markdown" or not notebook.cells[0].source.startswith("# "):
        yield "the first cell must be markdown and start with the title"


def headings_without_gaps(notebook: NotebookNode) -> Iterator[str]:
    above = 0
    for level, text in headings(notebook):
        if level > above + 1:
            yield f"heading {text!r} has level {level} below level {above}"
        above = level


def no_errors(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), start=1):
        for output in cell.outputs:
            if output.output_type == "error":
                yield f"code cell {number} ended in {output.ename}"
            if output.get("name") == "stderr":
                yield f"code cell {number} wrote to stderr: {output.text.strip()[:80]!r}"


def clean_metadata(notebook: NotebookNode) -> Iterator[str]:
    for key in sorted({*notebook.metadata, *METADATA}):
        if notebook.metadata.get(key) != METADATA.get(key):
            yield f"metadata.{key} is {notebook.metadata.get(key)}, expected {METADATA.get(key)}"
    for number, cell in enumerate(notebook.cells, start=1):
        if extra := sorted(set(cell.metadata) - {"tags"}):
            yield f"cell {number} has the metadata {', '.join(extra)}"
        if unknown := sorted(tags(cell) - set(TAGS)):
            yield f"cell {number} has the unknown tag {unknown[0]!r}"
        for output in cell.get("outputs", []):
            if "application/vnd.jupyter.widget-view+json" in output.get("data", {}):
                yield f"cell {number} stores a widget, which is an error message without its kernel"


def unique_ids(notebook: NotebookNode) -> Iterator[str]:
    ids = [cell.get("id") for cell in notebook.cells]
    if None in ids or len(set(ids)) != len(ids):
        yield "cells must have ids, each its own"


def nothing_variable(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), start=1):
        if tags(cell) & UNCOMPARED:
            continue
        for text in output_texts(cell):
            for name, pattern in VARIABLE.items():
                if match := pattern.search(text):
                    yield f"code cell {number} shows {name} in an output that is compared: {match[0]!r}"


def figures_say_their_numbers(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), start=1):
        for output in cell.outputs:
            data = output.get("data", {})
            if "image/png" in data and re.match(r"<.*>|$", data.get("text/plain", "")):
                yield f"the figure of code cell {number} has no sentence beside it, only {data.get('text/plain')!r}"


def labs_have_a_still(notebook: NotebookNode) -> Iterator[str]:
    """Who reads without running sees, in the cell before a lab, its starting state and a sentence with the numbers."""
    cells = code_cells(notebook)
    for before, cell in pairwise(cells):
        if any(text.startswith("A lab with") for text in output_texts(cell)):
            found = [output.get("data", {}) for output in before.outputs]
            if not any("image/png" in data and "bytes" in data.get("text/plain", "") for data in found):
                yield f"no picture with its bytes in words stands before the lab {cell.source[:50]!r}"


def parameters_first(notebook: NotebookNode) -> Iterator[str]:
    cells = code_cells(notebook)
    found = [number for number, cell in enumerate(cells, start=1) if "parameters" in tags(cell)]
    if found != [2]:
        yield f"the one cell tagged parameters must be the second code cell, behind the setup cell, found at {found}"
        return
    if "REPOSITORY =" not in cells[0].source:
        yield "the first code cell must be the one that finds the library: # <setup>"
    tree = ast.parse(cells[found[0] - 1].source)
    names = [target.id for node in tree.body if isinstance(node, ast.Assign) for target in node.targets]
    if names != list(PARAMETERS) or len(tree.body) != len(PARAMETERS):
        yield f"the parameters cell must assign {', '.join(PARAMETERS)}, it assigns {', '.join(names)}"
    elif not all(isinstance(node.value, ast.Constant) for node in tree.body):
        yield "the parameters cell must assign plain values"
    elif tree.body[-1].value.value != "auto":
        yield 'the parameters cell must end in device = "auto"'
    if "setup(" not in "".join(cell.source for cell in cells[found[0] : found[0] + 1]):
        yield "the cell after the parameters must call setup(...)"


def right_number_of_cells(notebook: NotebookNode) -> Iterator[str]:
    if len(notebook.cells) not in CELLS:
        yield f"it has {len(notebook.cells)} cells, expected {CELLS.start} to {CELLS.stop - 1}"


def right_number_of_words(notebook: NotebookNode) -> Iterator[str]:
    words = sum(bool(re.search(r"\w", token)) for token in prose(notebook).split())
    if words not in WORDS:
        yield f"it has {words} words outside <details>, expected {WORDS.start:,} to {WORDS.stop - 1:,}"


def short_code(notebook: NotebookNode) -> Iterator[str]:
    for number, cell in enumerate(code_cells(notebook), start=1):
        lines = sum(bool(line.strip()) for line in cell.source.splitlines())
        if lines > CODE_LINES:
            yield f"code cell {number} has {lines} lines that are not blank, at most {CODE_LINES} are allowed"


#: Rules for every notebook.
RULES = (
    executed_in_order,
    one_title,
    headings_without_gaps,
    no_errors,
    clean_metadata,
    unique_ids,
    nothing_variable,
    figures_say_their_numbers,
    labs_have_a_still,
    parameters_first,
    right_number_of_cells,
    right_number_of_words,
)


def nothing_revealed(student: NotebookNode, cuts: list[Cut]) -> Iterator[str]:
    """No line of a solution in a student notebook, nor as a part of one, but for what is folded into <details>."""
    stubs = "\n".join(squeezed(stub) for cut in cuts for stub in cut.stubs)
    shown = [cell.source for cell in code_cells(student)]
    shown += [text for cell in code_cells(student) for text in output_texts(cell)]
    shown += [DETAILS.sub("", cell.source) for cell in student.cells if cell.cell_type == "markdown"]
    visible = "\n".join(map(squeezed, shown))
    for cut in cuts:
        for solution in cut.solutions:
            for line in map(squeezed, solution.splitlines()):
                if len(line) >= TELLING_LENGTH and line in visible and line not in stubs:
                    yield f"the student notebook shows a line of a solution: {line!r}"


def squeezed(text: str) -> str:
    """Without comments and white space: how a line is laid out tells nothing."""
    return re.sub(r"\s+", "", re.sub(r"(?:^|(?<=\s))# .*$", "", text, flags=re.MULTILINE))


def exercises_state_what_they_take(notebook: NotebookNode) -> Iterator[str]:
    """Difficulty, minutes and purpose in the cell of each exercise; the minutes' sum where the notebook begins."""
    cells = [cell for cell in code_cells(notebook) if "exercise" in tags(cell)]
    if len(cells) not in EXERCISES:
        yield f"it has {len(cells)} exercises, expected {EXERCISES.start} to {EXERCISES.stop - 1}"
    stated = [EXERCISE_LINE.search(cell.source) for cell in cells]
    for cell, line in zip(cells, stated, strict=True):
        if line is None:
            yield (
                f"the exercise {cell.source[:50]!r} lacks a line '# Exercise: difficulty 1 of 3, 5 minutes. For: what.'"
            )
    took = exercise_minutes(notebook)
    promised = minutes_stated(notebook)
    if promised is None:
        yield "its first cell must say **After these N minutes, and M of exercises, you can**"
    elif took != promised[1]:
        yield f"its exercises take {took} minutes, its first cell says {promised[1]}"


def exercise_minutes(notebook: NotebookNode) -> int:
    found = (EXERCISE_LINE.search(cell.source) for cell in code_cells(notebook) if "exercise" in tags(cell))
    return sum(int(line["minutes"]) for line in found if line)


def minutes_stated(notebook: NotebookNode) -> tuple[int, int] | None:
    """Minutes of a notebook without its exercises, and of these, as its first cell says them."""
    match = MINUTES.search(notebook.cells[0].source)
    return (int(match[1]), int(match[2])) if match else None


def exercises_tried(notebook: NotebookNode, solved: bool) -> Iterator[str]:
    """An untouched stub says "Not tried yet"; a solved exercise says "Right." and nothing else."""
    for number, cell in enumerate(code_cells(notebook), start=1):
        if "exercise" not in tags(cell):
            continue
        said = "\n".join(output_texts(cell))
        if solved and ("Right." not in said or "Not tried yet" in said or "Not yet." in said):
            yield f"the solved exercise in code cell {number} says {said.strip()[:80]!r}"
        if not solved and "Not tried yet" not in said:
            yield f"the untouched exercise in code cell {number} says {said.strip()[:80]!r}"
