"""The lab driven in-process: sliders are set, buttons clicked, and what the reader would see is read."""

from __future__ import annotations

import re
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import nn

from lab_reading import read, rows
from memsave_lib import formulas
from memsave_lib.comparison import measure
from memsave_lib.labs import Job, Lab, LabConfig, Prediction, Slider, selective_lab
from memsave_lib.labs.component import PRESS_RUN
from memsave_lib.models import BlockStack
from memsave_lib.strategies import KeepAll, Selective
from memsave_lib.units import exact_bytes

SHAPE = dict(n_layers=5, hidden=32, heads=2, batch_size=3)
Values = dict[str, int]


@pytest.fixture(autouse=True)
def no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


@pytest.fixture(autouse=True)
def nobody_presses_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(PRESS_RUN, raising=False)


def state(lab: Lab) -> tuple[bool, bool, bool]:
    """Running, and which of Run and Stop can be pressed."""
    return lab.running, not lab.run_button.disabled, not lab.stop_button.disabled


IDLE, RUNNING = (False, True, False), (True, False, True)


def make_lab(seq_len: int = 24, checkpoint_every: int = 2) -> Lab:
    return selective_lab(**SHAPE, seq_len=seq_len, checkpoint_every=checkpoint_every)


def saved(seq_len: int, checkpoint_every: int) -> int:
    shape = formulas.BlockShape(SHAPE["batch_size"], seq_len, SHAPE["hidden"], SHAPE["heads"])
    return formulas.stack_saved_bytes(Selective(checkpoint_every).plan(SHAPE["n_layers"]), shape)


