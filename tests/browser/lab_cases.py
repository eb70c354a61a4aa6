"""The six labs in one notebook, and what each must say at any setting: computed here, not read from the lab."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import ClassVar

import torch
from nbformat import NotebookNode

import memsave_lib as ms
from memsave_lib import formulas, plots
from memsave_lib.course.costs import stack_costs, stack_model_costs
from memsave_lib.devices import Device
from memsave_lib.simulation import simulate
from memsave_lib.trace import Trace
from memsave_lib.units import exact_bytes
from tests.browser.lab import NotebookPage, own_notebook
from tests.browser.lab_page import LabPage

#: At twice this length a step can be watched, and at four times it can be stopped.
L, HIDDEN, HEADS, BATCH, SEQ_LEN = SIZES = (6, 128, 4, 4, 512)
SEQ_LENS = (128, 256, 512, 1024, 2048)
MEMORY = "Memory against time"
Values = dict[str, int | str]


@dataclass(frozen=True)
class Step:
    """The step that a lab's sliders ask for."""

    strategy: ms.Strategy
    seq_len: int
    n_layers: int = L
    batch: int = BATCH
    attention: str = "sdpa"

    @property
    def shape(self) -> formulas.BlockShape:
        return formulas.BlockShape(self.batch, self.seq_len, HIDDEN, HEADS, attention=self.attention)

    @property
    def plan(self) -> ms.Plan:
        return self.strategy.plan(self.n_layers)

    @property
    def saved_bytes(self) -> int:
        return formulas.stack_saved_bytes(self.plan, self.shape)

    @property
    def sent_bytes(self) -> int:
        return formulas.offloaded_bytes(self.plan, self.shape)

    @property
    def peak_bytes(self) -> int:
        parameters = 4 * self.n_layers * formulas.block_parameters(HIDDEN)
        options = {"loss": "sum", "input_requires_grad": False, "new_gradients": True}
        return parameters + formulas.stack_peak_bytes(self.plan, self.shape, **options)

    def measured(self) -> Trace:
        """The same step on a model made here: what ``ms.measure`` says, without its other steps."""
        model = ms.BlockStack(self.n_layers, HIDDEN, HEADS, attention=self.attention)
        x = torch.randn(self.batch, self.seq_len, HIDDEN)
        with ms.apply(model, self.strategy), ms.MemoryMeter(model) as meter:
            model(x).sum().backward()
        return meter.trace


@dataclass(frozen=True)
class LabCase:
    """One lab: how a cell makes it, where its sliders start, and what it means by their values."""

    code: str
    start: Values
    step: Callable[[Values], Step]
    moves: Values  # another value of each slider
    column: str  # the slider that, with seq_len, gives enough settings to walk through
    columns: Sequence[int]  # its last six choices

    units: str = ""  # of its first slider
    #: Its sentence, which is the alternative text of its second picture too, is "VERB at SETTING", and then this.
    verb: ClassVar[str] = "Predicted"
    end: ClassVar[str] = ": "

    def label(self, name: str) -> str:
        return f"{name}, {self.units}" if self.units and name == next(iter(self.start)) else name

    def say(self, values: Values) -> str:
        units = {next(iter(self.start)): f" {self.units}" if self.units else ""}
        return ", ".join(f"{name} {value}{units.get(name, '')}" for name, value in values.items())

    def say_step(self, values: Values) -> str:
        """What of it a real step depends on."""
        return self.say(values)

    def foretold(self, values: Values) -> str:
        return f"{self.verb} at {self.say(values)}{self.end}"

    def sentence(self, values: Values) -> str:
        """How the sentence about these values begins."""
        step = self.step(values)
        saved, peak = exact_bytes(step.saved_bytes), exact_bytes(step.peak_bytes)
        return f"{self.foretold(values)}saved {saved}, peak of the whole step {peak} in "

    def memory(self, values: Values) -> str:
        """The same for the alternative text of the picture of memory, before any run."""
        peak = exact_bytes(self.step(values).peak_bytes)
        return f"{MEMORY} at {self.say(values)}: predicted peak {peak} in "

    def measurement(self, values: Values) -> str:
        """What a run at these values ends in, measured here."""
        found = self.step(values).measured()
        return self._off_by_nothing({"saved": found.saved_bytes, "peak": found.peak_bytes})

    def _off_by_nothing(self, sizes: dict[str, int]) -> str:
        return "; ".join(f"{what} {exact_bytes(size)}, 0 bytes off the prediction" for what, size in sizes.items())


