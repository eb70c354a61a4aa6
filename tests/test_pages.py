"""Every page and every notebook: headings in order, links that lead somewhere, pictures with words, no misspelt word.

The rules of the Markdown linter are in ``.pymarkdown``; ``make lint`` runs it on the pages, this module on notebooks.
"""

from __future__ import annotations

import re
from itertools import pairwise
from pathlib import Path

import jupytext
import nbformat
import pytest
from pymarkdown.api import PyMarkdownApi
from spellchecker import SpellChecker

from tests.notebooks import rules
from tests.pages import ROOT, Page, nowhere, paths

PAGES = [pytest.param(path, id=path.relative_to(ROOT).as_posix()) for path in paths()]
NOTEBOOKS = [parameter for parameter in PAGES if parameter.id.endswith(".ipynb")]
SOURCES = sorted((ROOT / "notebooks" / "src").glob("*.py"))
#: A machine's own folders.
MACHINE = re.compile(r"(?<![\w.:/])/(?:home|Users|root|tmp|work|mnt|opt|var|private)/[\w.-]|[A-Z]:\\")
#: A picture of ours is an argument, and its text makes it too; a badge has a short name.
ALTERNATIVE_TEXT, BADGE_TEXT = 60, 10
WORDS = ROOT / "tests" / "words.txt"


def page_at(tmp_path: Path, text: str, name: str = "page.md") -> Page:
    (tmp_path / name).write_text(text, encoding="utf-8")
    return Page.read(tmp_path / name)


def faults_in_headings(page: Page) -> list[str]:
    levels = [heading.level for heading in page.headings]
    found = [] if levels.count(1) == 1 and levels[0] == 1 else [f"levels {levels}: one title is wanted, and first"]
    for above, heading in pairwise(page.headings):
        if heading.level > above.level + 1:
            found.append(f"{heading.text!r} has level {heading.level} below level {above.level}")
    return found


def rows_outside(page: Page) -> list[str]:
    """Paragraphs that were meant as a table: its head is missing, or something stands in between."""
    return [sentence for sentence in page.sentences if sentence.startswith("|")]


def faults_in_pictures(page: Page) -> list[str]:
    pictures = [link for link in page.links if link.picture]
    return [
        f"{link.target} is described in {len(link.text)} characters: {link.text!r}"
        for link in pictures
        if len(link.text) < (BADGE_TEXT if link.outside else ALTERNATIVE_TEXT)
    ]


def faults_in_links(page: Page) -> list[str]:
    return [fault for link in page.links if (fault := nowhere(page, link)) is not None]


def unknown_words(page: Page) -> list[str]:
    """Words that neither a dictionary of English nor the list of the project's terms knows."""
    ours = {word.lower() for word in WORDS.read_text(encoding="utf-8").split()}
    written = {re.sub(r"'s?$", "", word.replace("’", "'")).lower() for word in page.words}
    longer = {word for word in written if len(word) > 2}
    return sorted(SpellChecker(language="en", distance=1).unknown(longer) - ours)


def source_page(path: Path) -> Page:
    """The markdown of a notebook's source, before it is built: of both variants."""
    cells = jupytext.read(path, fmt="py:percent").cells
    return Page(path, "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown") + "\n")


def test_pages_and_notebooks_are_found() -> None:
    names = {parameter.id for parameter in PAGES}
    assert {"README.md", "CONTRIBUTING.md", "teaching/README.md", "teaching/take-away/06.md"} <= names
    assert len(NOTEBOOKS) == 2 * len(SOURCES) == 14


@pytest.mark.parametrize("path", PAGES)
def test_one_title_and_headings_without_gaps(path: Path) -> None:
    assert faults_in_headings(Page.read(path)) == []


@pytest.mark.parametrize("path", PAGES)
def test_rows_of_tables_are_in_tables(path: Path) -> None:
    assert rows_outside(Page.read(path)) == []


@pytest.mark.parametrize("path", PAGES)
def test_links_lead_somewhere(path: Path) -> None:
    assert faults_in_links(Page.read(path)) == []


@pytest.mark.parametrize("path", PAGES)
def test_pictures_have_words(path: Path) -> None:
    assert faults_in_pictures(Page.read(path)) == []


@pytest.mark.parametrize("path", PAGES)
def test_addresses_are_links_and_none_is_of_this_machine(path: Path) -> None:
    page = Page.read(path)
    assert page.bare_addresses == []
    assert MACHINE.findall(page.text) == []
    assert str(ROOT) not in page.text


@pytest.mark.parametrize("path", NOTEBOOKS)
def test_the_linter_finds_nothing_in_the_markdown_of_a_notebook(path: Path) -> None:
    linter = PyMarkdownApi().configuration_file_path(str(ROOT / ".pymarkdown"))
    found = linter.scan_string(Page.read(path).text).scan_failures
    assert [f"line {fault.line_number}: {fault.rule_id} {fault.rule_description}" for fault in found] == []


