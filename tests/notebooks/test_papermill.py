"""Every notebook runs with its defaults, with odd parameters and with the smallest legal ones.

The smallest run on a kernel with the widgets of Colab where `make` has made one, the others on the usual kernel.
"""

from __future__ import annotations

from importlib.metadata import version
from pathlib import Path
from typing import Any

import pytest

import build
import run
from memsave_lib.course.env import HEAD_SIZE, SMALLEST_SEQ_LEN
from tests.notebooks import driven
from tests.notebooks.colab_kernel import ColabKernel

COURSE = build.Course(build.ROOT)
ON_COLAB = "smallest"
LEGAL: dict[str, dict[str, Any]] = {
    "defaults": {},
    "odd": {"seq_len": 96, "checkpoint_every": 5, "n_layers": 7, "batch_size": 3, "steps": 2},
    ON_COLAB: {
        "seq_len": SMALLEST_SEQ_LEN,
        "checkpoint_every": 1,
        "n_layers": 1,
        "hidden": HEAD_SIZE,
        "batch_size": 1,
        "steps": 1,
    },
}

pytestmark = pytest.mark.notebooks


@pytest.mark.parametrize("parameters", LEGAL)
@pytest.mark.parametrize("name", COURSE.names())
def test_notebook_runs(
    name: str,
    parameters: str,
    colab_if_made: ColabKernel | None,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    colab = colab_if_made if parameters == ON_COLAB else None
    if colab is not None:
        colab.choose(monkeypatch.setenv)
    source = COURSE.target(name, "student")
    done = driven.drive(source, tmp_path / f"{name}.ipynb", LEGAL[parameters])
    assert done.failure == "", done.failure
    assert done.stderr == []
    seen = done.report
    assert sorted(lab["view"] for lab in seen["labs"]) == done.views
    for lab in seen["labs"]:
        assert lab["ran_or_refused"]
        assert (lab["unmoved"], lab["no_traits"]) == ([], [])
    if colab is None:
        assert seen["ipywidgets"] == version("ipywidgets")
    else:
        assert (seen["ipywidgets"], seen["IPython"], done.log) == ("7.7.1", "7.34.0", "")
        assert done.model_versions == ({driven.OLD_PROTOCOL} if seen["labs"] else set())
    if colab_if_made is not None:
        assert driven.unknown(seen["labs"], colab_if_made.widget_traits) == []


@pytest.mark.parametrize("name", COURSE.names())
def test_an_illegal_parameter_is_named(name: str, tmp_path: Path) -> None:
    result = run.execute(COURSE.target(name, "student"), tmp_path / f"{name}.ipynb", {"checkpoint_every": 0})
    assert "ValueError: checkpoint_every must be a whole number of at least 1, got 0" in result.failure.splitlines()[0]