class OffloadCase(LabCase):
    """Predicts a timeline. When a copy has ended is up to the disk, and so is the peak."""

    verb = "Simulated"
    end = ". "

    def say_step(self, values: Values) -> str:
        return self.say({name: value for name, value in values.items() if name != "bandwidth"})

    def sentence(self, values: Values) -> str:
        speed = 1e6 * values["bandwidth"]
        link = Device("two cores", flops=1e11, copy_out=speed, copy_in=speed)
        costs = stack_costs(self.step(values).shape, L)
        timelines = {
            name: simulate(costs, ms.Offload(strategy).plan(L), link, prefetch=values["prefetch"])
            for name, strategy in (("everything", ms.KeepAll()), ("checkpoints only", ms.FullCheckpoint()))
        }
        return f"{self.foretold(values)}{plots.stream_lanes(timelines).sentence}"

    def memory(self, values: Values) -> str:
        return f"{MEMORY} at {self.say(values)}: no such step has run."

    def measurement(self, values: Values) -> str:
        step = self.step(values)
        return self._off_by_nothing({"saved": step.measured().saved_bytes, "sent": step.sent_bytes})


@cache
def fastest(seq_len: int, percent: int) -> Step:
    """The fastest plan within a budget. Raises BelowTheFloor where there is none."""
    kept = Step(ms.KeepAll(), seq_len)
    costs, budget = stack_model_costs(kept.shape, L), kept.peak_bytes * percent // 100
    plan = ms.plan_under_budget(costs, budget, Device("any", flops=1.0), actions=("keep", "recompute"))
    return replace(kept, strategy=plan)


KEPT_OR_NOT = {"keep all": ms.KeepAll(), "checkpoint": ms.FullCheckpoint()}
SENT = {"everything": ms.KeepAll(), "checkpoints": ms.FullCheckpoint()}

CASES = {
    "activations": LabCase(
        f"labs.activations_lab{SIZES}",
        {"seq_len": SEQ_LEN, "n_layers": L, "batch_size": BATCH, "attention": "fused"},
        lambda v: Step(
            ms.KeepAll(), v["seq_len"], v["n_layers"], v["batch_size"],
            {"fused": "sdpa", "math": "math"}[v["attention"]],
        ),
        {"seq_len": 1024, "n_layers": 5, "batch_size": 6, "attention": "math"},
        "n_layers", range(7, 13),
    ),
    "checkpointing": LabCase(
        f"labs.checkpointing_lab{SIZES}",
        {"strategy": "checkpoint", "seq_len": SEQ_LEN, "n_layers": L},
        lambda v: Step(KEPT_OR_NOT[v["strategy"]], v["seq_len"], v["n_layers"]),
        {"strategy": "keep all", "seq_len": 128, "n_layers": 7},
        "n_layers", range(7, 13),
    ),
    "selective": LabCase(
        f"labs.selective_lab(*{SIZES}, checkpoint_every=2)",
        {"seq_len": SEQ_LEN, "checkpoint_every": 2},
        lambda v: Step(ms.Selective(v["checkpoint_every"]), v["seq_len"]),
        {"seq_len": 1024, "checkpoint_every": 4},
        "checkpoint_every", range(1, 7),
    ),
    "chunks": LabCase(
        f"labs.chunks_lab(*{SIZES}, chunks=2)",
        {"chunks": 2, "seq_len": SEQ_LEN, "the last chunk": "runs again"},
        lambda v: Step(ms.Chunked(v["chunks"], recompute_last=v["the last chunk"] == "runs again"), v["seq_len"]),
        {"chunks": 4, "seq_len": 256, "the last chunk": "is kept"},
        "chunks", range(1, 7),
    ),
    "offload": OffloadCase(
        f"labs.offload_lab{SIZES}",
        {"bandwidth": 1000, "seq_len": SEQ_LEN, "prefetch": 4, "Run sends": "everything"},
        lambda v: Step(
            ms.Offload(SENT[v["Run sends"]], store="disk", prefetch=v["prefetch"]), v["seq_len"]
        ),
        {"bandwidth": 250, "seq_len": 1024, "prefetch": 0, "Run sends": "checkpoints"},
        "bandwidth", (500, 1000, 2000, 4000, 8000, 16000), "MB/s",
    ),
    "budget": LabCase(
        f"labs.budget_lab{SIZES}",
        {"budget": 60, "seq_len": SEQ_LEN},
        lambda v: fastest(v["seq_len"], v["budget"]),
        {"budget": 90, "seq_len": 1024},
        "budget", range(50, 101, 10), "%",
    ),
}  # fmt: skip


def six_labs() -> NotebookNode:
    """One cell a lab; ``of`` maps their names to them."""
    setup = "import threading\nfrom memsave_lib import labs\nof = {}"
    return own_notebook(setup, *(f"of[{name!r}] = {case.code}\nof[{name!r}]" for name, case in CASES.items()))


def at_the_beginning(page: NotebookPage, name: str) -> LabPage:
    """One of the six labs, reset: a test before may have left a step running."""
    lab = LabPage(page, list(CASES).index(name))
    lab.burst(lab.button("Reset"), ["Enter"])
    lab.sentence("No step has run yet: press Run.")
    case = CASES[name]
    lab.sentence(case.foretold(case.start))
    return lab


def lab_threads(page: NotebookPage) -> list[str]:
    """Names of the threads in which labs run steps and draw them."""
    names = page.ask("import threading; print(*(one.name for one in threading.enumerate()), sep='\\n')").splitlines()
    return [name for name in names if name.startswith("lab")]
