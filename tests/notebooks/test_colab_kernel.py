"""The kernel with the widgets of Colab is what it says, and the tests that run on it see what they are there for."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import ipywidgets
import nbformat
import pytest
import torch
from packaging.requirements import Requirement

import memsave_lib
from tests.notebooks import colab_kernel, driven, small_lab
from tests.notebooks.colab_kernel import ColabKernel

Drive = Callable[..., driven.Driven]
LOOK = """import importlib, json
from importlib.metadata import version
modules = ["IPython", "ipykernel", "ipywidgets", "traitlets", "jedi", "torch", "transformers", "memsave_lib"]
files = {name: importlib.import_module(name).__file__ for name in modules}
print(json.dumps({"files": files, "versions": {name: version(name) for name in NAMES}}))"""


def pins() -> dict[str, str]:
    lines = (colab_kernel.ROOT / "requirements-colab.txt").read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def requirements() -> list[str]:
    lines = (colab_kernel.ROOT / "requirements.txt").read_text(encoding="utf-8").splitlines()
    return [Requirement(line).name for line in lines if line and not line.startswith("#")]


@pytest.fixture
def drive_cells(tmp_path: Path) -> Drive:
    """Execute cells of a test's own as a notebook of the course would be."""

    def drive(*cells: str, colab: ColabKernel | None = None) -> driven.Driven:
        code = [nbformat.v4.new_code_cell(cell) for cell in cells]
        kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
        notebook = nbformat.v4.new_notebook(cells=code, metadata={"kernelspec": kernel})
        nbformat.write(notebook, tmp_path / "own.ipynb")
        with pytest.MonkeyPatch.context() as patch:
            if colab is not None:
                colab.choose(patch.setenv)
            return driven.drive(tmp_path / "own.ipynb", tmp_path / "done.ipynb")

    return drive


def test_its_widgets_and_its_ipython_are_those_of_colab() -> None:
    assert pins()["ipywidgets"] == "7.7.1"
    assert pins()["ipython"] == "7.34.0"
    assert pins()["ipykernel"] == "6.17.1"


def test_where_it_is_missing_it_is_asked_for_or_demanded(tmp_path: Path) -> None:
    nowhere = {colab_kernel.FOLDER: str(tmp_path)}
    assert colab_kernel.find(nowhere) is None
    assert "`make colab-kernel`" in colab_kernel.MISSING
    with pytest.raises(FileNotFoundError, match="REQUIRE_COLAB_KERNEL=1, and there is no kernel .*`make colab-kernel`"):
        colab_kernel.find({**nowhere, colab_kernel.REQUIRED: "1"})
    made = ColabKernel(tmp_path)
    made.spec.parent.mkdir(parents=True)
    made.spec.write_text("{}", encoding="utf-8")
    assert colab_kernel.find(nowhere) == colab_kernel.find({**nowhere, colab_kernel.REQUIRED: "1"}) == made


@pytest.mark.notebooks
def test_a_trait_that_only_new_widgets_have_is_found(colab: ColabKernel) -> None:
    lab = {"traits": [["ipywidgets.widgets.widget_string.HTML", ["value", "tooltip"]]]}
    assert driven.unknown([lab], colab.widget_traits) == ["ipywidgets.widgets.widget_string.HTML.tooltip"]
    assert ipywidgets.HTML().has_trait("tooltip")


@pytest.mark.notebooks
def test_it_has_its_own_widgets_and_the_rest_from_the_course(colab: ColabKernel, drive_cells: Drive) -> None:
    names = [*pins(), *(name for name in requirements() if name not in pins())]
    done = drive_cells(LOOK.replace("NAMES", repr(names)), colab=colab)
    assert done.failure == "", done.failure
    seen = json.loads(done.outputs[0].text)
    assert seen["versions"] == {name: version(name) for name in requirements()} | pins()
    files = seen["files"]
    own = [name for name, file in files.items() if colab.folder in Path(file).parents]
    assert own == ["IPython", "ipykernel", "ipywidgets", "traitlets"]
    assert (files["torch"], files["memsave_lib"]) == (torch.__file__, memsave_lib.__file__)


@pytest.mark.notebooks
def test_labs_are_driven_on_it_and_what_one_gets_wrong_in_silence_is_seen(
    colab: ColabKernel, drive_cells: Drive
) -> None:
    wrong = [
        "other = small_lab()",
        "other.table.tooltip = other.view.layout.border_top = ''",
        "other.sliders['seq_len'].unobserve_all()",
    ]
    done = drive_cells(small_lab.cell(), *wrong, colab=colab)
    assert (done.failure, done.stderr, done.log) == ("", [], "")
    assert done.model_versions == {driven.OLD_PROTOCOL}
    good, bad = sorted(done.report["labs"], key=lambda lab: len(lab["no_traits"]))
    assert [good["view"]] == done.views
    assert (good["ran_or_refused"], good["unmoved"], good["no_traits"]) == (True, [], [])
    sliders = [names for kind, names in good["traits"] if kind.endswith(".SelectionSlider")]
    common = {"_options_labels", "description", "layout", "style"}
    # The second one stands at its first choice, as a new widget does.
    assert [set(names) for names in sliders] == [common | {"index"}, common]
    assert bad["unmoved"] == ["seq_len"]
    assert sorted(bad["no_traits"]) == [
        ["ipywidgets.widgets.widget_layout.Layout", ["border_top"]],
        ["ipywidgets.widgets.widget_string.HTML", ["tooltip"]],
    ]


@pytest.mark.notebooks
def test_a_lab_whose_worker_raises_fails_on_it(colab: ColabKernel, drive_cells: Drive) -> None:
    done = drive_cells(small_lab.cell("the worker gave up"), colab=colab)
    assert re.match(r"own-driven: cell In \[2\] ended in RuntimeError: the worker gave up", done.failure)


@pytest.mark.notebooks
def test_a_trait_that_its_widgets_lack_fails_on_it(colab: ColabKernel, drive_cells: Drive) -> None:
    done = drive_cells("import ipywidgets", "ipywidgets.IntSlider(tooltip='how long')", colab=colab)
    assert "In [3] ended in DeprecationWarning: Passing unrecognized arguments to super(IntSlider)" in done.failure
    assert "tooltip='how long'" in done.failure
