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


@pytest.fixture
def open_notebook(browser: Browser, lab_server: lab.LabServer) -> Iterator[Opener]:
    """For one test: a tab and a kernel of its own for each notebook."""
    with _opener(browser, lab_server) as opener:
        yield opener


@pytest.fixture(scope="module")
def open_shared(browser: Browser, lab_server: lab.LabServer) -> Iterator[Opener]:
    """The same for fixtures that serve all tests of a module: opening takes longer than most of what is tested."""
    with _opener(browser, lab_server) as opener:
        yield opener


@contextmanager
def _opener(browser: Browser, server: lab.LabServer) -> Iterator[Opener]:
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
        return pages[-1]

    try:
        yield open_it
    finally:
        for page in pages:
            page.close()
