"""A kernel with the widgets and the IPython that Colab has, for the tests of the notebooks.

    .venv/bin/python tests/notebooks/colab_kernel.py      make it, in .venv-colab; `make colab-kernel` does the same

It is a virtual environment with the few packages of requirements-colab.txt. A .pth file puts the course's environment
behind them, so that torch and all the rest are found there and nothing large is installed twice. Its kernel has the
name of every Python kernel, "python3", which the notebooks ask for. They get it where JUPYTER_PATH names its folder
``jupyter``, and nowhere else.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
import venv
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDER = "COLAB_VENV"  # in the environment: where it is, when that is not .venv-colab in the project's folder
REQUIRED = "REQUIRE_COLAB_KERNEL"  # "1" in the environment: tests that need the kernel fail without it
MISSING = "there is no kernel with the widgets of Colab: `make colab-kernel` makes it"


@dataclass(frozen=True)
class ColabKernel:
    """The kernel whose virtual environment is ``folder``."""

    folder: Path
    interpreter: Path | None = None  # where it is not in the folder

    @property
    def python(self) -> Path:
        return self.interpreter or self.folder / ("Scripts/python.exe" if os.name == "nt" else "bin/python")

    @property
    def spec(self) -> Path:
        return self.folder / "jupyter" / "kernels" / "python3" / "kernel.json"

    def choose(self, setenv: Callable[[str, str], None]) -> None:
        """Let notebooks that are started with this environment run on it."""
        setenv("JUPYTER_PATH", str(self.folder / "jupyter"))

    def without_course(self, folder: Path) -> ColabKernel:
        """The same kernel, described in ``folder``, where memsave_lib is not installed, as on a fresh Colab.

        Without the module site no .pth file is read, so that what is installed to be edited is not found.
        """
        own = self._ask("import sysconfig; print(sysconfig.get_path('purelib'))")
        course = (sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        bare = ColabKernel(folder, interpreter=self.python)
        bare._write_spec(["-S"], {"PYTHONPATH": os.pathsep.join(dict.fromkeys((own, *course)))})
        return bare

    def make(self) -> None:
        """From nothing: an environment that has packages of the course behind it must not be installed into."""
        venv.create(self.folder, clear=True, symlinks=os.name != "nt")
        install = [sys.executable, "-m", "pip", "--python", self.python, "install", "--quiet", "--no-deps"]
        subprocess.run([*install, "-r", ROOT / "requirements-colab.txt"], check=True)
        own = self._ask("import sysconfig; print(sysconfig.get_path('purelib'))")
        course = dict.fromkeys(sysconfig.get_path(kind) for kind in ("purelib", "platlib"))
        # Not the bare path: the .pth files in that folder, an editable install among them, have to be read too.
        lines = "".join(f"import site; site.addsitedir({folder!r})\n" for folder in course)
        Path(own, "course.pth").write_text(lines, encoding="utf-8")
        self._write_spec()

    def _write_spec(self, options: Sequence[str] = (), environment: Mapping[str, str] | None = None) -> None:
        # As newer ipykernels start a kernel: without -X the debugger warns that it may miss breakpoints.
        options = [*options, "-Xfrozen_modules=off", "-m", "ipykernel_launcher", "-f", "{connection_file}"]
        spec = {
            "argv": [str(self.python), *options],
            "display_name": "Python 3, as on Colab",
            "language": "python",
            # check_environment() goes by it
            "env": {"COLAB_RELEASE_TAG": "none: only its widgets", **(environment or {})},
        }
        self.spec.parent.mkdir(parents=True, exist_ok=True)
        self.spec.write_text(json.dumps(spec, indent=1), encoding="utf-8")

    @cached_property
    def widget_traits(self) -> dict[str, list[str]]:
        """The traits of every class of widgets there is."""
        return json.loads(self._ask(LIST_TRAITS))

    def _ask(self, code: str) -> str:
        return subprocess.run([self.python, "-c", code], check=True, capture_output=True, text=True).stdout.strip()


#: By the full names of the classes: there are two called Button.
LIST_TRAITS = """
import json, ipywidgets
def family(kind):
    return {kind}.union(*map(family, kind.__subclasses__()))
kinds = family(ipywidgets.Widget)
print(json.dumps({f"{kind.__module__}.{kind.__name__}": sorted(kind.class_traits()) for kind in kinds}))
"""


def find(environment: Mapping[str, str]) -> ColabKernel | None:
    """The kernel that these environment variables mean; None when nobody has made it.

    Raises FileNotFoundError instead where it is required.
    """
    kernel = ColabKernel(folder(environment))
    if kernel.spec.exists():
        return kernel
    if environment.get(REQUIRED) == "1":
        raise FileNotFoundError(f"{REQUIRED}=1, and {MISSING}")
    return None


def folder(environment: Mapping[str, str]) -> Path:
    return Path(environment.get(FOLDER) or ROOT / ".venv-colab").absolute()


if __name__ == "__main__":
    ColabKernel(folder(os.environ)).make()
