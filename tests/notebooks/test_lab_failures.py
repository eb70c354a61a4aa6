"""A lab whose worker raises fails the notebook under papermill and under nbval; one that works passes both."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_notebook, new_output

import run
from memsave_lib.labs.component import PRESS_RUN
from tests.notebooks import small_lab

ERROR = "the worker gave up"

pytestmark = pytest.mark.notebooks


@pytest.fixture
def press_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRESS_RUN, "1")


def write(path: Path, error: str, shown: str) -> Path:
    """A notebook with a lab and the output that the lab has when it works."""
    output = new_output("execute_result", {"text/plain": shown}, execution_count=1)
    cell = new_code_cell(small_lab.cell(error), outputs=[output], execution_count=1)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    nbformat.write(new_notebook(cells=[cell], metadata={"kernelspec": kernel}), path)
    return path


def python(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(Path(small_lab.__file__).parents[2])}
    return subprocess.run(
        [sys.executable, "-m", *arguments], capture_output=True, text=True, env=environment, timeout=300
    )


@pytest.mark.parametrize("error", ["", ERROR])
def test_papermill(error: str, press_run: None, tmp_path: Path) -> None:
    done = python("papermill", write(tmp_path / "lab.ipynb", error, ""), tmp_path / "done.ipynb")
    assert done.returncode == bool(error), done.stderr
    assert (f"RuntimeError: {ERROR}" in done.stderr) == bool(error)


@pytest.mark.parametrize("error", ["", ERROR])
def test_nbval(error: str, press_run: None, tmp_path: Path) -> None:
    notebook = write(tmp_path / "lab.ipynb", error, repr(small_lab.small_lab()))
    done = python("pytest", "--nbval", "--nbval-current-env", "-p", "no:cacheprovider", "--rootdir", tmp_path, notebook)
    assert done.returncode == bool(error), done.stdout
    assert ("1 failed" if error else "1 passed") in done.stdout
    assert (f"RuntimeError: {ERROR}" in run.ANSI_COLOUR.sub("", done.stdout)) == bool(error)
