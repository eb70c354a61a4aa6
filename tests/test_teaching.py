"""What ``teaching`` says: minutes and sections as the notebooks have them, figures as the library computes them, names
that exist."""

from __future__ import annotations

import importlib
import inspect
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path

import jupytext
import pytest

from memsave_lib.course import deepspeed_peer
from tests.notebooks import rules
from tests.pages import ROOT, Page, Table
from tests.take_away import FIGURES

TEACHING = ROOT / "teaching"
GUIDE = Page.read(TEACHING / "guide.md")
SOURCES = {path.stem[:2]: path for path in sorted((ROOT / "notebooks" / "src").glob("*.py"))}
NUMBER = re.compile(r"\d[\d,]*(?:\.\d+)?")


@dataclass(frozen=True)
class Section:
    """A part of a notebook under a heading of level 2, and the minutes that its exercises say."""

    name: str
    exercises: int


def stated(source: Path) -> tuple[int, int] | None:
    """Minutes of reading and of exercises in the first cell of a source."""
    match = rules.MINUTES.search(jupytext.read(source, fmt="py:percent").cells[0].source)
    return (int(match[1]), int(match[2])) if match else None


def sections(source: Path) -> list[Section]:
    found: list[Section] = []
    for cell in jupytext.read(source, fmt="py:percent").cells:
        if cell.cell_type == "markdown":
            found += [Section(heading.text, 0) for heading in Page(source, cell.source).headings if heading.level == 2]
        else:
            minutes = sum(int(line["minutes"]) for line in rules.EXERCISE_LINE.finditer(cell.source))
            if minutes:
                found[-1] = Section(found[-1].name, found[-1].exercises + minutes)
    return found


def minutes_of(number: str) -> tuple[int, int]:
    """What the first cell of a notebook states; the test is skipped until it does."""
    if (minutes := stated(SOURCES[number])) is None:
        pytest.skip(f"the first cell of notebook {number} does not say its minutes with and without exercises yet")
    return minutes


def guide_table(number: str) -> Table:
    return next(table for table in GUIDE.tables if table.above.startswith(f"{number} "))


def column(table: Table, name: str) -> list[int]:
    """The numbers of a column; an empty cell is 0."""
    place = table.head.index(name)
    return [int(row[place] or 0) for row in table.rows]


def clock(text: str) -> int:
    hours, minutes = map(int, text.split(":"))
    return 60 * hours + minutes


def starts_follow(table: Table) -> bool:
    """Whether each row of a schedule starts when the one above it ends."""
    minutes = column(table, "minutes")
    first = clock(table.rows[0][0])
    return [clock(row[0]) for row in table.rows] == list(accumulate(minutes[:-1], initial=first))


@pytest.mark.parametrize("number", SOURCES)
def test_the_guide_names_each_section_and_the_minutes_of_its_exercises(number: str) -> None:
    minutes_of(number)
    table = guide_table(number)
    said = [Section(row[0], exercises) for row, exercises in zip(table.rows, column(table, "exercises"), strict=True)]
    assert said == sections(SOURCES[number])


@pytest.mark.parametrize("number", SOURCES)
def test_the_guides_minutes_add_up_to_the_notebooks(number: str) -> None:
    reading, exercises = minutes_of(number)
    table = guide_table(number)
    assert (sum(column(table, "reading")), sum(column(table, "exercises"))) == (reading, exercises)
    assert table.above == Page(SOURCES[number], first_markdown(SOURCES[number])).headings[0].text


def first_markdown(source: Path) -> str:
    return jupytext.read(source, fmt="py:percent").cells[0].source


def test_three_hours_are_three_hours_of_sections_that_exist() -> None:
    table = GUIDE.table("Three hours")
    assert sum(column(table, "minutes")) == 180
    assert starts_follow(table)
    taught = [(row[2], row[3]) for row in table.rows if row[2]]
    names = {number: [section.name for section in sections(source)] for number, source in SOURCES.items()}
    assert [(number, name) for number, name in taught if name not in names[number]] == []
    assert taught == sorted(taught, key=lambda one: (one[0], names[one[0]].index(one[1])))


def test_one_day_ends_in_time_and_gives_no_exercise_more_than_it_takes() -> None:
    table = GUIDE.table("One day")
    assert sum(column(table, "minutes")) == 480
    assert starts_follow(table)
    rows = zip(table.rows, *(column(table, name) for name in ("minutes", "reading", "exercises")), strict=True)
    taught = [(row[2], *numbers) for row, *numbers in rows if row[2]]
    assert [number for number, *_ in taught] == list(SOURCES)
    for number, minutes, reading, exercises in taught:
        assert minutes == reading + exercises
        if (says := stated(SOURCES[number])) is not None:
            assert reading == says[0]
            assert exercises <= says[1]


