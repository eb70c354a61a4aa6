"""The simulated timeline: exact by hand on three blocks, and the engine's rules on random stacks."""

from __future__ import annotations

import math
import subprocess
import sys
from itertools import accumulate, pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import memsave_lib as ms
from memsave_lib.course.costs import stack_costs
from memsave_lib.devices import Device
from memsave_lib.formulas import BlockShape
from memsave_lib.lanes import Lanes, Span
from memsave_lib.plan import BlockFlops, Plan, Segment
from memsave_lib.profiling import block_costs
from memsave_lib.simulation import BlockCosts, simulate
from memsave_lib.strategies import (
    Chunked,
    FullCheckpoint,
    KeepAll,
    Offload,
    PerBlock,
    Recursive,
    Selective,
    SelectiveOps,
)

#: One FLOP, and one byte each way, a second: costs are seconds.
UNIT = Device("unit", flops=1, copy_out=1, copy_in=1, disk_write=2, disk_read=4)
#: Forward 4 s, backward 8 s; saves 1 byte after 2 s and 3 bytes after 4 s.
BLOCK = BlockCosts(forward=4, backward=8, saved=(1, 3), checkpoint=1)
THREE = [BLOCK] * 3


def lane(spans):
    return [(span.start, span.end, span.kind, span.block, span.nbytes) for span in spans]


def test_nothing_sent_nothing_copied():
    timeline = simulate(THREE, KeepAll().plan(3), Device("no links", flops=2))
    assert lane(timeline.compute) == [
        (0, 2, "forward", 0, 0),
        (2, 4, "forward", 1, 0),
        (4, 6, "forward", 2, 0),
        (6, 10, "backward", 2, 0),
        (10, 14, "backward", 1, 0),
        (14, 18, "backward", 0, 0),
    ]
    assert timeline.copy_out == timeline.copy_in == timeline.stalls == ()
    assert (timeline.step_seconds, timeline.compute_seconds, timeline.stall_seconds) == (18, 18, 0)
    assert timeline.peak_bytes == 12


def test_blocking_copies_by_hand():
    timeline = simulate(THREE, Offload(keep_last=1).plan(3), UNIT, prefetch=0)
    assert lane(timeline.compute) == [
        (0, 2, "forward", 0, 0),
        (3, 5, "forward", 0, 0),
        (8, 10, "forward", 1, 0),
        (11, 13, "forward", 1, 0),
        (16, 20, "forward", 2, 0),
        (20, 28, "backward", 2, 0),
        (31, 35, "backward", 1, 0),
        (36, 40, "backward", 1, 0),
        (43, 47, "backward", 0, 0),
        (48, 52, "backward", 0, 0),
    ]
    out = [(2, 3, "out", 0, 1), (5, 8, "out", 0, 3), (10, 11, "out", 1, 1), (13, 16, "out", 1, 3)]
    back = [(28, 31, "in", 1, 3), (35, 36, "in", 1, 1), (40, 43, "in", 0, 3), (47, 48, "in", 0, 1)]
    assert lane(timeline.copy_out) == out
    assert lane(timeline.copy_in) == back
    renamed = {"out": "leaving", "in": "returning"}
    assert lane(timeline.stalls) == [(start, end, renamed[kind], *rest) for start, end, kind, *rest in out + back]
    assert (timeline.step_seconds, timeline.compute_seconds, timeline.stall_seconds) == (52, 36, 16)
    assert timeline.peak_bytes == 4, "the last block keeps 1 + 3; all others hold one tensor at a time"


def test_one_copy_at_a_time_by_hand():
    timeline = simulate(THREE, Offload(keep_last=1).plan(3), UNIT, prefetch=1)
    assert lane(timeline.compute) == [
        (0, 4, "forward", 0, 0),
        (4, 6, "forward", 1, 0),
        (7, 9, "forward", 1, 0),
        (9, 13, "forward", 2, 0),
        (13, 21, "backward", 2, 0),
        (21, 29, "backward", 1, 0),
        (29, 37, "backward", 0, 0),
    ]
    assert lane(timeline.copy_out) == [
        (2, 3, "out", 0, 1), (4, 7, "out", 0, 3), (7, 8, "out", 1, 1), (9, 12, "out", 1, 3),
    ]  # fmt: skip
    # The first starts as backward begins, with the block that stayed.
    assert lane(timeline.copy_in) == [
        (13, 16, "in", 1, 3), (21, 22, "in", 1, 1), (25, 28, "in", 0, 3), (29, 30, "in", 0, 1),
    ]  # fmt: skip
    assert lane(timeline.stalls) == [(6, 7, "leaving", 0, 3)]
    assert (timeline.step_seconds, timeline.compute_seconds, timeline.stall_seconds) == (37, 36, 1)
    assert timeline.peak_bytes == 7, "the last block's 4, and the 3 bytes that nothing packed later has pushed out"


