"""The two pictures of a lab: memory against time, and what each choice on a slider would hold."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import lru_cache

from memsave_lib import plots
from memsave_lib.formulas import Forecast
from memsave_lib.labs.config import LabConfig, Prediction, Run, Values
from memsave_lib.labs.markup import image
from memsave_lib.trace import Trace
from memsave_lib.units import exact_bytes

#: Earlier runs behind the picture of a step.
GHOSTS = 3
CHOICES_INCHES, MEMORY_INCHES, LANES_INCHES = (3.8, 3.4), (7.2, 3.4), (7.2, 3.8)
STILL_INCHES = (8.0, 3.4)


class Pictures:
    """Draws for a lab, and says the same in words. Methods return HTML; any thread may call them."""

    def __init__(self, config: LabConfig) -> None:
        self.pen = threading.RLock()  # matplotlib draws in one thread at a time
        self._config = config
        self._memory = plots.MemoryPicture(LANES_INCHES if config.lanes else MEMORY_INCHES, config.lanes)
        self._choices = plots.ChoicePicture(config.slider(config.along).label, CHOICES_INCHES)
        self._drawing: tuple[plots.Scene, bytes, str] | None = None  # the newest of the memory
        self._names = tuple(slider.name for slider in config.sliders)
        self._known = lru_cache(maxsize=4096)(
            lambda *values: config.predict(dict(zip(self._names, values, strict=True)))
        )

    def predict(self, values: Values) -> Prediction:
        """What formulas say; the same question is not answered twice."""
        return self._known(*(values[name] for name in self._names))

    def memory(self, values: Values, runs: Sequence[Run]) -> str:
        """The newest run with these values if there is one, else the forecast; earlier runs behind it."""
        here, say = self.predict(values), self._config.say_step
        run = next((run for run in reversed(runs) if say(run.values) == say(values)), None)
        trace, copies = (None, None) if run is None else (run.trace, run.copies)
        ghosts, reach = _ghosts(runs, run), self._reach(values)
        scene = plots.Scene(here.forecast, _pace(runs), trace, False, ghosts, here.budget_bytes, copies, reach)
        return self._drawn(values, scene)

    def progress(self, values: Values, seen: Trace, runs: Sequence[Run]) -> str:
        """A step that has come so far."""
        here = self.predict(values)
        pace = plots.pace_of(seen, here.forecast, running=True) if here.forecast else None
        pace, ghosts, reach = pace or _pace(runs), _ghosts(runs), self._reach(values)
        scene = plots.Scene(here.forecast, pace, seen, True, ghosts, here.budget_bytes, None, reach)
        return self._drawn(values, scene)

    def prediction(self, values: Values, runs: Sequence[Run]) -> tuple[str, str]:
        """A picture of what the sliders say, and the sentence for it."""
        with self.pen:
            if self._config.picture is not None:
                shown = self._config.picture(values)
                sentence = f"Simulated at {self._config.say(values)}. {shown.sentence}"
            else:
                shown = self._curves(values, runs)
                sentence = self._foretold(values)
            return image(shown.quick_png(), shown.figure.get_figwidth(), sentence), sentence

    def still(self, values: Values) -> plots.Shown:
        """The lab without a kernel: its own picture, or the forecast."""
        if self._config.still is not None:
            return self._config.still(values)
        here = self.predict(values)
        scene = plots.Scene(here.forecast, budget=here.budget_bytes, reach=self._reach(values))
        with self.pen:
            shown = plots.MemoryPicture(STILL_INCHES, explained=True).draw(scene)
        return plots.Shown(shown.figure, self._foretold(values))

    def _foretold(self, values: Values) -> str:
        return f"Predicted at {self._config.say(values)}: {_in_words(self.predict(values))}"

    def _drawn(self, values: Values, scene: plots.Scene) -> str:
        with self.pen:
            if self._drawing is None or not scene.looks_like(self._drawing[0]):
                shown = self._memory.draw(scene)
                self._drawing = scene, shown.quick_png(), shown.sentence
            _, png, sentence = self._drawing
            return image(png, self._memory.size[0], f"Memory against time at {self._config.say(values)}: {sentence}")

    def _along(self, name: str | None, values: Values) -> dict[int | str, Prediction]:
        """Predictions for all choices of one slider, the others as they are."""
        choices = () if name is None else self._config.slider(name).choices
        return {choice: self.predict({**values, name: choice}) for choice in choices}

    def _reach(self, values: Values) -> list[Forecast]:
        """What the axes must have room for."""
        alike = self._along(self._config.same_scale, values).values()
        return [one.forecast for one in alike if one.forecast is not None]

    def _curves(self, values: Values, runs: Sequence[Run]) -> plots.Shown:
        along = self._config.along
        curves: dict[str, dict[int, int]] = {"saved": {}, "peak": {}, "budget": {}}
        for choice, one in self._along(along, values).items():
            sizes = {"budget": one.budget_bytes}
            if not one.obstacle:
                sizes |= {"saved": one.saved_bytes, "peak": one.peak_bytes}
            for name, size in sizes.items():
                if size is not None:
                    curves[name][choice] = size
        alike = [run for run in runs if {**run.values, along: 0} == {**values, along: 0}]
        measured = {name: {run.values[along]: run.measured[name] for run in alike} for name in ("saved", "peak")}
        name = self._config.same_scale
        others = [{**values, name: choice} for choice in self._config.slider(name).choices] if name else []
        alike = [one for other in others for one in self._along(along, other).values()]
        top = max((one.peak_bytes for one in alike if one.peak_bytes), default=1)
        return self._choices.draw(curves, values[along], measured, top)


def _ghosts(runs: Sequence[Run], shown: Run | None = None) -> list[plots.Ghost]:
    return [run.ghost for run in runs if run is not shown and run.trace.events][-GHOSTS:]


def _pace(runs: Sequence[Run]) -> float | None:
    """Of the last run that had a forecast."""
    timed = [run for run in runs if run.prediction.forecast is not None and run.trace.events]
    return plots.pace_of(timed[-1].trace, timed[-1].prediction.forecast) if timed else None


def _in_words(here: Prediction) -> str:
    if here.obstacle:
        return here.obstacle
    said = f"saved {exact_bytes(here.saved_bytes)}"
    if here.peak_bytes is not None:
        said += f", peak of the whole step {exact_bytes(here.peak_bytes)}"
    if here.forecast is not None:
        said += f" in {plots.moment_place(here.forecast.peak)}"
        work = here.forecast.flops_ratio
        said += f"; {work:.3f} times the FLOPs of keeping all" if work > 1 else ""
    return f"{said}.{here.remark and ' '}{here.remark}"
