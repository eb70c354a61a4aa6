"""What is special about a lab, and what comes out of one run of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cached_property

import ipywidgets as widgets
from torch import nn

from memsave_lib.formulas import Forecast
from memsave_lib.lanes import Lanes
from memsave_lib.plots import Ghost, Shown
from memsave_lib.runner import Report
from memsave_lib.strategies import Strategy
from memsave_lib.trace import Trace

#: What the sliders say: numbers, or the names of what is chosen.
Values = dict[str, int | str]


@dataclass(frozen=True)
class Slider:
    """One number or name that the reader sets."""

    name: str
    choices: Sequence[int] | Sequence[str]
    value: int | str
    unit: str = ""
    simulated: bool = False  # whether it changes nothing about a real step

    def __post_init__(self) -> None:
        if self.value not in self.choices:
            raise ValueError(
                f"{self.name} starts at {self.value!r}, which is none of {', '.join(map(str, self.choices))}"
            )

    @property
    def label(self) -> str:
        return f"{self.name}, {self.unit}" if self.unit else self.name

    def widget(self) -> widgets.Widget:
        return widgets.SelectionSlider(
            options=[(str(choice), choice) for choice in self.choices],
            value=self.value,
            description=self.label,
            style={"description_width": "125px"},
            layout=widgets.Layout(width="340px"),
        )

    def say(self, value: int | str) -> str:
        return f"{self.name} {value} {self.unit}".strip()


@dataclass(frozen=True)
class Prediction:
    """What formulas say about one setting of the sliders, in bytes."""

    saved_bytes: int
    peak_bytes: int | None  # of the whole step, parameters included; None where no formula covers it
    needed_bytes: int  # what the step will allocate: a run is refused when less is free
    sent_bytes: int | None = None  # what leaves for the host or the disk; None where the lab is not about that
    forecast: Forecast | None = None  # the memory of the step over its work; None where no formula covers it
    budget_bytes: int | None = None  # drawn as a line
    remark: str = ""  # one more sentence about this setting
    obstacle: str = ""  # why there is nothing to run at this setting, as a sentence


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
    still: Callable[[Values], Shown] | None = None  # the same without what differs from machine to machine
    remark: Callable[[Report], str] | None = None  # a sentence about what the strategy did in a run
    same_scale: str | None = None  # the slider along whose choices the axes of memory and time stay where they are
    recomputes: bool = True  # whether any strategy of the lab runs forward again
    lanes: bool = False  # whether copies are drawn below the memory of a run

    def slider(self, name: str) -> Slider:
        return next(slider for slider in self.sliders if slider.name == name)

    def say(self, values: Values) -> str:
        """The setting of the sliders in words."""
        return ", ".join(slider.say(values[slider.name]) for slider in self.sliders)

    def say_step(self, values: Values) -> str:
        """What of it a real step depends on: two settings with the same words are the same step."""
        return ", ".join(slider.say(values[slider.name]) for slider in self.sliders if not slider.simulated)


@dataclass(frozen=True)
class Run:
    """A finished run, with what had been predicted for it."""

    number: int  # from 1
    values: Values
    prediction: Prediction
    trace: Trace
    remark: str = ""
    copies: Lanes | None = None

    @cached_property
    def ghost(self) -> Ghost:
        """How it is drawn behind later runs."""
        return Ghost.of(f"run {self.number}", self.trace)

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
