"""Pictures of every lab of the course: fresh, while it runs, and after two runs; light and dark; wide and narrow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from string import ascii_lowercase

import nbformat
from playwright.sync_api import Browser

from tests.browser.cut import cut_to, lab_cells
from tests.browser.lab import open_page
from tests.browser.lab_page import LabPage
from tests.browser.server import LabServer, Theme, wait_for

WIDTHS = (1280, 800)
RUN_SECONDS = 120
FRAMES_OF_A_RUN = 12  # by then the curve has a shape


def open_labs(server: LabServer, browser: Browser, notebook: Path, sharpness: float = 1.5) -> list[LabPage]:
    """Open a notebook cut down to its labs, run it, and return them. None for a notebook without labs."""
    built = nbformat.read(notebook, as_version=4)
    cells = lab_cells(built)
    if not cells:
        return []
    nbformat.write(cut_to(built, cells), server.root / notebook.name)
    page = open_page(server, browser, notebook.name, sharpness)
    page.hide_sidebar()
    page.run_all()
    return [LabPage(page, number) for number in range(len(cells))]


def lab_pictures(labs: Sequence[LabPage], themes: Sequence[Theme], folder: Path) -> Iterator[Path]:
    """Save ``NN-STATE-THEME-WIDTH.png`` for the labs of one notebook: ``03-...``, and ``03b-...`` for a second lab.

    Raises AssertionError when the page reports a problem meanwhile.
    """
    for number, lab in enumerate(labs):
        name = lab.notebook.path.split("_")[0] + ("" if number == 0 else ascii_lowercase[number])
        for theme in themes:
            lab.notebook.set_theme(theme)
            for width in WIDTHS:
                for state, show in STATES.items():
                    show(lab, width)
                    yield lab.screenshot(folder / f"{name}-{state}-{theme}-{width}.png")
                    leave(lab)
        if lab.notebook.problems:
            raise AssertionError(f"{lab.notebook.path} reports {lab.notebook.problems}")


def show_fresh(lab: LabPage, width: int) -> None:
    lab.show_whole(width)


def show_running(lab: LabPage, width: int) -> None:
    """Run the longest step that the lab offers, and wait until its curve has begun."""
    if "seq_len" in lab.sliders:
        lab.notebook.press(lab.slider("seq_len"), "End")
        lab.page.wait_for_timeout(1000)
    lab.show_whole(width)
    watch = lab.watch_frames("Memory against time")
    lab.notebook.press(lab.button("Run"), "Enter")
    lab.sentence("Running at")
    wait_for(lambda: len(watch.frames) > FRAMES_OF_A_RUN, "the curve of the run to begin", RUN_SECONDS)


def show_two_runs(lab: LabPage, width: int) -> None:
    """Run, move the last slider one step, run again."""
    run(lab, 1)
    move(lab, lab.sliders[-1])
    run(lab, 2)
    lab.show_whole(width)


def run(lab: LabPage, number: int) -> None:
    lab.notebook.press(lab.button("Run"), "Enter")
    lab.sentence(f"Run {number} at", RUN_SECONDS)
    wait_for(lab.button("Run").is_enabled, "the Run button", 10)


def move(lab: LabPage, name: str) -> None:
    """One step to the right, or to the left at the right end."""
    handle = lab.slider(name)
    before = handle.get_attribute("aria-valuenow")
    lab.notebook.press(handle, "ArrowRight")
    lab.page.wait_for_timeout(1000)
    if handle.get_attribute("aria-valuenow") == before:
        lab.notebook.press(handle, "ArrowLeft")
        lab.page.wait_for_timeout(1000)


def leave(lab: LabPage) -> None:
    """Back to how the lab began."""
    lab.notebook.press(lab.button("Reset"), "Enter")
    lab.sentence("No step has run yet", RUN_SECONDS)
    wait_for(lab.button("Run").is_enabled, "the Run button", 10)


STATES = {"fresh": show_fresh, "running": show_running, "after": show_two_runs}
