"""Every notebook runs with its defaults, with odd parameters and with the smallest legal ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import nbformat
import pytest

import build
import run
from memsave_lib.course.env import HEAD_SIZE, SMALLEST_SEQ_LEN

COURSE = build.Course(build.ROOT)
LEGAL: dict[str, dict[str, Any]] = {
    "defaults": {},
    "odd": {"seq_len": 96, "checkpoint_every": 5, "n_layers": 7, "batch_size": 3, "steps": 2},
    "smallest": {
        "seq_len": SMALLEST_SEQ_LEN,
        "checkpoint_every": 1,
        "n_layers": 1,
        "hidden": HEAD_SIZE,
        "batch_size": 1,
        "steps": 1,
    },
}

pytestmark = pytest.mark.notebooks


@pytest.mark.parametrize("parameters", LEGAL.values(), ids=LEGAL)
@pytest.mark.parametrize("name", COURSE.names())
def test_notebook_runs(name: str, parameters: dict[str, Any], tmp_path: Path) -> None:
    output = tmp_path / f"{name}.ipynb"
    result = run.execute(COURSE.target(name, "student"), output, parameters)
    assert result.failure == "", result.failure
    code = [cell for cell in nbformat.read(output, as_version=4).cells if cell.cell_type == "code"]
    assert [text.text for cell in code for text in cell.outputs if text.get("name") == "stderr"] == []


@pytest.mark.parametrize("name", COURSE.names())
def test_an_illegal_parameter_is_named(name: str, tmp_path: Path) -> None:
    result = run.execute(COURSE.target(name, "student"), tmp_path / f"{name}.ipynb", {"checkpoint_every": 0})
    assert "ValueError: checkpoint_every must be a whole number of at least 1, got 0" in result.failure.splitlines()[0]
