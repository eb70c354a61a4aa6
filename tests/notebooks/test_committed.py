"""The committed notebooks: what every reader, nbval, papermill, GitHub and Colab rely on."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import jupytext
import nbformat
import pytest
from nbformat import NotebookNode

import build
from tests.notebooks import rules

COURSE = build.Course(build.ROOT)
COMMITTED = [
    pytest.param(name, variant, id=f"{name}-{variant}") for name in COURSE.names() for variant in build.VARIANTS
]


def read(name: str, variant: build.Variant) -> NotebookNode:
    return nbformat.read(COURSE.target(name, variant), as_version=4)


def cuts(name: str) -> list[build.Cut]:
    source = jupytext.reads((COURSE.folder / "src" / f"{name}.py").read_text(encoding="utf-8"), fmt="py:percent")
    return [
        build.cut_code(cell.source, "solved", build.Place(name, number, cell.source))
        for number, cell in enumerate(source.cells, start=1)
        if cell.cell_type == "code" and cell.source.strip() != build.SETUP_MARKER
    ]


def test_the_committed_notebooks_are_those_that_have_a_source() -> None:
    assert COURSE.orphans() == []
    assert [name for name in COURSE.names() if not COURSE.target(name, "student").exists()] == []


@pytest.mark.parametrize("rule", rules.RULES, ids=lambda rule: rule.__name__)
@pytest.mark.parametrize(("name", "variant"), COMMITTED)
def test_rule(name: str, variant: build.Variant, rule: Callable[[NotebookNode], Iterator[str]]) -> None:
    assert list(rule(read(name, variant))) == []


@pytest.mark.parametrize("name", COURSE.names())
def test_code_cells_of_a_student_are_short(name: str) -> None:
    assert list(rules.short_code(read(name, "student"))) == []


@pytest.mark.parametrize("name", COURSE.names())
def test_a_student_notebook_reveals_no_solution(name: str) -> None:
    assert list(rules.nothing_revealed(read(name, "student"), cuts(name))) == []


@pytest.mark.parametrize(("name", "variant"), COMMITTED)
def test_exercises_are_untried_or_solved(name: str, variant: build.Variant) -> None:
    assert list(rules.exercises_tried(read(name, variant), solved=variant == "solved")) == []


@pytest.mark.parametrize(("name", "variant"), COMMITTED)
def test_exercises_state_difficulty_minutes_and_purpose(name: str, variant: build.Variant) -> None:
    assert list(rules.exercises_state_what_they_take(read(name, variant))) == []


@pytest.mark.parametrize(("name", "variant"), COMMITTED)
def test_links_between_files_lead_somewhere(name: str, variant: build.Variant) -> None:
    folder = COURSE.target(name, variant).parent
    text = "\n".join(cell.source for cell in read(name, variant).cells if cell.cell_type == "markdown")
    links = [link for link in re.findall(r"\]\(([^)#]+)", text) if "://" not in link]
    assert [link for link in links if not Path(folder, link).exists()] == []
