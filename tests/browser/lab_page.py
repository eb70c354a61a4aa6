"""One lab of an open notebook: its sliders, buttons, sentences and pictures, and how fast they follow the keyboard."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from math import isnan
from pathlib import Path

from playwright.sync_api import Locator

from tests.browser import latency
from tests.browser.lab import NotebookPage
from tests.browser.server import wait_for

MARGIN = 4  # pixels around the picture of a lab: less than to the code above and the prompt beside it
SECONDS = 30


class LabPage:
    """The lab in a cell, or the n-th lab of a notebook: an output with sliders in it."""

    def __init__(self, notebook: NotebookPage, number: int = 0, cell: int | None = None) -> None:
        """``cell`` counts all cells of the notebook from 0, ``number`` the labs of that cell or of the page."""
        self.notebook = notebook
        self.page = notebook.page
        place = self.page.locator(".jp-Notebook .jp-Cell").nth(cell) if cell is not None else self.page
        outputs = place.locator(".jp-OutputArea-child").filter(has=self.page.locator(".noUi-handle"))
        self.root = outputs.nth(number).locator(".jp-OutputArea-output")

    # Finding

    @property
    def sliders(self) -> list[str]:
        """The names of the sliders, in the order of the page."""
        return [text.strip() for text in self.root.locator(".widget-slider > .widget-label").all_inner_texts()]

    def slider(self, name: str) -> Locator:
        """The handle of a slider; focus it and press keys."""
        return self._slider(name).locator(".noUi-handle")

    def button(self, text: str) -> Locator:
        return self.root.locator("button", has_text=re.compile(rf"^\s*{re.escape(text)}\s*$"))

    def image(self, alt: str) -> Locator:
        """The picture whose alternative text contains ``alt``."""
        return self.root.locator(f'img[alt*="{alt}"]').first

    def sentence(self, start: str, seconds: float = SECONDS) -> str:
        """Wait for a sentence that starts like this, and return all of it.

        Raises TimeoutError with what the lab says instead, at once when it says that it failed.
        """
        result = self.root.evaluate(latency.SENTENCE, {"start": start, "seconds": seconds})
        if "failure" in result:
            raise TimeoutError(f"{result['failure']}: no sentence begins with {start!r}; the lab says {result['all']}")
        return result["found"]

    def wait_until_idle(self, seconds: float = SECONDS) -> None:
        """Wait until no step runs: Run can be pressed, and Stop cannot."""
        run, stop = self.button("Run"), self.button("Stop")
        wait_for(lambda: run.is_enabled() and stop.is_disabled(), "Run instead of Stop", seconds)

    # The keyboard

    @property
    def focused(self) -> str | None:
        """What has the focus, as in :meth:`tab_stops`; None when that is not in the lab."""
        return self.root.evaluate(latency.FOCUSED)

    def burst(self, handle: Locator, keys: Sequence[str]) -> None:
        """Focus a control and press many keys without waiting for what they do."""
        handle.scroll_into_view_if_needed()
        handle.focus()
        for key in keys:
            self.page.keyboard.press(key)

    def set_slider(self, name: str, value: object) -> None:
        """Move a slider by keyboard until it shows ``value``. Raises ValueError when it never does."""
        for key in self.keys_to(name, value):
            self.page.keyboard.press(key)

    def keys_to(self, name: str, value: object) -> Iterator[str]:
        """The keys that bring a slider to ``value``, each to be pressed before the next is asked for.

        To the right, or to the left where the slider shows a larger number; to a name from the first on. Raises
        ValueError at the slider's end.
        """
        handle = self.slider(name)
        handle.scroll_into_view_if_needed()
        handle.focus()
        passed = [self._shown(name)]
        key = "ArrowLeft" if _number(passed[0]) > _number(str(value)) else "ArrowRight"
        if passed[0] != str(value) and isnan(_number(str(value))):
            yield "Home"
            passed.append(self._shown(name))
        while passed[-1] != str(value):
            position = handle.get_attribute("aria-valuenow")
            yield key
            if handle.get_attribute("aria-valuenow") == position:
                raise ValueError(f"{name} cannot be {value}: with {key} it goes through {', '.join(passed)}")
            passed.append(self._shown(name))

    def _shown(self, name: str) -> str:
        return self._slider(name).locator(".widget-readout").inner_text().strip()

    def tab_stops(self, until: str | None = None, most: int = 40) -> list[str]:
        """Press Tab from the first slider on and say what gets the focus: names of sliders, texts of buttons.

        The number beside a slider that can be typed is "NAME, as a number". Without ``until`` it ends where the focus
        leaves the lab; with it, on that control. Raises AssertionError when the focus does not come by there.
        """
        self.root.locator(".noUi-handle").first.focus()
        stops: list[str] = []
        while len(stops) < most and (stop := self.focused) is not None:
            stops.append(stop)
            if stop == until:
                return stops
            self.page.keyboard.press("Tab")
        if until is None:
            return stops
        raise AssertionError(f"Tab does not come to {until!r}, only to {stops}")

    def _slider(self, name: str) -> Locator:
        label = self.page.locator(".widget-label", has_text=re.compile(rf"^\s*{re.escape(name)}\s*$"))
        return self.root.locator(".widget-slider").filter(has=label)

    # Pictures

    def watch_frames(self, alt: str) -> latency.FrameWatch:
        """Note every picture from now on whose alternative text contains ``alt``, with the time when it came."""
        return latency.FrameWatch(self.root.evaluate_handle(latency.FRAMES, alt))

    def time_to_picture(
        self, handle: Locator, key: str, picture: str, expected: str, seconds: float = SECONDS
    ) -> float:
        """Press ``key`` on a control: the milliseconds until its picture is there and decoded.

        Args:
            picture: the part of its alternative text by which the picture is known.
            expected: another part, which it has after the key only.
        """
        return self.time_to_pictures(handle, key, {picture: expected}, seconds)[picture]

    def time_to_pictures(
        self, handle: Locator, key: str, expected: Mapping[str, str], seconds: float = SECONDS
    ) -> dict[str, float]:
        """The same for all pictures that shall change: ``{picture: expected}`` gives ``{picture: milliseconds}``.

        Raises TimeoutError that names the pictures that did not come or cannot be decoded.
        """
        handle.scroll_into_view_if_needed()
        handle.focus()
        arguments = {"key": key, "expected": dict(expected), "seconds": seconds}
        watcher = self.root.evaluate_handle(latency.LATENCY, arguments)
        self.page.keyboard.press(key)
        result = watcher.evaluate("watcher => watcher.done")
        if "failure" in result:
            raise TimeoutError(f"{key}: {result['failure']}")
        return result["milliseconds"]

    def screenshot(self, path: Path) -> Path:
        """Save a picture of the lab with a margin around it."""
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(self.png())
        return path

    def png(self) -> bytes:
        """The lab as it looks now. It must fit into the window: see :meth:`show_whole`."""
        box = self.root.bounding_box()
        clip = {
            "x": max(box["x"] - MARGIN, 0),
            "y": max(box["y"] - MARGIN, 0),
            "width": box["width"] + 2 * MARGIN,
            "height": box["height"] + 2 * MARGIN,
        }
        return self.page.screenshot(clip=clip)

    def show_whole(self, width: int, room: int = 300) -> None:
        """Make the window ``width`` wide and as tall as the lab needs, and scroll to it."""
        for _ in range(2):  # its height depends on its width
            height = self.root.bounding_box()["height"]
            self.page.set_viewport_size({"width": width, "height": int(height) + room})
            self.page.wait_for_timeout(300)
        # At the top, because what a run adds comes below.
        self.root.evaluate("root => { root.style.scrollMargin = '20px'; root.scrollIntoView({block: 'start'}); }")
        wait_for(lambda: self.root.bounding_box()["y"] >= 0, "the lab to be in the window", 5)


def _number(text: str) -> float:
    """NaN, which is larger than nothing, for what is no number."""
    try:
        return float(text.replace(",", ""))
    except ValueError:
        return float("nan")
