"""A short film of a lab: a slider is moved by keyboard, Run is pressed, the curve grows."""

from __future__ import annotations

import io
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from PIL import Image

from tests.browser.lab_page import LabPage
from tests.browser.lab_pictures import RUN_SECONDS

MOST_WIDTH = 900
MOST_BYTES = 2_000_000
LEAST_FRAMES = 15
HOLD_MILLISECONDS = 2000
#: What a run takes in the film, however long it took: a film that drags is not looked at.
RUN_MILLISECONDS = 5000
STEP_MILLISECONDS = 600
MOST_MILLISECONDS = 400
#: GIF counts in hundredths of a second, and browsers slow down what is faster than this.
LEAST_MILLISECONDS = 20


@dataclass(frozen=True)
class Shot:
    """A picture and how long it stays."""

    picture: Image.Image
    milliseconds: float


def film(lab: LabPage, moves: Sequence[tuple[str, str]]) -> list[Shot]:
    """Set sliders to values one after the other, then run; the lab is already as large as it gets.

    Raises RuntimeError when the run is over before :data:`LEAST_FRAMES` pictures could be taken.
    """
    shots = [Shot(_look(lab), 2 * STEP_MILLISECONDS)]
    for name, value in moves:
        handle = lab.slider(name)
        for key in lab.keys_to(name, value):
            lab.notebook.press(handle, key)
            lab.page.wait_for_timeout(STEP_MILLISECONDS)
            shots.append(Shot(_look(lab), STEP_MILLISECONDS))
    lab.notebook.press(lab.button("Run"), "Enter")
    lab.sentence("Running at")
    taken = list(_pictures_of_the_run(lab))
    if len(taken) < LEAST_FRAMES:
        raise RuntimeError(f"{len(taken)} pictures of the run, and {LEAST_FRAMES} are wanted: choose a larger step")
    lab.sentence("Run 1 at")
    times = [moment for moment, _ in taken] + [time.monotonic()]
    pace = RUN_MILLISECONDS / (times[-1] - times[0])
    for (moment, picture), after in zip(taken, times[1:], strict=True):
        shots.append(Shot(picture, min(pace * (after - moment), MOST_MILLISECONDS)))
    lab.page.wait_for_timeout(500)
    return [*shots, Shot(_look(lab), HOLD_MILLISECONDS)]


def _pictures_of_the_run(lab: LabPage) -> Iterator[tuple[float, Image.Image]]:
    """(time, picture) whenever the lab looks different, until its run ends."""
    began, before = time.monotonic(), None
    while lab.button("Run").is_disabled():
        now, picture = time.monotonic(), _look(lab)
        if now - began > RUN_SECONDS:
            raise RuntimeError(f"the run takes longer than {RUN_SECONDS} s: choose a smaller step")
        if before is None or picture.tobytes() != before.tobytes():
            yield now, picture
        before = picture


def write_gif(shots: Sequence[Shot], path: Path) -> int:
    """Write a GIF that repeats for ever, and return its size in bytes. Raises ValueError when it is too large."""
    shots = _without_repeats(_of_one_size(shots))
    palette = _palette([shot.picture for shot in shots])
    frames = [shot.picture.quantize(palette=palette, dither=Image.Dither.NONE) for shot in shots]
    path.parent.mkdir(parents=True, exist_ok=True)
    durations = [max(10 * round(shot.milliseconds / 10), LEAST_MILLISECONDS) for shot in shots]
    # Pillow keeps of each frame what differs from the one before.
    frames[0].save(path, save_all=True, append_images=frames[1:], duration=durations, loop=0, optimize=True, disposal=1)
    size = path.stat().st_size
    if size > MOST_BYTES:
        raise ValueError(f"{path} has {size:,} bytes, and {MOST_BYTES:,} are allowed: choose a shorter run")
    return size


def _look(lab: LabPage) -> Image.Image:
    picture = Image.open(io.BytesIO(lab.png())).convert("RGB")
    if picture.width <= MOST_WIDTH:
        return picture
    return picture.resize((MOST_WIDTH, round(picture.height * MOST_WIDTH / picture.width)), Image.Resampling.LANCZOS)


def _of_one_size(shots: Sequence[Shot]) -> list[Shot]:
    """A lab grows by a longer sentence and a table: before that there is nothing below it."""
    size = tuple(max(shot.picture.size[side] for shot in shots) for side in (0, 1))
    padded = []
    for shot in shots:
        picture = Image.new("RGB", size, shot.picture.getpixel((0, 0)))
        picture.paste(shot.picture)
        padded.append(Shot(picture, shot.milliseconds))
    return padded


def _without_repeats(shots: Sequence[Shot]) -> list[Shot]:
    kept: list[Shot] = []
    for shot in shots:
        if kept and kept[-1].picture.tobytes() == shot.picture.tobytes():
            kept[-1] = Shot(shot.picture, kept[-1].milliseconds + shot.milliseconds)
        else:
            kept.append(shot)
    return kept


def _palette(pictures: Sequence[Image.Image]) -> Image.Image:
    """One palette for all: frames that share their colours differ only where something has moved."""
    some = [*pictures[:: max(len(pictures) // 6, 1)], pictures[-1]]
    sheet = Image.new("RGB", (some[0].width, sum(picture.height for picture in some)))
    top = 0
    for picture in some:
        sheet.paste(picture, (0, top))
        top += picture.height
    # The usual way, by the median, gives up colours of few pixels, such as those of a legend.
    return sheet.quantize(255, method=Image.Quantize.MAXCOVERAGE, dither=Image.Dither.NONE)