def test_self_study_lists_the_minutes_of_each_notebook() -> None:
    table = GUIDE.table("Self-study")
    *notebooks, together = table.rows
    assert [row[0] for row in notebooks] == list(SOURCES)
    for name in ("reading", "exercises", "together"):
        *numbers, total = column(table, name)
        assert total == sum(numbers)
    assert all(int(row[1]) + int(row[2]) == int(row[3]) for row in (*notebooks, together))
    for row in notebooks:
        assert row[1:3] == tuple(str(sum(column(guide_table(row[0]), name))) for name in ("reading", "exercises"))


def test_what_learners_get_wrong_has_rows_for_every_notebook() -> None:
    page = Page.read(TEACHING / "mistakes.md")
    titles = [Page(source, first_markdown(source)).headings[0].text for source in SOURCES.values()]
    assert [table.above for table in page.tables] == ["In every notebook", *titles]
    assert sum(len(table.rows) for table in page.tables) >= 25
    assert [row for table in page.tables for row in table.rows if not all(row)] == []


@pytest.mark.parametrize("number", FIGURES)
def test_a_take_away_page_shows_what_the_library_computes(number: str) -> None:
    page, figures = Page.read(TEACHING / "take-away" / f"{number}.md"), FIGURES[number]()
    assert tuple(table.rows for table in page.tables) == figures.tables
    written = {found.rstrip(",") for sentence in page.sentences for found in NUMBER.findall(sentence)}
    assert written - figures.computed - figures.chosen == set()
    assert figures.computed <= written


@pytest.mark.parametrize("number", FIGURES)
def test_a_take_away_page_is_one_page(number: str) -> None:
    page = Page.read(TEACHING / "take-away" / f"{number}.md")
    title = Page(SOURCES[number], first_markdown(SOURCES[number])).headings[0].text
    parts = [heading.text.removesuffix("s") for heading in page.headings]
    assert parts == [
        f"{title}: to take away",
        "Remember",
        "Formula",
        "Picture",
        "Ask yourself at work",
        "Where the figures come from",
    ]
    assert 3 <= sum(token.type == "list_item_open" for token in page.tokens) <= 6
    assert len(list(page.words)) <= 400


def lookup(name: str) -> object:
    """What a dotted name stands for: the longest module in front, then attributes."""
    parts = name.split(".")
    for length in range(len(parts), 0, -1):
        try:
            found: object = importlib.import_module(".".join(parts[:length]))
        except ModuleNotFoundError:
            continue
        for part in parts[length:]:
            found = getattr(found, part)
        return found
    raise ModuleNotFoundError(name)


def glossary_names(prefix: str) -> Sequence[str]:
    spans = Page.read(TEACHING / "glossary.md").code_spans
    return sorted({span for span in spans if span.startswith(prefix)})


@pytest.mark.parametrize("name", glossary_names("torch."))
def test_a_name_of_pytorch_in_the_glossary_exists(name: str) -> None:
    assert lookup(name) is not None


@pytest.mark.parametrize("name", glossary_names("deepspeed."))
def test_a_name_of_deepspeed_in_the_glossary_exists(name: str) -> None:
    if missing := deepspeed_peer.why_not():
        pytest.skip(missing)
    deepspeed_peer.load("cpu")
    assert lookup(name) is not None


def test_the_names_of_hugging_face_in_the_glossary_exist() -> None:
    from transformers import PreTrainedModel, TrainingArguments
    from transformers.modeling_layers import GradientCheckpointingLayer
    from transformers.trainer_utils import TrainerMemoryTracker

    assert {GradientCheckpointingLayer.__name__, TrainerMemoryTracker.__name__} <= set(glossary_names(""))
    assert hasattr(PreTrainedModel, "gradient_checkpointing_enable")
    assert "skip_memory_metrics" in inspect.signature(TrainingArguments).parameters
    if not hasattr(PreTrainedModel, "activation_checkpointing_enable"):
        pytest.skip("this transformers is older than activation_checkpointing_enable")
    parameters = inspect.signature(PreTrainedModel.activation_checkpointing_enable).parameters
    assert {"every_n_layers", "offload"} <= set(parameters)


def test_every_row_of_the_glossary_has_a_word_or_says_that_there_is_none() -> None:
    tables = Page.read(TEACHING / "glossary.md").tables
    tools = ("here", "PyTorch", "Hugging Face", "Megatron-LM", "DeepSpeed", "torchtitan")
    assert {table.head for table in tables} == {tools}
    assert [row for table in tables for row in table.rows if not all(row)] == []
