"""What is special about a lab, and what comes out of one run of it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

import ipywidgets as widgets
from torch import nn

from memsave_lib.plots import Shown
from memsave_lib.runner import Report
from memsave_lib.strategies import Strategy
from memsave_lib.trace import Trace

Values = dict[str, int]


@dataclass(frozen=True)
class Slider:
    """One number that the reader sets: evenly spaced choices as a ``range``, others as a tuple."""

    name: str
    choices: range | tuple[int, ...]
    value: int

    def widget(self) -> widgets.Widget:
        layout = widgets.Layout(width="330px")
        common = dict(value=self.value, description=self.name, style={"description_width": "125px"}, layout=layout)
        if isinstance(self.choices, range):
            low, high, step = self.choices[0], self.choices[-1], self.choices.step
            return widgets.IntSlider(min=low, max=high, step=step, **common)
        return widgets.SelectionSlider(options=[(str(number), number) for number in self.choices], **common)


@dataclass(frozen=True)
class Prediction:
    """What formulas say about one setting of the sliders, in bytes."""

    saved_bytes: int
    peak_bytes: int | None  # of the whole step, parameters included; None where no formula covers it
    needed_bytes: int  # what the step will allocate: a run is refused when less is free
    sent_bytes: int | None = None  # what leaves for the host or the disk; None where the lab is not about that


@dataclass(frozen=True)
class Job:
    """A step to run: ``step()`` does forward and backward of ``model``, to which ``strategy`` is applied."""

    model: nn.Module
    strategy: Strategy
    step: Callable[[], object]


@dataclass(frozen=True)
class LabConfig:
    """What is special about one lab: curves ``along`` a slider, or a ``picture`` of its own."""

    sliders: tuple[Slider, ...]
    along: str  # the slider whose number is the x axis of the predicted curves
    predict: Callable[[Values], Prediction]
    prepare: Callable[[Values], Job]  # called in the worker thread
    free_bytes: Callable[[], int | None]  # None where it cannot be known
    picture: Callable[[Values], Shown] | None = None  # drawn in place of the curves
    remark: Callable[[Report], str] | None = None  # a sentence about what the strategy did in a run


@dataclass(frozen=True)
class Run:
    """A finished run, with what had been predicted for it."""

    values: Values
    prediction: Prediction
    trace: Trace
    remark: str = ""

    @property
    def measured(self) -> dict[str, int]:
        away = self.trace.host_peak_bytes + self.trace.disk_peak_bytes
        return {"saved": self.trace.saved_bytes, "sent": away, "peak": self.trace.peak_bytes}

    @property
    def comparisons(self) -> list[tuple[str, int, int]]:
        """(what, predicted bytes, measured bytes) of everything that was predicted."""
        one = self.prediction
        predicted = {"saved": one.saved_bytes, "sent": one.sent_bytes, "peak": one.peak_bytes}
        return [(what, size, self.measured[what]) for what, size in predicted.items() if size is not None]

    @cached_property
    def outline(self) -> list[tuple[float, int]]:
        """(seconds, live bytes), to be drawn behind later runs."""
        curve = self.trace.curve()
        return list(zip(curve["seconds"], curve["total"], strict=True))