def test_the_end_of_forward_waits_for_what_is_leaving_by_hand():
    """Two tensors of 4 bytes each leave while one second is computed after each; both ways are slow."""
    costs = [BlockCosts(forward=1, backward=2, saved=(4,))] * 3
    timeline = simulate(costs, Offload(keep_last=0).plan(3), UNIT, prefetch=2)
    assert lane(timeline.copy_out) == [(1, 5, "out", 0, 4), (5, 9, "out", 1, 4), (9, 13, "out", 2, 4)]
    # Packing the third waits for the first; the end waits for the other two.
    assert lane(timeline.stalls) == [
        (3, 5, "leaving", 0, 4),
        (5, 13, "drain", 2, 8),
        (13, 17, "returning", 2, 4),
        (19, 21, "returning", 1, 4),
        (23, 25, "returning", 0, 4),
    ]
    assert lane(timeline.copy_in) == [(13, 17, "in", 2, 4), (17, 21, "in", 1, 4), (21, 25, "in", 0, 4)]
    assert (timeline.step_seconds, timeline.compute_seconds, timeline.stall_seconds) == (27, 9, 18)
    assert timeline.peak_bytes == 12, "all three, while the third is packed and again when the third is asked for"


def test_checkpoints_sent_away_by_hand():
    costs = [BlockCosts(forward=4, backward=8, recompute=3, saved=(2, 6), checkpoint=2)] * 3
    timeline = simulate(costs, Offload(FullCheckpoint(), keep_last=1).plan(3), UNIT, prefetch=1)
    assert lane(timeline.copy_out) == [(0, 2, "out", 0, 2), (4, 6, "out", 1, 2)], "when forward enters the block"
    assert lane(timeline.compute) == [
        (0, 4, "forward", 0, 0),
        (4, 8, "forward", 1, 0),
        (8, 12, "forward", 2, 0),
        (12, 15, "recompute", 2, 0),
        (15, 23, "backward", 2, 0),
        (23, 26, "recompute", 1, 0),
        (26, 34, "backward", 1, 0),
        (34, 37, "recompute", 0, 0),
        (37, 45, "backward", 0, 0),
    ]
    assert lane(timeline.copy_in) == [(12, 14, "in", 1, 2), (23, 25, "in", 0, 2)], "ahead of the block that runs again"
    assert timeline.stalls == ()
    assert timeline.peak_bytes == 10, "a block's 8 with its input among them, and the next checkpoint, asked for early"


