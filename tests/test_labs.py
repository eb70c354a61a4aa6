"""Every lab, driven in-process: its numbers are the library's own, whatever its sliders say, and Run measures them."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch

import memsave_lib as ms
from lab_reading import alt, read, rows
from memsave_lib import fake, formulas, labs, planner, profiling
from memsave_lib.comparison import Measurement
from memsave_lib.devices import Device
from memsave_lib.labs.component import PRESS_RUN
from memsave_lib.units import exact_bytes, human_bytes

L, HIDDEN, HEADS, BATCH, SEQ_LEN = 3, 32, 2, 2, 24
SIZES = (L, HIDDEN, HEADS, BATCH, SEQ_LEN)
Values = dict[str, int | str]


pytestmark = pytest.mark.usefixtures("no_thread_is_left", "nobody_presses_run")


@dataclass(frozen=True)
class Asked:
    """The step that a lab's sliders ask for."""

    strategy: ms.Strategy
    seq_len: int = SEQ_LEN
    n_layers: int = L
    batch: int = BATCH
    attention: str = "sdpa"

    @property
    def shape(self) -> formulas.BlockShape:
        return formulas.BlockShape(self.batch, self.seq_len, HIDDEN, HEADS, attention=self.attention)

    @property
    def parameter_bytes(self) -> int:
        return 4 * self.n_layers * formulas.block_parameters(HIDDEN)

    @property
    def peak_bytes(self) -> int:
        options = {"loss": "sum", "input_requires_grad": False, "new_gradients": True}
        plan = self.strategy.plan(self.n_layers)
        return self.parameter_bytes + formulas.stack_peak_bytes(plan, self.shape, **options)

    @property
    def saved_bytes(self) -> int:
        return formulas.stack_saved_bytes(self.strategy.plan(self.n_layers), self.shape)

    @property
    def sent_bytes(self) -> int:
        return formulas.offloaded_bytes(self.strategy.plan(self.n_layers), self.shape)


@cache
def measured(asked: Asked) -> Measurement:
    torch.manual_seed(0)
    model = ms.BlockStack(asked.n_layers, HIDDEN, HEADS, attention=asked.attention)
    x = torch.randn(asked.batch, asked.seq_len, HIDDEN)

    def step() -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    return ms.measure(step, model, asked.strategy, repeats=0)


@cache
def costs(seq_len: int) -> ms.ModelCosts:
    """Measured on fake tensors, where the lab takes them from closed forms."""
    x = torch.randn(BATCH, seq_len, HIDDEN)
    made = fake.copy_of(ms.BlockStack(L, HIDDEN, HEADS), x, lambda output, batch: output.sum())
    with made.running():
        return profiling.model_costs(made.model, made.step)


def budget_of(values: Values) -> int:
    return Asked(ms.KeepAll(), values["seq_len"]).peak_bytes * values["budget"] // 100


def fastest(values: Values) -> Asked:
    device = Device("by hand", flops=1e12)
    plan = ms.plan_under_budget(costs(values["seq_len"]), budget_of(values), device, actions=("keep", "recompute"))
    return Asked(ms.PerBlock(plan.actions), values["seq_len"])


@dataclass(frozen=True)
class Case:
    """How a lab is made, and what it means by its values."""

    make: Callable[[], ms.labs.Lab]
    asked: Callable[[Values], Asked]


CASES = {
    "activations": Case(
        lambda: labs.activations_lab(*SIZES),
        lambda v: Asked(
            ms.KeepAll(), v["seq_len"], v["n_layers"], v["batch_size"],
            {"fused": "sdpa", "math": "math"}[v["attention"]],
        ),
    ),
    "checkpointing": Case(
        lambda: labs.checkpointing_lab(*SIZES),
        lambda v: Asked(
            {"keep all": ms.KeepAll(), "checkpoint": ms.FullCheckpoint()}[v["strategy"]], v["seq_len"],
            v["n_layers"],
        ),
    ),
    "selective": Case(
        lambda: labs.selective_lab(*SIZES, checkpoint_every=2),
        lambda v: Asked(ms.Selective(v["checkpoint_every"]), v["seq_len"]),
    ),
    "chunks": Case(
        lambda: labs.chunks_lab(*SIZES, chunks=2),
        lambda v: Asked(ms.Chunked(v["chunks"], recompute_last=v["the last chunk"] == "runs again"), v["seq_len"]),
    ),
    "offload": Case(
        lambda: labs.offload_lab(*SIZES),
        lambda v: Asked(
            ms.Offload(
                {"everything": ms.KeepAll(), "checkpoints": ms.FullCheckpoint()}[v["Run sends"]],
                store="disk", prefetch=v["prefetch"],
            ),
            v["seq_len"],
        ),
    ),
    "budget": Case(lambda: labs.budget_lab(*SIZES, percent=90), fastest),
}  # fmt: skip
MADE = pytest.mark.parametrize("name", CASES)


