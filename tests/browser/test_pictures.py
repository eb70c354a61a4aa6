"""What pictures and films of labs are made of: notebooks cut down to their labs, frames put together. No browser."""

from __future__ import annotations

from pathlib import Path

import pytest
from nbformat import NotebookNode
from nbformat.v4 import new_code_cell, new_markdown_cell, new_notebook, new_output
from PIL import Image

from tests.browser import gif
from tests.browser.cut import cut_to, lab_cells
from tests.browser.gif import Shot, write_gif

CELLS = (
    "import torch\nfrom here import labs, setup",
    "size = 8\nsteps = 2",
    "place = setup(size)",
    "def slow(n):\n    return n * steps",
    "size = slow(2)\nsize += 1",
    "other = [torch.zeros(n) for n in range(size)]",
    "place.clean()",
    "def options():\n    place = 1\n    return {'size': size}",
    "lab = labs.chunks(place, **options())\nlab.still()",
    "lab",
    "done = True",
)


@pytest.fixture
def built() -> NotebookNode:
    cells = [new_code_cell(code) for code in CELLS]
    cells[8].outputs = [new_output("execute_result", {"text/plain": "Predicted at size 8."})]
    cells[9].outputs = [new_output("execute_result", {"text/plain": "A lab with sliders for size."})]
    return new_notebook(cells=[new_markdown_cell("# labs.chunks"), *cells], metadata={"marked": True})


def test_labs_are_found_by_their_output(built: NotebookNode) -> None:
    assert lab_cells(built) == [10]


def test_a_notebook_is_cut_to_what_its_lab_uses(built: NotebookNode) -> None:
    small = cut_to(built, lab_cells(built))
    assert [cell.source for cell in small.cells] == [CELLS[n] for n in (0, 1, 2, 3, 4, 7, 8, 9)]
    assert small.metadata == built.metadata and len(built.cells) == 12
    assert [cell.source for cell in cut_to(built, [3]).cells] == list(CELLS[:3])


def rectangle(width: int, height: int, at: int) -> Image.Image:
    picture = Image.new("RGB", (width, height), "white")
    picture.paste("blue", (at, 5, at + 5, 10))
    return picture


def test_a_film_has_one_size_and_no_frame_twice(tmp_path: Path) -> None:
    shots = [Shot(rectangle(40, 20, at), 104) for at in (0, 0, 10, 20)] + [Shot(rectangle(40, 30, 30), 2)]
    size = write_gif(shots, tmp_path / "folder" / "film.gif")
    assert size == (tmp_path / "folder" / "film.gif").stat().st_size
    with Image.open(tmp_path / "folder" / "film.gif") as film:
        assert (film.size, film.n_frames, film.info["loop"]) == ((40, 30), 4, 0)
        durations, places = [], []
        for number in range(film.n_frames):
            film.seek(number)
            durations.append(film.info["duration"])
            frame = film.convert("RGB")
            places.append(next(x for x in range(40) if frame.getpixel((x, 7)) == (0, 0, 255)))
            assert frame.getpixel((39, 29)) == (255, 255, 255)
    assert durations == [210, 100, 100, 20] and places == [0, 10, 20, 30]


def test_a_film_keeps_colours_of_few_pixels(tmp_path: Path) -> None:
    picture = Image.new("RGB", (256, 100))
    picture.putdata([(255, shade, shade) for shade in range(256)] * 100)
    rare = [(0, 0, 200), (0, 200, 0), (200, 200, 0)]
    for row, colour in enumerate(rare):
        picture.paste(colour, (0, row, 4, row + 1))
    write_gif([Shot(picture, 100)], tmp_path / "film.gif")
    with Image.open(tmp_path / "film.gif") as film:
        assert [film.convert("RGB").getpixel((0, row)) for row in range(3)] == rare


def test_a_film_that_is_too_large_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gif, "MOST_BYTES", 100)
    with pytest.raises(ValueError, match=r"film.gif has \d+ bytes, and 100 are allowed"):
        write_gif([Shot(rectangle(40, 20, at), 100) for at in (0, 10)], tmp_path / "film.gif")
