"""A browser and a JupyterLab of this machine, started for tests and stopped again."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from jupyter_client import BlockingKernelClient
from playwright.sync_api import Browser, sync_playwright

CHROMIUM_NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")
Theme = Literal["light", "dark"]
START_SECONDS = 60


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
    """A running JupyterLab that serves ``root``; the files of its kernels are in ``work``."""

    url: str
    token: str
    root: Path
    work: Path

    def api(self, path: str, method: str = "GET") -> Any:
        """Ask the server's REST interface; None where it has nothing to say."""
        headers = {"Authorization": f"token {self.token}"}
        request = urllib.request.Request(f"{self.url}/api/{path}", headers=headers, method=method)
        with urllib.request.urlopen(request, timeout=10) as answer:
            return json.loads(answer.read() or "null")

    def kernel_of(self, path: str) -> dict:
        """State of the kernel of an open notebook, {} before it has one."""
        kernels = [session["kernel"] for session in self._sessions(path)]
        return kernels[0] if kernels else {}

    def end_session(self, path: str) -> None:
        """End the kernel of a notebook, if it has one."""
        for session in self._sessions(path):
            self.api(f"sessions/{session['id']}", "DELETE")

    def _sessions(self, path: str) -> list[dict]:
        return [session for session in self.api("sessions") if session["path"] == path]

    def ask(self, path: str, code: str, seconds: float = 30) -> str:
        """Execute code in the kernel of an open notebook and return what it prints and the value of its last line.

        The notebook shows nothing of it, and its cells keep their numbers. Raises RuntimeError with the traceback when
        the code fails, TimeoutError when the kernel stays busy.
        """
        connection = _folder(self.work, "JUPYTER_RUNTIME_DIR") / f"kernel-{self.kernel_of(path)['id']}.json"
        client = BlockingKernelClient(connection_file=os.fspath(connection))
        client.load_connection_file()
        client.start_channels()
        texts: list[str] = []

        def hear(message: dict) -> None:
            content = message["content"]
            texts.append(content.get("text") or content.get("data", {}).get("text/plain", ""))

        try:
            client.wait_for_ready(timeout=seconds)
            reply = client.execute_interactive(
                code, store_history=False, allow_stdin=False, timeout=seconds, output_hook=hear
            )
        finally:
            client.stop_channels()
        if reply["content"]["status"] != "ok":
            raise RuntimeError("\n".join(reply["content"].get("traceback", ["the kernel gave up"])))
        return "".join(texts)

    def kernel_with(self, environment: Mapping[str, str]) -> dict[str, str]:
        """The ``kernelspec`` metadata of a notebook whose kernel shall have these variables too."""
        name = f"with-{secrets.token_hex(4)}"
        spec = {
            "argv": [sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"],
            "display_name": name,
            "language": "python",
            "env": dict(environment),
        }
        folder = _folder(self.work, "JUPYTER_DATA_DIR") / "kernels" / name
        folder.mkdir(parents=True)
        (folder / "kernel.json").write_text(json.dumps(spec))
        return {"name": name, "display_name": name, "language": "python"}


@contextmanager
def lab_server(
    root: Path, work: Path, theme: Theme = "light", environment: Mapping[str, str] | None = None
) -> Iterator[LabServer]:
    """Serve ``root`` with JupyterLab on a free port of 127.0.0.1, and stop it.

    ``work`` receives settings, kernel files and the log, so that nothing of the user's own Jupyter is read or written.
    ``environment`` is for the server and for every kernel. Raises RuntimeError with the end of the log when the server
    does not come up.
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
    variables = {**os.environ, **{name: os.fspath(_folder(work, name)) for name in folders}}
    # Here the buttons are pressed by the test.
    variables.pop("MEMSAVE_PRESS_RUN", None)
    variables.update(environment or {})
    log = work / "jupyterlab.log"
    with log.open("w") as stream:
        process = subprocess.Popen(command, env=variables, stdout=stream, stderr=subprocess.STDOUT)
    server = LabServer(f"http://127.0.0.1:{port}", token, root, work)
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


def _folder(work: Path, variable: str) -> Path:
    return work / variable.lower()


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
