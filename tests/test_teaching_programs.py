"""The two programs in ``teaching``: the check at home, and the one that writes minutes into the guide."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from memsave_lib.course.env import EnvironmentReport, Line
from teaching import check, minutes
from tests.pages import ROOT, Page

CHECK = ROOT / "teaching" / "check.py"
READY = EnvironmentReport((Line("Python", "3.12"), Line("torch", "2.13.0")))
EXACT = (check.Count("saved", 12, 12), check.Count("peak", 34, 34))


def run(folder: Path, **environment: str) -> subprocess.CompletedProcess[str]:
    """The check as a participant starts it, from any folder."""
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return subprocess.run(
        [sys.executable, str(CHECK)], cwd=folder, env=kept | environment, capture_output=True, text=True, timeout=300
    )


def test_the_check_measures_a_step_to_the_byte_and_says_what_the_page_promises(tmp_path: Path) -> None:
    done = run(tmp_path, PYTHONPATH=str(ROOT), OMP_NUM_THREADS="2")
    assert (done.returncode, done.stderr) == (0, "")
    page = Page.read(ROOT / "teaching" / "before-the-workshop.md")
    promised = [
        token.content for token in page.tokens if token.type == "fence" and "One training step" in token.content
    ]
    assert len(promised) == 1
    assert promised[0] in done.stdout
    assert done.stdout.startswith(("OK ", "WARN "))


def test_the_measured_step_is_the_formula() -> None:
    counts = check.measure_step()
    assert [count.difference for count in counts] == [0, 0]
    assert [count.what for count in counts] == ["saved", "peak"]
    assert min(count.formula for count in counts) > 1_000_000


def test_a_difference_stops_the_course() -> None:
    assert check.stoppers(READY, EXACT) == []
    off = replace(EXACT[1], measured=35)
    assert str(off) == "peak: formula 34 bytes, measured 35 bytes, difference 1"
    (reason,) = check.stoppers(READY, (EXACT[0], off))
    assert reason.startswith("Formula and measurement differ")


def test_a_wrong_version_stops_the_course_and_little_memory_does_not() -> None:
    old = Line("torch", "2.1.0", 'pip install "torch>=2.6,<3", then restart the kernel')
    low = Line("host memory", "1.00 GiB free of 8.00 GiB", "free 4.00 GiB")
    assert check.stoppers(EnvironmentReport((*READY.lines, low)), EXACT) == []
    assert check.stoppers(EnvironmentReport((*READY.lines, low, old)), EXACT) == [
        'torch is 2.1.0: pip install "torch>=2.6,<3", then restart the kernel.'
    ]


def test_main_exits_with_1_and_a_sentence(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "measure_step", lambda: (replace(EXACT[0], measured=11),))
    assert check.main() == 1
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "Not ready.",
        "Formula and measurement differ, which the course promises they do not: send the lines above to whoever gives "
        "the workshop.",
    ]


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "PACKAGES", ("torch", "no_such_package"))
    assert check.main() == 1
    said = capsys.readouterr().out
    assert said.startswith(f"Not ready: no_such_package cannot be found by {sys.executable}.")
    assert "run: make check (" in said


def test_an_old_python_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(check, "OLDEST_PYTHON", (9, 1))
    assert check.main() == 1
    found = "{}.{}".format(*sys.version_info)
    assert capsys.readouterr().out == f"Not ready: this is Python {found}, and the course needs 9.1 or newer.\n"


def test_a_torch_that_does_not_load_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text('raise OSError("libsomething.so: cannot open shared object file")\n')
    done = run(tmp_path, PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert (done.returncode, done.stderr) == (1, "")
    assert done.stdout.startswith("Not ready: PyTorch is installed and does not load: libsomething.so")


SOURCE = """# %% [markdown]
# # 09 A title
#
# ## 1. First

# %%
# Exercise: difficulty 1 of 3, 2 minutes. For: this.
x = 1

# %%
# Exercise: difficulty 2 of 3, 10 minutes. For: that.
x = 2

# %% [markdown]
# ## Next
"""
TABLE = """# Guide

## Self-study

| notebook | reading | exercises | together |
|---|---|---|---|
| 09 | 9 | 9 | 9 |
| all | 9 | 9 | 9 |

### 09 A title

| section | reading | exercises | show live |
|---|---|---|---|
| 1. First | 4 | 0 | this |
| Next | 1 | 0 | |
"""


def test_the_minutes_of_exercises_are_read_from_a_source() -> None:
    assert minutes.sections(SOURCE) == [minutes.Section("1. First", 12), minutes.Section("Next", 0)]


def test_minutes_are_written_into_the_guide_and_added_up() -> None:
    new = minutes.updated(TABLE, {"09": minutes.sections(SOURCE)})
    with_exercises = TABLE.replace("| 1. First | 4 | 0 |", "| 1. First | 4 | 12 |")
    assert new == with_exercises.replace("| 9 | 9 | 9 |", "| 5 | 12 | 17 |")
    assert minutes.updated(new, {"09": minutes.sections(SOURCE)}) == new


def test_a_section_without_a_row_is_an_error() -> None:
    with pytest.raises(minutes.GuideError, match=r"sections without a row: \['2. Second'\]; rows .*: none"):
        minutes.updated(TABLE, {"09": [*minutes.sections(SOURCE), minutes.Section("2. Second")]})
    with pytest.raises(minutes.GuideError, match=r"without a row: none; rows without a section: \['Next'\]"):
        minutes.updated(TABLE, {"09": minutes.sections(SOURCE)[:1]})
