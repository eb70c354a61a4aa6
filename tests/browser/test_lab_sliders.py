"""The sliders of the six labs by keyboard: every number and picture follows, and Tab comes everywhere and out again."""

from __future__ import annotations

import pytest

from tests.browser.lab import NotebookPage
from tests.browser.lab_cases import CASES, MEMORY, at_the_beginning
from tests.browser.lab_page import LabPage

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("nothing_reported")]

EACH_LAB = pytest.mark.parametrize("name", CASES)


def sources(lab: LabPage, verb: str) -> list[str]:
    return [lab.image(alt).get_attribute("src") for alt in (MEMORY, f"{verb} at")]


@EACH_LAB
def test_each_slider_moves_both_pictures_and_the_sentence(labs_page: NotebookPage, name: str) -> None:
    lab, case = at_the_beginning(labs_page, name), CASES[name]
    assert lab.sliders == [case.label(slider) for slider in case.start]
    values = dict(case.start)
    for slider, value in case.moves.items():
        memory, choices = sources(lab, case.verb)
        lab.set_slider(case.label(slider), value)
        values[slider] = value
        said = lab.sentence(case.foretold(values))
        assert said.startswith(case.sentence(values))
        lab.image(case.memory(values)).wait_for()
        assert lab.image(f"{case.verb} at").get_attribute("alt") == said, "who cannot see it reads the same"
        # Before any run the lab on offloading has nothing to show of a step, and simulates whatever Run sends.
        now = sources(lab, case.verb)
        assert (now[0] != memory) == (name != "offload"), slider
        assert (now[1] != choices) == (slider != "Run sends"), slider
    assert labs_page.ask(f"of[{name!r}].values == {values}") == "True"


def test_keys_move_the_slider_and_not_the_notebook(labs_page: NotebookPage) -> None:
    lab, case = at_the_beginning(labs_page, "selective"), CASES["selective"]
    cell = "[...document.querySelectorAll('.jp-Cell')].findIndex(cell => cell.matches('.jp-mod-active'))"
    lab.slider("seq_len").focus()
    before = labs_page.page.evaluate(cell)
    assert before == 2 + list(CASES).index("selective"), "after a heading and a cell that imports"
    for key, seq_len in (
        ("ArrowUp", 1024), ("ArrowRight", 2048), ("ArrowRight", 2048), ("ArrowDown", 1024), ("Home", 128),
        ("ArrowLeft", 128), ("End", 2048), ("PageDown", 128), ("PageUp", 2048),
    ):  # fmt: skip
        lab.burst(lab.slider("seq_len"), [key])
        values = {**case.start, "seq_len": seq_len}
        assert lab.sentence(case.foretold(values)).startswith(case.sentence(values))
        lab.image(case.memory(values)).wait_for()
    assert labs_page.page.evaluate(cell) == before, "arrows choose a cell where nobody takes them"


@EACH_LAB
def test_a_burst_of_keys_ends_at_the_last_value(labs_page: NotebookPage, name: str) -> None:
    lab, case = at_the_beginning(labs_page, name), CASES[name]
    keys = ["Home"] + 4 * ["ArrowRight"] + 3 * ["ArrowLeft"] + 3 * ["ArrowRight"] + 5 * ["ArrowLeft"] + ["End"]
    lab.burst(lab.slider("seq_len"), [*keys, "ArrowLeft", "ArrowLeft", "ArrowRight"])
    values = {**case.start, "seq_len": 1024}
    said = case.foretold(values)
    lab.sentence(said)
    assert labs_page.ask(f"of[{name!r}].values == {values}") == "True"
    labs_page.page.wait_for_timeout(1000)  # whatever else were on its way has come
    assert lab.sentence(said, seconds=0.1).startswith(case.sentence(values))
    assert lab.image(MEMORY).get_attribute("alt").startswith(case.memory(values))
    assert lab.image(f"{case.verb} at").get_attribute("alt").startswith(case.sentence(values))


@EACH_LAB
def test_tab_goes_through_a_lab_in_the_order_of_the_page(labs_page: NotebookPage, name: str) -> None:
    lab, case = at_the_beginning(labs_page, name), CASES[name]
    stops = lab.tab_stops()
    assert [stop for stop in stops if not stop.endswith(", as a number")] == [*lab.sliders, "Run", "Reset"]
    assert lab.tab_stops(until="Reset") == stops, "Reset is the last, and the next Tab leaves the lab"
    for _ in stops[1:]:
        labs_page.page.keyboard.press("Shift+Tab")
    assert lab.focused == case.label(next(iter(case.start)))
    labs_page.page.keyboard.press("Shift+Tab")
    assert lab.focused is None


def test_a_pressed_run_leaves_the_reader_at_stop_and_a_pressed_stop_at_run(labs_page: NotebookPage) -> None:
    lab, keyboard = at_the_beginning(labs_page, "selective"), labs_page.page.keyboard
    lab.set_slider("seq_len", 2048)
    lab.tab_stops(until="Run")
    keyboard.press("Space")
    lab.sentence("Running at")
    keyboard.press("Tab")
    assert lab.focused == "Stop"
    stops = [stop for stop in lab.tab_stops() if not stop.endswith(", as a number")]
    assert stops == [*lab.sliders, "Stop", "Reset"]
    lab.tab_stops(until="Stop")
    keyboard.press("Space")
    lab.sentence("Stopped at")
    lab.wait_until_idle()
    keyboard.press("Shift+Tab")
    assert lab.focused == "Run"
    keyboard.press("Space")
    lab.sentence("Running at")
    keyboard.press("Tab")
    keyboard.press("Tab")
    assert lab.focused == "Reset"
    keyboard.press("Enter")
    lab.sentence("No step has run yet: press Run.")
    assert lab.focused == "Reset", "a button that stays keeps the focus"
