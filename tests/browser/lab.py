"""A real JupyterLab in a real Chromium, for tests and for looking at the notebooks.

``LabServer`` serves a folder on this machine; ``NotebookPage`` does what a reader does: open a notebook, run all cells,
move a slider by keyboard, press a button, look.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from playwright.sync_api import Browser, Locator, Page, sync_playwright

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
Theme = Literal["light", "dark"]
START_SECONDS = 60
RUN_SECONDS = 180
VIEWPORT = {"width": 1280, "height": 1000}


def find_chromium() -> str | None:
    """The Chromium or Chrome of this machine; ``CHROMIUM`` may name another."""
    return os.environ.get("CHROMIUM") or next(filter(None, map(shutil.which, CHROMIUM_NAMES)), None)


@contextmanager
def chromium(executable: str) -> Iterator[Browser]:
    """Start a headless browser and close it."""
    # Chromium's sandbox refuses to work for root, which is who runs CI in a container.
    arguments = ["--no-sandbox"] if _is_root() else []
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=arguments)
        try:
            yield browser
        finally:
            browser.close()


def wait_for(condition: Callable[[], object], what: str, seconds: float) -> None:
    """Poll until ``condition()`` is true. Raises TimeoutError that says what was waited for."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.1)


@dataclass(frozen=True)
class LabServer:
    """A running JupyterLab that serves ``root``."""

    url: str
    token: str
    root: Path

    def api(self, path: str) -> list[dict]:
        """Ask the server's REST interface."""
        request = urllib.request.Request(f"{self.url}/api/{path}", headers={"Authorization": f"token {self.token}"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.load(answer)

    def kernel_of(self, path: str) -> dict:
        """State of the kernel of an open notebook, {} before it has one."""
        kernels = [session["kernel"] for session in self.api("sessions") if session["path"] == path]
        return kernels[0] if kernels else {}


@contextmanager
def lab_server(root: Path, work: Path, theme: Theme = "light") -> Iterator[LabServer]:
    """Serve ``root`` with JupyterLab on a free port of 127.0.0.1, and stop it.

    ``work`` receives settings, kernel files and the log, so that nothing of the user's own Jupyter is read or written.
    Raises RuntimeError with the end of the log when the server does not come up.
    """
    settings = work / "settings"
    settings.mkdir(parents=True)
    (settings / "overrides.json").write_text(
        json.dumps(
            {
                "@jupyterlab/apputils-extension:notification": {"fetchNews": "false", "checkForUpdates": False},
                "@jupyterlab/apputils-extension:themes": {"theme": f"JupyterLab {theme.title()}"},
                # Every cell is in the page, also the ones that are scrolled out of view.
                "@jupyterlab/notebook-extension:tracker": {"windowingMode": "none"},
            }
        )
    )
    port, token = _free_port(), secrets.token_hex(24)
    options = {
        "ServerApp.ip": "127.0.0.1",
        "ServerApp.port": port,
        "ServerApp.port_retries": 0,
        "ServerApp.open_browser": False,
        "ServerApp.root_dir": root,
        "IdentityProvider.token": token,
        "LabApp.app_settings_dir": settings,
        "LabApp.user_settings_dir": work / "user-settings",
        "LabApp.workspaces_dir": work / "workspaces",
    }
    command = [sys.executable, "-m", "jupyterlab", *(f"--{name}={value}" for name, value in options.items())]
    if _is_root():
        command.append("--allow-root")
    folders = ("JUPYTER_CONFIG_DIR", "JUPYTER_DATA_DIR", "JUPYTER_RUNTIME_DIR", "IPYTHONDIR")
    environment = {**os.environ, **{name: str(work / name.lower()) for name in folders}}
    # Here the buttons are pressed by the test.
    environment.pop("MEMSAVE_PRESS_RUN", None)
    log = work / "jupyterlab.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=environment, stdout=stream, stderr=subprocess.STDOUT)
    server = LabServer(f"http://127.0.0.1:{port}", token, root)
    try:
        wait_for(lambda: process.poll() is not None or _answers(server), "JupyterLab to start", START_SECONDS)
        if process.poll() is not None:
            raise RuntimeError(f"JupyterLab ended with status {process.returncode}:\n{log.read_text()[-2000:]}")
        yield server
    finally:
        process.terminate()
        try:
            process.wait(timeout=20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class NotebookPage:
    """One notebook open in one browser tab."""

    def __init__(self, server: LabServer, page: Page, path: str) -> None:
        self.server = server
        self.page = page
        self.path = path
        #: Errors of the page's own scripts; a test may demand that there are none.
        self.script_errors: list[str] = []
        page.on("pageerror", lambda error: self.script_errors.append(str(error)))

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

    def close(self) -> None:
        self.page.context.close()

    def _connected(self) -> bool:
        kernel = self.server.kernel_of(self.path)
        return kernel.get("execution_state") == "idle" and kernel.get("connections", 0) >= 1

    def _all_executed(self) -> bool:
        prompts = self.prompts()
        return bool(prompts) and all(re.fullmatch(r"\[\d+\]:", prompt) for prompt in prompts)


def open_page(server: LabServer, browser: Browser, path: str, sharpness: float = 1) -> NotebookPage:
    """Open a notebook of the server in a fresh browser profile."""
    context = browser.new_context(viewport=VIEWPORT, device_scale_factor=sharpness, reduced_motion="reduce")
    page = NotebookPage(server, context.new_page(), path)
    page.open()
    return page


def _is_root() -> bool:
    return hasattr(os, "geteuid") and os.geteuid() == 0


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _answers(server: LabServer) -> bool:
    try:
        server.api("sessions")
    except OSError:
        return False
    return True
