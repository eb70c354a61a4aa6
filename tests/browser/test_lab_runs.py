"""Run by keyboard: the picture fills while the step runs, and ends in the bytes that are measured without a lab."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from tests.browser.lab import NotebookPage, wait_for
from tests.browser.lab_cases import CASES, MEMORY, at_the_beginning, lab_threads
from tests.browser.lab_page import LabPage

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("nothing_reported")]

SELECTIVE = CASES["selective"]


def press(lab: LabPage, button: str) -> None:
    """As a reader does who has just moved a slider."""
    lab.tab_stops(until=button)
    lab.page.keyboard.press("Enter")


def runs(page: NotebookPage) -> str:
    return page.ask("[run.values for run in of['selective'].runs]")


def long_step(page: NotebookPage) -> tuple[LabPage, str]:
    """The lab on ``checkpoint_every``, set to a step that takes seconds, and what it says of this setting."""
    lab = at_the_beginning(page, "selective")
    lab.set_slider("seq_len", 2048)
    setting = SELECTIVE.say({**SELECTIVE.start, "seq_len": 2048})
    lab.sentence(f"Predicted at {setting}")
    return lab, setting


@contextmanager
def one_core(page: NotebookPage) -> Iterator[None]:
    """A step of seconds takes twice as many: time for questions to the kernel, which may take a second themselves."""
    threads = page.ask("import torch; threads = torch.get_num_threads(); torch.set_num_threads(1); threads")
    yield
    page.ask(f"torch.set_num_threads({threads})")


@pytest.mark.parametrize("name", CASES)
def test_run_fills_the_picture_and_ends_in_what_is_measured_without_it(labs_page: NotebookPage, name: str) -> None:
    lab, case = at_the_beginning(labs_page, name), CASES[name]
    lab.set_slider("seq_len", 1024)
    values = {**case.start, "seq_len": 1024}
    setting, step = case.say(values), case.say_step(values)
    lab.sentence(case.foretold(values))
    watch = lab.watch_frames(MEMORY)
    press(lab, "Run")
    said = lab.sentence("Run 1 at ", seconds=90)
    lab.wait_until_idle()
    measured = case.measurement(values)
    assert said.startswith(f"Run 1 at {step}: {measured}. The peak is in ")
    first, *frames = watch.stop()
    assert first.alt.startswith(case.memory(values))
    growing = [frame for frame in frames if frame.alt.endswith(" live now.")]
    assert {frame.alt.partition(": ")[0] for frame in frames} == {f"{MEMORY} at {setting}"}
    assert len({frame.src for frame in growing}) >= 3, "the picture grows while the step runs"
    assert len({frame.alt for frame in growing}) >= 3, "and so do its words"
    last = frames[-1]
    assert last not in growing and last.src not in {frame.src for frame in growing}
    if name != "offload":
        peak = measured.rpartition("; peak ")[2].partition(", 0 bytes")[0]
        assert last.alt.startswith(f"{MEMORY} at {setting}: Peak {peak} in ")
    rows = [row.locator("td").all_inner_texts() for row in lab.root.locator("tr").all()[1:]]
    assert rows[0][:3] == ["1", step, "saved"] and len(rows) == 2
    assert (rows[0][5], rows[1][3]) == ("0", "0"), "errors in bytes"
    assert lab_threads(labs_page) == []


def test_two_presses_of_run_are_one_run(labs_page: NotebookPage) -> None:
    lab = at_the_beginning(labs_page, "selective")
    lab.burst(lab.button("Run"), ["Enter", "Enter", "Space"])
    lab.sentence("Run 1 at ", seconds=90)
    lab.wait_until_idle()
    assert runs(labs_page) == str([SELECTIVE.start])
    assert lab_threads(labs_page) == []


def test_a_slider_moved_during_a_run_moves_the_prediction_and_not_the_run(labs_page: NotebookPage) -> None:
    lab, setting = long_step(labs_page)
    watch = lab.watch_frames(MEMORY)
    press(lab, "Run")
    lab.sentence(f"Running at {setting}: ")
    moved = {"seq_len": 256, "checkpoint_every": 3}
    for slider, value in moved.items():
        lab.set_slider(slider, value)
    assert lab.sentence(SELECTIVE.foretold(moved)).startswith(SELECTIVE.sentence(moved))
    assert lab.button("Stop").is_enabled(), "the step takes longer than the sliders"
    assert lab.image(MEMORY).get_attribute("alt").startswith(f"{MEMORY} at {setting}: ")
    lab.sentence(f"Run 1 at {setting}: ", seconds=90)
    lab.wait_until_idle()
    assert {frame.alt.partition(": ")[0] for frame in watch.stop()} == {f"{MEMORY} at {setting}"}
    assert lab.sentence("Predicted at ").startswith(SELECTIVE.sentence(moved)), "no old numbers come with the run"
    assert runs(labs_page) == str([{**SELECTIVE.start, "seq_len": 2048}])
    press(lab, "Run")
    lab.sentence(f"Run 2 at {SELECTIVE.say(moved)}: {SELECTIVE.measurement(moved)}. ", seconds=90)


def test_stop_ends_a_step_midway_and_the_next_run_works(labs_page: NotebookPage) -> None:
    lab, setting = long_step(labs_page)
    with one_core(labs_page):
        press(lab, "Run")
        lab.sentence(f"Running at {setting}: ")
        assert lab_threads(labs_page) == ["lab_0", "lab_1"]
        lab.image("live now").wait_for()  # stopped before its first operation, a step has no picture of its own
        press(lab, "Stop")
        stopped = lab.sentence("Stopped at ")
        live = stopped.removeprefix(f"Stopped at {setting}, with ").removesuffix(" live.")
        assert lab.image(MEMORY).get_attribute("alt") == f"{MEMORY} at {setting}: {live} live now."
        lab.wait_until_idle()
    assert lab_threads(labs_page) == [] and runs(labs_page) == "[]"
    assert lab.root.locator("table").count() == 0
    lab.set_slider("seq_len", 128)
    small = {**SELECTIVE.start, "seq_len": 128}
    lab.image(SELECTIVE.memory(small)).wait_for()
    press(lab, "Run")
    lab.sentence(f"Run 1 at {SELECTIVE.say(small)}: {SELECTIVE.measurement(small)}. ", seconds=90)


def test_reset_ends_a_running_step_and_forgets_all(labs_page: NotebookPage) -> None:
    lab = at_the_beginning(labs_page, "selective")
    press(lab, "Run")
    lab.sentence("Run 1 at ", seconds=90)
    lab.set_slider("seq_len", 2048)
    press(lab, "Run")
    lab.sentence("Running at ")
    press(lab, "Reset")
    lab.sentence("No step has run yet: press Run.")
    assert lab.sentence("Predicted at ").startswith(SELECTIVE.sentence(SELECTIVE.start))
    lab.image(SELECTIVE.memory(SELECTIVE.start)).wait_for()
    lab.wait_until_idle()
    wait_for(lambda: lab.root.locator("table").count() == 0, "the table to go", 10)
    assert lab_threads(labs_page) == [] and runs(labs_page) == "[]"
