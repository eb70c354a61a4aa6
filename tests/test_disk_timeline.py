"""A step on disk, predicted and measured: copies and their order are equal; the arithmetic of the error, by hand."""

from __future__ import annotations

import threading

import pytest
import torch

from memsave_lib import devices, formulas
from memsave_lib.course import disk_timeline
from memsave_lib.course.disk_timeline import Comparison, Step, calibrated, compare, median_step
from memsave_lib.devices import Device
from memsave_lib.formulas import BlockShape
from memsave_lib.lanes import Lanes, Span, StreamTimeline
from memsave_lib.simulation import simulate
from memsave_lib.strategies import KeepAll, Offload
from offloading import nameless_files

pytestmark = pytest.mark.skipif(disk_timeline.why_not() is not None, reason=str(disk_timeline.why_not()))

SHAPE = BlockShape(2, 128, 64, 2)
#: Its figures are of no importance to what leaves, and in which order.
MACHINE = Device("made up", flops=1e9, disk_write=1e9, disk_read=2e9)


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_copies_are_those_that_were_predicted(prefetch, tmp_path):
    found = compare(SHAPE, 3, prefetch=prefetch, seconds=1e-9, directory=tmp_path, machine=MACHINE)
    assert found.same_copies and found.predicted_copies == found.measured_copies
    out = [copy for copy in found.measured_copies if copy[0] == "out"]
    # Two blocks leave; the input of the first stays. Norms' statistics and log-sum-exp are too small.
    sizes = [size for size in formulas.block_storages(SHAPE) if size >= 64 * 1024]
    assert sizes == [65536, 65536, 196608, 65536, 65536, 65536, 262144, 262144]
    assert out == [("out", 0, size) for size in sizes[1:]] + [("out", 1, size) for size in sizes]
    assert found.measured_copies == (*out, *(("in", *rest) for _, *rest in reversed(out)))
    assert sum(size for _, _, size in out) == formulas.offloaded_bytes(Offload().plan(3), SHAPE)
    assert (found.prefetch, found.device.disk_write, found.device.disk_read) == (prefetch, 1e9, 2e9)
    assert found.predicted.prefetch_hits == (len(out) if prefetch else 0)
    assert f"prefetch={prefetch}: predicted " in found.sentence
    assert "Copies: 15 out, 15 back, as predicted." in found.sentence


def test_nothing_is_left_behind(tmp_path):
    before = (torch.get_rng_state().tolist(), threading.active_count(), nameless_files())
    compare(SHAPE, 2, seconds=1e-9, directory=tmp_path, machine=MACHINE)
    assert (torch.get_rng_state().tolist(), threading.active_count(), nameless_files()) == before
    assert list(tmp_path.iterdir()) == []


def test_computing_takes_one_thread_meanwhile(monkeypatch, tmp_path):
    run, seen = disk_timeline._run, []
    monkeypatch.setattr(disk_timeline, "_run", lambda *step: seen.append(torch.get_num_threads()) or run(*step))
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        compare(SHAPE, 2, seconds=1e-9, directory=tmp_path, machine=MACHINE)
        assert seen == [1] * 3 * (1 + disk_timeline.MIN_TURNS)
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_machine_is_measured_where_the_file_is(monkeypatch, tmp_path):
    asked = []
    monkeypatch.setattr(devices, "measure", lambda *where, seconds: asked.append((*where, seconds)) or MACHINE)
    found = compare(SHAPE, 2, seconds=1e-9, directory=tmp_path)
    assert asked == [("cpu", tmp_path, 0.5)]
    assert found.device.name == "made up, this stack"


