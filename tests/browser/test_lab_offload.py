"""The lab on offloading as a reader uses it: bandwidth by keyboard, the simulated picture, a real step on this disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from memsave_lib import formulas
from memsave_lib.labs import offload_picture
from memsave_lib.strategies import Offload
from memsave_lib.units import exact_bytes
from tests.browser.lab import NotebookPage

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
LAB = f"""
import sys
sys.path.insert(0, {os.fspath(ROOT)!r})
from memsave_lib.labs import offload_lab
offload_lab(n_layers=4, hidden=128, heads=2, batch_size=2, seq_len=256)
"""
SHAPE = formulas.BlockShape(2, 256, 128, 2)


def test_a_slower_link_turns_the_picture_red_and_run_measures(
    open_notebook: Callable[[NotebookNode], NotebookPage],
) -> None:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [new_markdown_cell("# A lab"), new_code_cell(LAB.strip())]
    page = open_notebook(new_notebook(metadata=kernel, cells=cells))
    page.run_all()
    picture = page.image("Simulated at bandwidth in MB/s 1000, seq_len 256, prefetch 2")
    before = picture.get_attribute("src")

    page.press(page.slider("bandwidth in MB/s"), "ArrowLeft", times=2)
    page.press(page.slider("prefetch"), "Home")
    said = f"Simulated at bandwidth in MB/s 250, seq_len 256, prefetch 0. {offload_picture(SHAPE, 4, 250, 0).sentence}"
    page.page.locator("p[role=status]", has_text=said).wait_for(timeout=30_000)
    slower = page.image("Simulated at bandwidth in MB/s 250, seq_len 256, prefetch 0")
    slower.wait_for()
    assert slower.get_attribute("src") != before

    page.press(page.button("Run"), "Enter")
    status = page.page.locator("p[role=status]", has_text="Run 1 at bandwidth in MB/s 250, seq_len 256, prefetch 0")
    status.wait_for(timeout=90_000)
    sent = exact_bytes(formulas.offloaded_bytes(Offload().plan(4), SHAPE))
    assert f"sent {sent}, 0 bytes off the prediction" in status.inner_text()
    assert page.script_errors == []
