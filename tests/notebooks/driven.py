"""Execute a notebook under the eyes of a test: deprecations of widgets are errors, and its labs are driven."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
from nbformat import NotebookNode

import run

#: ipywidgets takes a trait that it does not know with no more than a DeprecationWarning, which Python does not show.
FIRST_CELL = """import warnings

for category in (DeprecationWarning, PendingDeprecationWarning):
    warnings.filterwarnings("error", category=category, module=r"(ipywidgets|traitlets|memsave_lib|__main__)\\b")"""
LAST_CELL = Path(__file__).with_name("lab_driver.py").read_text(encoding="utf-8")
#: How ipywidgets 7 calls the protocol between its buttons and sliders and a browser. In ipywidgets 8 it is 2.0.0.
OLD_PROTOCOL = "1.5.0"
VIEW = "application/vnd.jupyter.widget-view+json"
STATE = "application/vnd.jupyter.widget-state+json"


@dataclass(frozen=True)
class Driven:
    """What an executed notebook showed. ``log``: what the kernel process, as opposed to a cell, said on stderr."""

    failure: str
    log: str
    notebook: NotebookNode

    @property
    def outputs(self) -> list[NotebookNode]:
        return [output for cell in self.notebook.cells if cell.cell_type == "code" for output in cell.outputs]

    @property
    def stderr(self) -> list[str]:
        return [output.text for output in self.outputs if output.get("name") == "stderr"]

    @property
    def views(self) -> list[str]:
        """The models of the widgets that are on display."""
        return sorted(output.data[VIEW]["model_id"] for output in self.outputs if VIEW in output.get("data", {}))

    @property
    def model_versions(self) -> set[str]:
        """The versions of that protocol which a browser is told."""
        models = self.notebook.metadata.get("widgets", {STATE: {"state": {}}})[STATE]["state"].values()
        return {model["model_module_version"] for model in models if model["model_module"].endswith("/controls")}

    @property
    def report(self) -> dict[str, Any]:
        """What lab_driver.py has printed: the versions of ``ipywidgets`` and ``IPython``, and the ``labs``."""
        return json.loads(self.outputs[-1].text)


def unknown(labs: list[dict[str, Any]], known: Mapping[str, list[str]]) -> list[str]:
    """The traits that labs have set, and that these classes of widgets (name -> traits) do not have."""
    used = {(kind, name) for lab in labs for kind, names in lab["traits"] for name in names}
    return sorted(f"{kind}.{name}" for kind, name in used if name not in known.get(kind, ()))


def drive(source: Path, output: Path, parameters: dict[str, Any] | None = None) -> Driven:
    """Execute ``source`` in its own folder, with a cell more at either end; ``output`` is the result."""
    notebook = nbformat.read(source, as_version=4)
    first, last = (nbformat.v4.new_code_cell(text) for text in (FIRST_CELL, LAST_CELL))
    notebook.cells = [first, *notebook.cells, last]
    copy = output.with_name(f"{source.stem}-driven.ipynb")
    nbformat.write(notebook, copy)
    result = run.execute(copy, output, parameters, folder=source.parent)
    log = output.with_suffix(".log").read_text(encoding="utf-8")
    return Driven(result.failure, log, nbformat.read(output, as_version=4))
