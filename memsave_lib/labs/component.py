"""The component that all labs share.

Pictures are plain ``<img>`` tags, and every one has its numbers in a sentence below, because slider handles and
pictures are mute to a screen reader. Only what ipywidgets 7.7 and 8 have in common is used.
"""

from __future__ import annotations

import os
import textwrap
import threading
import traceback
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ipywidgets as widgets

from memsave_lib import _compat, plots
from memsave_lib.labs.config import LabConfig, Prediction, Run, Values
from memsave_lib.labs.markup import key, paragraph, table
from memsave_lib.labs.pictures import Pictures
from memsave_lib.meter import MemoryMeter, Stopped
from memsave_lib.runner import apply
from memsave_lib.strategies import KeepAll
from memsave_lib.units import exact_bytes, human_bytes

PRESS_RUN = "MEMSAVE_PRESS_RUN"  # "1" in the environment: every lab presses its own Run, and fails if the run does
FRAME_SECONDS = 0.1


class Lab:
    """Sliders, Run, Stop, Reset. Put it last in a cell; its attributes are widgets, which code may drive as well."""

    def __init__(self, config: LabConfig) -> None:
        self.config = config
        self.runs: list[Run] = []
        self.error: BaseException | None = None
        self.running = False
        self._starting = threading.Lock()
        self._stop = threading.Event()
        self._meter = MemoryMeter()
        self._threads: ThreadPoolExecutor | None = None
        self._pictures = Pictures(config)
        self.sliders = {slider.name: slider.widget() for slider in config.sliders}
        narrow = widgets.Layout(width="100px")
        self.run_button = widgets.Button(description="Run", icon="play", style={"font_weight": "bold"}, layout=narrow)
        self.stop_button = widgets.Button(description="Stop", icon="stop", disabled=True, layout=narrow)
        self.reset_button = widgets.Button(description="Reset", icon="undo", layout=narrow)
        self.prediction, self.memory, self.key = (
            widgets.HTML(),
            widgets.HTML(),
            widgets.HTML(key(config.recomputes, config.lanes)),
        )
        self.predicted, self.status, self.table = widgets.HTML(), widgets.HTML(), widgets.HTML()
        for slider in self.sliders.values():
            slider.observe(lambda change: self._guarded(self._moved), "value")
        for button, action in (
            (self.run_button, self.run),
            (self.stop_button, self.stop),
            (self.reset_button, self.reset),
        ):
            button.on_click(lambda button, action=action: self._guarded(action))
        wrap = widgets.Layout(display="flex", flex_flow="row wrap", margin="0 0 6px 0")
        for picture, share in ((self.memory, "2 1 480px"), (self.prediction, "1 1 300px")):
            # A picture of its own, such as one of lanes, is as wide as that of the memory.
            picture.layout.flex = share if config.picture is None else "1 1 640px"
        buttons = widgets.Box([self.run_button, self.stop_button, self.reset_button])
        controls = widgets.Box([*self.sliders.values(), buttons], layout=wrap)
        pictures = widgets.Box([self.memory, self.prediction], layout=wrap)
        self.view = widgets.VBox([controls, self.key, pictures, self.predicted, self.status, self.table])
        self._begin()
        if os.environ.get(PRESS_RUN) == "1":
            self.run()
            self.wait()

    def __repr__(self) -> str:
        """For who reads without running: the numbers of the starting state too."""
        names = " and ".join(self.sliders)
        said = f"A lab with sliders for {names}: run this cell, move them, press Run. {self.still().sentence}"
        return textwrap.fill(said, 110)

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.view.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, "text/plain": repr(self)}

    def still(self) -> plots.Shown:
        """What the lab shows before anybody has moved a slider, as a picture that needs no kernel."""
        return self._pictures.still({slider.name: slider.value for slider in self.config.sliders})

    @property
    def values(self) -> Values:
        """What the sliders say."""
        return {name: slider.value for name, slider in self.sliders.items()}

    # What the buttons do

    def run(self) -> None:
        """Train one step with the sliders' values in a thread of its own. While one is running: nothing."""
        with self._starting:
            if not self.running:
                self._start()

    def _start(self) -> None:
        self.error = None
        values = self.values
        prediction = self._pictures.predict(values)
        if obstacle := prediction.obstacle or self._too_large(prediction):
            self._say(f"Refused at {self.config.say_step(values)}: {obstacle}", alarm=True)
            return
        self._stop = threading.Event()
        self._meter = MemoryMeter()
        self._set_running(True)
        self._say(f"Running at {self.config.say_step(values)}.")
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="lab")
        followed = False
        try:
            work = self._threads.submit(self._train, values, prediction, self._stop)
            self._threads.submit(self._follow, work, values)
            followed = True
        finally:
            self._threads.shutdown(wait=False)  # both threads end with their work
            if not followed:  # there was no thread to be had
                self.stop()
                self._set_running(False)

    def _too_large(self, prediction: Prediction) -> str:
        free = self.config.free_bytes()
        if free is None or prediction.needed_bytes <= free:
            return ""
        needed = human_bytes(prediction.needed_bytes)
        return f"the step needs {needed}, and {human_bytes(free)} are free. Choose smaller numbers."

    def stop(self) -> None:
        """End the running step before its next operation."""
        self._stop.set()

    def reset(self) -> None:
        """Back to how the lab began: runs forgotten, sliders where they were."""
        self.stop()
        self._join()
        self.runs.clear()
        self.error = None
        for slider in self.config.sliders:
            self.sliders[slider.name].value = slider.value
        self._begin()

    def wait(self) -> None:
        """Until the running step has ended and been drawn. Raises what it, or any callback since, has raised."""
        self._join()
        if self.error is not None:
            raise self.error

    def _join(self) -> None:
        if self._threads is not None:
            self._threads.shutdown(wait=True)

    # In threads of their own

    def _train(self, values: Values, prediction: Prediction, stop: threading.Event) -> Run:
        job = self.config.prepare(values)
        if job.strategy != KeepAll():
            _compat.load_checkpointing()  # outside of the meter, and before anybody waits for the first operation
        self._meter = MemoryMeter(job.model, stop=stop)
        try:
            with apply(job.model, job.strategy) as applied, self._meter:
                job.step()
        finally:
            job.model.zero_grad(set_to_none=True)
        report = applied.report
        said = self.config.remark(report) if self.config.remark else ""
        copies = report.offload.lanes if report.offload else None
        return Run(len(self.runs) + 1, values, prediction, self._meter.trace, said, copies)

    def _follow(self, work: Future[Run], values: Values) -> None:
        """Draw the memory of a running step until it ends, then what came of it."""
        with _Guard(self, BaseException):
            while wait([work], timeout=FRAME_SECONDS).not_done:
                live = self._draw_progress(values)
                self._say(f"Running at {self.config.say_step(values)}: {human_bytes(live)} live now.")
            error = work.exception()
            if isinstance(error, Stopped):
                live = self._draw_progress(values)
                self._say(f"Stopped at {self.config.say_step(values)}, with {human_bytes(live)} live.")
                if self.config.say_step(self.values) != self.config.say_step(values):
                    self.memory.value = self._pictures.memory(self.values, self.runs)
            elif error is not None:
                self.fail(error)
            else:
                self._finish(work.result())
        self._stop.set()  # if drawing has failed, the step goes no further either
        wait([work])
        self._meter = MemoryMeter()  # the other one holds on to the model
        self._set_running(False)

    # What the reader sees

    def _begin(self) -> None:
        self._moved()
        self._say("No step has run yet: press Run.")
        self.table.value = ""

    def _moved(self) -> None:
        """Redraw what depends on the sliders: the picture of a step that runs stays."""
        values = self.values
        if not self.running:
            self.memory.value = self._pictures.memory(values, self.runs)
        self._predict()

    def _predict(self) -> None:
        # The values are read under the pen: whoever draws last draws the newest.
        with self._pictures.pen:
            picture, sentence = self._pictures.prediction(self.values, self.runs)
            self.prediction.value = picture
            self.predicted.value = paragraph(sentence, lines=2)

    def _draw_progress(self, values: Values) -> int:
        """Bytes that live at the end of what is drawn."""
        seen = self._meter.so_far()
        self.memory.value = self._pictures.progress(values, seen, self.runs)
        return int(seen.live_bytes[-1])

    def _finish(self, run: Run) -> None:
        picture = self._pictures.memory(run.values, [*self.runs, run])
        self.runs.append(run)  # not before: a run that cannot be drawn has failed
        self.memory.value = picture
        self._predict()  # rings show what was measured
        measured = [
            f"{what} {exact_bytes(found)}, {found - expected:,} bytes off the prediction"
            for what, expected, found in run.comparisons
        ]
        where = run.trace.peak_at.in_words
        remark = f" {run.remark}" if run.remark else ""
        name = f"Run {run.number} at {self.config.say_step(run.values)}"
        self._say(f"{name}: {'; '.join(measured)}. The peak is in {where}.{remark}")
        self.table.value = table(self.runs, self.config)

    def fail(self, error: BaseException) -> None:
        """Show an error in place of a result, and keep it for :meth:`wait`."""
        _forget_frames(error)
        self.error = error
        self._say(f"Failed: {type(error).__name__}: {error}", alarm=True)

    def _say(self, sentence: str, alarm: bool = False) -> None:
        if alarm or self.error is None:  # what a callback has raised stays to be read while a step goes on
            self.status.value = paragraph(sentence, alarm)

    def _set_running(self, running: bool) -> None:
        self.running = running
        self.run_button.disabled, self.stop_button.disabled = running, not running

    def _guarded(self, action: Callable[[], None]) -> None:
        with _Guard(self):
            action()


@dataclass(frozen=True)
class _Guard:
    """Around callbacks and threads: what they raise is shown to the reader and kept, not lost in a log."""

    lab: Lab
    kinds: type[BaseException] = Exception

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, self.kinds):
            self.lab.fail(error)
        return isinstance(error, self.kinds)


def _forget_frames(error: BaseException | None) -> None:
    """Frames would keep every tensor of a failed step alive: their text stays, as a note, and they go."""
    while error is not None:
        if error.__traceback__ is not None:
            error.add_note("".join(traceback.format_tb(error.__traceback__)))
        error = error.with_traceback(None).__cause__ or error.__context__
