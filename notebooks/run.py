"""Execute the notebooks of the course with papermill and say what each one took.

    python notebooks/run.py                           every notebook, into build/
    python notebooks/run.py 01 03 -p seq_len 96       some, with other parameters
    python notebooks/run.py --solutions               the solved notebooks

One progress bar runs over the cells of the whole course. The table at the end holds the seconds and the peak
memory of each notebook's kernel process. The exit status is 1 when a notebook failed; the others still run.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import nbformat
import papermill
import psutil
import yaml
from nbclient.exceptions import CellTimeoutError, DeadKernelError
from papermill.clientwrap import PapermillNotebookClient
from papermill.engines import NBClientEngine, NotebookExecutionManager, papermill_engines
from papermill.exceptions import PapermillExecutionError
from tqdm.auto import tqdm
from traitlets.config import Config

ROOT = Path(__file__).resolve().parent
PARAMETERS = ("seq_len", "checkpoint_every", "n_layers", "hidden", "batch_size", "steps", "device")
#: What outputs depend on, besides the installed versions. With the last, a lab presses its own Run button.
FIXED_ENVIRONMENT = {"OMP_NUM_THREADS": "2", "PYTHONHASHSEED": "0", "MEMSAVE_PRESS_RUN": "1"}
CELL_TIMEOUT_SECONDS = 300
#: Without it, ipykernel complains on the terminal that others on this machine could read the traffic.
KERNEL_CONFIG = Config({"KernelManager": {"transport_encryption": "auto"}})
ANSI_COLOUR = re.compile(r"\x1b\[[0-9;]*m")


@dataclass(frozen=True)
class Result:
    """One executed notebook: peak bytes of its kernel process, and what failed, empty when nothing did."""

    name: str
    seconds: float
    peak_bytes: int
    failure: str = ""


class CourseEngine(NBClientEngine):
    """papermill's own engine with a fixed environment for the kernel and a call after every code cell."""

    @classmethod
    def execute_managed_notebook(
        cls,
        nb_man: NotebookExecutionManager,
        kernel_name: str,
        *,
        after_cell: Callable[[int], None],
        log: Path,
        start_timeout: int = 60,
        **_ignored: Any,
    ) -> None:
        """Run the cells; ``after_cell(pid of the kernel process)`` is called after each code cell.

        ``log`` receives what the kernel process, as opposed to a cell, writes to stderr.
        """
        client = PapermillNotebookClient(
            nb_man,
            kernel_name=kernel_name,
            timeout=CELL_TIMEOUT_SECONDS,
            startup_timeout=start_timeout,
            config=KERNEL_CONFIG,
            on_cell_executed=lambda **_cell: after_cell(client.km.provisioner.pid),
        )
        # What the kernel process itself says, not its cells, would break the progress bar.
        with log.open("w") as stream:
            client.execute(env={**FIXED_ENVIRONMENT, **os.environ}, stderr=stream)


def execute(
    notebook: Path,
    output: Path,
    parameters: dict[str, Any] | None = None,
    after_cell: Callable[[], None] = lambda: None,
    folder: Path | None = None,
) -> Result:
    """Execute ``notebook`` with papermill and write it, outputs included, to ``output``.

    It runs in its own folder unless there is another ``folder``. Raises OSError when ``output`` cannot be written; a
    cell that fails is told in ``Result.failure``.
    """
    papermill_engines.register("course", CourseEngine)
    log = output.with_suffix(".log")
    peaks = [0]

    def cell_done(pid: int) -> None:
        peaks.append(peak_memory(pid))
        after_cell()

    failure = ""
    start = time.perf_counter()
    try:
        papermill.execute_notebook(
            notebook,
            output,
            parameters=parameters or {},
            engine_name="course",
            kernel_name="python3",
            progress_bar=False,
            cwd=folder or notebook.parent,
            after_cell=cell_done,
            log=log,
        )
    except PapermillExecutionError as error:
        failure = describe_failure(notebook.stem, error)
    except (CellTimeoutError, DeadKernelError) as error:
        failure = f"{notebook.stem}: {error}\n{log.read_text()[-2000:]}"
    return Result(notebook.stem, time.perf_counter() - start, max(peaks), failure)


def describe_failure(name: str, error: PapermillExecutionError) -> str:
    """The notebook, the cell, its source and the error, as a person wants to read them."""
    source = "\n".join(f"    {line}" for line in error.source.splitlines())
    traceback = ANSI_COLOUR.sub("", "\n".join(error.traceback)).splitlines()
    tail = "\n".join(f"    {line}" for line in traceback[-12:])
    return (
        f"{name}: cell In [{error.exec_count}] ended in {error.ename}: {error.evalue}\n"
        f"  The cell:\n{source}\n  The end of the traceback:\n{tail}"
    )


