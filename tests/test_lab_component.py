"""What all labs share, driven in-process: sliders are set, buttons clicked, and what the reader would see is read."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from collections import Counter
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import nn

from lab_reading import alt, read, rows
from memsave_lib import plots
from memsave_lib.labs import Job, Lab, LabConfig, Prediction, Slider, selective_lab
from memsave_lib.labs.component import PRESS_RUN
from memsave_lib.strategies import KeepAll
from memsave_lib.trace import CATEGORIES

Values = dict[str, int]


pytestmark = pytest.mark.usefixtures("no_thread_is_left", "nobody_presses_run")


def state(lab: Lab) -> tuple[bool, bool, bool]:
    """Running, and which of Run and Stop can be pressed."""
    return lab.running, not lab.run_button.disabled, not lab.stop_button.disabled


IDLE, RUNNING = (False, True, False), (True, False, True)
START = "seq_len 2, checkpoint_every 1"


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


def small_lab() -> Lab:
    return selective_lab(3, 32, 2, 2, seq_len=24, checkpoint_every=2)


def finished(lab: Lab) -> Lab:
    lab.run_button.click()
    lab.wait()
    return lab


def test_a_new_lab_shows_its_prediction() -> None:
    lab = waiting_lab(Waiting())
    assert read(lab.predicted) == f"Predicted at {START}: saved 200 bytes, peak of the whole step 400 bytes."
    assert alt(lab.memory) == f"Memory against time at {START}: no such step has run."
    assert read(lab.status) == "No step has run yet: press Run."
    assert lab.table.value == "" and state(lab) == IDLE and lab.runs == []


def test_a_slider_moves_both_pictures_and_the_sentence_at_once() -> None:
    lab = small_lab()
    seen = [(lab.memory.value, lab.prediction.value, lab.predicted.value)]
    for seq_len, every in ((24, 3), (48, 3), (96, 1)):
        lab.sliders["seq_len"].value, lab.sliders["checkpoint_every"].value = seq_len, every
        seen.append((lab.memory.value, lab.prediction.value, lab.predicted.value))
    assert [len(set(column)) for column in zip(*seen, strict=True)] == [4, 4, 4]


def test_the_memory_grows_on_screen_in_categories_while_a_step_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    scenes: list[plots.Scene] = []
    draw = plots.MemoryPicture.draw
    monkeypatch.setattr(plots.MemoryPicture, "draw", lambda self, scene: scenes.append(scene) or draw(self, scene))
    block = Waiting()
    lab = waiting_lab(block)
    before = lab.memory.value
    lab.run_button.click()
    assert block.entered.wait(30)
    wait_until(lambda: "144 B live now" in read(lab.status))
    assert read(lab.status) == f"Running at {START}: 144 B live now."
    assert alt(lab.memory) == f"Memory against time at {START}: 144 B live now."
    assert lab.memory.value != before and state(lab) == RUNNING
    running = scenes[-1]
    assert running.running and list(running.trace.live_bytes) == [80, 112, 144]
    # Sixteen weights and four biases, an input of two tokens that is saved, and what the first layer has made of it.
    at_end = {name: size for name, size in running.trace.at_end.items() if size}
    assert at_end == {"parameter": 80, "activation": 32, "output": 32} and set(at_end) <= set(CATEGORIES)
    block.go_on.set()
    lab.wait()
    assert not scenes[-1].running and scenes[-1].trace is lab.runs[0].trace
    assert read(lab.status).startswith(f"Run 1 at {START}: ")


def test_the_values_of_an_earlier_run_show_that_run_again() -> None:
    lab = finished(small_lab())
    first = alt(lab.memory)
    assert first.startswith("Memory against time at seq_len 24, checkpoint_every 2: Peak ")
    lab.sliders["checkpoint_every"].value = 3
    assert "checkpoint_every 3: predicted peak " in alt(lab.memory)
    assert alt(lab.memory).endswith("; no such step has run.")
    finished(lab)
    second = alt(lab.memory)
    assert second.startswith("Memory against time at seq_len 24, checkpoint_every 3: Peak ")
    lab.sliders["checkpoint_every"].value = 2
    assert alt(lab.memory) == first
    lab.sliders["checkpoint_every"].value = 3
    assert alt(lab.memory) == second
    lab.sliders["checkpoint_every"].value = 1
    assert "checkpoint_every 1: predicted peak " in alt(lab.memory)


def test_earlier_runs_stand_behind_as_ghosts(monkeypatch: pytest.MonkeyPatch) -> None:
    scenes: list[plots.Scene] = []
    draw = plots.MemoryPicture.draw
    monkeypatch.setattr(plots.MemoryPicture, "draw", lambda self, scene: scenes.append(scene) or draw(self, scene))
    lab = small_lab()
    assert [ghost.name for ghost in scenes[-1].ghosts] == [] and scenes[-1].pace is None

    def shown() -> tuple[bool, list[str]]:
        assert (scenes[-1].pace is not None) == bool(lab.runs)
        return scenes[-1].events, [ghost.name for ghost in scenes[-1].ghosts]

    for every in (1, 2, 3):
        lab.sliders["checkpoint_every"].value = every
        finished(lab)
    assert shown() == (True, ["run 1", "run 2"]), "the run itself is no ghost"
    lab.sliders["checkpoint_every"].value = 1
    assert shown() == (True, ["run 2", "run 3"])
    lab.sliders["seq_len"].value = 12
    assert shown() == (False, ["run 1", "run 2", "run 3"])
    finished(lab)
    lab.sliders["seq_len"].value = 8
    assert shown() == (False, ["run 2", "run 3", "run 4"]), "three at most"


def test_a_prediction_is_made_once_for_a_setting() -> None:
    asked: Counter[tuple[int, ...]] = Counter()

    def predict(values: Values) -> Prediction:
        asked[tuple(values.values())] += 1
        return Prediction(1, None, needed_bytes=1)

    block = Waiting()
    block.go_on.set()
    lab = waiting_lab(block, predict=predict, same_scale="checkpoint_every")
    assert asked == {(2, 1): 1, (2, 2): 1, (2, 3): 1}, "the setting, and what stands beside it on the curve"
    finished(lab)
    lab.sliders["checkpoint_every"].value = 3
    lab.still()
    finished(lab)
    lab.reset_button.click()
    assert asked == {(2, 1): 1, (2, 2): 1, (2, 3): 1}
    lab.sliders["seq_len"].value = 3
    assert asked == {(seq_len, every): 1 for seq_len in (2, 3) for every in (1, 2, 3)}


def test_where_there_is_nothing_to_run_an_obstacle_is_said() -> None:
    block = Waiting()
    why = "two tokens do not fit into one."
    lab = waiting_lab(block, predict=lambda values: Prediction(0, None, needed_bytes=0, obstacle=why))
    assert read(lab.predicted) == f"Predicted at {START}: {why}"
    lab.run_button.click()
    lab.wait()
    assert read(lab.status) == f"Refused at {START}: {why}"
    assert 'role="alert"' in lab.status.value
    assert not block.entered.is_set() and state(lab) == IDLE and lab.runs == []


def test_the_table_has_a_row_for_each_number() -> None:
    block = Waiting()
    block.go_on.set()
    lab = finished(finished(waiting_lab(block)))
    where = "backward, block 0, linear"
    seconds = [f"{run.trace.seconds:.2f}" for run in lab.runs]
    assert rows(lab) == [
        ["run", "with", "", "predicted", "measured", "error, bytes", "the peak is in", "seconds"],
        ["1", START, "saved", "200 B", "64 B", "-136", where, seconds[0]],
        ["1", START, "peak", "400 B", "312 B", "-88", where, seconds[0]],
        ["2", START, "saved", "200 B", "64 B", "-136", where, seconds[1]],
        ["2", START, "peak", "400 B", "312 B", "-88", where, seconds[1]],
    ]


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
    assert rows(lab)[1][:4] == ["1", START, "saved", "200 B"]


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
    reset = threading.Thread(target=lab.reset_button.click)
    reset.start()
    wait_until(lab._stop.is_set)
    block.go_on.set()
    reset.join(30)
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
    lab.runs.append("not a run")  # drawing it as a ghost fails
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
    assert [row[2] for row in rows(lab)[1:]] == ["saved"]


def test_where_it_is_asked_for_a_lab_presses_its_own_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(PRESS_RUN, "1")
    assert len(small_lab().runs) == 1
    block = Waiting()
    block.error = RuntimeError("made to fail")
    block.go_on.set()
    with pytest.raises(RuntimeError, match="made to fail"):
        waiting_lab(block)


def test_a_lab_prints_nothing(capfd: pytest.CaptureFixture[str]) -> None:
    lab = finished(small_lab())
    lab.still()
    lab.reset_button.click()
    assert capfd.readouterr() == ("", "")


def test_a_lab_shows_the_same_text_everywhere_and_its_widget() -> None:
    lab = small_lab()
    bundle = lab._repr_mimebundle_()
    assert bundle["text/plain"] == repr(lab)
    start = "A lab with sliders for seq_len and checkpoint_every: run this cell, move them, press Run. "
    assert " ".join(repr(lab).split()) == start + lab.still().sentence
    assert bundle["application/vnd.jupyter.widget-view+json"]["model_id"] == lab.view.model_id


def test_a_slider_starts_at_one_of_its_choices() -> None:
    with pytest.raises(ValueError, match="bandwidth starts at 300, which is none of 125, 250"):
        Slider("bandwidth", (125, 250), 300)


def of_its_own(made: list[weakref.ref], error: str = "") -> Callable[[Values], Job]:
    """A step of a model and an input that nobody else holds."""

    def prepare(values: Values) -> Job:
        block, x = Waiting(), torch.ones(values["seq_len"], 4)
        block.go_on.set()
        block.error = RuntimeError(error) if error else None
        made.extend((weakref.ref(block), weakref.ref(x)))
        model = nn.ModuleDict({"blocks": nn.ModuleList([block])})
        return Job(model, KeepAll(), lambda: block(x).sum().backward())

    return prepare


@pytest.mark.parametrize("error", ["", "made to fail"])
def test_a_run_leaves_neither_model_nor_input_behind(error: str) -> None:
    made: list[weakref.ref] = []
    lab = waiting_lab(Waiting(), prepare=of_its_own(made, error))
    lab.run_button.click()
    wait_until(lambda: not lab.running)
    gc.collect()
    assert [ref() for ref in made] == [None, None]
    assert (str(lab.error) == error) if error else len(lab.runs) == 1


def test_where_the_worker_failed_stays_as_a_note() -> None:
    lab = waiting_lab(Waiting(), prepare=of_its_own([], "made to fail"))
    lab.run_button.click()
    with pytest.raises(RuntimeError, match="made to fail") as caught:
        lab.wait()
    assert "in forward" in caught.value.__notes__[0]


def test_a_step_without_operations_spoils_no_later_picture() -> None:
    lab = waiting_lab(Waiting())
    model = nn.ModuleDict({"blocks": nn.ModuleList([Waiting()])})
    lab.config = replace(lab.config, prepare=lambda values: Job(model, KeepAll(), lambda: None))
    finished(lab)
    lab.sliders["seq_len"].value = 5
    lab.wait()
    assert alt(lab.memory) == "Memory against time at seq_len 5, checkpoint_every 1: no such step has run."


def test_where_no_thread_is_to_be_had_the_lab_says_so_and_runs_later(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    block = Waiting()
    block.go_on.set()
    lab = waiting_lab(block)
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", start)
        lab.run_button.click()
    assert read(lab.status) == "Failed: RuntimeError: can't start new thread" and state(lab) == IDLE
    assert read(finished(lab).status).startswith("Run 1 at")


def test_an_interrupt_while_a_picture_is_drawn_ends_the_run_and_is_kept() -> None:
    block, interrupt = Waiting(), threading.Event()

    def picture(values: Values) -> plots.Shown:
        if interrupt.is_set():
            raise KeyboardInterrupt
        return plots.MemoryPicture().draw(plots.Scene())

    lab = waiting_lab(block, picture=picture)
    interrupt.set()
    block.go_on.set()
    lab.run_button.click()
    with pytest.raises(KeyboardInterrupt):
        lab.wait()
    assert read(lab.status).startswith("Failed: KeyboardInterrupt") and state(lab) == IDLE


def test_run_from_two_threads_is_one_run() -> None:
    block, others = Waiting(), []

    def free_bytes() -> None:
        if not others:  # asked while the first run begins
            others.append(threading.Thread(target=lab.run))
            others[0].start()
            others[0].join(0.3)

    lab = waiting_lab(block, free_bytes=free_bytes)
    lab.run()
    others[0].join()
    block.go_on.set()
    lab.wait()
    assert len(lab.runs) == 1 and len(others) == 1
