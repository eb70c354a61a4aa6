"""The pages of the repository as what they show: headings, links, pictures, tables, words. Parsed, not searched."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from urllib.parse import unquote, urlsplit

import nbformat
from markdown_it import MarkdownIt
from markdown_it.token import Token

ROOT = Path(__file__).resolve().parent.parent
MARKDOWN = MarkdownIt("commonmark").enable("table")
#: What is made here and thrown away; folders with a dot in front hold no pages of ours either.
MADE = "build"
WORD = re.compile(r"[A-Za-z]+(?:['’][A-Za-z]+)*")


@dataclass(frozen=True)
class Heading:
    """``text`` as a reader sees it."""

    level: int
    text: str


@dataclass(frozen=True)
class Link:
    """Where a link or picture leads, and its text; ``picture`` tells which."""

    target: str
    text: str
    picture: bool = False

    @property
    def outside(self) -> bool:
        return bool(urlsplit(self.target).scheme)


@dataclass(frozen=True)
class Table:
    """Cells as a reader sees them, without the marks of bold and code; all rows are as long as the head."""

    head: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]
    above: str  # the nearest heading


@dataclass(frozen=True)
class Page:
    """A Markdown file, or the markdown cells of a notebook one below the other."""

    path: Path
    text: str

    @classmethod
    def read(cls, path: Path) -> Page:
        if path.suffix != ".ipynb":
            return cls(path, path.read_text(encoding="utf-8"))
        cells = nbformat.read(path, as_version=4).cells
        return cls(path, "\n\n".join(cell.source for cell in cells if cell.cell_type == "markdown") + "\n")

    @property
    def name(self) -> str:
        return self.path.relative_to(ROOT).as_posix() if self.path.is_relative_to(ROOT) else self.path.name

    @cached_property
    def tokens(self) -> list[Token]:
        return MARKDOWN.parse(self.text)

    @property
    def inlines(self) -> Iterator[list[Token]]:
        """The inline tokens of each paragraph, heading and cell of a table."""
        for token in self.tokens:
            if token.type == "inline":
                yield token.children or []

    @cached_property
    def headings(self) -> list[Heading]:
        pairs = zip(self.tokens, self.tokens[1:], strict=False)
        return [
            Heading(int(opening.tag[1:]), shown(content.children or []))
            for opening, content in pairs
            if opening.type == "heading_open"
        ]

    @cached_property
    def links(self) -> list[Link]:
        found = []
        for children in self.inlines:
            for start, token in enumerate(children):
                if token.type == "image":
                    found.append(Link(str(token.attrs["src"]), shown(token.children or []), picture=True))
                elif token.type == "link_open":
                    end = next(i for i in range(start, len(children)) if children[i].type == "link_close")
                    found.append(Link(str(token.attrs["href"]), shown(children[start:end])))
        return found

    @cached_property
    def bare_addresses(self) -> list[str]:
        """Addresses in the text that are not links."""
        found = []
        for children in self.inlines:
            inside = 0
            for token in children:
                inside += token.nesting if token.type in ("link_open", "link_close") else 0
                if token.type == "text" and not inside:
                    found += re.findall(r"https?://\S+|\bwww\.\S+", token.content)
        return found

    @cached_property
    def anchors(self) -> set[str]:
        """What may follow # in a link to this page: GitHub's names, and in a notebook JupyterLab's too."""
        found: dict[str, int] = {}
        for heading in self.headings:
            slug = re.sub(r"[^\w\- ]", "", heading.text.lower()).replace(" ", "-")
            found[slug] = found.get(slug, -1) + 1
        names = {f"{slug}-{number}" if number else slug for slug, last in found.items() for number in range(last + 1)}
        if self.path.suffix == ".ipynb":
            names |= {heading.text.replace(" ", "-") for heading in self.headings}
        return names

    @cached_property
    def tables(self) -> list[Table]:
        found: list[Table] = []
        above, rows = "", []
        for token, following in zip(self.tokens, [*self.tokens[1:], None], strict=True):
            if token.type == "heading_open" and following is not None:
                above = shown(following.children or [])
            elif token.type == "table_open":
                rows = []
            elif token.type == "tr_open":
                rows.append([])
            elif token.type in ("th_open", "td_open") and following is not None:
                rows[-1].append(shown(following.children or []))
            elif token.type == "table_close":
                head, *body = map(tuple, rows)
                found.append(Table(head, tuple(body), above))
        return found

    def table(self, above: str) -> Table:
        """The first table below the heading ``above``."""
        return next(table for table in self.tables if table.above == above)

    @property
    def prose(self) -> Iterator[str]:
        """Text without code and addresses, paragraph by paragraph, alternative texts included."""
        for children in self.inlines:
            named = [
                token
                for token, before in zip(children, [None, *children], strict=False)
                if token.type != "code_inline" and (before is None or before.markup != "autolink")
            ]
            yield shown(named)

    @property
    def sentences(self) -> Iterator[str]:
        """Prose that is in no table."""
        page, depth = [], 0
        for token in self.tokens:
            depth += token.nesting if token.type in ("table_open", "table_close") else 0
            if not depth:
                page.append(token)
        for token in page:
            if token.type == "inline":
                yield shown([child for child in token.children or [] if child.type != "code_inline"])

    @property
    def code_spans(self) -> Iterator[str]:
        for children in self.inlines:
            yield from (token.content for token in children if token.type == "code_inline")

    @property
    def words(self) -> Iterator[str]:
        for text in self.prose:
            yield from WORD.findall(text)


def shown(children: list[Token]) -> str:
    """Inline tokens as a reader sees them."""
    parts = []
    for token in children:
        if token.type == "image":
            parts.append(shown(token.children or []))
        elif token.type in ("softbreak", "hardbreak"):
            parts.append(" ")
        elif token.type in ("text", "code_inline", "text_special"):
            parts.append(token.content)
    return "".join(parts).strip()


def paths() -> list[Path]:
    """Every Markdown page and every notebook of the repository."""
    found = (path for kind in ("*.md", "*.ipynb") for path in ROOT.rglob(kind))
    return sorted(path for path in found if not any(part == MADE or part.startswith(".") for part in _folders(path)))


def _folders(path: Path) -> tuple[str, ...]:
    return path.relative_to(ROOT).parts[:-1]


def nowhere(page: Page, link: Link) -> str | None:
    """Why a link inside the repository leads nowhere; None when it leads somewhere or outside."""
    address = urlsplit(link.target)
    if link.outside:
        return None if address.scheme in ("https", "mailto") else f"{link.target} is not an https address"
    if not address.path:
        return None if address.fragment in page.anchors else f"{link.target} has no such heading"
    target = (page.path.parent / unquote(address.path)).resolve()
    if not target.is_relative_to(ROOT):
        return f"{link.target} leads out of the repository"
    if not target.exists():
        return f"{link.target} is not there"
    if address.fragment and target.suffix in (".md", ".ipynb") and address.fragment not in Page.read(target).anchors:
        return f"{link.target} has no such heading"
    return None