@pytest.mark.parametrize("path", [parameter for parameter in PAGES if parameter.id.endswith(".md")])
def test_the_words_of_a_page_are_english_or_ours(path: Path) -> None:
    assert unknown_words(Page.read(path)) == []


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_the_words_of_a_notebook_are_english_or_ours(path: Path) -> None:
    assert unknown_words(source_page(path)) == []


def test_the_list_of_our_words_is_sorted() -> None:
    words = WORDS.read_text(encoding="utf-8").split()
    assert words == sorted(set(words), key=str.lower)


def readme_minutes() -> dict[str, list[int]]:
    """Notebook -> the numbers in the column "minutes" of README's table of the course."""
    table = next(table for table in Page.read(ROOT / "README.md").tables if "minutes" in table.head)
    minutes = table.head.index("minutes")
    return {row[0]: [int(number) for number in re.findall(r"\d+", row[minutes])] for row in table.rows}


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: path.stem)
def test_readme_says_the_minutes_of_each_notebook(path: Path) -> None:
    notebook = nbformat.read(ROOT / "notebooks" / f"{path.stem}.ipynb", as_version=4)
    assert readme_minutes()[path.stem[:2]] == list(rules.minutes_stated(notebook))


def test_a_page_without_a_title_and_with_a_gap_is_noticed(tmp_path: Path) -> None:
    assert faults_in_headings(page_at(tmp_path, "# A\n\n## B\n\n### C\n\n## D\n")) == []
    assert len(faults_in_headings(page_at(tmp_path, "# A\n\n### C\n"))) == 1
    assert len(faults_in_headings(page_at(tmp_path, "# A\n\n# B\n"))) == 1
    assert len(faults_in_headings(page_at(tmp_path, "## B\n"))) == 1
    assert faults_in_headings(page_at(tmp_path, "# A\n\n```bash\n# no heading\n```\n")) == []


def test_a_row_without_a_head_is_noticed(tmp_path: Path) -> None:
    assert rows_outside(page_at(tmp_path, "| a | b |\n|---|---|\n| 1 | 2 |\n")) == []
    assert rows_outside(page_at(tmp_path, "| 1 | 2 |\n\n| a | b |\n|---|---|\n")) == ["| 1 | 2 |"]


def test_a_picture_without_words_is_noticed(tmp_path: Path) -> None:
    assert len(faults_in_pictures(page_at(tmp_path, "![](a.png)\n"))) == 1
    assert len(faults_in_pictures(page_at(tmp_path, "![memory](a.png)\n"))) == 1
    assert faults_in_pictures(page_at(tmp_path, f"![{'memory ' * 10}](a.png)\n")) == []
    assert len(faults_in_pictures(page_at(tmp_path, "![](https://a.org/badge.svg)\n"))) == 1


def test_an_address_that_is_no_link_is_noticed(tmp_path: Path) -> None:
    linked = page_at(tmp_path, "<https://a.org> [here](https://b.org) `https://c.org`\n")
    assert linked.bare_addresses == []
    assert page_at(tmp_path, "see https://a.org/x now\n").bare_addresses == ["https://a.org/x"]


def test_a_link_that_leads_nowhere_is_noticed() -> None:
    def faults(text: str, below: str = "teaching") -> list[str]:
        return faults_in_links(Page(ROOT / below / "page.md", f"# A title, twice\n\n## A title, twice\n\n{text}\n"))

    assert faults("[x](../README.md) [y](../README.md#licence) [z](#a-title-twice-1)") == []
    assert faults("[z](#a-title-twice-2)") == ["#a-title-twice-2 has no such heading"]
    assert faults("[x](../READ.md)") == ["../READ.md is not there"]
    assert faults("[x](../README.md#license)") == ["../README.md#license has no such heading"]
    assert faults("[x](../../other/README.md)") == ["../../other/README.md leads out of the repository"]
    assert faults("[x](http://a.org)") == ["http://a.org is not an https address"]
    assert faults("![x](gone.png)") == ["gone.png is not there"]
    assert faults("[x][1]\n\n[1]: gone.md") == ["gone.md is not there"]
    assert faults("`[x](gone.md)`") == []


def test_a_misspelt_word_is_noticed(tmp_path: Path) -> None:
    assert unknown_words(page_at(tmp_path, "Offload the activatoins of GPT-2, please: it's the block's.\n")) == [
        "activatoins"
    ]
    assert unknown_words(page_at(tmp_path, "`activatoins` <https://activatoins.org> [link](activatoins.md)\n")) == []
