"""Pictures of the notebooks as readers see them, screen by screen, in the light and the dark theme.

    python -m tests.browser.screenshots                                     every committed notebook
    python -m tests.browser.screenshots notebooks/01_activations.ipynb      only this one
    python -m tests.browser.screenshots --run --theme dark 03               run it first, so that widgets are alive

The pictures go into build/screenshots/NAME-THEME-NN.png.
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from tests.browser import lab

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


def main() -> int:
    parser = argparse.ArgumentParser(description="Take pictures of the notebooks.")
    parser.add_argument("notebooks", nargs="*", metavar="NOTEBOOK", help="any part of a notebook's path")
    parser.add_argument("--theme", choices=("light", "dark"), action="append", help="default: both")
    parser.add_argument("--run", action="store_true", help="run all cells first")
    parser.add_argument("--open-details", action="store_true", help="unfold hints and solutions")
    options = parser.parse_args()
    chosen, executable = choose(options.notebooks), lab.find_chromium()
    if not chosen or executable is None:
        print("no notebook matches" if executable else "no Chromium on this machine", file=sys.stderr)
        return 2
    for theme in options.theme or ("light", "dark"):
        with tempfile.TemporaryDirectory() as work, lab.chromium(executable) as browser:
            root = Path(work, "course")
            root.mkdir()
            for path in chosen:
                shutil.copy(path, root / path.name)
            with lab.lab_server(root, Path(work, "jupyter"), theme) as server:
                for path in chosen:
                    page = lab.open_page(server, browser, path.name, sharpness=1.5)
                    page.hide_sidebar()
                    if options.run:
                        page.run_all()
                    if options.open_details:
                        page.page.evaluate("document.querySelectorAll('details').forEach(d => d.open = true)")
                    for picture in page.screenshots(OUTPUT, f"{path.stem}-{theme}"):
                        print(picture.relative_to(ROOT))
                    page.close()
    return 0


if __name__ == "__main__":
    sys.exit(main())