# Three blocks, one of each kind: block 0 is kept and sent away (A, then B), block 1 is recomputed and its input C sent
# away, block 2 stays. Sizes in bytes and seconds of computing; block 0's own input belongs to the caller.
ONE_OF_EACH = Offload(Selective(2), keep_last=1).plan(3)
EACH = [BlockCosts(forward=4, backward=8, recompute=3, saved=(2, 6), checkpoint=2)] * 3
A, B, C = (0, 2), (0, 6), (1, 2)
#: prefetch, link -> computing, copies out, copies back, waits, memory after each change. The host's link carries 1 byte
#: a second each way: A takes 2 s, B 6 s, C 2 s. The disk writes 2 and reads 4: 1, 3, 1 s and 0.5, 1.5, 0.5 s.
ONE_OF_EACH_BY_HAND = {
    (0, "host"): (
        [
            (0, 2, "forward", 0, 0),  # half of 4 s; then A leaves, waited for: 2 + 2
            (4, 6, "forward", 0, 0),  # then B: 6 + 6
            (14, 18, "forward", 1, 0),  # C left first: 12 + 2
            (18, 22, "forward", 2, 0),
            (22, 30, "backward", 2, 0),
            (32, 35, "recompute", 1, 0),  # once C is back: 30 + 2; early stop after 3 s
            (35, 43, "backward", 1, 0),
            (49, 53, "backward", 0, 0),  # once B is back: 43 + 6
            (55, 59, "backward", 0, 0),  # once A is back: 53 + 2
        ],
        [(2, 4, "out", *A), (6, 12, "out", *B), (12, 14, "out", *C)],
        [(30, 32, "in", *C), (43, 49, "in", *B), (53, 55, "in", *A)],
        [
            (2, 4, "leaving", *A), (6, 12, "leaving", *B), (12, 14, "leaving", *C),
            (30, 32, "returning", *C), (43, 49, "returning", *B), (53, 55, "returning", *A),
        ],
        # A, gone; B, gone; C, gone; block 2: 2 + 6, let go the other way round; C, which block 1 saves first, and 6;
        # both let go; B, let go; A, let go.
        [
            (2, 2), (4, 0), (6, 6), (12, 0), (12, 2), (14, 0), (20, 2), (22, 8), (26, 2), (30, 0),
            (30, 2), (35, 8), (39, 2), (43, 0), (43, 6), (53, 0), (53, 2), (59, 0),
        ],
    ),
    (0, "disk"): (
        [
            (0, 2, "forward", 0, 0),
            (3, 5, "forward", 0, 0),  # 2 + 1
            (9, 13, "forward", 1, 0),  # 5 + 3 for B, + 1 for C
            (13, 17, "forward", 2, 0),
            (17, 25, "backward", 2, 0),
            (25.5, 28.5, "recompute", 1, 0),  # 25 + 0.5 for C
            (28.5, 36.5, "backward", 1, 0),
            (38, 42, "backward", 0, 0),  # 36.5 + 1.5 for B
            (42.5, 46.5, "backward", 0, 0),  # 42 + 0.5 for A
        ],
        [(2, 3, "out", *A), (5, 8, "out", *B), (8, 9, "out", *C)],
        [(25, 25.5, "in", *C), (36.5, 38, "in", *B), (42, 42.5, "in", *A)],
        [
            (2, 3, "leaving", *A), (5, 8, "leaving", *B), (8, 9, "leaving", *C),
            (25, 25.5, "returning", *C), (36.5, 38, "returning", *B), (42, 42.5, "returning", *A),
        ],
        [
            (2, 2), (3, 0), (5, 6), (8, 0), (8, 2), (9, 0), (15, 2), (17, 8), (21, 2), (25, 0),
            (25, 2), (28.5, 8), (32.5, 2), (36.5, 0), (36.5, 6), (42, 0), (42, 2), (46.5, 0),
        ],
    ),
    (1, "host"): (
        [
            (0, 4, "forward", 0, 0),  # A has left when B is packed
            (10, 14, "forward", 1, 0),  # C may leave once B has: 4 + 6
            (14, 18, "forward", 2, 0),
            (18, 26, "backward", 2, 0),
            (26, 29, "recompute", 1, 0),
            (29, 37, "backward", 1, 0),
            (37, 45, "backward", 0, 0),
        ],
        [(2, 4, "out", *A), (4, 10, "out", *B), (10, 12, "out", *C)],
        # Backward begins with C; whoever takes one asks for the next: at 26 for B, at 37 for A.
        [(18, 20, "in", *C), (26, 32, "in", *B), (37, 39, "in", *A)],
        [(4, 10, "leaving", *B)],
        # A, B, A gone; C, B gone; block 2 saves; C gone, and asked for; block 2 lets go; B asked for; block 1 saves 6
        # beside C, lets go; A asked for; B and A let go.
        [
            (2, 2), (4, 8), (4, 6), (4, 8), (10, 2), (16, 4), (18, 10), (18, 8), (18, 10), (22, 4), (26, 2),
            (26, 8), (29, 14), (33, 8), (37, 6), (37, 8), (41, 2), (45, 0),
        ],
    ),
    (1, "disk"): (
        [
            (0, 4, "forward", 0, 0),
            (7, 11, "forward", 1, 0),  # B: 4 + 3
            (11, 15, "forward", 2, 0),
            (15, 23, "backward", 2, 0),
            (23, 26, "recompute", 1, 0),
            (26, 34, "backward", 1, 0),
            (34, 42, "backward", 0, 0),
        ],
        [(2, 3, "out", *A), (4, 7, "out", *B), (7, 8, "out", *C)],
        [(15, 15.5, "in", *C), (23, 24.5, "in", *B), (34, 34.5, "in", *A)],
        [(4, 7, "leaving", *B)],
        [
            (2, 2), (4, 8), (4, 6), (4, 8), (7, 2), (13, 4), (15, 10), (15, 8), (15, 10), (19, 4), (23, 2),
            (23, 8), (26, 14), (30, 8), (34, 6), (34, 8), (38, 2), (42, 0),
        ],
    ),
    (2, "host"): (
        [  # 3 * 4 + 3 + 3 * 8 seconds without a wait: B and C leave behind blocks 1 and 2
            (0, 4, "forward", 0, 0),
            (4, 8, "forward", 1, 0),
            (8, 12, "forward", 2, 0),
            (12, 20, "backward", 2, 0),
            (20, 23, "recompute", 1, 0),
            (23, 31, "backward", 1, 0),
            (31, 39, "backward", 0, 0),
        ],
        [(2, 4, "out", *A), (4, 10, "out", *B), (10, 12, "out", *C)],
        [(12, 14, "in", *C), (14, 20, "in", *B), (20, 22, "in", *A)],
        [],
        # A, B; C with A gone; block 2 saves; B and C gone; C and B asked for; block 2 lets go; A asked for; block 1
        # saves, lets go; B and A let go.
        [
            (2, 2), (4, 8), (4, 10), (4, 8), (10, 10), (12, 16), (12, 10), (12, 8), (12, 10), (12, 16), (16, 10),
            (20, 8), (20, 10), (23, 16), (27, 10), (31, 8), (35, 2), (39, 0),
        ],
    ),
    (2, "disk"): (
        [
            (0, 4, "forward", 0, 0),
            (4, 8, "forward", 1, 0),
            (8, 12, "forward", 2, 0),
            (12, 20, "backward", 2, 0),
            (20, 23, "recompute", 1, 0),
            (23, 31, "backward", 1, 0),
            (31, 39, "backward", 0, 0),
        ],
        [(2, 3, "out", *A), (4, 7, "out", *B), (7, 8, "out", *C)],
        [(12, 12.5, "in", *C), (12.5, 14, "in", *B), (20, 20.5, "in", *A)],
        [],
        [
            (2, 2), (4, 8), (4, 10), (4, 8), (10, 10), (12, 16), (12, 10), (12, 8), (12, 10), (12, 16), (16, 10),
            (20, 8), (20, 10), (23, 16), (27, 10), (31, 8), (35, 2), (39, 0),
        ],
    ),
}  # fmt: skip


