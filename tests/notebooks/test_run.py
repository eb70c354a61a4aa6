"""`make run`: one bar, a closing table, and failures that a person can act on."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook

import run


def write(path: Path, *cells: str) -> Path:
    """A notebook that starts with its parameters cell."""
    parameters = new_code_cell("seq_len = 8", metadata={"tags": ["parameters"]})
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    code = [new_code_cell(cell) for cell in cells]
    nbformat.write(new_notebook(metadata=kernel, cells=[new_markdown_cell("# T"), parameters, *code]), path)
    return path


def test_parameters_are_read_as_yaml_and_unknown_names_are_refused() -> None:
    assert run.read_parameters([["seq_len", "96"], ["device", "cpu"]]) == {"seq_len": 96, "device": "cpu"}
    with pytest.raises(ValueError, match="no notebook has a parameter 'heads'; they have seq_len, checkpoint_every"):
        run.read_parameters([["heads", "4"]])


def test_notebooks_are_chosen_by_any_part_of_their_name(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no notebook in "):
        run.choose(tmp_path, [])
    both = [write(tmp_path / "00_a.ipynb"), write(tmp_path / "01_b.ipynb")]
    assert run.choose(tmp_path, []) == both
    assert run.choose(tmp_path, ["notebooks/01_b.ipynb"]) == run.choose(tmp_path, ["b"]) == both[1:]
    with pytest.raises(ValueError, match="no notebook matches '07'; there are 00_a, 01_b"):
        run.choose(tmp_path, ["07"])


def test_the_table_has_a_line_for_each_notebook_and_one_for_the_course() -> None:
    results = [run.Result("00_start_here", 12.34, 300 * 2**20), run.Result("01_more", 1.0, 700 * 2**20, "no")]
    assert run.table(results).splitlines() == [
        "notebook        seconds   peak memory",
        "00_start_here      12.3       300 MiB",
        "01_more             1.0       700 MiB  FAILED",
        "the course         13.3       700 MiB",
    ]


@pytest.mark.notebooks
def test_execute_counts_cells_measures_the_kernel_and_injects_parameters(tmp_path: Path) -> None:
    megabytes = 200
    notebook = write(tmp_path / "a.ipynb", f"x = bytes(b'1') * ({megabytes} * 10**6)", "del x; print(seq_len)")
    ticks: list[int] = []
    result = run.execute(notebook, tmp_path / "out.ipynb", {"seq_len": 96}, lambda: ticks.append(1))
    assert result.failure == ""
    assert len(ticks) == run.code_cells(notebook) + 1
    assert megabytes * 10**6 < result.peak_bytes < megabytes * 10**6 + 200 * 2**20
    assert nbformat.read(tmp_path / "out.ipynb", as_version=4).cells[-1].outputs[0].text == "96\n"


@pytest.mark.notebooks
def test_a_failure_names_the_notebook_the_cell_and_the_error(tmp_path: Path) -> None:
    notebook = write(tmp_path / "03_bad.ipynb", "fine = 1", "size = {}\nsize['block 5']")
    result = run.execute(notebook, tmp_path / "out.ipynb")
    assert result.failure.splitlines()[:4] == [
        "03_bad: cell In [3] ended in KeyError: 'block 5'",
        "  The cell:",
        "    size = {}",
        "    size['block 5']",
    ]
    assert "\x1b" not in result.failure


@pytest.mark.notebooks
def test_a_kernel_that_dies_is_a_failure_too(tmp_path: Path) -> None:
    notebook = write(tmp_path / "03_dies.ipynb", "import os\nos.write(2, b'last words')\nos._exit(9)")
    result = run.execute(notebook, tmp_path / "out.ipynb")
    assert result.failure.startswith("03_dies: Kernel died")


@pytest.mark.notebooks
def test_the_command_works_from_any_folder_runs_on_after_a_failure_and_exits_with_1(tmp_path: Path) -> None:
    course = tmp_path / "my course"
    course.mkdir()
    (course / "run.py").write_text(Path(run.__file__).read_text())
    write(course / "00_bad.ipynb", "1 / 0", "never")
    write(course / "01_good.ipynb", "from pathlib import Path", "print(Path.cwd().name)")
    done = subprocess.run(
        [sys.executable, str(course / "run.py"), "-p", "seq_len", "16"], cwd="/", capture_output=True, text=True
    )
    assert done.returncode == 1
    table = done.stdout.splitlines()
    assert table[0].split() == ["notebook", "seconds", "peak", "memory"]
    assert [line.split()[0] for line in table[1:]] == ["00_bad", "01_good", "the"]
    assert [line.endswith("FAILED") for line in table] == [False, True, False, False]
    assert "00_bad: cell In [3] ended in ZeroDivisionError: division by zero" in done.stderr
    assert "the course: 100%" in done.stderr
    executed = nbformat.read(tmp_path / "build" / "01_good.ipynb", as_version=4)
    assert executed.cells[-1].outputs[0].text == "my course\n"


def test_a_folder_that_cannot_be_written_is_told_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "file").write_text("")
    write(tmp_path / "00_a.ipynb")
    (tmp_path / "run.py").write_text(Path(run.__file__).read_text())
    done = subprocess.run(
        [sys.executable, str(tmp_path / "run.py"), "--output", str(tmp_path / "file")], capture_output=True, text=True
    )
    assert done.returncode == 2
    assert "choose another folder with --output" in done.stderr