class Waiting(nn.Module):
    """A block that lets the test decide when forward goes on, and that may fail."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.entered, self.go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None
        self.finished = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.linear(x)
        self.entered.set()
        assert self.go_on.wait(30)
        if self.error is not None:
            raise self.error
        x = self.linear(x)
        self.finished = True
        return x


def waiting_lab(block: Waiting, **changes: object) -> Lab:
    model = nn.ModuleDict({"blocks": nn.ModuleList([block])})

    def prepare(values: Values) -> Job:
        return Job(model, KeepAll(), lambda: block(torch.ones(values["seq_len"], 4)).sum().backward())

    config = LabConfig(
        sliders=(Slider("seq_len", range(1, 9), 2), Slider("checkpoint_every", range(1, 4), 1)),
        along="checkpoint_every",
        predict=lambda values: Prediction(100 * values["seq_len"], 200 * values["seq_len"], needed_bytes=1000),
        prepare=prepare,
        free_bytes=lambda: None,
    )
    return Lab(replace(config, **changes))


def wait_until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_new_lab_shows_its_prediction() -> None:
    lab = make_lab()
    assert lab.values == {"seq_len": 24, "checkpoint_every": 2}
    assert read(lab.predicted).startswith(
        f"Predicted at seq_len 24, checkpoint_every 2: saved {exact_bytes(saved(24, 2))}, peak of the whole step "
    )
    assert read(lab.status) == "No step has run yet: press Run."
    assert lab.table.value == ""
    assert state(lab) == IDLE
    for picture in (lab.prediction, lab.memory):
        assert re.match(
            r'<img alt="[^"]{10,}" width="\d+" height="\d+" [^>]*src="data:image/png;base64,', picture.value
        )


def test_a_slider_moves_prediction_sentence_and_picture_at_once() -> None:
    lab = make_lab()
    for seq_len, every in ((24, 3), (48, 3), (96, 1), (8, 5)):
        before = lab.prediction.value
        lab.sliders["seq_len"].value = seq_len
        lab.sliders["checkpoint_every"].value = every
        assert f"seq_len {seq_len}, checkpoint_every {every}: saved {exact_bytes(saved(seq_len, every))}," in read(
            lab.predicted
        )
        assert lab.prediction.value != before


def test_the_sliders_reach_around_the_parameters() -> None:
    lab = make_lab(seq_len=24)
    assert [value for _, value in lab.sliders["seq_len"].options] == [8, 12, 24, 48, 96]
    assert (lab.sliders["checkpoint_every"].min, lab.sliders["checkpoint_every"].max) == (1, 5)
    smallest = selective_lab(1, 64, 1, 1, seq_len=8, checkpoint_every=1)
    assert [value for _, value in smallest.sliders["seq_len"].options] == [8, 16, 32]
    assert smallest.sliders["checkpoint_every"].max == 2, "a slider needs two ends"
    assert selective_lab(2, 64, 1, 1, seq_len=8, checkpoint_every=7).values["checkpoint_every"] == 7


@pytest.mark.parametrize(("seq_len", "every"), [(24, 2), (24, 1), (48, 5), (8, 3)])
def test_run_measures_what_was_predicted_and_what_measure_gives(seq_len: int, every: int) -> None:
    lab = make_lab()
    lab.sliders["seq_len"].value, lab.sliders["checkpoint_every"].value = seq_len, every
    lab.run_button.click()
    lab.wait()
    assert state(lab) == IDLE

    model = BlockStack(SHAPE["n_layers"], SHAPE["hidden"], SHAPE["heads"])
    x = torch.randn(SHAPE["batch_size"], seq_len, SHAPE["hidden"])

    def step() -> torch.Tensor:
        loss = model(x).sum()
        loss.backward()
        return loss

    expected = measure(step, model, Selective(every), repeats=0)
    (run,) = lab.runs
    assert (run.trace.saved_bytes, run.trace.peak_bytes) == (expected.saved_bytes, expected.peak_bytes)
    assert (run.prediction.saved_bytes, run.prediction.peak_bytes) == (expected.saved_bytes, expected.peak_bytes)
    assert str(run.trace.peak_at) == str(expected.trace.peak_at)
    assert read(lab.status).startswith(
        f"Run 1 at seq_len {seq_len}, checkpoint_every {every}: saved {exact_bytes(expected.saved_bytes)}, "
        f"0 bytes off the prediction; peak {exact_bytes(expected.peak_bytes)}, 0 bytes off the prediction. "
    )


def test_runs_fill_the_table_and_stay_as_outlines() -> None:
    lab = make_lab()
    lab.run_button.click()
    lab.wait()
    first = lab.memory.value
    lab.sliders["checkpoint_every"].value = 1
    lab.run_button.click()
    lab.wait()
    assert lab.memory.value != first
    head, one, two = rows(lab)
    assert head == [
        "run", "seq_len", "checkpoint_every", "saved, predicted", "saved, measured", "error, bytes",
        "peak, predicted", "peak, measured", "error, bytes", "the peak is in",
    ]  # fmt: skip
    assert one[:3] == ["1", "24", "2"] and two[:3] == ["2", "24", "1"]
    assert one[5] == one[8] == two[5] == two[8] == "0"
    assert two[9].startswith("backward, blocks.4")


def test_the_memory_grows_on_screen_while_a_step_runs() -> None:
    block = Waiting()
    lab = waiting_lab(block)
    before = lab.memory.value
    lab.run_button.click()
    assert block.entered.wait(30)
    wait_until(lambda: "live now" in read(lab.status))
    assert lab.memory.value != before
    assert read(lab.status) == "Running at seq_len 2, checkpoint_every 1: 144 B live now."
    assert state(lab) == RUNNING
    block.go_on.set()
    lab.wait()
    assert read(lab.status).startswith("Run 1 at seq_len 2")


def test_run_pressed_twice_is_one_run() -> None:
    block = Waiting()
    lab = waiting_lab(block)
    lab.run_button.click()
    lab.run_button.click()
    block.go_on.set()
    lab.wait()
    assert len(lab.runs) == 1


def test_a_slider_moved_during_a_run_changes_the_prediction_and_not_the_run() -> None:
    block = Waiting()
    lab = waiting_lab(block)
    lab.run_button.click()
    assert block.entered.wait(30)
    lab.sliders["seq_len"].value = 7
    assert read(lab.predicted).startswith("Predicted at seq_len 7, checkpoint_every 1: saved 700 bytes, ")
    block.go_on.set()
    lab.wait()
    assert lab.runs[0].values == {"seq_len": 2, "checkpoint_every": 1}
    assert read(lab.predicted).startswith("Predicted at seq_len 7"), "no old numbers come back with the run"
    assert rows(lab)[1][:4] == ["1", "2", "1", "200 B"]


def test_stop_ends_a_step_midway() -> None:
    block = Waiting()
    lab = waiting_lab(block)
    lab.run_button.click()
    assert block.entered.wait(30)
    lab.stop_button.click()
    block.go_on.set()
    lab.wait()
    assert read(lab.status) == "Stopped at seq_len 2, checkpoint_every 1, with 144 B live."
    assert lab.runs == [] and state(lab) == IDLE
    assert not block.finished
    lab.run_button.click()
    lab.wait()
    assert len(lab.runs) == 1, "a stopped lab runs again"
    assert block.finished and block.linear.weight.grad is None, "gradients are not left to the next run"


def test_reset_forgets_runs_and_puts_the_sliders_back() -> None:
    block = Waiting()
    block.go_on.set()
    lab = waiting_lab(block)
    fresh = [widget.value for widget in (lab.prediction, lab.memory, lab.predicted, lab.status, lab.table)]
    lab.sliders["seq_len"].value = 5
    lab.run_button.click()
    lab.wait()
    lab.reset_button.click()
    assert lab.runs == [] and lab.values == {"seq_len": 2, "checkpoint_every": 1}
    assert [widget.value for widget in (lab.prediction, lab.memory, lab.predicted, lab.status, lab.table)] == fresh


def test_reset_ends_a_running_step() -> None:
    block = Waiting()
    lab = waiting_lab(block)
    lab.run_button.click()
    assert block.entered.wait(30)
    threading.Timer(0.2, block.go_on.set).start()
    lab.reset_button.click()
    assert state(lab) == IDLE and lab.runs == []
    assert read(lab.status) == "No step has run yet: press Run."


def test_a_step_that_does_not_fit_is_refused_with_the_numbers() -> None:
    block = Waiting()
    lab = waiting_lab(block, free_bytes=lambda: 999)
    lab.run_button.click()
    lab.wait()
    assert read(lab.status) == (
        "Refused at seq_len 2, checkpoint_every 1: the step needs 1000 B, and 999 B are free. Choose smaller numbers."
    )
    assert 'role="alert"' in lab.status.value
    assert not block.entered.is_set() and state(lab) == IDLE


def test_what_the_worker_raises_is_shown_and_raised_again(capfd: pytest.CaptureFixture[str]) -> None:
    block = Waiting()
    block.error = RuntimeError("made to <fail>")
    block.go_on.set()
    lab = waiting_lab(block)
    lab.run_button.click()
    with pytest.raises(RuntimeError, match="made to <fail>"):
        lab.wait()
    assert read(lab.status) == "Failed: RuntimeError: made to <fail>"
    assert state(lab) == IDLE and lab.runs == []
    assert capfd.readouterr() == ("", ""), "the worker never prints"
    block.error = None
    lab.run_button.click()
    lab.wait()
    assert read(lab.status).startswith("Run 1 at"), "the next run starts with a clean slate"


def test_a_failed_step_leaves_no_tensors_behind() -> None:
    block = Waiting()
    block.error = RuntimeError("made to fail")
    block.go_on.set()
    lab = waiting_lab(block)
    lab.run_button.click()
    with pytest.raises(RuntimeError) as caught:
        lab.wait()
    trace, held = caught.value.__traceback__, []
    while trace is not None:
        held += [value for value in trace.tb_frame.f_locals.values() if isinstance(value, torch.Tensor)]
        trace = trace.tb_next
    assert held == []


def test_a_failing_callback_is_shown_and_raised_again() -> None:
    def predict(values: Values) -> Prediction:
        if values["seq_len"] == 6:
            raise ZeroDivisionError("no prediction for 6")
        return Prediction(1, None, needed_bytes=1)

    lab = waiting_lab(Waiting(), predict=predict)
    lab.sliders["seq_len"].value = 6
    assert read(lab.status) == "Failed: ZeroDivisionError: no prediction for 6"
    with pytest.raises(ZeroDivisionError, match="no prediction for 6"):
        lab.wait()


def test_a_failing_picture_ends_the_step_too() -> None:
    block = Waiting()
    lab = waiting_lab(block)
    lab.run_button.click()
    assert block.entered.wait(30)
    lab.runs.append("not a run")  # drawing its outline fails
    wait_until(lambda: lab.error is not None)
    assert read(lab.status).startswith("Failed: AttributeError")
    block.go_on.set()
    with pytest.raises(AttributeError):
        lab.wait()
    assert state(lab) == IDLE and not block.finished


def test_without_a_formula_for_the_peak_only_saved_bytes_are_compared() -> None:
    block = Waiting()
    block.go_on.set()
    lab = waiting_lab(block, predict=lambda values: Prediction(32, None, needed_bytes=1))
    assert read(lab.predicted) == "Predicted at seq_len 2, checkpoint_every 1: saved 32 bytes."
    lab.run_button.click()
    lab.wait()
    assert [what for what, _, _ in lab.runs[0].comparisons] == ["saved"]
    assert len(rows(lab)[0]) == 7


def test_a_lab_shows_the_same_text_everywhere_and_its_widget() -> None:
    lab = make_lab()
    bundle = lab._repr_mimebundle_()
    assert (
        bundle["text/plain"]
        == repr(lab)
        == ("A lab with sliders for seq_len and checkpoint_every: run this cell, move them, press Run.")
    )
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == lab.view.model_id


def test_where_it_is_asked_for_a_lab_presses_its_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRESS_RUN, "1")
    assert len(make_lab().runs) == 1
    block = Waiting()
    block.error = RuntimeError("made to fail")
    block.go_on.set()
    with pytest.raises(RuntimeError, match="made to fail"):
        waiting_lab(block)


def test_only_widgets_that_old_and_new_ipywidgets_share() -> None:
    lab = make_lab()
    kinds, todo = set(), [lab.view]
    while todo:
        widget = todo.pop()
        kinds.add(type(widget).__name__)
        todo += getattr(widget, "children", ())
    assert kinds == {"VBox", "Box", "IntSlider", "SelectionSlider", "Button", "HTML"}
