"""How long after a key the pictures of each lab have changed. The summary of the tests says it.

A lab should follow in 150 ms, and in 300 ms while a step runs. A machine with other things to do would fail that, so
it is reported and not demanded. On an idle one ``LATENCY=1 python -m pytest tests/browser/test_lab_latency.py`` demands
it.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise

import pytest

from tests.browser.lab import NotebookPage
from tests.browser.lab_cases import CASES, MEMORY, SEQ_LENS, LabCase, Values, at_the_beginning, lab_threads
from tests.browser.lab_page import LabPage

pytestmark = [pytest.mark.browser, pytest.mark.usefixtures("nothing_reported")]

PRESSES = 12
IDLE_MS, RUNNING_MS = 150, 300


def walk(case: LabCase, columns: Sequence[int]) -> list[Values]:
    """Settings that are one key apart and none twice, as a reader tries them: along the columns, then a shorter one."""
    settings = []
    for row, seq_len in enumerate(reversed(SEQ_LENS)):
        for column in columns[::-1] if row % 2 else columns:
            settings.append({**case.start, "seq_len": seq_len, case.column: column})
    return settings[: PRESSES + 1]


def steps(case: LabCase, settings: Sequence[Values]) -> Iterator[tuple[str, str, Values]]:
    """(slider, key, the values after it) of a walk."""
    for before, after in pairwise(settings):
        (slider,) = (name for name in after if after[name] != before[name])
        yield case.label(slider), "ArrowRight" if after[slider] > before[slider] else "ArrowLeft", after


def go_to(lab: LabPage, case: LabCase, values: Values) -> None:
    for name in ("seq_len", case.column):
        lab.set_slider(case.label(name), values[name])
    lab.sentence(case.foretold(values))


def run_if_none_does(lab: LabPage) -> None:
    if lab.button("Run").is_enabled():
        lab.burst(lab.button("Run"), ["Enter"])
        lab.sentence("Running at ")
        lab.button("Stop").and_(lab.page.locator(":enabled")).wait_for()


@pytest.mark.parametrize("name", CASES)
def test_pictures_follow_the_keyboard(
    labs_page: NotebookPage, name: str, record_property: Callable[[str, object], None]
) -> None:
    lab, case = at_the_beginning(labs_page, name), CASES[name]
    prediction = f"{case.verb} at"

    settings = walk(case, case.columns[:3])
    go_to(lab, case, settings[0])
    idle = []
    for slider, key, values in steps(case, settings):
        expected = {MEMORY: f"at {case.say(values)}: ", prediction: case.foretold(values)}
        idle.append(lab.time_to_pictures(lab.slider(slider), key, expected))

    settings = walk(case, case.columns[:-4:-1])
    go_to(lab, case, settings[0])
    running = []
    for slider, key, values in steps(case, settings):
        run_if_none_does(lab)
        running.append(lab.time_to_picture(lab.slider(slider), key, prediction, case.foretold(values)))
    lab.burst(lab.button("Reset"), ["Enter"])
    lab.sentence("No step has run yet: press Run.", seconds=90)
    lab.wait_until_idle()
    assert lab_threads(labs_page) == []

    medians = {
        "idle_ms": statistics.median(max(one.values()) for one in idle),
        "first_ms": statistics.median(min(one.values()) for one in idle),
        "running_ms": statistics.median(running),
    }
    assert len(idle) == len(running) == PRESSES
    record_property("latency", {"lab": name, "presses": PRESSES, **medians})
    if os.environ.get("LATENCY") == "1":
        assert medians["idle_ms"] <= IDLE_MS
        assert medians["running_ms"] <= RUNNING_MS
