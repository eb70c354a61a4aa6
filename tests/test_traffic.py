"""What the offload engine reports: counts that add up, a snapshot that stays, timelines that survive an error."""

from __future__ import annotations

import errno

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import memsave_lib as ms
from memsave_lib.stores import NullStore
from memsave_lib.stores.slab import Extent
from memsave_lib.traffic import Tally


class FailsOnce(ms.DiskStore):
    """The fifth write fails."""

    def __init__(self) -> None:
        super().__init__()
        self.writes = 0
        self._slab.write, self._write = self.write, self._slab.write

    def write(self, extent: Extent, memory: memoryview) -> None:
        self.writes += 1
        if self.writes == 5:
            raise OSError(errno.EIO, "injected")
        self._write(extent, memory)


@pytest.fixture
def stack() -> ms.BlockStack:
    torch.manual_seed(0)
    return ms.BlockStack(4, 16, 2)


X = torch.randn(2, 8, 16)


@pytest.mark.parametrize("store", ["host", "disk", NullStore()], ids=["host", "disk", "null"])
def test_counts_add_up(stack: ms.BlockStack, store: object):
    with ms.apply(stack, ms.Offload(store=store, min_bytes=600)) as applied:
        for _ in range(2):
            stack(X).sum().backward()
        traffic = applied.report.offload
    skipped = sum(tally.tensors for tally in traffic.skipped.values())
    assert traffic.packed.tensors == traffic.moved.tensors + traffic.deduplicated.tensors + skipped
    skipped = sum(tally.bytes for tally in traffic.skipped.values())
    assert traffic.packed.bytes == traffic.moved.bytes + traffic.deduplicated.bytes + skipped
    assert set(traffic.skipped) == {"parameter", "input", "small"}
    assert traffic.returned == traffic.moved
    assert traffic.prefetch_hits + traffic.prefetch_misses == traffic.returned.tensors
    assert (traffic.to_host, traffic.to_disk) == {
        "host": (traffic.moved, Tally()),
        "disk": (Tally(), traffic.moved),
        None: (Tally(), Tally()),
    }[traffic.lane]


def test_backward_finds_everything_on_its_way(stack: ms.BlockStack):
    """The block that stays gives the first tensors their time; without prefetch every tensor is asked for too late."""
    for prefetch, late in ((2, 0), (0, None)):
        with ms.apply(stack, ms.Offload(min_bytes=600, prefetch=prefetch)) as applied:
            stack(X).sum().backward()
        traffic = applied.report.offload
        assert traffic.prefetch_misses == (traffic.moved.tensors if late is None else late)


def test_a_retained_graph_is_prefetched_each_time(stack: ms.BlockStack):
    with ms.apply(stack, ms.Offload(min_bytes=600)) as applied:
        loss = stack(X).sum()
        for _ in range(3):
            loss.backward(retain_graph=True)
        traffic = applied.report.offload
    assert traffic.returned.tensors == 3 * traffic.moved.tensors
    assert traffic.prefetch_misses == 0


def test_the_timeline_covers_the_step(stack: ms.BlockStack):
    with ms.apply(stack, ms.Offload(store="disk", min_bytes=600, prefetch=1)) as applied:
        stack(X).sum().backward()
    lanes = applied.report.offload.lanes
    assert [(span.kind, span.block) for span in lanes.compute] == [
        *(("forward", block) for block in range(4)),
        *(("backward", block) for block in (2, 1, 0)),
    ]
    assert len(lanes.copy_out) == len(lanes.copy_in) == applied.report.offload.moved.tensors
    for lane in (lanes.compute, lanes.copy_out):
        assert all(a.end <= b.start for a, b in zip(lane, lane[1:], strict=False))
    assert all(span.end > span.start for span in (*lanes.copy_out, *lanes.copy_in, *lanes.stalls))


def test_an_error_leaves_nothing_behind_and_the_next_step_works(stack: ms.BlockStack):
    """The error must not hold the interrupted step: its tensors, and their place on disk, go with it."""
    store = FailsOnce()
    with ms.apply(stack, ms.Offload(store=store, min_bytes=0)) as applied:
        with pytest.raises(OSError, match="injected"):
            stack(X).sum().backward()
        assert store.stored_bytes == 0
        assert len(applied.report.offload.lanes.copy_out) < 7, "copies that failed are no part of the timeline"
        stack.zero_grad()
        stack(X).sum().backward()
    ours = [parameter.grad.clone() for parameter in stack.parameters()]
    stack.zero_grad()
    stack(X).sum().backward()
    assert all(torch.equal(a, b.grad) for a, b in zip(ours, stack.parameters(), strict=True))


def test_a_trace_stays_as_it_is_when_the_graph_dies_later(stack: ms.BlockStack):
    with ms.apply(stack, ms.Offload(min_bytes=0)), ms.MemoryMeter(stack) as meter:
        loss = stack(X).sum()
    trace = meter.trace
    changes, stored = len(trace.away), trace.host_peak_bytes
    assert stored > 0
    loss.backward()
    del loss
    assert (len(trace.away), trace.host_peak_bytes) == (changes, stored)


@pytest.mark.parametrize("store", ["host", "disk"])
@pytest.mark.parametrize("strategy", [ms.KeepAll(), ms.FullCheckpoint()], ids=str)
def test_fake_tensors_travel_like_real_ones(store: str, strategy: ms.Strategy):
    """Nothing is allocated or written, and every figure is the same."""

    def run() -> tuple[int, ...]:
        stack = ms.BlockStack(4, 16, 2)
        x = torch.randn(2, 8, 16)
        with ms.apply(stack, ms.Offload(strategy, store, min_bytes=600)) as applied, ms.MemoryMeter(stack) as meter:
            stack(x).sum().backward()
        trace, traffic = meter.trace, applied.report.offload
        away = (trace.host_peak_bytes, trace.disk_peak_bytes)
        return trace.peak_bytes, trace.saved_bytes, traffic.moved.bytes, traffic.returned.bytes, *away

    with FakeTensorMode():
        pretended = run()
    assert pretended == run()
