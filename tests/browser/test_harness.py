"""The harness sees what a reader sees: a slider moved by keyboard changes a text and a picture, errors are reported."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

from tests.browser.lab import NotebookPage

pytestmark = pytest.mark.browser

LAB = """
import base64
import ipywidgets as widgets

def draw(value):
    box = f"width='{10 * value}' height='9'"
    svg = f"<svg xmlns='http://www.w3.org/2000/svg' {box}><rect {box}/></svg>"
    data = base64.b64encode(svg.encode()).decode()
    view.value = f"<img alt='a bar of {value}' src='data:image/svg+xml;base64,{data}'><p class='said'>value {value}</p>"

view = widgets.HTML()
slider = widgets.IntSlider(3, 1, 9, description="seq_len")
button = widgets.Button(description="Double")
slider.observe(lambda change: draw(change["new"]), "value")
button.on_click(lambda _: draw(2 * slider.value))
draw(slider.value)
widgets.VBox([slider, button, view])
"""


def notebook(*code: str) -> NotebookNode:
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [new_markdown_cell("# A lab"), *(new_code_cell(text.strip()) for text in code)]
    # As in a committed notebook, the cells look executed before they are.
    for count, cell in enumerate(cells[1:], start=1):
        cell.execution_count = count
    return new_notebook(metadata=kernel, cells=cells)


def test_keys_and_buttons_change_what_is_shown(
    open_notebook: Callable[[NotebookNode], NotebookPage], tmp_path: Path
) -> None:
    page = open_notebook(notebook(LAB, "slider.value"))
    page.run_all()
    assert page.prompts() == ["[1]:", "[2]:"]
    said, picture = page.page.locator(".said"), page.image("a bar of")
    assert said.inner_text() == "value 3"
    before = picture.get_attribute("src")
    page.press(page.slider("seq_len"), "ArrowRight", times=2)
    page.wait_for_change(said, "text", "value 3")
    page.image("a bar of 5").wait_for()
    assert picture.get_attribute("src") != before
    page.button("Double").click()
    page.image("a bar of 10").wait_for()
    assert said.inner_text() == "value 10"
    assert page.screenshot(tmp_path / "lab.png").stat().st_size > 10_000
    assert page.script_errors == []


def test_a_cell_that_fails_fails_the_test(open_notebook: Callable[[NotebookNode], NotebookPage]) -> None:
    page = open_notebook(notebook("1", "1 / 0", "2"))
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        page.run_all()
