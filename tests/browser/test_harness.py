"""The harness sees what a reader sees, does what a reader does, and says so when it cannot."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from tests.browser.conftest import Opener
from tests.browser.lab import NotebookPage, own_notebook
from tests.browser.lab_page import LabPage

pytestmark = pytest.mark.browser

LAB = """
import base64
import os
import threading
import ipywidgets as widgets

def picture(alt, value):
    box = f"width='{10 * value}' height='9'"
    svg = f"<svg xmlns='http://www.w3.org/2000/svg' {box}><rect {box}/></svg>"
    data = base64.b64encode(svg.encode()).decode() if value != 8 else "broken"
    return f"<img alt='{alt}' src='data:image/svg+xml;base64,{data}'>"

def draw(value):
    bar.value = picture(f"a bar of {value}", value) + f"<p role='status' class='said'>value {value}</p>"
    curve.value = picture(f"the curve at {value}", value + 1)

def run(_):
    def work():
        for number in range(1, 6):
            film.value = picture(f"frame {number}", number)
            said.value = f"<p role='status'>Running at {number}</p>"
        said.value = "<p role='status'>Run 1 at 5: <b>done</b></p>"
    threading.Thread(target=work, name="work").start()

def fail(_):
    said.value = "<p role='alert'>Failed: ValueError: a reason</p>"