@pytest.mark.parametrize(("prefetch", "link"), ONE_OF_EACH_BY_HAND)
def test_one_block_of_each_kind_by_hand(prefetch, link):
    assert ONE_OF_EACH.segments == (Segment(0, 1, offload=True), Segment(1, 2, True, offload=True), Segment(2, 3))
    timeline = simulate(EACH, ONE_OF_EACH, UNIT, prefetch=prefetch, link=link)
    compute, out, back, stalls, memory = ONE_OF_EACH_BY_HAND[prefetch, link]
    assert lane(timeline.compute) == compute
    assert lane(timeline.copy_out) == out
    assert lane(timeline.copy_in) == back
    assert lane(timeline.stalls) == stalls
    assert list(timeline.memory) == memory
    # Copies that are all waited for: 10 bytes each way, 20 s by the host's link, 5 + 2.5 s by the disk's.
    waits = {0: {"host": 20, "disk": 7.5}, 1: {"host": 6, "disk": 3}, 2: {"host": 0, "disk": 0}}[prefetch][link]
    assert (timeline.compute_seconds, timeline.stall_seconds) == (39, waits)
    assert timeline.step_seconds == 39 + waits
    assert (timeline.peak_bytes, timeline.prefetch_hits) == ((8, 0), (14, 3), (16, 3))[prefetch]


def test_the_disk_has_lanes_of_its_own():
    timeline = simulate(THREE, Offload().plan(3), UNIT, prefetch=0, link="disk")
    assert [copy.seconds for copy in timeline.copy_out] == [0.5, 1.5, 0.5, 1.5]
    assert [copy.seconds for copy in timeline.copy_in] == [0.75, 0.25, 0.75, 0.25]


#: A region that ends with a region: early stop ends the outer one where the inner one would start.
NESTED_AT_THE_END = Plan(
    8, (Segment(0, 8, True, (Segment(0, 3), Segment(3, 8, True, (Segment(3, 4, True), Segment(4, 8))))),)
)
PLANS = [
    *(strategy.plan(8) for strategy in (KeepAll(), FullCheckpoint(), Selective(3), Chunked(3), Recursive())),
    Chunked(2, recompute_last=False).plan(8),
    NESTED_AT_THE_END,
]


@pytest.mark.parametrize("plan", PLANS)
def test_recomputation_takes_as_many_flops_as_the_plan_forecasts(plan):
    flops = [BlockFlops(forward=6 + index, tail=index) for index in range(8)]
    costs = [BlockCosts(one.forward, 2 * one.forward, one.repeated(early_stop=True)) for one in flops]
    timeline = simulate(costs, plan, UNIT)
    again = sum(span.seconds for span in timeline.compute if span.kind == "recompute")
    assert again == plan.extra_flops(flops)
    assert timeline.step_seconds == 3 * sum(one.forward for one in flops) + again


def test_peak_of_chunks_is_checkpoints_and_one_chunk():
    """L/m + m*A', less the chunk's own input, which is among what its first block saves."""
    costs = [BlockCosts(1, 2, saved=(2, 5, 9), checkpoint=2)] * 12
    for chunks in (1, 2, 3, 4, 6, 12):
        peak = simulate(costs, Chunked(chunks).plan(12), UNIT).peak_bytes
        assert peak == chunks * 2 + 12 // chunks * 16 - 2
    # Bisection of 8 blocks: inputs of the regions 0-3, 4-5, 6-6 and block 7 itself; 19.08 units were measured.
    assert simulate(costs[:8], Recursive().plan(8), UNIT).peak_bytes == 3 * 2 + 16


def test_peak_of_offloading_is_a_tensor_and_the_next_one_on_its_way():
    """In forward the 4 just packed and the 1 before it, or the other way round; in backward the same in reverse."""
    costs = [BlockCosts(2, 4, saved=(1, 4))] * 3
    assert simulate(costs, Offload(keep_last=0).plan(3), UNIT, prefetch=1).peak_bytes == 5
    assert simulate(costs, Offload(keep_last=0).plan(3), UNIT, prefetch=0).peak_bytes == 4


