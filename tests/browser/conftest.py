"""Fixtures for tests in a real browser.

    def test_something(open_notebook):
        page = open_notebook("03_selective_recomputation.ipynb")
        page.run_all()
        lab = LabPage(page)
        page.press(lab.slider("seq_len"), "ArrowRight")
        assert lab.sentence("Predicted at").startswith("Predicted at seq_len 1024")

Without Chromium these tests are skipped; with REQUIRE_BROWSER=1 they fail instead.
"""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Protocol

import nbformat
import pytest
from nbformat import NotebookNode
from playwright.sync_api import Browser

import build
from tests.browser import lab
from tests.browser.lab_cases import six_labs

MISSING = "no Chromium on this machine: install it, or name one in the variable CHROMIUM"


@pytest.fixture(scope="session")
def browser() -> Iterator[Browser]:
    executable = lab.find_chromium()
    if executable is None:
        if os.environ.get("REQUIRE_BROWSER") == "1":
            pytest.fail(f"REQUIRE_BROWSER=1, and {MISSING}")
        pytest.skip(MISSING)
    with lab.chromium(executable) as started:
        yield started


@pytest.fixture(scope="session")
def lab_server(browser: Browser, tmp_path_factory: pytest.TempPathFactory) -> Iterator[lab.LabServer]:
    """JupyterLab on a copy of the committed notebooks, which tests may run and save."""
    root = tmp_path_factory.mktemp("course")
    for notebook in build.ROOT.glob("**/*.ipynb"):
        copy = root / notebook.relative_to(build.ROOT)
        copy.parent.mkdir(exist_ok=True)
        shutil.copy(notebook, copy)
    with lab.lab_server(root, tmp_path_factory.mktemp("jupyter")) as server:
        yield server


class Opener(Protocol):
    """Open a committed notebook by its path below notebooks/, or a notebook of the test's own.

    ``environment`` is for the kernel of a notebook of the test's own.
    """

    def __call__(
        self, notebook: str | NotebookNode, environment: Mapping[str, str] | None = None
    ) -> lab.NotebookPage: ...


@pytest.fixture(scope="session")
def open_pages() -> list[lab.NotebookPage]:
    """All that are open now."""
    return []


@pytest.fixture
def open_notebook(browser: Browser, lab_server: lab.LabServer, open_pages: list[lab.NotebookPage]) -> Iterator[Opener]:
    """For one test: a tab and a kernel of its own for each notebook."""
    with _opener(browser, lab_server, open_pages) as opener:
        yield opener


@pytest.fixture(scope="module")
def open_shared(browser: Browser, lab_server: lab.LabServer, open_pages: list[lab.NotebookPage]) -> Iterator[Opener]:
    """The same for fixtures that serve all tests of a module: opening takes longer than most of what is tested."""
    with _opener(browser, lab_server, open_pages) as opener:
        yield opener


@pytest.fixture(scope="session")
def labs_page(
    browser: Browser, lab_server: lab.LabServer, open_pages: list[lab.NotebookPage]
) -> Iterator[lab.NotebookPage]:
    """The six labs in one notebook, for the tests of all modules: see :func:`lab_cases.at_the_beginning`."""
    with _opener(browser, lab_server, open_pages) as opener:
        page = opener(six_labs())
        page.run_all()
        yield page


@pytest.fixture
def nothing_reported(open_pages: list[lab.NotebookPage]) -> Iterator[None]:
    """Fails a test during which a page that stays open has reported an error on its console."""
    before = {page.path: len(page.problems) for page in open_pages}
    yield
    assert [problem for page in open_pages for problem in page.problems[before.get(page.path, 0) :]] == []


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """Say how fast the labs were."""
    reports = [report for outcome in ("passed", "failed") for report in terminalreporter.getreports(outcome)]
    found = [value for report in reports for name, value in report.user_properties if name == "latency"]
    if found:
        terminalreporter.section("From a key to the new pictures of a lab")
    for one in found:
        terminalreporter.line(
            f"{one['lab']}: {one['idle_ms']:.0f} ms idle (the first picture {one['first_ms']:.0f} ms), "
            f"{one['running_ms']:.0f} ms during a run (median of {one['presses']})"
        )


@contextmanager
def _opener(browser: Browser, server: lab.LabServer, open_pages: list[lab.NotebookPage]) -> Iterator[Opener]:
    pages: list[lab.NotebookPage] = []

    def open_it(notebook: str | NotebookNode, environment: Mapping[str, str] | None = None) -> lab.NotebookPage:
        path = notebook
        if not isinstance(notebook, str):
            if environment:
                notebook.metadata["kernelspec"] = server.kernel_with(environment)
            path = f"own-{secrets.token_hex(4)}.ipynb"
            nbformat.write(notebook, Path(server.root, path))
        elif environment:
            raise ValueError(f"{notebook} is committed with its kernel: only a test's own notebook takes variables")
        pages.append(lab.open_page(server, browser, path))
        open_pages.append(pages[-1])
        return pages[-1]

    try:
        yield open_it
    finally:
        for page in pages:
            open_pages.remove(page)
            page.close()