bar, curve, film, said = (widgets.HTML() for _ in range(4))
slider = widgets.IntSlider(3, 1, 9, description="seq_len")
length = widgets.SelectionSlider(options=[("32", 32), ("64", 64), ("128", 128)], value=32, description="length")
buttons = {name: widgets.Button(description=name) for name in ("Double", "Run", "Stop", "Fail")}
slider.observe(lambda change: draw(change["new"]), "value")
buttons["Double"].on_click(lambda _: draw(2 * slider.value))
buttons["Run"].on_click(run)
buttons["Fail"].on_click(fail)
buttons["Stop"].disabled = True
draw(slider.value)
film.value = picture("frame 0", 9)
widgets.VBox([slider, length, *buttons.values(), bar, curve, film, said])
"""


@pytest.fixture(scope="module")
def shared(open_shared: Opener) -> NotebookPage:
    page = open_shared(own_notebook(LAB, "slider.value", "widgets.VBox([widgets.IntSlider(7, description='other')])"))
    page.run_all()
    return page


@pytest.fixture
def lab(shared: NotebookPage) -> LabPage:
    """The first lab, with its sliders as it began."""
    one = LabPage(shared)
    one.set_slider("seq_len", 3)
    one.set_slider("length", 32)
    one.sentence("value 3")
    return one


def test_keys_and_buttons_change_what_is_shown(lab: LabPage, shared: NotebookPage, tmp_path: Path) -> None:
    assert shared.prompts() == ["[1]:", "[2]:", "[3]:"]
    said, picture = shared.page.locator(".said"), shared.image("a bar of")
    assert said.inner_text() == "value 3"
    before = picture.get_attribute("src")
    shared.press(shared.slider("seq_len"), "ArrowRight", times=2)
    shared.wait_for_change(said, "text", "value 3")
    shared.image("a bar of 5").wait_for()
    assert picture.get_attribute("src") != before
    shared.button("Double").click()
    shared.image("a bar of 10").wait_for()
    assert said.inner_text() == "value 10"
    assert shared.screenshot(tmp_path / "lab.png").stat().st_size > 10_000
    assert lab.screenshot(tmp_path / "lab-only.png").stat().st_size > 1000
    assert shared.problems == []


def test_a_cell_that_fails_fails_the_test(open_notebook: Opener) -> None:
    page = open_notebook(own_notebook("1", "1 / 0", "2"))
    with pytest.raises(AssertionError, match="ZeroDivisionError"):
        page.run_all()


def test_what_the_page_reports_is_kept(open_notebook: Opener) -> None:
    page = open_notebook(own_notebook("1"))
    assert page.problems == [], "JupyterLab opens a notebook without reporting anything"
    page.page.evaluate(
        "console.warn('a warning'); console.error('an error'); setTimeout(() => { throw Error('thrown') })"
    )
    page.page.wait_for_timeout(100)
    assert [problem.partition(" (")[0] for problem in page.problems] == ["an error", "thrown"]


def test_a_lab_is_found_by_its_number_or_its_cell(lab: LabPage, shared: NotebookPage) -> None:
    assert lab.sliders == LabPage(shared, cell=1).sliders == ["seq_len", "length"]
    assert LabPage(shared, 1).sliders == LabPage(shared, cell=3).sliders == ["other"]
    assert lab.button("Stop").is_disabled()


def test_a_sentence_is_waited_for_and_comes_whole(lab: LabPage) -> None:
    lab.button("Run").press("Enter")
    assert lab.sentence("Run 1 at") == "Run 1 at 5: done"
    with pytest.raises(TimeoutError, match=re.escape("no sentence begins with 'Run 2'; the lab says ['value 3', ")):
        lab.sentence("Run 2", seconds=0.1)


def test_a_lab_that_fails_is_not_waited_for(lab: LabPage) -> None:
    lab.button("Fail").evaluate("button => setTimeout(() => button.click(), 300)")
    with pytest.raises(
        TimeoutError, match="the lab failed: no sentence begins with 'Run 9'.*Failed: ValueError: a reason"
    ):
        lab.sentence("Run 9", seconds=60)


def test_every_frame_of_a_picture_is_seen(lab: LabPage) -> None:
    watch = lab.watch_frames("frame ")
    first = watch.frames
    lab.button("Run").press("Enter")
    lab.sentence("Run 1 at")
    frames = watch.stop()
    assert [frame.alt for frame in frames] == [first[0].alt, *(f"frame {number}" for number in range(1, 6))]
    assert len({frame.src for frame in frames[1:]}) == 5
    assert [frame.milliseconds for frame in frames] == sorted(frame.milliseconds for frame in frames)
    lab.button("Run").press("Enter")
    lab.image("frame 5").wait_for()
    assert watch.frames == frames, "it has stopped"


def test_the_time_from_a_key_to_its_pictures(lab: LabPage) -> None:
    handle = lab.slider("seq_len")
    assert lab.time_to_picture(handle, "ArrowRight", "a bar", "of 4") > 0
    both = lab.time_to_pictures(handle, "ArrowRight", {"a bar": "of 5", "the curve": "at 5"})
    assert list(both) == ["a bar", "the curve"] and min(both.values()) > 0
    with pytest.raises(TimeoutError, match="ArrowRight: not shown in time: the curve$"):
        lab.time_to_pictures(handle, "ArrowRight", {"a bar": "of 6", "the curve": "at 5.5"}, seconds=2)
    with pytest.raises(TimeoutError, match="shown before the key: a bar with of 6"):
        lab.time_to_picture(handle, "ArrowUp", "a bar", "of 6")
    lab.set_slider("seq_len", 7)
    with pytest.raises(TimeoutError, match="no picture that can be decoded: a bar of 8"):
        lab.time_to_picture(handle, "ArrowRight", "a bar", "of 8")


def test_a_burst_of_keys_arrives_whole(lab: LabPage, shared: NotebookPage) -> None:
    keys = ["ArrowRight"] * 6 + ["ArrowLeft"] * 4 + ["ArrowRight"] * 4 + ["ArrowLeft"] * 6
    lab.burst(lab.slider("seq_len"), [*keys, "ArrowRight"])
    lab.sentence("value 4")
    lab.image("the curve at 4").wait_for()
    assert shared.ask("slider.value") == "4"


def test_a_slider_is_set_by_keyboard(lab: LabPage, shared: NotebookPage) -> None:
    lab.set_slider("length", 128)
    lab.set_slider("seq_len", 1)
    lab.sentence("value 1")
    assert shared.ask("slider.value, length.value") == "(1, 128)"
    with pytest.raises(ValueError, match="length cannot be 96: with ArrowLeft it goes through 128, 64, 32"):
        lab.set_slider("length", 96)


def test_the_kernel_answers_unseen_by_the_notebook(lab: LabPage, shared: NotebookPage) -> None:
    assert shared.ask("print('said')\nslider.value") == "said\n3"
    assert shared.ask("[one.name for one in threading.enumerate() if one.name == 'work']") == "[]"
    with pytest.raises(RuntimeError, match="ZeroDivisionError"):
        shared.ask("1 / 0")
    assert shared.ask("get_ipython().execution_count") == "4", "the next cell gets the number that it would have got"
    assert shared.prompts() == ["[1]:", "[2]:", "[3]:"] and shared.errors() == []


def test_tab_goes_through_the_controls_of_a_lab(lab: LabPage) -> None:
    stops = ["seq_len", "seq_len, as a number", "length", "length, as a number", "Double", "Run"]
    assert lab.tab_stops() == [*stops, "Fail"], "a disabled button is no stop"
    assert lab.tab_stops(until="Run") == stops
    lab.page.keyboard.press("Enter")
    lab.sentence("Run 1 at")
    with pytest.raises(AssertionError, match="Tab does not come to 'Stop', only to "):
        lab.tab_stops(until="Stop")


def test_a_kernel_gets_the_variables_of_its_test(open_notebook: Opener) -> None:
    page = open_notebook(own_notebook("import os; os.environ['PRESSED']"), environment={"PRESSED": "by the cell"})
    page.run_all()
    assert page.ask("os.environ['PRESSED']") == "'by the cell'"
    page.close()
    assert page.server.kernel_of(page.path) == {}
    with pytest.raises(ValueError, match="00_start_here.ipynb is committed with its kernel"):
        open_notebook("00_start_here.ipynb", environment={"PRESSED": "1"})