def test_a_block_that_saves_nothing_still_computes():
    timeline = simulate([BlockCosts(1, 2)] * 2, Offload(keep_last=0).plan(2), UNIT)
    assert (timeline.step_seconds, timeline.copy_out, timeline.peak_bytes) == (6, (), 0)
    checkpointed = simulate([BlockCosts(1, 2, checkpoint=5)] * 2, FullCheckpoint().plan(2), UNIT)
    assert (checkpointed.step_seconds, checkpointed.peak_bytes) == (8, 10)


# Whole numbers, halves by the number of tensors and bandwidths that are powers of two: all seconds are exact.
any_costs = st.builds(
    BlockCosts,
    st.integers(0, 20),
    st.integers(0, 20),
    st.none() | st.integers(0, 20),
    st.sampled_from([0, 1, 2, 4]).flatmap(lambda n: st.tuples(*[st.integers(0, 20)] * n)),
    st.integers(0, 20),
)
bandwidths = st.sampled_from([0.25, 0.5, 1, 2, 4])


@st.composite
def steps(draw):
    """Costs, a plan with any mixture of kept, recomputed, nested and offloaded segments, a device, a prefetch depth."""
    sizes = draw(st.lists(st.integers(1, 4), min_size=1, max_size=5))
    segments, start = [], 0
    for size in sizes:
        stop = start + size
        recompute, nested = draw(st.booleans()), draw(st.booleans())
        inner = Recursive().plan(size).segments if recompute and nested else ()
        shifted = tuple(shift(segment, start) for segment in inner)
        segments.append(Segment(start, stop, recompute, shifted, offload=draw(st.booleans())))
        start = stop
    costs = draw(st.lists(any_costs, min_size=start, max_size=start))
    device = Device("any", 1, draw(bandwidths), draw(bandwidths))
    return costs, Plan(start, tuple(segments)), device, draw(st.integers(0, 5))


def shift(segment, by):
    return Segment(segment.start + by, segment.stop + by, segment.recompute, tuple(shift(s, by) for s in segment.inner))


def moments(timeline, costs, plan):
    """When each offloaded tensor was packed and when it was used, in the order of packing, from the compute lane alone.

    A tensor is packed when its share of forward has been computed, and used when backward's other shares have.
    """
    packed, used = [], []
    for segment in (segment for segment in plan.segments if segment.offload):
        if segment.recompute and costs[segment.start].checkpoint == 0:
            continue  # nothing to send: the input of the whole stack
        if segment.recompute:
            blocks = range(segment.start, segment.stop)
            before = [span.end for span in timeline.compute if span.kind == "forward" and span.block < segment.start]
            packed.append(max(before, default=0))
            used.append(first_start(timeline, "recompute", blocks) or first_start(timeline, "backward", blocks))
            continue
        for block in range(segment.start, segment.stop):
            count = len(costs[block].saved)
            for j in (j for j in range(count) if costs[block].saved[j]):
                packed.append(reached(timeline, "forward", block, costs[block].forward * (j + 1) / count, after=False))
                used.append(reached(timeline, "backward", block, costs[block].backward * (count - 1 - j) / count))
    return packed, used


def first_start(timeline, kind, blocks):
    return min((span.start for span in timeline.compute if span.kind == kind and span.block in blocks), default=None)


def reached(timeline, kind, block, seconds, after=True):
    """When so much of a phase has been computed: the moment computation goes on from there, or arrives there."""
    spans = [span for span in timeline.compute if span.kind == kind and span.block == block]
    done = 0
    for span in spans:
        if done + span.seconds > seconds if after else done + span.seconds >= seconds:
            return span.start + seconds - done
        done += span.seconds
    return None  # the phase takes no time: nobody can see when


@given(steps())
def test_lanes_never_overlap_and_the_step_is_computing_and_waiting(step):
    costs, plan, device, prefetch = step
    timeline = simulate(costs, plan, device, prefetch=prefetch)
    for spans in (timeline.compute, timeline.copy_out, timeline.copy_in, timeline.stalls):
        assert all(one.end <= other.start for one, other in pairwise(spans))
    busy = sorted((span.start, span.end) for span in (*timeline.compute, *timeline.stalls))
    assert [end for _, end in busy[:-1]] == [start for start, _ in busy[1:]], "computing or waiting, at any time"
    assert timeline.compute_seconds + timeline.stall_seconds == timeline.step_seconds
    early = [cost.forward if cost.recompute is None else cost.recompute for cost in costs]
    flops = [BlockFlops(cost.forward, cost.forward - again) for cost, again in zip(costs, early, strict=True)]
    extra = plan.extra_flops(flops)
    assert timeline.compute_seconds == sum(cost.forward + cost.backward for cost in costs) + extra