def settings(lab: labs.Lab, ends_only: bool = False) -> Iterator[Values]:
    """The sliders at their start, then each at each of its choices, or at its first and last."""
    start = lab.values
    yield start
    for name, slider in lab.sliders.items():
        for _, choice in slider.options[:: len(slider.options) - 1] if ends_only else slider.options:
            slider.value = choice
            assert lab.values == {**start, name: choice}
            yield lab.values
        slider.value = start[name]


def said(lab: labs.Lab, values: Values, of_step: bool = False) -> str:
    """The setting in words, written down here once more; bandwidth is nothing that a real step depends on."""
    units = {"bandwidth": " MB/s", "budget": " %"}
    names = [name for name in lab.sliders if not (of_step and name == "bandwidth")]
    return ", ".join(f"{name} {values[name]}{units.get(name, '')}" for name in names)


def obstacle(error: planner.BelowTheFloor, values: Values) -> str:
    whole = Asked(ms.KeepAll(), values["seq_len"]).peak_bytes
    return f"{error}. That is {error.floor_bytes / whole:.0%} of what keeping all needs."


@MADE
def test_a_lab_says_the_librarys_own_numbers_at_every_setting(name: str) -> None:
    lab, case = CASES[name].make(), CASES[name]
    seen = []
    for values in settings(lab):
        sentence, setting = read(lab.predicted), said(lab, values)
        assert alt(lab.memory).startswith(f"Memory against time at {setting}: ")
        assert alt(lab.prediction) == sentence, "who cannot see it reads the same"
        if name == "offload":
            assert sentence.startswith(f"Simulated at {setting}. ")
            continue
        try:
            asked = case.asked(values)
        except planner.BelowTheFloor as error:
            assert sentence == f"Predicted at {setting}: {obstacle(error, values)}"
            continue
        seen.append(values)
        peak = exact_bytes(asked.peak_bytes)
        assert sentence.startswith(
            f"Predicted at {setting}: saved {exact_bytes(asked.saved_bytes)}, peak of the whole step {peak} in "
        )
        assert f": predicted peak {peak} in " in alt(lab.memory)
    assert seen or name == "offload"


@MADE
def test_run_measures_what_was_predicted_and_what_measure_gives(name: str) -> None:
    lab, case = CASES[name].make(), CASES[name]
    ran: list[Values] = []
    for values in settings(lab, ends_only=True):
        lab.run_button.click()
        lab.wait()
        try:
            asked = case.asked(values)
        except planner.BelowTheFloor as error:
            assert read(lab.status) == f"Refused at {said(lab, values)}: {obstacle(error, values)}"
            assert len(lab.runs) == len(ran)
            continue
        ran.append(values)
        run, found = lab.runs[-1], measured(asked)
        assert run.values == values and len(lab.runs) == len(ran)
        assert run.trace.saved_bytes == found.saved_bytes == asked.saved_bytes
        expected = {"saved": found.saved_bytes, "peak": found.peak_bytes}
        if name == "offload":
            # When a copy has ended is up to the disk, and so is the peak.
            expected = {"saved": found.saved_bytes, "sent": asked.sent_bytes}
        else:
            assert run.trace.peak_bytes == found.peak_bytes == asked.peak_bytes
        assert run.comparisons == [(what, size, size) for what, size in expected.items()]
        words = "; ".join(f"{what} {exact_bytes(size)}, 0 bytes off the prediction" for what, size in expected.items())
        assert read(lab.status).startswith(
            f"Run {len(ran)} at {said(lab, values, of_step=True)}: {words}. The peak is in "
        )
        if name == "offload":
            continue
        assert alt(lab.memory).startswith(
            f"Memory against time at {said(lab, values)}: Peak {exact_bytes(found.peak_bytes)} in "
        )
    table = rows(lab)
    assert table[0] == ["run", "with", "", "predicted", "measured", "error, bytes", "the peak is in", "seconds"]
    assert {row[5] for row in table[1:]} == {"0"}
    assert [row[:3] for row in table[1:]] == [
        [str(number), said(lab, values, of_step=True), what]
        for number, values in enumerate(ran, start=1)
        for what in ("saved", "sent" if name == "offload" else "peak")
    ]
    assert all(row[3] == row[4] == human_bytes(lab.runs[int(row[0]) - 1].measured[row[2]]) for row in table[1:])


@MADE
def test_building_and_running_a_lab_leaves_the_dice_alone(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRESS_RUN, "1")
    torch.manual_seed(7)
    torch.rand(3)
    before = torch.get_rng_state()
    lab = CASES[name].make()
    assert len(lab.runs) == 1, "where it is asked for a lab presses its own run"
    assert torch.equal(torch.get_rng_state(), before)
    lab.still()
    lab.run()
    lab.wait()
    assert torch.equal(torch.get_rng_state(), before)
    assert {found - expected for run in lab.runs for _, expected, found in run.comparisons} == {0}


