"""What goes wrong in a lab is said where the reader looks, leaves the buttons as they were, and the next Run works."""

from __future__ import annotations

import pytest

import memsave_lib as ms
from memsave_lib import planner
from memsave_lib.units import human_bytes
from tests.browser.conftest import Opener
from tests.browser.lab import NotebookPage, own_notebook
from tests.browser.lab_cases import CASES, MEMORY, SIZES, Step, Values, fastest, lab_threads
from tests.browser.lab_page import LabPage

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("nothing_reported")]

SELECTIVE, BUDGET = CASES["selective"], CASES["budget"]
SETUP = """
import threading
from dataclasses import replace
from memsave_lib import labs
"""
TIGHT = f"""
tight = labs.selective_lab(*{SIZES}, checkpoint_every=2)
tight.config = replace(tight.config, free_bytes=lambda: 999)
tight
"""
POOR = f"""
poor = labs.budget_lab{SIZES}
poor
"""
#: A lab on ``checkpoint_every`` with no prediction at 256, no model for 1, and a step that fails in backward at 3.
FRAIL = f"""
sound = labs.selective_lab(*{SIZES}, checkpoint_every=2).config

def predict(values):
    if values["seq_len"] == 256:
        raise ZeroDivisionError("no prediction for 256")
    return sound.predict(values)

def fail(*_):
    raise RuntimeError("made to <b>fail</b> in backward")

def prepare(values):
    if values["checkpoint_every"] == 1:
        raise MemoryError("no room for a model")
    job = sound.prepare(values)
    if values["checkpoint_every"] == 3:
        job.model.blocks[2].register_full_backward_hook(fail)
    return job

frail = labs.Lab(replace(sound, predict=predict, prepare=prepare))
frail
"""


@pytest.fixture(scope="module")
def page(open_shared: Opener) -> NotebookPage:
    opened = open_shared(own_notebook(SETUP, TIGHT, POOR, FRAIL))
    opened.run_all()
    return opened


def beginning(page: NotebookPage, number: int) -> LabPage:
    lab = LabPage(page, number)
    lab.burst(lab.button("Reset"), ["Enter"])
    lab.sentence("No step has run yet: press Run.")
    return lab


def press_run(lab: LabPage) -> None:
    lab.tab_stops(until="Run")
    lab.page.keyboard.press("Enter")


def alarm(lab: LabPage) -> str:
    """The one alert that there is."""
    alert = lab.root.locator("p[role=alert]")
    alert.wait_for()
    return alert.inner_text()


def assert_it_runs(lab: LabPage, values: Values) -> None:
    """At these values, with an end to all alarm and no thread left."""
    press_run(lab)
    lab.sentence(f"Run 1 at {SELECTIVE.say(values)}: {SELECTIVE.measurement(values)}. ", seconds=90)
    assert_it_waits(lab)
    assert lab.root.locator("p[role=alert]").count() == 0


def assert_it_waits(lab: LabPage) -> None:
    lab.wait_until_idle()
    assert lab.button("Reset").is_enabled()
    assert lab_threads(lab.notebook) == []


def test_a_run_that_would_not_fit_is_refused_with_the_numbers(page: NotebookPage) -> None:
    lab, start = beginning(page, 0), SELECTIVE.start
    for _ in range(2):
        press_run(lab)
        needs = human_bytes(SELECTIVE.step(start).peak_bytes)
        assert alarm(lab) == (
            f"Refused at {SELECTIVE.say(start)}: the step needs {needs}, and 999 B are free. Choose smaller numbers."
        )
        assert lab.focused == "Run", "nothing has run, so the button stays"
        assert_it_waits(lab)
    lab.set_slider("checkpoint_every", 3)
    moved = {**start, "checkpoint_every": 3}
    assert lab.sentence(SELECTIVE.foretold(moved)).startswith(SELECTIVE.sentence(moved))
    page.ask("tight.config = replace(tight.config, free_bytes=lambda: None)")
    assert_it_runs(lab, moved)


