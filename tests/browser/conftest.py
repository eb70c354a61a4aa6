"""Fixtures for tests in a real browser.

    def test_something(open_notebook):
        page = open_notebook("03_selective_recomputation.ipynb")
        page.run_all()
        page.press(page.slider("seq_len"), "ArrowRight")

Without Chromium these tests are skipped; with REQUIRE_BROWSER=1 they fail instead.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
import pytest
from nbformat import NotebookNode
from playwright.sync_api import Browser

import build
from tests.browser import lab

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


@pytest.fixture
def open_notebook(
    browser: Browser, lab_server: lab.LabServer
) -> Iterator[Callable[[str | NotebookNode], lab.NotebookPage]]:
    """Open a committed notebook by its path below notebooks/, or a notebook of the test's own."""
    pages: list[lab.NotebookPage] = []

    def open_it(notebook: str | NotebookNode) -> lab.NotebookPage:
        path = notebook
        if not isinstance(notebook, str):
            path = f"own-{len(pages)}.ipynb"
            nbformat.write(notebook, Path(lab_server.root, path))
        pages.append(lab.open_page(lab_server, browser, path))
        return pages[-1]

    yield open_it
    for page in pages:
        page.close()