@given(steps())
def test_what_leaves_comes_back_in_reverse_at_the_speed_of_the_link(step):
    costs, plan, device, prefetch = step
    timeline = simulate(costs, plan, device, prefetch=prefetch)
    sent = [
        (block, nbytes)
        for segment in plan.segments
        if segment.offload
        for block in ([segment.start] if segment.recompute else range(segment.start, segment.stop))
        for nbytes in ([costs[block].checkpoint] if segment.recompute else costs[block].saved)
        if nbytes
    ]
    assert [(copy.block, copy.nbytes) for copy in timeline.copy_out] == sent
    assert [(copy.block, copy.nbytes) for copy in timeline.copy_in] == sent[::-1]
    assert all(copy.seconds == copy.nbytes / device.copy_out for copy in timeline.copy_out)
    assert all(copy.seconds == copy.nbytes / device.copy_in for copy in timeline.copy_in)


@given(steps())
def test_no_tensor_is_read_before_its_copy_ended(step):
    costs, plan, device, prefetch = step
    timeline = simulate(costs, plan, device, prefetch=prefetch)
    packed, used = moments(timeline, costs, plan)
    out, back = timeline.copy_out, timeline.copy_in[::-1]
    assert len(packed) == len(out) == len(back)
    end_of_forward = max((span.end for span in timeline.compute if span.kind == "forward"), default=0)
    for number, (there, here) in enumerate(zip(out, back, strict=True)):
        assert there.end <= here.start, "what comes back has left"
        if packed[number] is not None:
            assert packed[number] <= there.start, "what leaves has been computed"
        if used[number] is not None:
            assert here.end <= used[number], "what is used is back"
        assert there.end <= max(here.start, end_of_forward)
    if out and used[-1] is not None:
        assert max(copy.end for copy in out) <= used[-1], "forward ends when everything has left"


@given(steps())
def test_no_more_than_prefetch_copies_are_under_way(step):
    costs, plan, device, prefetch = step
    timeline = simulate(costs, plan, device, prefetch=prefetch)
    packed, used = moments(timeline, costs, plan)
    window = max(prefetch, 1)
    for earlier, later in zip(timeline.copy_out, timeline.copy_out[window:], strict=False):
        assert earlier.end <= later.start
    # A copy back starts no earlier than the tensor that comes `prefetch` tensors before it is asked for: when the one
    # before that one has been used.
    takes = used[::-1]
    for number, copy in enumerate(timeline.copy_in):
        before = number - prefetch - 1
        if before >= 0 and takes[before] is not None:
            assert copy.start >= takes[before]
    if prefetch == 0:
        waited = {(stall.start, stall.end) for stall in timeline.stalls}
        copies = (*timeline.copy_out, *timeline.copy_in)
        assert waited == {(copy.start, copy.end) for copy in copies if copy.seconds > 0}


@given(steps(), st.tuples(*[st.sampled_from([1, 2, 8])] * 3))
def test_faster_links_more_prefetch_and_faster_computing_never_make_a_step_longer(step, faster):
    """Always true here: every moment is the latest of some earlier ones plus a duration, and the plan alone says of
    which. Shorter durations make no moment later; a larger ``prefetch`` only takes earlier ones off the list.
    """
    costs, plan, device, prefetch = step
    timeline = simulate(costs, plan, device, prefetch=prefetch)
    flops, out, back = faster
    better = Device("better", flops, out * device.copy_out, back * device.copy_in)
    improved = simulate(costs, plan, better, prefetch=prefetch)
    assert improved.step_seconds <= timeline.step_seconds
    assert simulate(costs, plan, device, prefetch=prefetch + 1).step_seconds <= timeline.step_seconds
    assert [held for _, held in improved.memory] == [held for _, held in timeline.memory], "the order is the plan's"
    assert improved.prefetch_hits == timeline.prefetch_hits


@given(steps())
def test_a_step_takes_no_less_than_any_of_its_lanes(step):
    costs, plan, device, prefetch = step
    timeline = simulate(costs, plan, device, prefetch=prefetch)
    out, back = (sum(copy.seconds for copy in copies) for copies in (timeline.copy_out, timeline.copy_in))
    assert timeline.step_seconds >= timeline.compute_seconds
    assert timeline.step_seconds >= out + back, "nothing comes back before all has left: one disk serves both lanes"
    if timeline.copy_out:
        assert timeline.copy_out[-1].end <= timeline.copy_in[0].start


@given(steps())
def test_memory_is_never_negative_and_all_of_it_is_given_back(step):
    costs, plan, device, prefetch = step
    timeline = simulate(costs, plan, device, prefetch=prefetch)
    seconds, levels = [at for at, _ in timeline.memory], [held for _, held in timeline.memory]
    assert min(levels, default=0) >= 0
    assert levels[-1:] in ([], [0])
    assert seconds == sorted(seconds)
    assert timeline.peak_bytes == max(levels, default=0)


