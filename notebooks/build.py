"""Build the notebooks: ``notebooks/src/NN_name.py`` becomes a student and a solved notebook, both executed.

    python notebooks/build.py               build every notebook
    python notebooks/build.py 01 03         only these (any part of the name will do)
    python notebooks/build.py --check       execute nothing; compare what is committed with its source

A source is a Python file in jupytext's percent format. A code cell may hold exercise regions, one below the
other:

    def live_bytes(sizes: list[int]) -> int:
        # <exercise>
        # <stub>
        return 0  # your turn
        # <solution>
        return sum(sizes)
        # </exercise>

The student notebook gets the lines below ``<stub>``, the solved notebook those below ``<solution>``. In a
markdown cell

    <!-- student -->  ...  <!-- /student -->      is left out of the solved notebook,
    <!-- solved -->   ...  <!-- /solved -->       is left out of the student notebook,
    <!-- solution -->                             inside <details> becomes the solution of the exercise above,
    <!-- colab -->                                becomes a link that opens this very notebook on Colab.

A code cell with nothing but ``# <setup>`` becomes ``notebooks/setup_cell.py``, which finds the library.

Every marker stands alone on its line. Anything that looks like a marker and is none stops the build.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import os
import re
import sys
import textwrap
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import jupytext
import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError
from nbformat import NotebookNode

from run import CELL_TIMEOUT_SECONDS, FIXED_ENVIRONMENT, KERNEL_CONFIG

ROOT = Path(__file__).resolve().parent
Variant = Literal["student", "solved"]
VARIANTS: tuple[Variant, ...] = ("student", "solved")

#: Notebook metadata, the same in every notebook; ``accelerator`` and ``colab`` ask Colab for a T4.
METADATA = {
    "accelerator": "GPU",
    "colab": {"gpuType": "T4", "provenance": []},
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": "python3"},
    "language_info": {"file_extension": ".py", "mimetype": "text/x-python", "name": "python"},
}
#: Tags a source may use. nbval knows the two in the middle, papermill the first.
TAGS = ("parameters", "nbval-ignore-output", "nbval-skip", "exercise")

CODE_MARKERS = ("exercise", "stub", "solution", "/exercise")
SETUP_MARKER = "# <setup>"
TEXT_MARKERS = ("student", "/student", "solved", "/solved", "solution", "colab")
CODE_MARKER = re.compile(r"\s*#\s*<\s*(/?[A-Za-z_-]+)\s*/?>\s*")
TEXT_MARKER = re.compile(r"\s*<!--\s*(/?[A-Za-z_-]+)\s*-->\s*")
MARKER_ANYWHERE = re.compile(r"#\s*</?(?:exercise|stub|solution)>|<!--\s*/?(?:student|solved|solution|colab)\s*-->")


class SourceError(ValueError):
    """A source that cannot be built; the message says where and what would be right."""


@dataclass(frozen=True)
class Place:
    """A cell of a source, for messages."""

    source: str
    cell: int
    text: str

    def error(self, line: int, message: str) -> SourceError:
        first = self.text.strip().splitlines()[0] if self.text.strip() else ""
        return SourceError(f"{self.source}, cell {self.cell} ({first[:50]!r}), line {line} of the cell: {message}")


def _marker_of(line: str, pattern: re.Pattern[str], known: tuple[str, ...], place: Place, number: int) -> str | None:
    """The marker on this line, None when there is none; SourceError if it is misspelt or shares its line."""
    match = pattern.fullmatch(line)
    if match is None:
        if MARKER_ANYWHERE.search(line):
            raise place.error(number, f"a marker stands alone on its line, got {line.strip()!r}")
        return None
    if match[1] not in known:
        raise place.error(number, f"unknown marker {line.strip()!r}; known are {', '.join(known)}")
    return match[1]


@dataclass(frozen=True)
class Cut:
    """A code cell after its exercise regions were resolved.

    ``code`` is what the variant gets; ``solutions`` and ``stubs`` hold the lines of each region, dedented.
    """

    code: str
    stubs: tuple[str, ...]
    solutions: tuple[str, ...]


def cut_code(text: str, variant: Variant, place: Place) -> Cut:
    """Resolve the exercise regions of a code cell.

    Raises SourceError for a marker out of order, a region left open, an empty stub or solution, or a stub
    that is its own solution.
    """
    kept: list[str] = []
    regions: dict[str, list[str]] = {"stub": [], "solution": []}
    stubs: list[str] = []
    solutions: list[str] = []
    state = "common"
    expected = {"common": "exercise", "exercise": "stub", "stub": "solution", "solution": "/exercise"}
    for number, line in enumerate(text.splitlines(), start=1):
        marker = _marker_of(line, CODE_MARKER, CODE_MARKERS, place, number)
        if marker is not None:
            if marker != expected[state]:
                raise place.error(number, f"expected the marker <{expected[state]}>, got <{marker}>")
            if marker == "/exercise":
                stub, solution = (textwrap.dedent("\n".join(regions[part])).strip("\n") for part in regions)
                for part, lines in (("stub", stub), ("solution", solution)):
                    if not lines.strip():
                        raise place.error(number, f"the <{part}> of this exercise is empty")
                if stub == solution:
                    raise place.error(number, "the <stub> of this exercise is its <solution>")
                kept += regions["stub" if variant == "student" else "solution"]
                stubs.append(stub)
                solutions.append(solution)
                regions = {"stub": [], "solution": []}
                state = "common"
            else:
                state = marker
        elif state == "common":
            kept.append(line)
        elif state == "exercise":
            if line.strip():
                raise place.error(number, f"only <stub> may follow <exercise>, got {line.strip()!r}")
        else:
            regions[state].append(line)
    if state != "common":
        raise place.error(len(text.splitlines()), f"the exercise is left open: <{expected[state]}> is missing")
    return Cut("\n".join(kept), tuple(stubs), tuple(solutions))


def cut_text(text: str, variant: Variant, solutions: tuple[str, ...], badge: str, place: Place) -> str:
    """Resolve the markers of a markdown cell; ``solutions`` are those of the nearest exercise above it.

    ``badge`` replaces the marker for Colab; when it is empty the marker's line is left out.
    """
    kept: list[str] = []
    only: str | None = None
    details = 0
    for number, line in enumerate(text.splitlines(), start=1):
        marker = _marker_of(line, TEXT_MARKER, TEXT_MARKERS, place, number)
        if marker is None:
            details += line.count("<details") - line.count("</details>")
            if only in (None, variant):
                kept.append(line)
        elif marker == "solution":
            if details < 1:
                raise place.error(number, "<!-- solution --> outside <details> would show the answer at once")
            if not solutions:
                raise place.error(number, "<!-- solution --> has no exercise above it")
            if only in (None, variant):
                kept.append("```python\n" + "\n\n".join(solutions) + "\n```")
        elif marker == "colab":
            if badge:
                kept.append(badge)
            elif kept and not kept[-1]:
                kept.pop()  # the empty line above it goes too
        elif only is None and not marker.startswith("/"):
            only = marker
        elif marker == f"/{only}":
            only = None
        else:
            wanted = f"<!-- /{only} -->" if only else "<!-- student --> or <!-- solved -->"
            raise place.error(number, f"expected {wanted}, got {line.strip()!r}")
    if only is not None:
        raise place.error(len(text.splitlines()), f"<!-- /{only} --> is missing")
    return "\n".join(kept).strip("\n")


def colab_badge(repository: str, path: str) -> str:
    """A picture that links to the notebook at ``path`` of a public repository "owner/name"; "" without one."""
    if not repository:
        return ""
    page = f"https://colab.research.google.com/github/{repository}/blob/main/{path}"
    return f"[![Open in Colab](https://colab.research.google.com/assets/colab-badge.svg)]({page})"


def setup_cell(repository: str) -> str:
    """The cell that finds the library, and fetches it from a public repository "owner/name" where there is one."""
    template = (ROOT / "setup_cell.py").read_text(encoding="utf-8").rstrip("\n")
    setting = 'REPOSITORY = ""'
    if template.count(setting) != 1:
        raise SourceError(f"setup_cell.py must hold the line {setting} once")
    return template.replace(setting, f'REPOSITORY = "{repository}"')


def generate(source: str, name: str, variant: Variant, repository: str = "", path: str = "") -> NotebookNode:
    """The notebook of one variant, not executed.

    ``repository`` is where the course is published, "owner/name" or "", and ``path`` the notebook's place in it: for
    the link to Colab and the setup cell.

    A cell's id depends on its source text alone, so that it survives a rebuild, a move and a change
    elsewhere, and is the same in both variants.
    """
    raw = jupytext.reads(source, fmt="py:percent")
    badge = colab_badge(repository, path)
    notebook = nbformat.v4.new_notebook(metadata=copy.deepcopy(METADATA))
    solutions: tuple[str, ...] = ()
    seen: set[str] = set()
    for index, cell in enumerate(raw.cells, start=1):
        place = Place(name, index, cell.source)
        tags = cell.metadata.get("tags", [])
        if unknown := sorted(set(tags) - set(TAGS)):
            raise place.error(1, f"unknown tag {unknown[0]!r}; known are {', '.join(TAGS)}")
        if cell.cell_type == "code" and cell.source.strip() == SETUP_MARKER:
            text = setup_cell(repository)
            new = nbformat.v4.new_code_cell(text)
        elif cell.cell_type == "code":
            cut = cut_code(cell.source, variant, place)
            text = cut.code
            if cut.solutions:
                solutions = cut.solutions
                tags = [*tags, *({"exercise"} - set(tags))]
            new = nbformat.v4.new_code_cell(text)
        elif cell.cell_type == "markdown":
            text = cut_text(cell.source, variant, solutions, badge, place)
            new = nbformat.v4.new_markdown_cell(text)
        else:
            raise place.error(1, f"a source holds code and markdown cells, not {cell.cell_type}")
        identifier = _identifier(cell, seen)
        seen.add(identifier)
        if not text.strip():
            continue
        new.id = identifier
        new.metadata = nbformat.from_dict({"tags": tags} if tags else {})
        notebook.cells.append(new)
    return notebook


def _identifier(cell: NotebookNode, seen: set[str]) -> str:
    """Eight hexadecimal digits from the cell's text; equal cells are told apart by counting."""
    for count in range(len(seen) + 1):
        digest = hashlib.sha256(f"{cell.cell_type}\0{cell.source}\0{count}".encode()).hexdigest()[:8]
        if digest not in seen:
            return digest
    raise AssertionError("more collisions than cells")


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run every cell in a fresh kernel that works in ``folder``; the outputs go into ``notebook``."""
    client = NotebookClient(
        notebook,
        timeout=CELL_TIMEOUT_SECONDS,
        kernel_name="python3",
        coalesce_streams=True,
        record_timing=False,
        config=KERNEL_CONFIG,
    )
    client.execute(cwd=str(folder), env={**os.environ, **FIXED_ENVIRONMENT})
    clean(notebook)


def clean(notebook: NotebookNode) -> None:
    """Take out what execution leaves behind and what differs between two runs of the same source."""
    notebook.metadata = nbformat.from_dict(copy.deepcopy(METADATA))
    for cell in notebook.cells:
        cell.metadata = nbformat.from_dict({key: cell.metadata[key] for key in ("tags",) if key in cell.metadata})
        for output in cell.get("outputs", []):
            # The widget itself lives in the kernel that is gone; its text/plain stays.
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)
            if "metadata" in output:
                # A picture says how wide it wants to be: it has more pixels than that.
                widths = {kind: value for kind, value in output.metadata.items() if set(value) == {"width"}}
                output.metadata = nbformat.from_dict(widths)


def sources_of(notebook: NotebookNode) -> dict[str, object]:
    """What ``--check`` compares: everything that comes from the source, nothing that comes from execution."""
    cells = [(cell.cell_type, cell.id, cell.source, dict(cell.metadata)) for cell in notebook.cells]
    return {"metadata": dict(notebook.metadata), "cells": cells, "format": notebook.nbformat_minor}


def same_but_pictures(new: NotebookNode, old: NotebookNode) -> bool:
    """Whether two executed notebooks agree in everything but pictures and outputs that nobody compares."""
    return sources_of(new) == sources_of(old) and all(
        _compared_outputs(one) == _compared_outputs(other) for one, other in zip(new.cells, old.cells, strict=True)
    )


def _compared_outputs(cell: NotebookNode) -> object:
    if cell.cell_type != "code":
        return None
    if {"nbval-ignore-output", "nbval-skip"} & set(cell.metadata.get("tags", [])):
        return cell.execution_count
    outputs = copy.deepcopy(cell.outputs)
    for output in outputs:
        for kind in ("image/png", "image/jpeg"):
            if kind in output.get("data", {}):
                output.data[kind] = "a picture"
    return cell.execution_count, outputs


def first_difference(generated: NotebookNode, committed: NotebookNode) -> str | None:
    """The first place where a committed notebook is not what its source gives, in words; None without."""
    want, have = sources_of(generated), sources_of(committed)
    if want == have:
        return None
    for key in ("metadata", "format"):
        if want[key] != have[key]:
            return f"notebook {key} is {have[key]}, the source gives {want[key]}"
    for number, (one, other) in enumerate(zip(generated.cells, committed.cells, strict=False), start=1):
        for part in ("cell_type", "source", "id", "metadata"):
            if one[part] != other[part]:
                return f"cell {number}: {part} is {_short(other[part])}, the source gives {_short(one[part])}"
    return f"it has {len(committed.cells)} cells, the source gives {len(generated.cells)}"


def _short(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 120 else text[:117] + "..."


@dataclass(frozen=True)
class Course:
    """A course's folder: ``src/NN_name.py`` gives ``NN_name.ipynb`` and ``solutions/NN_name.ipynb``."""

    folder: Path

    @property
    def repository(self) -> str:
        """Where the course is published, "owner/name", from pyproject.toml beside the folder; "" when nowhere."""
        settings = self.folder.parent / "pyproject.toml"
        if not settings.exists():
            return ""
        return tomllib.loads(settings.read_text(encoding="utf-8"))["tool"]["memsave"]["repository"]

    def names(self, parts: tuple[str, ...] = ()) -> list[str]:
        """Names of the sources in order: all, or those that contain one of ``parts``.

        Raises SourceError for a part that no name contains.
        """
        names = sorted(path.stem for path in (self.folder / "src").glob("*.py"))
        wanted = [Path(part).stem for part in parts]
        for part in wanted:
            if not any(part in name for name in names):
                raise SourceError(f"no source matches {part!r}; there are {', '.join(names) or 'none'}")
        return [name for name in names if not wanted or any(part in name for part in wanted)]

    def target(self, name: str, variant: Variant) -> Path:
        return (self.folder if variant == "student" else self.folder / "solutions") / f"{name}.ipynb"

    def generate(self, name: str, variant: Variant) -> NotebookNode:
        path = self.folder / "src" / f"{name}.py"
        place = self.target(name, variant).relative_to(self.folder.parent)
        return generate(path.read_text(encoding="utf-8"), path.name, variant, self.repository, place.as_posix())

    def orphans(self) -> list[Path]:
        """Notebooks without a source."""
        expected = {self.target(name, variant) for name in self.names() for variant in VARIANTS}
        found = [*self.folder.glob("*.ipynb"), *(self.folder / "solutions").glob("*.ipynb")]
        return sorted(set(found) - expected)

    def build(self, name: str, variant: Variant, force: bool = False) -> bool:
        """Execute and write one notebook; False when nothing but pictures would change."""
        notebook = self.generate(name, variant)
        execute(notebook, self.folder)
        target = self.target(name, variant)
        if target.exists() and not force and same_but_pictures(notebook, nbformat.read(target, as_version=4)):
            return False
        target.parent.mkdir(exist_ok=True)
        nbformat.validate(notebook)
        target.write_text(nbformat.writes(notebook) + "\n", encoding="utf-8")
        return True

    def check(self, names: list[str]) -> list[str]:
        """Complaints about committed notebooks that their sources do not give, one sentence each."""
        complaints = [f"{path.name} has no source in src/: delete it" for path in self.orphans()]
        for name in names:
            for variant in VARIANTS:
                target = self.target(name, variant)
                if not target.exists():
                    complaints.append(f"{target.name} ({variant}) is not built")
                elif difference := first_difference(self.generate(name, variant), nbformat.read(target, as_version=4)):
                    complaints.append(f"{target.name} ({variant}): {difference}")
        return complaints


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Build the notebooks from notebooks/src.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="any part of a notebook's name; all without")
    parser.add_argument("--check", action="store_true", help="execute nothing, compare what is committed")
    parser.add_argument("--force", action="store_true", help="write also when only pictures changed")
    options = parser.parse_args(arguments)
    course = Course(ROOT)
    try:
        names = course.names(tuple(options.names))
        if options.check:
            complaints = course.check(names)
            print("\n".join(complaints) or f"{len(names)} sources give what is committed")
            if complaints:
                print("Run: make notebooks")
            return bool(complaints)
        for name in names:
            for variant in VARIANTS:
                written = course.build(name, variant, options.force)
                print(f"{name} ({variant}): {'written' if written else 'unchanged'}", flush=True)
    except SourceError as error:
        print(error, file=sys.stderr)
        return 1
    except CellExecutionError as error:
        print(f"{name} ({variant}) failed:\n{error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