@MADE
def test_the_still_is_the_lab_before_anybody_touched_it(name: str) -> None:
    lab = CASES[name].make()
    first = lab.still()._repr_mimebundle_()
    assert set(first[0]) == {"image/png", "text/plain"}
    if name != "offload":
        assert first[0]["text/plain"] == read(lab.predicted)
    start = lab.values
    for slider in lab.sliders.values():
        slider.value = slider.options[-1][1]
    lab.run()
    lab.wait()
    assert lab.values != start
    assert lab.still()._repr_mimebundle_() == first


@MADE
def test_only_widgets_that_old_and_new_ipywidgets_share(name: str) -> None:
    kinds, todo = set(), [CASES[name].make().view]
    while todo:
        widget = todo.pop()
        kinds.add(type(widget).__name__)
        todo += getattr(widget, "children", ())
    assert kinds == {"VBox", "Box", "SelectionSlider", "Button", "HTML"}


@MADE
def test_pictures_are_images_with_words(name: str) -> None:
    lab = CASES[name].make()
    for widget in (lab.memory, lab.prediction):
        assert re.fullmatch(r'<img alt="[^"]{30,}" style="[^"]*" src="data:image/png;base64,[\w+/=]+">', widget.value)


def test_sliders_reach_around_where_they_start() -> None:
    def choices(lab: labs.Lab, name: str) -> list[int]:
        return [value for _, value in lab.sliders[name].options]

    lab = CASES["activations"].make()
    assert choices(lab, "seq_len") == [8, 12, 24, 48, 96], "none below 8"
    assert choices(lab, "n_layers") == [1, 2, 3, 4, 5, 6] and choices(lab, "batch_size") == [1, 2, 3, 4]
    assert choices(labs.checkpointing_lab(2, 32, 2, 1, 256), "seq_len") == [16, 32, 64, 128, 256, 512, 1024]
    assert choices(CASES["selective"].make(), "checkpoint_every") == [1, 2, 3]
    smallest = labs.selective_lab(1, 32, 1, 1, seq_len=8, checkpoint_every=1)
    assert choices(smallest, "seq_len") == [8, 16, 32]
    assert choices(smallest, "checkpoint_every") == [1, 2], "a slider needs two ends"
    assert labs.selective_lab(2, 32, 1, 1, seq_len=8, checkpoint_every=7).values["checkpoint_every"] == 7
    assert choices(CASES["chunks"].make(), "chunks") == [1, 2, 3]
    assert choices(CASES["budget"].make(), "budget") == [20, 30, 40, 50, 60, 70, 80, 90, 100]


def test_the_budget_lab_says_which_blocks_it_keeps() -> None:
    lab = CASES["budget"].make()
    for percent, kept in ((90, "blocks 1, 2"), (100, "blocks 0, 1, 2")):
        lab.sliders["budget"].value = percent
        actions = fastest(lab.values).strategy.actions
        assert kept == "blocks " + ", ".join(str(i) for i, action in enumerate(actions) if action == "keep")
        within = human_bytes(budget_of(lab.values))
        assert read(lab.predicted).endswith(f" Within {within} the fastest plan keeps {kept}.")


def test_labs_on_one_block_and_short_sequences() -> None:
    lab = labs.chunks_lab(1, 32, 2, 1, seq_len=4, chunks=1)
    assert [value for _, value in lab.sliders["seq_len"].options] == [4, 8, 16]
    lab.sliders["chunks"].value = 2
    why = "2 chunks need as many blocks; this stack has 1."
    setting = "chunks 2, seq_len 4, the last chunk runs again"
    assert read(lab.predicted) == f"Predicted at {setting}: {why}"
    lab.run_button.click()
    lab.wait()
    assert read(lab.status) == f"Refused at {setting}: {why}" and lab.runs == []


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (lambda: labs.activations_lab(0, 32, 2, 1, 8), "n_layers must be a whole number of at least 1, got 0"),
        (lambda: labs.selective_lab(2, 32, 2, 1, 16.0, 1), "seq_len must be a whole number of at least 1, got 16.0"),
        (lambda: labs.checkpointing_lab(2, 32, 2, True, 16), "batch_size must be a whole number"),
        (lambda: labs.chunks_lab(2, 32, 2, 1, 16, 9), "chunks starts at 9, which is none of 1, 2"),
        (lambda: labs.budget_lab(2, 32, 2, 1, 16, percent=65), "budget starts at 65, which is none of 20, 30, 40"),
        (lambda: labs.offload_lab(2, 32, 3, 1, 16), "heads must divide hidden: 32 is not a multiple of 3"),
        (lambda: labs.offload_lab(2, 32, 2, 1, 16, device="gpu"), 'device must be "auto", "cpu"'),
    ],
)
def test_a_wrong_argument_is_named_at_once(make: Callable[[], labs.Lab], says: str) -> None:
    with pytest.raises((TypeError, ValueError), match=re.escape(says)):
        make()


def test_the_default_type_of_tensors_changes_no_byte() -> None:
    torch.set_default_dtype(torch.float64)
    try:
        lab = CASES["selective"].make()
        lab.run()
        lab.wait()
    finally:
        torch.set_default_dtype(torch.float32)
    assert {found - expected for _, expected, found in lab.runs[0].comparisons} == {0}