def peak_memory(pid: int) -> int:
    """Peak resident bytes of a process: the system's own mark on Linux and Windows, else the present size."""
    status = Path(f"/proc/{pid}/status")
    if status.exists():
        return int(re.search(r"VmHWM:\s+(\d+) kB", status.read_text())[1]) * 1024
    memory = psutil.Process(pid).memory_info()
    return getattr(memory, "peak_wset", memory.rss)


def code_cells(notebook: Path) -> int:
    """How many cells a kernel executes."""
    cells = nbformat.read(notebook, as_version=4).cells
    return sum(cell.cell_type == "code" and bool(cell.source.strip()) for cell in cells)


def table(results: list[Result]) -> str:
    """The closing table, one line a notebook and one for the whole course."""
    width = max(len("the course"), *(len(result.name) for result in results))
    rows = [f"{'notebook':<{width}}  {'seconds':>8}  {'peak memory':>12}"]
    for result in results:
        state = "  FAILED" if result.failure else ""
        rows.append(f"{result.name:<{width}}  {result.seconds:8.1f}  {result.peak_bytes / 2**20:8.0f} MiB{state}")
    seconds = sum(result.seconds for result in results)
    peak = max(result.peak_bytes for result in results)
    rows.append(f"{'the course':<{width}}  {seconds:8.1f}  {peak / 2**20:8.0f} MiB")
    return "\n".join(rows)


def choose(folder: Path, parts: list[str]) -> list[Path]:
    """The notebooks of a folder in order, all or those whose name contains one of ``parts``.

    Raises ValueError when there is none, or a part that no name contains.
    """
    found = sorted(folder.glob("*.ipynb"))
    if not found:
        raise ValueError(f"there is no notebook in {folder.name}/; `make notebooks` builds them")
    wanted = [Path(part).stem for part in parts]
    for part in wanted:
        if not any(part in path.stem for path in found):
            raise ValueError(f"no notebook matches {part!r}; there are {', '.join(path.stem for path in found)}")
    return [path for path in found if not wanted or any(part in path.stem for part in wanted)]


def read_parameters(pairs: list[list[str]]) -> dict[str, Any]:
    """Values are read as YAML, as papermill's own ``-p`` does. Raises ValueError for an unknown name."""
    for name, _value in pairs:
        if name not in PARAMETERS:
            raise ValueError(f"no notebook has a parameter {name!r}; they have {', '.join(PARAMETERS)}")
    return {name: yaml.safe_load(value) for name, value in pairs}


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="Execute the notebooks of the course.")
    parser.add_argument("names", nargs="*", metavar="NAME", help="any part of a notebook's name; all without")
    parser.add_argument("-p", dest="pairs", nargs=2, action="append", default=[], metavar=("NAME", "VALUE"))
    parser.add_argument("--solutions", action="store_true", help="execute the solved notebooks")
    parser.add_argument("--output", type=Path, default=ROOT.parent / "build", metavar="FOLDER")
    options = parser.parse_args(arguments)
    output = options.output / "solutions" if options.solutions else options.output
    try:
        notebooks = choose(ROOT / "solutions" if options.solutions else ROOT, options.names)
        parameters = read_parameters(options.pairs)
        output.mkdir(parents=True, exist_ok=True)
    except ValueError as error:
        print(f"run.py: {error}", file=sys.stderr)
        return 2
    except OSError as error:
        print(f"run.py: cannot write there ({error}); choose another folder with --output", file=sys.stderr)
        return 2
    # papermill puts one cell of its own into each notebook when it is given parameters.
    cells = [code_cells(notebook) + bool(parameters) for notebook in notebooks]
    results = []
    with tqdm(total=sum(cells), unit="cell") as bar:
        for number, notebook in enumerate(notebooks, start=1):
            bar.set_description(notebook.stem)
            results.append(execute(notebook, output / notebook.name, parameters, bar.update))
            # A notebook that failed has not executed all of its cells.
            bar.update(sum(cells[:number]) - bar.n)
        bar.set_description("the course")
    print(table(results))
    failures = [result.failure for result in results if result.failure]
    for failure in failures:
        print(f"\n{failure}", file=sys.stderr)
    return 1 if failures else 0


if __name__ == "__main__":
    sys.exit(main())
