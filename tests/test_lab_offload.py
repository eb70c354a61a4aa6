"""The lab on offloading, driven in-process: the simulated picture follows the sliders, Run measures a real step."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

import memsave_lib as ms
from lab_reading import alt, read, rows
from memsave_lib import formulas, plots
from memsave_lib.course.costs import stack_costs
from memsave_lib.devices import Device
from memsave_lib.labs import offload_lab, offload_picture
from memsave_lib.labs.offload import BANDWIDTH, BANDWIDTHS, SENT
from memsave_lib.simulation import simulate
from memsave_lib.units import exact_bytes, human_bytes

SHAPE = dict(n_layers=4, hidden=64, heads=2, batch_size=2)


pytestmark = pytest.mark.usefixtures("no_thread_is_left", "nobody_presses_run")


def shape_at(seq_len: int) -> formulas.BlockShape:
    return formulas.BlockShape(2, seq_len, 64, 2)


def sentence_at(bandwidth: int, seq_len: int, prefetch: int) -> str:
    """The two timelines, simulated by hand."""
    device = Device("by hand", flops=1e11, copy_out=bandwidth * 1e6, copy_in=bandwidth * 1e6)
    timelines = {}
    for name, strategy in (("everything", ms.KeepAll()), ("checkpoints only", ms.FullCheckpoint())):
        plan = ms.Offload(strategy).plan(4)
        timelines[name] = simulate(stack_costs(shape_at(seq_len), 4), plan, device, prefetch=prefetch)
    return plots.stream_lanes(timelines).sentence


def test_sliders_move_the_simulated_picture_at_once() -> None:
    lab = offload_lab(**SHAPE, seq_len=256)
    assert lab.values == {BANDWIDTH: 1000, "seq_len": 256, "prefetch": 4, SENT: "everything"}
    seen = {lab.prediction.value}
    for bandwidth, seq_len, prefetch in ((125, 256, 4), (16000, 512, 4), (16000, 512, 0), (30, 1024, 2)):
        values = {BANDWIDTH: bandwidth, "seq_len": seq_len, "prefetch": prefetch}
        for name, value in values.items():
            lab.sliders[name].value = value
        assert read(lab.predicted) == (
            f"Simulated at bandwidth {bandwidth} MB/s, seq_len {seq_len}, prefetch {prefetch}, "
            f"Run sends everything. {sentence_at(bandwidth, seq_len, prefetch)}"
        )
        assert alt(lab.prediction) == read(lab.predicted), "who cannot see it reads the same"
        seen.add(lab.prediction.value)
    assert len(seen) == 5


def test_the_bandwidths_double_or_nearly_so() -> None:
    assert all(2 <= after / before < 2.1 for before, after in pairwise(BANDWIDTHS))
    lab = offload_lab(**SHAPE, seq_len=256)
    assert [value for _, value in lab.sliders[BANDWIDTH].options] == list(BANDWIDTHS)
    assert [value for _, value in lab.sliders["prefetch"].options] == [0, 1, 2, 3, 4]


@pytest.mark.parametrize(
    ("seq_len", "prefetch", "leaves", "strategy"),
    [
        (256, 2, "everything", ms.KeepAll()),
        (256, 0, "everything", ms.KeepAll()),
        (64, 1, "everything", ms.KeepAll()),
        (256, 2, "checkpoints", ms.FullCheckpoint()),
    ],
)
def test_run_sends_what_was_predicted(seq_len: int, prefetch: int, leaves: str, strategy: ms.Strategy) -> None:
    lab = offload_lab(**SHAPE, seq_len=256)
    for name, value in (("seq_len", seq_len), ("prefetch", prefetch), (SENT, leaves)):
        lab.sliders[name].value = value
    lab.run_button.click()
    lab.wait()
    (run,) = lab.runs
    plan = ms.Offload(strategy).plan(4)
    sent, saved = (of(plan, shape_at(seq_len)) for of in (formulas.offloaded_bytes, formulas.stack_saved_bytes))
    assert (run.trace.disk_peak_bytes, run.trace.saved_bytes) == (sent, saved)
    assert run.trace.host_peak_bytes == 0, "the disk it is"

    stack, x = ms.BlockStack(4, 64, 2), torch.randn(2, seq_len, 64)
    with ms.apply(stack, ms.Offload(strategy, store="disk", prefetch=prefetch)) as applied:
        stack(x).sum().backward()
    traffic = applied.report.offload
    assert traffic.moved.bytes == sent
    setting = f"seq_len {seq_len}, prefetch {prefetch}, Run sends {leaves}"
    assert read(lab.status) == (
        f"Run 1 at {setting}: saved {exact_bytes(saved)}, 0 bytes off the prediction; sent {exact_bytes(sent)}, "
        f"0 bytes off the prediction. The peak is in {run.trace.peak_at.in_words}. "
        f"{traffic.moved.tensors} tensors left, "
        f"{traffic.prefetch_hits} were on their way back when asked for."
    )
    assert (traffic.prefetch_hits == 0) == (prefetch == 0)
    assert [len(lane) for lane in (run.copies.copy_out, run.copies.copy_in)] == [traffic.moved.tensors] * 2
    assert sum(span.nbytes for span in run.copies.copy_out) == sent
    assert [row[1:6] for row in rows(lab)[1:]] == [
        [setting, what, human_bytes(size), human_bytes(size), "0"] for what, size in (("saved", saved), ("sent", sent))
    ]


def test_after_a_run_other_settings_show_it_as_a_ghost() -> None:
    lab = offload_lab(**SHAPE, seq_len=64)
    before = lab.memory.value
    lab.run_button.click()
    lab.wait()
    lab.sliders["prefetch"].value = 0
    assert alt(lab.memory).endswith("prefetch 0, Run sends everything: no such step has run.")
    assert lab.memory.value.partition("src=")[2] != before.partition("src=")[2], "the outline of run 1 is there"


def test_one_block_has_nothing_to_send() -> None:
    lab = offload_lab(1, 64, 1, 1, seq_len=8)
    assert read(lab.predicted).count("no copies") == 2
    lab.run_button.click()
    lab.wait()
    assert lab.runs[0].measured["sent"] == 0


def test_the_static_picture_shows_the_same_without_seconds() -> None:
    with_seconds = offload_picture(shape_at(256), 4, 1000, 2)
    assert with_seconds.sentence == sentence_at(1000, 256, 2)
    without = offload_picture(shape_at(256), 4, 1000, 2, seconds=False)
    assert "everything: " in without.sentence and " ms" not in without.sentence


def test_the_still_is_the_static_picture() -> None:
    lab = offload_lab(**SHAPE, seq_len=256)
    lab.sliders[BANDWIDTH].value = 125
    assert lab.still().sentence == offload_picture(shape_at(256), 4, 1000, 4, seconds=False).sentence


def test_a_lab_says_its_sliders() -> None:
    lab = offload_lab(**SHAPE, seq_len=256)
    assert " ".join(repr(lab).split()) == (
        "A lab with sliders for bandwidth and seq_len and prefetch and Run sends: run this cell, move them, press Run. "
        + lab.still().sentence
    )


def test_the_bandwidth_is_nothing_that_a_real_step_depends_on() -> None:
    lab = offload_lab(**SHAPE, seq_len=64)
    lab.run_button.click()
    lab.wait()
    lab.sliders[BANDWIDTH].value = 125
    assert "bandwidth 125 MB/s" in alt(lab.memory) and ": Peak " in alt(lab.memory), "the run is shown still"
