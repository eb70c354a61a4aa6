"""The lab on checkpoint_every as a reader uses it: a real JupyterLab, the keyboard, the numbers of the library."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from memsave_lib import formulas
from memsave_lib.strategies import Selective
from memsave_lib.units import exact_bytes
from tests.browser.lab import NotebookPage, wait_for

pytestmark = pytest.mark.browser

ROOT = Path(__file__).resolve().parents[2]
#: Large enough for a step that can be watched and stopped.
SETUP = f"""
import sys
sys.path.insert(0, {os.fspath(ROOT)!r})
from memsave_lib.labs import selective_lab
"""
LAB = """
lab = selective_lab(n_layers=6, hidden=256, heads=4, batch_size=4, seq_len=256, checkpoint_every=2)
lab
"""


@pytest.fixture
def page(open_notebook: Callable[[NotebookNode], NotebookPage]) -> NotebookPage:
    cells = [new_markdown_cell("# A lab"), *(new_code_cell(code.strip()) for code in (SETUP, LAB))]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    opened = open_notebook(new_notebook(metadata=kernel, cells=cells))
    opened.console: list[str] = []
    opened.page.on("console", lambda message: opened.console.append(message.text) if message.type == "error" else None)
    opened.run_all()
    return opened


def predicted(seq_len: int, every: int) -> str:
    shape = formulas.BlockShape(4, seq_len, 256, 4)
    saved = formulas.stack_saved_bytes(Selective(every).plan(6), shape)
    return f"Predicted at seq_len {seq_len}, checkpoint_every {every}: saved {exact_bytes(saved)}, peak"


def sentence(page: NotebookPage, start: str, seconds: float = 30) -> str:
    """Wait for a sentence of the lab that starts like this, and return all of it."""
    found = page.page.locator(".jp-OutputArea p[role]", has_text=re.compile(f"^{re.escape(start)}"))
    found.first.wait_for(timeout=1000 * seconds)
    return found.first.inner_text()


def test_keys_move_the_prediction_and_run_measures_it(page: NotebookPage) -> None:
    sentence(page, predicted(256, 2))
    picture = page.image("Predicted at")
    before = picture.get_attribute("src")
    page.press(page.slider("checkpoint_every"), "ArrowRight", times=2)
    sentence(page, predicted(256, 4))
    page.image("Predicted at seq_len 256, checkpoint_every 4").wait_for()
    assert picture.get_attribute("src") != before
    page.press(page.slider("seq_len"), "ArrowRight")
    sentence(page, predicted(512, 4))

    memory = page.image("Memory against time")
    frames = {memory.get_attribute("src")}
    page.press(page.button("Run"), "Enter")
    sentence(page, "Running at seq_len 512, checkpoint_every 4")

    def finished() -> bool:
        frames.add(memory.get_attribute("src"))
        return page.page.locator("p[role=status]", has_text="Run 1 at seq_len 512, checkpoint_every 4").count() > 0

    wait_for(finished, "the run to end", 90)
    assert len(frames) >= 3, "the picture grows while the step runs"
    assert "0 bytes off the prediction; peak" in sentence(page, "Run 1 at")
    assert sentence(page, "Run 1 at").count(" 0 bytes off the prediction") == 2
    row = page.page.locator(".jp-OutputArea table tr").nth(1).locator("td").all_inner_texts()
    assert row[:3] == ["1", "512", "4"] and row[5] == row[8] == "0"
    assert page.script_errors == page.console == []


def test_stop_by_keyboard_and_two_presses_of_run(page: NotebookPage) -> None:
    page.press(page.slider("seq_len"), "End")
    sentence(page, predicted(1024, 2))
    page.press(page.button("Run"), "Enter", times=2)
    sentence(page, "Running at seq_len 1024, checkpoint_every 2: ")
    page.press(page.slider("checkpoint_every"), "Home")
    sentence(page, predicted(1024, 1))
    page.press(page.button("Stop"), "Enter")
    stopped = sentence(page, "Stopped at ")
    assert stopped.startswith("Stopped at seq_len 1024, checkpoint_every 2, with ")
    assert page.button("Run").is_enabled() and page.button("Stop").is_disabled()
    page.press(page.button("Reset"), "Enter")
    sentence(page, predicted(256, 2))
    sentence(page, "No step has run yet")
    assert page.script_errors == page.console == []


def test_a_burst_of_keys_ends_at_the_last_value(page: NotebookPage) -> None:
    slider = page.slider("checkpoint_every")
    page.press(slider, "Home")
    for key, times in (("ArrowRight", 5), ("ArrowLeft", 4), ("ArrowRight", 4), ("ArrowLeft", 5), ("ArrowRight", 2)):
        page.press(slider, key, times)
    # 1, 6, 2, 6, 1, and at last:
    sentence(page, predicted(256, 3))
    page.page.wait_for_timeout(2000)
    sentence(page, predicted(256, 3), seconds=1)
    page.image("Predicted at seq_len 256, checkpoint_every 3").wait_for()
    assert slider.get_attribute("aria-valuenow") == "3.0"
    assert page.script_errors == page.console == []