def test_calibrated_costs_take_as_long_as_the_step_that_keeps_all():
    """Forward 2 s and backward 3 s in all: F is what forward reaches, and the blocks share both evenly."""
    costs, flops = calibrated(SHAPE, 4, Step(forward=2.0, backward=3.0))
    assert flops == sum(cost.forward for cost in costs) / 2
    # 24*h*h + 2*s*h FLOPs a token, for 256 tokens and 4 blocks.
    assert flops == 4 * 256 * (24 * 64 * 64 + 2 * 128 * 64) / 2
    kept = simulate(costs, KeepAll().plan(4), Device("this stack", flops=flops))
    assert [span.seconds for span in kept.compute] == pytest.approx([0.5] * 4 + [0.75] * 4)
    # With nothing under way every copy is waited for: bytes over rates are added to it.
    plan = Offload().plan(4)
    sent = formulas.offloaded_bytes(plan, SHAPE)
    blocking = simulate(costs, plan, Device("", flops=flops, disk_write=1e6, disk_read=2e6), prefetch=0, link="disk")
    assert blocking.step_seconds == pytest.approx(5 + sent / 1e6 + sent / 2e6)


def test_the_median_is_a_step_that_happened():
    steps = [Step(1.0, seconds) for seconds in (9.0, 2.0, 3.0, 1.0)]
    assert median_step(steps) is steps[1], "of 2, 3, 4 and 10 seconds: 3"
    assert median_step(steps[:3]) is steps[2]
    assert median_step(steps[:1]) is steps[0]


def by_hand(predicted_seconds: float = 9.0, back: int = 4) -> Comparison:
    """Predicted: 9 s, of which 2 waiting. Measured: 12 s, of which 3; 6 s when all is kept, 7.5 s with hooks."""
    out = (Span(1, 3, "out", 0, 4),)
    predicted = StreamTimeline(
        (Span(0, predicted_seconds, "forward", 0),), out, (Span(5, 6, "in", 0, 4),), (Span(1, 3, "leaving", 0, 4),)
    )
    stalls = (Span(1, 3, "leaving", 0, 4), Span(7, 8, "returning", 0, 4))
    measured = Lanes((Span(0, 7, "forward", 0),), (Span(1, 2, "out", 0, 4),), (Span(7, 9, "in", 0, back),), stalls)
    device = Device("", flops=1, disk_write=2, disk_read=4)
    return Comparison(predicted, Step(5.0, 7.0, measured), Step(2.0, 4.0), Step(3.0, 4.5), device, 0)


def test_the_error_is_of_the_measured_seconds():
    short, long = by_hand(), by_hand(predicted_seconds=15.0)
    assert short.error == 9 / 12 - 1 == -0.25
    assert long.error == 15 / 12 - 1 == 0.25
    assert (short.slowdown, short.hooks_slowdown) == ((12 - 3) / 6, 7.5 / 6)
    assert short.copy_rates == (4 / 1, 4 / 2)
    assert short.sentence == (
        "prefetch=0: predicted 9000.0 ms, measured 12000.0 ms: 25% too short. Copies: 1 out, 1 back, as "
        "predicted. Waiting: predicted 2000.0 ms, measured 3000.0 ms. Computing took 1.50 times as long as in a "
        "step that keeps all (1.25 times with hooks but no copies); copies ran 2.0 times (writing) and "
        "0.5 times (reading) as fast as measured alone."
    )
    assert "25% too long" in long.sentence


def test_other_copies_are_told():
    other = by_hand(back=3)
    assert not other.same_copies
    assert other.predicted_copies == (("out", 0, 4), ("in", 0, 4))
    assert other.measured_copies == (("out", 0, 4), ("in", 0, 3))
    assert "Copies: 1 out, 1 back, NOT as predicted." in other.sentence


@pytest.mark.parametrize(
    ("shape", "n_layers", "message"),
    [
        (SHAPE, 1, "nothing leaves: the last block stays, .* below 64.0 KiB; got n_layers=1"),
        (BlockShape(1, 8, 16, 2), 4, "nothing leaves: .*got n_layers=4 and BlockShape"),
        (BlockShape(2, 128, 64, 2, device="cuda"), 4, "shape.device must be 'cpu', .*got 'cuda'"),
        (BlockShape(2, 128, 64, 2, attention="math"), 4, "attention='sdpa', dropout 0 and no autocast only"),
    ],
    ids=["one block", "small", "cuda", "math"],
)
def test_what_cannot_be_compared_is_named_before_anything_is_measured(shape, n_layers, message, monkeypatch):
    monkeypatch.setattr(devices, "measure", lambda *where, seconds: pytest.fail("measured"))
    with pytest.raises(ValueError, match=message):
        compare(shape, n_layers)
