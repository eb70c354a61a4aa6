"""A real JupyterLab in a real Chromium, for tests and for looking at the notebooks.

``NotebookPage`` does what a reader does: open a notebook, run all cells, move a slider by keyboard, press a button,
look. ``tests.browser.lab_page.LabPage`` is about one lab of it.
"""

from __future__ import annotations

import re
from pathlib import Path

from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook
from playwright.sync_api import Browser, ConsoleMessage, Locator, Page

from tests.browser.server import START_SECONDS, LabServer, Theme, chromium, find_chromium, lab_server, wait_for

__all__ = [
    "LabServer",
    "NotebookPage",
    "Theme",
    "chromium",
    "find_chromium",
    "lab_server",
    "open_page",
    "own_notebook",
    "wait_for",
]

RUN_SECONDS = 180
VIEWPORT = {"width": 1280, "height": 1000}


class NotebookPage:
    """One notebook open in one browser tab."""

    def __init__(self, server: LabServer, page: Page, path: str) -> None:
        self.server = server
        self.page = page
        self.path = path
        self._problems: list[str] = []
        page.on("pageerror", lambda error: self._problems.append(str(error)))
        page.on("console", self._note)

    @property
    def problems(self) -> list[str]:
        """Exceptions of the page's scripts, and all that it reports as an error on its console, since it was opened.

        JupyterLab itself reports nothing, so a test may demand that there are none.
        """
        self.page.evaluate("null")  # what has been reported before this is answered has arrived then
        return list(self._problems)

    @property
    def script_errors(self) -> list[str]:
        return self.problems

    def open(self) -> None:
        """Open the notebook and wait for its kernel.

        The kernel must be idle and the page connected to it: before that, Run All silently does nothing.
        """
        self.page.goto(f"{self.server.url}/lab/tree/{self.path}?reset&token={self.server.token}")
        self.page.locator(".jp-Notebook .jp-Cell").first.wait_for(timeout=START_SECONDS * 1000)
        wait_for(self._connected, f"the kernel of {self.path}", START_SECONDS)

    def run_all(self, seconds: float = RUN_SECONDS) -> None:
        """Clear all outputs, run all cells and wait for the last. Raises AssertionError for a cell that failed."""
        self.menu("Edit", "Clear Outputs of All Cells")
        wait_for(lambda: not any(re.search(r"\d", prompt) for prompt in self.prompts()), "cleared outputs", 10)
        self.menu("Run", "Run All Cells")
        wait_for(lambda: self.errors() or self._all_executed(), f"every cell of {self.path}", seconds)
        if errors := self.errors():
            raise AssertionError(f"a cell of {self.path} failed:\n" + "\n".join(errors))

    def menu(self, *titles: str) -> None:
        """Choose an entry of the menu bar by its path."""
        self.page.locator(".lm-MenuBar-itemLabel", has_text=re.compile(f"^{titles[0]}$")).click()
        for title in titles[1:]:
            self.page.locator(".lm-Menu-itemLabel", has_text=re.compile(f"^{re.escape(title)}$")).click()

    def prompts(self) -> list[str]:
        """The prompts of the code cells that hold code: "[3]:" when executed, "[*]:" while running, "[ ]:" before."""
        cells = self.page.locator(".jp-Notebook .jp-CodeCell").all()
        return [cell.locator(".jp-InputPrompt").first.inner_text().strip() for cell in cells]

    def errors(self) -> list[str]:
        """Texts of what cells wrote to stderr, which is where JupyterLab shows exceptions too."""
        return self.page.locator('.jp-OutputArea [data-mime-type="application/vnd.jupyter.stderr"]').all_inner_texts()

    def slider(self, label: str) -> Locator:
        """The handle of the slider with this description; focus it and press keys."""
        widget = self.page.locator(".widget-slider, .jupyter-widgets.widget-hslider").filter(
            has=self.page.locator(".widget-label", has_text=re.compile(rf"^\s*{re.escape(label)}\s*$"))
        )
        return widget.locator(".noUi-handle").first

    def press(self, target: Locator, key: str, times: int = 1) -> None:
        """Focus ``target`` as the Tab key would and press ``key``."""
        target.scroll_into_view_if_needed()
        target.focus()
        for _ in range(times):
            self.page.keyboard.press(key)

    def button(self, text: str) -> Locator:
        """The widget button with this text."""
        return self.page.locator("button.jupyter-button", has_text=re.compile(rf"^\s*{re.escape(text)}\s*$"))

    def image(self, alt: str) -> Locator:
        """The picture of a widget whose alternative text contains ``alt``."""
        return self.page.locator(f'.jp-OutputArea img[alt*="{alt}"]').first

    def wait_for_change(self, target: Locator, attribute: str, before: str | None, seconds: float = 20) -> str:
        """Wait until an attribute differs from ``before`` and return it; "text" means the element's text."""
        read = target.inner_text if attribute == "text" else lambda: target.get_attribute(attribute)
        wait_for(lambda: read() != before, f"a change of {attribute}", seconds)
        return read()

    def screenshot(self, path: Path, target: Locator | None = None) -> Path:
        """Save a picture of the page, or of one element."""
        path.parent.mkdir(parents=True, exist_ok=True)
        (target or self.page).screenshot(path=path)
        return path

    def screenshots(self, folder: Path, stem: str) -> list[Path]:
        """Save the notebook from top to bottom, one picture a screenful: ``stem-01.png`` and so on."""
        scroller = self.page.locator(".jp-Notebook .jp-WindowedPanel-outer").first
        # JupyterLab lets a reader scroll beyond the last cell; there is nothing to see.
        height, total = scroller.evaluate(
            """panel => {
                const last = [...panel.querySelectorAll(".jp-Cell")].pop().getBoundingClientRect().bottom;
                return [panel.clientHeight, last - panel.getBoundingClientRect().top + panel.scrollTop];
            }"""
        )
        overlap = 60
        pictures = []
        for number, top in enumerate(range(0, max(int(total) - overlap, 1), height - overlap), start=1):
            scroller.evaluate("(panel, top) => panel.scrollTo(0, top)", top)
            self.page.wait_for_timeout(300)
            pictures.append(self.screenshot(folder / f"{stem}-{number:02}.png", self.page.locator(".jp-NotebookPanel")))
        return pictures

    def hide_sidebar(self) -> None:
        """Give the notebook the width of the window."""
        self.page.keyboard.press("Control+b")
        self.page.wait_for_timeout(500)

    def ask(self, code: str, seconds: float = 30) -> str:
        """Execute code in the notebook's kernel, unseen by the notebook; see :meth:`LabServer.ask`."""
        return self.server.ask(self.path, code, seconds)

    def set_theme(self, theme: Theme) -> None:
        """Change the colours of JupyterLab as a reader does, by its menu."""
        self.menu("Settings", "Theme", f"JupyterLab {theme.title()}")
        light = "true" if theme == "light" else "false"
        self.page.locator(f'body[data-jp-theme-light="{light}"]').wait_for(state="attached")

    def close(self) -> None:
        """Close the tab and end the kernel, so that who opens the notebook next gets a fresh one."""
        self.page.context.close()
        self.server.end_session(self.path)

    def _note(self, message: ConsoleMessage) -> None:
        if message.type == "error":
            self._problems.append(f"{message.text} ({message.location['url']})")

    def _connected(self) -> bool:
        kernel = self.server.kernel_of(self.path)
        return kernel.get("execution_state") == "idle" and kernel.get("connections", 0) >= 1

    def _all_executed(self) -> bool:
        prompts = self.prompts()
        return bool(prompts) and all(re.fullmatch(r"\[\d+\]:", prompt) for prompt in prompts)


def own_notebook(*code: str) -> NotebookNode:
    """A notebook for a test: a heading and these cells, which look executed, as those of a committed notebook do."""
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    cells = [new_code_cell(text.strip(), execution_count=count) for count, text in enumerate(code, start=1)]
    return new_notebook(metadata=kernel, cells=[new_markdown_cell("# A lab"), *cells])


def open_page(server: LabServer, browser: Browser, path: str, sharpness: float = 1) -> NotebookPage:
    """Open a notebook of the server in a fresh browser profile."""
    context = browser.new_context(viewport=VIEWPORT, device_scale_factor=sharpness, reduced_motion="reduce")
    page = NotebookPage(server, context.new_page(), path)
    page.open()
    return page