@given(st.lists(st.tuples(any_costs, st.booleans()), min_size=1, max_size=6), st.integers(0, 5))
def test_the_peak_is_what_is_kept_and_a_window_of_what_is_sent(blocks, prefetch):
    """Of kept blocks, sent away or not. A tensor is packed, or taken back, beside those kept before it and the
    ``prefetch`` sent before it; backward begins with all that is kept, and the last ``prefetch`` sent.
    """
    costs = [cost for cost, _ in blocks]
    plan = Plan(len(blocks), tuple(Segment(i, i + 1, offload=sent) for i, (_, sent) in enumerate(blocks)))
    kept, window, peak = 0, [], 0
    for cost, sent in blocks:
        if not sent:
            kept += sum(cost.saved)
        for nbytes in filter(None, cost.saved if sent else ()):
            window.append(nbytes)
            peak = max(peak, kept + sum(window[-1 - prefetch :]))
    peak = max(peak, kept + sum(window[len(window) - min(prefetch, len(window)) :]))
    assert simulate(costs, plan, UNIT, prefetch=prefetch).peak_bytes == peak


@given(st.lists(any_costs, min_size=1, max_size=8))
def test_keep_all_holds_the_sum(costs):
    timeline = simulate(costs, KeepAll().plan(len(costs)), UNIT)
    assert timeline.peak_bytes == max(accumulate(sum(cost.saved) for cost in costs))


@given(steps())
def test_the_frame_lists_every_span_in_order(step):
    costs, plan, device, prefetch = step
    timeline = simulate(costs, plan, device, prefetch=prefetch)
    frame = timeline.frame()
    assert list(frame.columns) == ["lane", "kind", "block", "start", "seconds", "bytes"]
    assert frame["start"].is_monotonic_increasing
    counts = frame["lane"].value_counts().to_dict()
    lanes = {
        "compute": timeline.compute,
        "copy out": timeline.copy_out,
        "copy in": timeline.copy_in,
        "stall": timeline.stalls,
    }
    assert counts == {name: len(spans) for name, spans in lanes.items() if spans}
    assert frame.loc[frame["lane"] == "stall", "seconds"].sum() == timeline.stall_seconds


def test_lanes_of_a_measured_step_start_whenever_they_start():
    measured = Lanes(compute=(Span(101.5, 103.0, "forward", 0),), copy_out=(Span(102.0, 105.5, "out", 0, 7),))
    assert (measured.step_seconds, measured.compute_seconds, measured.stall_seconds) == (4.0, 1.5, 0.0)
    assert (Lanes().step_seconds, len(Lanes().frame())) == (0.0, 0)


# The engine itself

SHAPE = BlockShape(batch=2, seq_len=8, hidden=16, heads=2)
UNDERNEATH = (KeepAll(), FullCheckpoint(), Chunked(2), Chunked(2, recompute_last=False), Selective(2), Recursive())
MIXTURES = (
    ("offload", "recompute", "keep", "offload", "recompute"),
    ("recompute", "offload", "offload", "keep", "keep"),
    ("keep", "offload", "keep", "offload", "keep"),
    ("offload",) * 5,
)


def every_way(min_bytes, store="host", prefetches=range(6)):
    """Every strategy under every number of blocks that stay, and mixtures."""
    for prefetch in prefetches:
        options = {"store": store, "min_bytes": min_bytes, "prefetch": prefetch}
        yield from (Offload(strategy, keep_last=stay, **options) for strategy in UNDERNEATH for stay in range(4))
        yield from (PerBlock(actions, **options) for actions in MIXTURES)


def trips(timeline):
    """(block, whether back, bytes) in the order of asking."""
    return [(copy.block, copy.kind == "in", copy.nbytes) for copy in (*timeline.copy_out, *timeline.copy_in)]


@pytest.mark.parametrize("store", [ms.HostStore, ms.DiskStore])
def test_the_engine_makes_the_simulated_trips(store):
    """Costs by closed form; then which tensors leave and come back, of which blocks, in which order, and how many of
    them ahead of use.

    Statistics of the norms and attention's log-sum-exp stay, as they do in larger models: then no operation takes back
    two storages that nobody has asked for.
    """
    costs, stack, x = stack_costs(SHAPE, 5, min_bytes=512), ms.BlockStack(5, 16, 2), torch.randn(2, 8, 16)
    assert costs[1].saved == (1024, 1024, 3072, 1024, 1024, 1024, 4096, 4096)
    for strategy in every_way(512, store()):
        with ms.apply(stack, strategy) as applied:
            stack(x).sum().backward()
        traffic = applied.report.offload
        simulated = simulate(costs, strategy.plan(5), UNIT, prefetch=strategy.prefetch)
        assert [(block, trip.back, trip.nbytes) for block, trip in traffic.last.trips] == trips(simulated), strategy
        assert trips(traffic.lanes) == trips(simulated), strategy
        assert traffic.prefetch_hits == simulated.prefetch_hits, strategy
        assert traffic.prefetch_misses == len(simulated.copy_in) - simulated.prefetch_hits, strategy
        assert simulated.prefetch_hits == (len(simulated.copy_in) if strategy.prefetch else 0), strategy