def test_a_budget_below_the_floor_is_refused_with_the_floor(page: NotebookPage) -> None:
    lab = beginning(page, 1)
    lab.set_slider("seq_len", 128)
    lab.set_slider("budget, %", 30)
    low = {"budget": 30, "seq_len": 128}
    with pytest.raises(planner.BelowTheFloor) as floor:
        fastest(low["seq_len"], low["budget"])
    share = floor.value.floor_bytes / Step(ms.KeepAll(), low["seq_len"]).peak_bytes
    why = f"{floor.value}. That is {share:.0%} of what keeping all needs."
    assert lab.sentence(BUDGET.foretold(low)) == f"{BUDGET.foretold(low)}{why}"
    assert lab.image(MEMORY).get_attribute("alt") == f"{MEMORY} at {BUDGET.say(low)}: no such step has run."
    press_run(lab)
    assert alarm(lab) == f"Refused at {BUDGET.say(low)}: {why}"
    assert_it_waits(lab)
    lab.set_slider("budget, %", 60)
    enough = {**low, "budget": 60}
    assert lab.sentence(BUDGET.foretold(enough)).startswith(BUDGET.sentence(enough))
    press_run(lab)
    lab.sentence(f"Run 1 at {BUDGET.say(enough)}: {BUDGET.measurement(enough)}. ", seconds=90)
    assert_it_waits(lab)


def test_a_prediction_that_fails_is_said_and_other_values_go_on(page: NotebookPage) -> None:
    lab, start = beginning(page, 2), SELECTIVE.start
    said = "Failed: ZeroDivisionError: no prediction for 256"
    lab.set_slider("seq_len", 256)
    assert alarm(lab) == said
    assert_it_waits(lab)
    press_run(lab)
    page.ask("None")  # the press has been answered
    assert alarm(lab) == said, "where nothing can be predicted, nothing runs"
    assert_it_waits(lab)
    assert page.ask("frail.runs") == "[]"
    lab.set_slider("seq_len", 128)
    small = {**start, "seq_len": 128}
    assert lab.sentence(SELECTIVE.foretold(small)).startswith(SELECTIVE.sentence(small))
    lab.image(SELECTIVE.memory(small)).wait_for()
    assert_it_runs(lab, small)


def test_a_prediction_that_fails_during_a_run_is_said_and_the_run_ends(page: NotebookPage) -> None:
    lab, start = beginning(page, 2), {**SELECTIVE.start, "seq_len": 2048}
    lab.set_slider("seq_len", 2048)
    lab.sentence(SELECTIVE.foretold(start))
    press_run(lab)
    lab.sentence(f"Running at {SELECTIVE.say(start)}: ")
    lab.set_slider("seq_len", 256)
    assert alarm(lab) == "Failed: ZeroDivisionError: no prediction for 256"
    lab.wait_until_idle(90)
    assert page.ask("[run.values['seq_len'] for run in frail.runs]") in ("[]", "[2048]")
    assert_it_waits(lab)


@pytest.mark.parametrize(
    ("every", "why"),
    [(1, "MemoryError: no room for a model"), (3, "RuntimeError: made to <b>fail</b> in backward")],
    ids=["before the step", "in backward"],
)
def test_a_worker_that_fails_is_said_and_the_next_run_works(page: NotebookPage, every: int, why: str) -> None:
    lab, start = beginning(page, 2), SELECTIVE.start
    lab.set_slider("checkpoint_every", every)
    lab.sentence(SELECTIVE.foretold({**start, "checkpoint_every": every}))
    press_run(lab)
    assert alarm(lab) == f"Failed: {why}"
    assert_it_waits(lab)
    assert lab.root.locator("table").count() == 0 and page.ask("frail.runs") == "[]"
    assert page.errors() == [], "the worker prints nothing into the notebook"
    lab.set_slider("checkpoint_every", 2)
    lab.sentence(SELECTIVE.foretold(start))
    assert_it_runs(lab, start)
