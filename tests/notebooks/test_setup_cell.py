"""The first cell of each notebook finds the library wherever a reader may have it, on a kernel as on Colab."""

from __future__ import annotations

import json
import shutil
import subprocess
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import nbformat
import pytest
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

import build
import memsave_lib
from run import KERNEL_CONFIG
from tests.notebooks.colab_kernel import ROOT, ColabKernel

pytestmark = pytest.mark.notebooks

LOOK = """import json, sys
import ipywidgets, memsave_lib
from memsave_lib.course import texts
print(json.dumps({"file": memsave_lib.__file__, "data": texts.BOOKS_FILE.exists(), "widgets": ipywidgets.__version__,
                  "path": sys.path}))"""


@dataclass(frozen=True)
class Found:
    """What the setup cell said, and where the course was found after it."""

    said: str
    course: Path
    data: bool
    widgets: str
    path: list[str]


Begin = Callable[..., Found]


@pytest.fixture
def begin(colab: ColabKernel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Begin:
    """Run the setup cell of a course at ``repository`` in ``folder``, ``times`` times."""

    def run(folder: Path, repository: str = "", installed: bool = False, times: int = 1) -> Found:
        kernel = colab if installed else colab.without_course(tmp_path / "kernel")
        kernel.choose(monkeypatch.setenv)
        cells = [*[build.setup_cell(repository)] * times, LOOK]
        notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(cell) for cell in cells])
        client = NotebookClient(notebook, timeout=120, kernel_name="python3", config=KERNEL_CONFIG)
        client.execute(cwd=str(folder))
        *_, setup, look = notebook.cells
        assert [output.name for output in setup.outputs] == ["stdout"], setup.outputs
        seen = json.loads(look.outputs[0].text)
        return Found(setup.outputs[0].text, Path(seen.pop("file")).parents[1], **seen)

    return run


def checkout(folder: Path) -> Path:
    """What of the course a notebook needs, in a folder of its own."""
    for name in ("memsave_lib", "data"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "notebooks" / "solutions").mkdir(parents=True)
    return folder


def zipped(folder: Path, target: Path) -> None:
    """With one folder around everything, as GitHub packs a repository."""
    with zipfile.ZipFile(target, "w") as archive:
        for path in folder.rglob("*"):
            archive.write(path, Path("course-main", path.relative_to(folder)))


def content(tmp_path: Path) -> Path:
    """An empty folder, as /content is on Colab."""
    (tmp_path / "content").mkdir()
    return tmp_path / "content"


def test_an_installed_library_is_used_and_nothing_is_fetched(begin: Begin, tmp_path: Path) -> None:
    folder = content(tmp_path)
    found = begin(folder, repository="nobody/nothing", installed=True)
    assert found.course == Path(memsave_lib.__file__).parents[1]
    assert list(folder.iterdir()) == []
    assert "WARN device" in found.said, "a kernel as on Colab, without a GPU"
    assert "Runtime > Change runtime type > T4 GPU" in found.said
    assert "seq_len up to" in found.said


@pytest.mark.parametrize("place", ["notebooks", "notebooks/solutions"])
def test_a_checkout_needs_no_installation(begin: Begin, tmp_path: Path, place: str) -> None:
    course = checkout(tmp_path / "course")
    found = begin(course / place)
    assert (found.course, found.data, found.widgets) == (course, True, "7.7.1")


def test_an_uploaded_zip_is_unpacked_once_and_other_zips_are_left_alone(begin: Begin, tmp_path: Path) -> None:
    folder = content(tmp_path)
    zipped(checkout(tmp_path / "packed"), folder / "course.zip")
    with zipfile.ZipFile(folder / "holiday.zip", "w") as archive:
        archive.writestr("beach.txt", "sand")
    course = folder / "course" / "course-main"
    found = begin(folder, times=2)
    assert (found.course, found.data, found.path.count(str(course))) == (course, True, 1)
    assert sorted(path.name for path in folder.iterdir()) == ["course", "course.zip", "holiday.zip"]
    assert sorted(path.name for path in course.iterdir()) == ["data", "memsave_lib", "notebooks"]
    edited = course / "data" / "books.json"
    edited.write_text("{}")
    assert begin(folder).course == course, "in a kernel that has just been started"
    assert edited.read_text() == "{}"


def published(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A repository in ``folder`` that git takes for everything at GitHub."""
    monkeypatch.setenv("GIT_CONFIG_COUNT", "1")
    monkeypatch.setenv("GIT_CONFIG_KEY_0", f"url.file://{folder.parent}/.insteadOf")
    monkeypatch.setenv("GIT_CONFIG_VALUE_0", "https://github.com/ada/")


def test_the_course_is_cloned_from_its_address(begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = checkout(tmp_path / "course")
    git = ["git", "-C", str(source), "-c", "user.name=Ada", "-c", "user.email=ada@example.org"]
    for command in (["init", "-q"], ["add", "."], ["commit", "-q", "-m", "Begin"]):
        subprocess.run([*git, *command], check=True)
    published(source, monkeypatch)
    folder = content(tmp_path)
    assert begin(folder, repository="ada/course").course == folder / "course"


@pytest.mark.parametrize("repository", ["", "ada/course"])
def test_where_it_is_nowhere_the_cell_says_what_to_do(
    begin: Begin, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, repository: str
) -> None:
    published(tmp_path / "nowhere" / "course", monkeypatch)
    with pytest.raises(CellExecutionError, match="The course is not here: upload its zip beside this notebook"):
        begin(content(tmp_path), repository=repository)


def test_the_cell_is_short_and_names_the_repository() -> None:
    assert 'REPOSITORY = "ada/course"\n' in build.setup_cell("ada/course")
    assert sum(bool(line.strip()) for line in build.setup_cell("").splitlines()) <= 15
