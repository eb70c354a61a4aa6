"""The component that all labs share.

Pictures are plain ``<img>`` tags, and every one has its numbers in a sentence below, because slider handles and
pictures are mute to a screen reader. Only what ipywidgets 7.7 and 8 have in common is used.
"""

from __future__ import annotations

import os
import threading
import traceback
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import ipywidgets as widgets

from memsave_lib import plots
from memsave_lib.labs.config import LabConfig, Prediction, Run, Values
from memsave_lib.labs.markup import image, paragraph, setting, table
from memsave_lib.meter import MemoryMeter, Stopped
from memsave_lib.runner import apply
from memsave_lib.trace import Trace
from memsave_lib.units import exact_bytes, human_bytes

PRESS_RUN = "MEMSAVE_PRESS_RUN"  # "1" in the environment: every lab presses its own Run, and fails if the run does
FRAME_SECONDS = 0.1
GHOSTS = 4
PREDICTION_INCHES, MEMORY_INCHES = (4.3, 3.0), (6.2, 3.0)


class Lab:
    """Sliders, Run, Stop, Reset. Put it last in a cell; its attributes are widgets, which code may drive as well."""

    def __init__(self, config: LabConfig) -> None:
        self.config = config
        self.runs: list[Run] = []
        self.error: BaseException | None = None
        self.running = False
        self._stop = threading.Event()
        self._meter = MemoryMeter()
        self._threads: ThreadPoolExecutor | None = None
        self._pen = threading.Lock()  # matplotlib draws in one thread at a time
        self.sliders = {slider.name: slider.widget() for slider in config.sliders}
        narrow = widgets.Layout(width="100px")
        self.run_button = widgets.Button(description="Run", icon="play", button_style="primary", layout=narrow)
        self.stop_button = widgets.Button(description="Stop", icon="stop", disabled=True, layout=narrow)
        self.reset_button = widgets.Button(description="Reset", icon="undo", layout=narrow)
        self.prediction, self.memory = widgets.HTML(), widgets.HTML()
        self.predicted, self.status, self.table = widgets.HTML(), widgets.HTML(), widgets.HTML()
        for slider in self.sliders.values():
            slider.observe(lambda change: self._guarded(self._predict), "value")
        for button, action in (
            (self.run_button, self.run),
            (self.stop_button, self.stop),
            (self.reset_button, self.reset),
        ):
            button.on_click(lambda button, action=action: self._guarded(action))
        wrap = widgets.Layout(display="flex", flex_flow="row wrap")
        buttons = widgets.Box([self.run_button, self.stop_button, self.reset_button])
        controls = widgets.Box([*self.sliders.values(), buttons], layout=wrap)
        rows = [controls, widgets.Box([self.prediction, self.memory], layout=wrap)]
        self.view = widgets.VBox([*rows, self.predicted, self.status, self.table])
        self._begin()
        if os.environ.get(PRESS_RUN) == "1":
            self.run()
            self.wait()

    def __repr__(self) -> str:
        return f"A lab with sliders for {' and '.join(self.sliders)}: run this cell, move them, press Run."

    def _repr_mimebundle_(self, include: object = None, exclude: object = None) -> dict[str, Any]:
        view = {"version_major": 2, "version_minor": 0, "model_id": self.view.model_id}
        return {"application/vnd.jupyter.widget-view+json": view, "text/plain": repr(self)}

    @property
    def values(self) -> Values:
        """What the sliders say."""
        return {name: slider.value for name, slider in self.sliders.items()}

    # What the buttons do

    def run(self) -> None:
        """Train one step with the sliders' values in a thread of its own. While one is running: nothing."""
        if self.running:
            return
        self.error = None
        values = self.values
        prediction = self.config.predict(values)
        free = self.config.free_bytes()
        if free is not None and prediction.needed_bytes > free:
            self._say(
                f"Refused at {setting(values)}: the step needs {human_bytes(prediction.needed_bytes)}, "
                f"and {human_bytes(free)} are free. Choose smaller numbers.",
                alarm=True,
            )
            return
        self._stop = threading.Event()
        self._meter = MemoryMeter()
        self._set_running(True)
        self._say(f"Running at {setting(values)}.")
        self._threads = ThreadPoolExecutor(2, thread_name_prefix="lab")
        work = self._threads.submit(self._train, values, self._stop)
        self._threads.submit(self._follow, work, values, prediction)
        self._threads.shutdown(wait=False)  # both threads end with their work

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

    def _train(self, values: Values, stop: threading.Event) -> tuple[Trace, str]:
        job = self.config.prepare(values)
        self._meter = MemoryMeter(job.model, stop=stop)
        try:
            with apply(job.model, job.strategy) as applied, self._meter:
                job.step()
        finally:
            job.model.zero_grad(set_to_none=True)
        return self._meter.trace, self.config.remark(applied.report) if self.config.remark else ""

    def _follow(self, work: Future[tuple[Trace, str]], values: Values, prediction: Prediction) -> None:
        """Draw the memory of a running step until it ends, then what came of it."""
        with _Guard(self):
            while wait([work], timeout=FRAME_SECONDS).not_done:
                self._draw_memory(prediction, points=self._meter.progress())
                self._say(f"Running at {setting(values)}: {human_bytes(self._meter.live_bytes)} live now.")
            error = work.exception()
            if isinstance(error, Stopped):
                self._draw_memory(prediction, points=self._meter.progress())
                self._say(f"Stopped at {setting(values)}, with {human_bytes(self._meter.live_bytes)} live.")
            elif error is not None:
                self.fail(error)
            else:
                self._finish(Run(values, prediction, *work.result()))
        self._stop.set()  # if drawing has failed, the step goes no further either
        wait([work])
        self._set_running(False)

    # What the reader sees

    def _begin(self) -> None:
        self._predict()
        self._draw_memory()
        self._say("No step has run yet: press Run.")
        self.table.value = ""

    def _predict(self) -> None:
        """Redraw what depends on the sliders alone."""
        with self._pen:  # the values are read inside: whoever draws last draws the newest
            values = self.values
            shown, sentence = self._curves(values) if self.config.picture is None else self._picture(values)
            self.prediction.value = image(shown, sentence)
            self.predicted.value = paragraph(sentence)

    def _picture(self, values: Values) -> tuple[plots.Shown, str]:
        shown = self.config.picture(values)
        return shown, f"Simulated at {setting(values)}. {shown.sentence}"

    def _curves(self, values: Values) -> tuple[plots.Shown, str]:
        along = self.config.along
        choices = next(slider.choices for slider in self.config.sliders if slider.name == along)
        predictions = {number: self.config.predict({**values, along: number}) for number in choices}
        here = predictions[values[along]]
        curves = {"saved": {number: one.saved_bytes for number, one in predictions.items()}}
        if here.peak_bytes is not None:
            curves["peak"] = {number: one.peak_bytes for number, one in predictions.items()}
        measured = self._measured_along(values, curves)
        peak = "" if here.peak_bytes is None else f", peak of the whole step {exact_bytes(here.peak_bytes)}"
        sentence = f"Predicted at {setting(values)}: saved {exact_bytes(here.saved_bytes)}{peak}."
        shown = plots.bytes_against(along, curves, measured, values[along], "predicted memory", PREDICTION_INCHES)
        return shown, sentence

    def _measured_along(self, values: Values, names: Iterable[str]) -> dict[str, dict[int, int]]:
        """Measured bytes of the runs whose other values are these, for the rings on the curves."""
        along = self.config.along
        alike = [run for run in self.runs if {**run.values, along: 0} == {**values, along: 0}]
        found = {name: {run.values[along]: run.measured[name] for run in alike} for name in names}
        return found if alike else {}

    def _draw_memory(
        self, prediction: Prediction | None = None, points: Sequence[tuple[float, int]] = (), trace: Trace | None = None
    ) -> None:
        """Memory against time, over the outlines of earlier runs."""
        with self._pen:
            earlier = [(f"run {n}", run.outline) for n, run in enumerate(self.runs, start=1) if run.trace is not trace]
            predicted = prediction and prediction.peak_bytes
            shown = plots.memory_run(
                points, trace=trace, ghosts=earlier[-GHOSTS:], predicted=predicted, size=MEMORY_INCHES
            )
            self.memory.value = image(shown, f"Memory against time: {shown.sentence}")

    def _finish(self, run: Run) -> None:
        self.runs.append(run)
        self._draw_memory(run.prediction, trace=run.trace)
        self._predict()  # rings show what was measured
        measured = [
            f"{what} {exact_bytes(found)}, {found - expected:,} bytes off the prediction"
            for what, expected, found in run.comparisons
        ]
        where = plots.place(run.trace)
        remark = f" {run.remark}" if run.remark else ""
        said = f"Run {len(self.runs)} at {setting(run.values)}: {'; '.join(measured)}. The peak is in {where}.{remark}"
        self._say(said)
        self.table.value = table(self.runs)

    def fail(self, error: BaseException) -> None:
        """Show an error in place of a result, and keep it for :meth:`wait`."""
        # Its frames would keep every tensor of the failed step alive.
        traceback.clear_frames(error.__traceback__)
        self.error = error
        self._say(f"Failed: {type(error).__name__}: {error}", alarm=True)

    def _say(self, sentence: str, alarm: bool = False) -> None:
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

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> bool:
        if isinstance(error, Exception):
            self.lab.fail(error)
        return isinstance(error, Exception)
