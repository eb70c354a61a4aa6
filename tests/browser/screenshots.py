"""Pictures of the notebooks and their labs as readers see them, in the light and the dark theme.

    python -m tests.browser.screenshots                                     every committed notebook, and all labs
    python -m tests.browser.screenshots notebooks/01_activations.ipynb      only this one
    python -m tests.browser.screenshots --pages --run --theme dark 03       run it first, so that widgets are alive
    python -m tests.browser.screenshots --labs 03 05                        only the labs
    python -m tests.browser.screenshots --gif 03 --set seq_len=1024 --output docs/lab.gif

Whole notebooks go into build/screenshots/NAME-THEME-NN.png, screen by screen, labs into
build/screenshots/labs/NN-STATE-THEME-WIDTH.png: fresh, running, and after two runs.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser

from tests.browser import gif, lab
from tests.browser.lab_pictures import lab_pictures, open_labs
from tests.browser.server import LabServer, Theme

ROOT = Path(__file__).resolve().parents[2]
NOTEBOOKS = ROOT / "notebooks"
OUTPUT = ROOT / "build" / "screenshots"


def choose(parts: list[str]) -> list[Path]:
    """Notebooks below notebooks/ whose path contains one of ``parts``; without any, all student notebooks."""
    if not parts:
        return sorted(NOTEBOOKS.glob("*.ipynb"))
    found = sorted(NOTEBOOKS.glob("**/*.ipynb"))
    if "solutions" not in " ".join(parts):
        found = [path for path in found if path.parent == NOTEBOOKS]
    return [path for path in found if any(part in str(path.relative_to(ROOT)) for part in parts)]


@contextmanager
def _started(theme: Theme, executable: str) -> Iterator[tuple[LabServer, Browser]]:
    with tempfile.TemporaryDirectory() as work, lab.chromium(executable) as browser:
        root = Path(work, "course")
        root.mkdir()
        # The notebooks are copies elsewhere, and shall use the library beside this file.
        with lab.lab_server(root, Path(work, "jupyter"), theme, {"PYTHONPATH": str(ROOT)}) as server:
            yield server, browser


def show_pages(notebooks: Sequence[Path], theme: Theme, executable: str, run: bool, details: bool) -> None:
    """Every screenful of whole notebooks."""
    with _started(theme, executable) as (server, browser):
        for path in notebooks:
            shutil.copy(path, server.root / path.name)
            page = lab.open_page(server, browser, path.name, sharpness=1.5)
            page.hide_sidebar()
            if run:
                page.run_all()
            if details:
                page.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
            for picture in page.screenshots(OUTPUT, f"{path.stem}-{theme}"):
                print(picture.relative_to(ROOT))
            page.close()


def show_labs(notebooks: Sequence[Path], themes: Sequence[Theme], executable: str) -> None:
    """Every lab in all its states."""
    with _started(themes[0], executable) as (server, browser):
        for path in notebooks:
            labs = open_labs(server, browser, path)
            for picture in lab_pictures(labs, themes, OUTPUT / "labs"):
                print(picture.relative_to(ROOT))
            if labs:
                labs[0].notebook.close()


def show_film(notebook: Path, moves: Sequence[tuple[str, str]], width: int, output: Path, executable: str) -> None:
    """A run of the notebook's first lab as an animated picture."""
    with _started("light", executable) as (server, browser):
        labs = open_labs(server, browser, notebook)
        if not labs:
            raise ValueError(f"{notebook.name} has no lab")
        labs[0].show_whole(width)
        size = gif.write_gif(gif.film(labs[0], moves), output)
    print(f"{output}: {size:,} bytes")


def _move(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form slider=value")
    return name, value


def main() -> int:
    parser = argparse.ArgumentParser(description="Take pictures of the notebooks and their labs.")
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="any part of a notebook's path")
    parser.add_argument("--theme", choices=("light", "dark"), action="append", help="default: both")
    parser.add_argument("--pages", action="store_true", help="only whole notebooks")
    parser.add_argument("--labs", action="store_true", help="only the labs")
    parser.add_argument("--run", action="store_true", help="whole notebooks: run all cells first")
    parser.add_argument("--open-details", action="store_true", help="whole notebooks: unfold hints and solutions")
    parser.add_argument("--gif", metavar="NOTEBOOK", help="only a film of a run of this notebook's lab")
    parser.add_argument("--set", type=_move, action="append", default=[], metavar="SLIDER=VALUE", help="before the run")
    parser.add_argument("--width", type=int, default=1280, help="of the film's window, in pixels")
    parser.add_argument("--output", type=Path, default=OUTPUT / "lab.gif", help="where the film goes")
    options = parser.parse_args()
    chosen, executable = choose([options.gif] if options.gif else options.notebooks), lab.find_chromium()
    if not chosen or executable is None:
        print("no notebook matches" if executable else "no Chromium on this machine", file=sys.stderr)
        return 2
    if options.gif:
        show_film(chosen[0], options.set, options.width, options.output, executable)
        return 0
    themes = options.theme or ["light", "dark"]
    if not options.labs:
        for theme in themes:
            show_pages(chosen, theme, executable, options.run, options.open_details)
    if not options.pages:
        show_labs(chosen, themes, executable)
    return 0


if __name__ == "__main__":
    sys.exit(main())
