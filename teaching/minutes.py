"""Write the minutes of exercises, which the notebooks' sources state, into the tables of ``guide.md``.

    python teaching/minutes.py            write
    python teaching/minutes.py --check    compare, and exit with 1 where something differs

Minutes of reading are the guide's own, row by row; this only adds them up. A section without a row, or a row without a
section, is an error: rows are written by a person.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import jupytext

HERE = Path(__file__).resolve().parent
GUIDE = HERE / "guide.md"
SOURCES = HERE.parent / "notebooks" / "src"
#: The line at the head of each exercise, which the rules for notebooks demand.
EXERCISE_LINE = re.compile(
    r"^# Exercise: difficulty [123] of 3, (?P<minutes>\d+) minutes\. For: (?P<purpose>.+)\.$", re.MULTILINE
)
SECTION = re.compile(r"^## (.+)$", re.MULTILINE)
NOTEBOOK = re.compile(r"### (\d\d) ")
STUDY = "## Self-study"


class GuideError(ValueError):
    """Rows of the guide that are not the sections of the notebook."""


@dataclass(frozen=True)
class Section:
    """A part of a notebook under a heading of level 2, and the minutes that its exercises state."""

    name: str
    exercises: int = 0


def sections(source: str) -> list[Section]:
    """The sections of a notebook's source, in order."""
    found: list[Section] = []
    for cell in jupytext.reads(source, fmt="py:percent").cells:
        if cell.cell_type == "markdown":
            found += map(Section, SECTION.findall(cell.source))
        elif minutes := sum(int(line["minutes"]) for line in EXERCISE_LINE.finditer(cell.source)):
            found[-1] = Section(found[-1].name, found[-1].exercises + minutes)
    return found


def updated(guide: str, notebooks: Mapping[str, list[Section]]) -> str:
    """The guide with the minutes of these notebooks: number -> sections. Raises GuideError where rows do not fit."""
    sums = {number: _sums(_rows(guide, f"### {number} "), number, found) for number, found in notebooks.items()}
    heading, lines = "", []
    for line in guide.splitlines():
        heading = line if line.startswith("#") else heading
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        number = match[1] if (match := NOTEBOOK.match(heading)) else None
        if line.startswith("| ") and number in notebooks and cells[0] != "section":
            cells[2] = str(next(one.exercises for one in notebooks[number] if one.name == cells[0]))
            line = _row(cells)
        elif line.startswith("| ") and heading == STUDY and cells[0] in (*sums, "all"):
            reading, exercises = sums[cells[0]] if cells[0] in sums else map(sum, zip(*sums.values(), strict=True))
            line = _row([cells[0], str(reading), str(exercises), str(reading + exercises)])
        lines.append(line)
    return "\n".join(lines) + "\n"


def _rows(guide: str, heading: str) -> list[list[str]]:
    """Cells of the table under a heading, without its head."""
    part = guide.split(f"\n{heading}", 1)[-1].split("\n#", 1)[0]
    lines = [line for line in part.splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def _sums(rows: list[list[str]], number: str, found: list[Section]) -> tuple[int, int]:
    named = [row[0] for row in rows]
    if named != (wanted := [one.name for one in found]):
        missing = [name for name in wanted if name not in named] or "none"
        left = [name for name in named if name not in wanted] or "none"
        raise GuideError(f"notebook {number}: sections without a row: {missing}; rows without a section: {left}")
    return sum(int(row[1]) for row in rows), sum(one.exercises for one in found)


def _row(cells: list[str]) -> str:
    return "".join(f"| {cell} " if cell else "| " for cell in cells) + "|"


def main(arguments: list[str]) -> int:
    notebooks = {path.stem[:2]: sections(path.read_text(encoding="utf-8")) for path in sorted(SOURCES.glob("*.py"))}
    guide = GUIDE.read_text(encoding="utf-8")
    try:
        new = updated(guide, notebooks)
    except GuideError as error:
        print(error, file=sys.stderr)
        return 1
    if new == guide:
        print("guide.md has the minutes of the notebooks")
        return 0
    if "--check" in arguments:
        print("guide.md has other minutes than the notebooks. Run: python teaching/minutes.py", file=sys.stderr)
        return 1
    GUIDE.write_text(new, encoding="utf-8")
    print("guide.md now has the minutes of the notebooks")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