def metered_peak(stack, x, strategy):
    """The largest sum of saved activations, those of a recomputation included, that a meter sees in a step."""
    with ms.apply(stack, strategy), ms.MemoryMeter(stack) as meter:
        stack(x * 1).sum().backward()  # an operation's output travels: nobody else holds it
    return meter.trace.peak_of("activation", "recomputed")


def test_the_meter_finds_the_simulated_peak():
    """Whole stacks in which everything travels, to the byte. Where every block is sent away, memory may be highest in
    attention's backward, which the next test is about.
    """
    stack, x = ms.BlockStack(5, 16, 2), torch.randn(2, 8, 16, requires_grad=True)
    costs = block_costs(stack, lambda: stack(x * 1).sum().backward(), min_bytes=1)
    assert costs[0].saved == (1024, 64, 64, 1024, 3072, 128, 1024, 1024, 64, 64, 1024, 4096, 4096)
    for strategy in every_way(1, prefetches=(0, 1, 4)):
        plan = strategy.plan(5)
        if set(plan.actions) != {"offload"}:
            peak = simulate(costs, plan, UNIT, prefetch=strategy.prefetch).peak_bytes
            assert metered_peak(stack, x, strategy) - peak == 0, strategy


def test_attention_takes_back_three_tensors_at_once():
    """Its backward reads queries, keys and values (3,072 bytes), its output (1,024) and the log-sum-exp (128) together.

    The simulator hands a block its tensors one after the other, so with every block away its peak is one wide tensor.
    """
    stack, x = ms.BlockStack(5, 16, 2), torch.randn(2, 8, 16, requires_grad=True)
    costs = block_costs(stack, lambda: stack(x * 1).sum().backward(), min_bytes=1)
    everything = Offload(keep_last=0, min_bytes=1, prefetch=0)
    assert metered_peak(stack, x, everything) == 3072 + 1024 + 128
    assert simulate(costs, everything.plan(5), UNIT, prefetch=0).peak_bytes == 4096


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"costs": THREE[:2]}, "costs has 2 entries for a plan of 3 blocks"),
        ({"plan": SelectiveOps("attention").plan(3)}, "this plan recomputes attention inside each"),
        ({"link": "tape"}, 'link is "host" or "disk", got \'tape\''),
        ({"prefetch": -1}, "prefetch must be a whole number of at least 0, got -1"),
        ({"device": Device("X", copy_out=1, copy_in=1)}, "flops of X is not known"),
        ({"device": Device("X", flops=1, copy_out=1)}, "copy_in of X is not known"),
        (
            {"device": Device("X", flops=1), "link": "disk"},
            r"disk_write of X is not known; .*with_disk\(devices.NVME\)",
        ),
    ],
)
def test_wrong_arguments_of_simulate_are_named(options, message):
    right = {"costs": THREE, "plan": Offload().plan(3), "device": UNIT}
    with pytest.raises(ValueError, match=message):
        simulate(**right | options)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"forward": -1}, ValueError, "forward must be FLOPs, a number of at least 0, got -1"),
        ({"backward": True}, ValueError, "backward must be FLOPs, a number of at least 0, got True"),
        ({"recompute": math.nan}, ValueError, "recompute must be FLOPs, a number of at least 0, got nan"),
        ({"forward": None}, ValueError, "forward must be FLOPs, a number of at least 0, got None"),
        ({"saved": (3, -1)}, ValueError, r"saved\[1\] must be a whole number of at least 0, got -1"),
        ({"saved": (1.5,)}, TypeError, r"saved\[0\] must be a whole number of at least 0, got 1.5"),
        ({"checkpoint": -1}, ValueError, "checkpoint must be a whole number of at least 0, got -1"),
    ],
)
def test_wrong_costs_are_named(options, error, message):
    with pytest.raises(error, match=message):
        BlockCosts(**{"forward": 1, "backward": 2} | options)


def test_simulating_needs_no_torch():
    program = "import sys, memsave_lib.simulation, memsave_lib.devices as d; d.T4; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", program], check=True)


def test_a_strategy_is_no_plan_yet():
    with pytest.raises(TypeError, match=r"plan is what a strategy makes of a stack, .* got KeepAll\(\)"):
        simulate([BlockCosts(1, 2)], KeepAll(), Device("none", flops=1.0))
