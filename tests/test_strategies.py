"""Strategies and plans: what happens to each block, in words, in counts and in FLOPs. No model runs here."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsave_lib.plan import BlockFlops, Plan, RegionFlops, Segment
from memsave_lib.strategies import (
    OPS,
    Chunked,
    FullCheckpoint,
    KeepAll,
    Recursive,
    Selective,
    SelectiveOps,
    Strategy,
    chunk_sizes,
)

# A block of three equal parts, of which the last lies behind its last saved tensor: the up- and down-projection of the
# course's block hold two thirds of its matrix products, the down-projection alone one third.
THIRDS = BlockFlops(forward=3, tail=1)


def extra(strategy: Strategy, n_blocks: int, early_stop: bool = True) -> float:
    """Block forwards that one backward adds."""
    return strategy.plan(n_blocks).extra_flops([THIRDS] * n_blocks, early_stop) / THIRDS.forward


def segments_inside(plan: Plan) -> list[Segment]:
    """Every segment, the nested ones included."""
    found, waiting = [], list(plan.segments)
    while waiting:
        segment = waiting.pop()
        found.append(segment)
        waiting.extend(segment.inner)
    return found


depths = st.integers(1, 40)
any_strategy = st.one_of(
    st.just(KeepAll()),
    st.just(FullCheckpoint()),
    st.just(Recursive()),
    st.builds(Selective, st.integers(1, 45)),
    st.builds(SelectiveOps, st.lists(st.sampled_from(OPS), min_size=1, unique=True)),
)


@st.composite
def strategies_with_depth(draw):
    n_blocks = draw(depths)
    chunked = st.builds(Chunked, st.integers(1, n_blocks), st.booleans())
    return draw(st.one_of(any_strategy, chunked)), n_blocks


# Plans


def test_keep_all_keeps_all():
    plan = KeepAll().plan(3)
    assert plan.actions == ("keep",) * 3
    assert (plan.n_regions, plan.region_runs(), plan.has_chunks) == (0, 0, False)
    assert plan.recompute_counts() == (0, 0, 0)


def test_full_checkpoint_recomputes_each_block_alone():
    plan = FullCheckpoint().plan(3)
    assert plan.segments == (Segment(0, 1, True), Segment(1, 2, True), Segment(2, 3, True))
    assert (plan.n_regions, plan.region_runs(), plan.has_chunks) == (3, 3, False)
    assert plan.recompute_counts() == (1, 1, 1)


@given(depths, st.integers(1, 45))
def test_selective_keeps_block_i_when_k_divides_i(n_blocks, k):
    actions = Selective(k).plan(n_blocks).actions
    assert [action == "keep" for action in actions] == [i % k == 0 for i in range(n_blocks)]


@given(depths)
def test_selective_1_is_keep_all_and_a_large_k_keeps_the_first_block_only(n_blocks):
    assert Selective(1).plan(n_blocks).actions == KeepAll().plan(n_blocks).actions
    assert Selective(n_blocks).plan(n_blocks).actions == ("keep",) + ("recompute",) * (n_blocks - 1)


@given(st.lists(st.sampled_from(OPS), min_size=1, unique=True), depths)
def test_selective_ops_keeps_every_block_and_orders_its_operations(ops, n_blocks):
    plan = SelectiveOps(ops).plan(n_blocks)
    assert plan.actions == ("keep",) * n_blocks
    assert plan.recompute_ops == tuple(op for op in OPS if op in ops)
    assert SelectiveOps(ops) == SelectiveOps(tuple(reversed(ops)))


def test_one_operation_may_be_a_plain_string():
    assert SelectiveOps("attention") == SelectiveOps(("attention",))
    assert SelectiveOps() == SelectiveOps(OPS)


@given(depths, st.data())
def test_chunks_cover_the_stack_the_larger_first(n_blocks, data):
    chunks = data.draw(st.integers(1, n_blocks))
    sizes = chunk_sizes(n_blocks, chunks)
    assert len(sizes) == chunks and sum(sizes) == n_blocks
    assert all(first >= second for first, second in pairwise(sizes))
    assert sizes[0] - sizes[-1] <= 1
    plan = Chunked(chunks).plan(n_blocks)
    assert tuple(segment.n_blocks for segment in plan.segments) == sizes
    assert all(segment.recompute for segment in plan.segments)
    last_kept = Chunked(chunks, recompute_last=False).plan(n_blocks)
    assert [segment.recompute for segment in last_kept.segments] == [True] * (chunks - 1) + [False]
    assert plan.has_chunks is (chunks < n_blocks)


def test_chunks_that_cannot_be_equal():
    assert chunk_sizes(7, 3) == (3, 2, 2)
    assert chunk_sizes(8, 3) == (3, 3, 2)


@given(depths)
def test_recursive_keeps_about_log2_checkpoints_and_one_live_block(n_blocks):
    plan = Recursive().plan(n_blocks)
    assert plan.actions[-1] == "keep" and "keep" not in plan.actions[:-1]
    assert plan.n_regions == math.floor(math.log2(n_blocks))
    for segment in segments_inside(plan):
        if segment.recompute and segment.n_blocks > 1:
            assert segment.inner[-1] == Segment(segment.stop - 1, segment.stop)


@given(strategies_with_depth())
def test_every_plan_covers_every_block_once_in_order(case):
    strategy, n_blocks = case
    plan = strategy.plan(n_blocks)
    assert len(plan.actions) == len(plan.recompute_counts()) == plan.n_blocks == n_blocks
    assert [i for s in plan.segments for i in range(s.start, s.stop)] == list(range(n_blocks))
    assert plan.n_regions == sum(segment.recompute for segment in plan.segments)
    assert plan.region_runs() == sum(segment.recompute for segment in segments_inside(plan))
    assert strategy.plan(n_blocks) == plan and hash(strategy) == hash(strategy)


@pytest.mark.parametrize("segments", [
    (),
    (Segment(0, 2),),
    (Segment(0, 4),),
    (Segment(1, 3),),
    (Segment(0, 2), Segment(1, 3)),
    (Segment(0, 1), Segment(2, 3)),
    (Segment(0, 3), Segment(3, 3)),
    (Segment(0, 3, True, (Segment(0, 2),)),),
    (Segment(0, 3, True, (Segment(0, 2), Segment(2, 4))),),
])  # fmt: skip
def test_a_plan_with_gaps_or_overlaps_is_refused(segments):
    with pytest.raises(ValueError, match="segments"):
        Plan(3, segments)


# What a plan costs


@pytest.mark.parametrize(
    ("strategy", "n_blocks", "forwards"),
    [
        (KeepAll(), 8, 0),
        (FullCheckpoint(), 8, 16 / 3),
        (FullCheckpoint(), 16, 32 / 3),
        (Chunked(4), 8, 20 / 3),
        (Chunked(3), 8, 7),
        (Chunked(1), 8, 23 / 3),
        (Chunked(4, recompute_last=False), 8, 5),
        (Selective(2), 8, 8 / 3),
        (Selective(3), 8, 10 / 3),
        (Recursive(), 8, 29 / 3),
        (Recursive(), 16, 27),
        (Recursive(), 1, 0),
    ],
    ids=str,
)
def test_extra_block_forwards_with_early_stop(strategy, n_blocks, forwards):
    assert extra(strategy, n_blocks) == pytest.approx(forwards, rel=1e-12)


@given(strategies_with_depth())
def test_without_early_stop_every_region_runs_whole(case):
    strategy, n_blocks = case
    runs = sum(segment.n_blocks for segment in segments_inside(strategy.plan(n_blocks)) if segment.recompute)
    if not isinstance(strategy, SelectiveOps):
        assert extra(strategy, n_blocks, early_stop=False) == runs
        assert extra(strategy, n_blocks) <= runs


@pytest.mark.parametrize("power", range(1, 7))
def test_recursion_costs_half_of_l_log_l_forwards_without_early_stop(power):
    n_blocks = 2**power
    assert extra(Recursive(), n_blocks, early_stop=False) == n_blocks / 2 * power


@given(depths)
def test_early_stop_spares_a_checkpointed_stack_one_tail_a_block(n_blocks):
    assert extra(FullCheckpoint(), n_blocks, early_stop=False) == n_blocks
    assert extra(FullCheckpoint(), n_blocks) == pytest.approx(2 / 3 * n_blocks)


def test_blocks_that_differ_are_priced_one_by_one():
    costs = [BlockFlops(forward=10**i, tail=2 * 10**i // 10) for i in range(1, 5)]
    assert Chunked(2).plan(4).extra_flops(costs) == (10 + 100 - 20) + (1000 + 10000 - 2000)
    assert Selective(2).plan(4).extra_flops(costs) == (100 - 20) + (10000 - 2000)
    # Bisection of four: the left half runs as one region, in which block 0 is a region of its own; block 2 is another.
    assert Recursive().plan(4).extra_flops(costs) == (10 + 100 - 20) + (10 - 2) + (1000 - 200)


def test_operations_inside_blocks_cost_what_their_regions_repeat():
    regions = {
        "attention": (RegionFlops(100, 40),),
        "activation": (RegionFlops(7, 7),),
        "norm": (RegionFlops(3, 3), RegionFlops(4, 4)),
    }
    costs = [BlockFlops(1000, 300, regions)] * 3
    assert SelectiveOps("attention").plan(3).extra_flops(costs) == 3 * 60
    assert SelectiveOps(("activation", "norm")).plan(3).extra_flops(costs) == 0
    assert SelectiveOps(("activation", "norm")).plan(3).extra_flops(costs, early_stop=False) == 3 * (7 + 3 + 4)


def test_counts_of_blocks_started_again():
    assert Recursive().plan(8).recompute_counts() == (3, 2, 2, 1, 2, 1, 1, 0)
    assert Chunked(2).plan(4).recompute_counts() == (1, 1, 1, 1)
    nested_last = Plan(2, (Segment(0, 2, True, (Segment(0, 1), Segment(1, 2, True))),))
    # The outer region stops before the inner one at its end, which runs on its own account.
    assert nested_last.recompute_counts() == (1, 1)
    assert nested_last.extra_flops([THIRDS] * 2) == 3 + 2


def test_costs_must_match_the_depth():
    with pytest.raises(ValueError, match="costs has 3 entries for a plan of 4 blocks"):
        KeepAll().plan(4).extra_flops([THIRDS] * 3)


# Best chunks


def chunk_peak(n_blocks, chunks, block_bytes, checkpoint_bytes):
    sizes = chunk_sizes(n_blocks, chunks)
    return max((j + 1) * checkpoint_bytes + size * block_bytes for j, size in enumerate(sizes))


@given(depths, st.integers(1, 200), st.integers(1, 50))
def test_best_number_of_chunks_has_the_lowest_peak(n_blocks, block_bytes, checkpoint_bytes):
    best = Chunked.best(n_blocks, block_bytes, checkpoint_bytes).num_checkpoints
    peaks = [chunk_peak(n_blocks, chunks, block_bytes, checkpoint_bytes) for chunks in range(1, n_blocks + 1)]
    assert peaks[best - 1] == min(peaks)
    assert all(peak > min(peaks) for peak in peaks[best:])


@pytest.mark.parametrize("relative_size", [1, 2, 8, 16, 32])
@pytest.mark.parametrize("n_blocks", [64, 100, 144])
def test_best_number_of_equal_chunks_lies_near_the_square_root(n_blocks, relative_size):
    equal = [chunks for chunks in range(1, n_blocks + 1) if n_blocks % chunks == 0]
    best = min(equal, key=lambda chunks: chunk_peak(n_blocks, chunks, relative_size, 1))
    assert 1 / 2 <= best / math.sqrt(n_blocks * relative_size) <= 2


def test_best_number_of_chunks_for_transformer_blocks():
    # A block with fused attention in float32 saves 16 times its input.
    assert Chunked.best(12, 16, 1) == Chunked(12)
    # Where a block saves no more than its input, 3 chunks of 9 are best, and 5 as good and cheaper.
    assert Chunked.best(9, 1, 1) == Chunked(5)
    assert chunk_peak(9, 3, 1, 1) == chunk_peak(9, 5, 1, 1) == 6
    # 80 blocks: 32 chunks of two blocks and 16 of one beat 40 chunks of two, because the last chunks, where most
    # checkpoints are alive, are the small ones.
    assert Chunked.best(80, 16, 1) == Chunked(48)
    assert chunk_peak(80, 48, 16, 1) == 64 < chunk_peak(80, 40, 16, 1) == 72


# In words


def test_describe_has_one_line_a_block():
    assert Selective(2).plan(3).describe() == "block  0: keep\nblock  1: recompute\nblock  2: keep"
    assert Chunked(2).plan(3).describe().splitlines() == [
        "block  0: recompute, region of blocks 0-1",
        "block  1: recompute, region of blocks 0-1",
        "block  2: recompute",
    ]
    assert Recursive().plan(4).describe().splitlines() == [
        "block  0: recompute, region of blocks 0-1, started again 2 times",
        "block  1: recompute, region of blocks 0-1",
        "block  2: recompute",
        "block  3: keep",
    ]
    assert SelectiveOps(("norm", "attention")).plan(1).describe() == (
        "block  0: keep, recomputing inside: attention, norm"
    )


@given(strategies_with_depth())
def test_describe_names_every_block(case):
    strategy, n_blocks = case
    lines = strategy.plan(n_blocks).describe().splitlines()
    assert [line.split(":")[0].split() for line in lines] == [["block", str(i)] for i in range(n_blocks)]


def test_labels():
    labels = {
        KeepAll(): "keep all",
        FullCheckpoint(): "full checkpoint",
        Selective(3): "selective, k=3",
        SelectiveOps(("norm", "activation")): "recompute activation + norm",
        Chunked(1): "1 chunk",
        Chunked(4): "4 chunks",
        Chunked(4, recompute_last=False): "4 chunks, last one kept",
        Recursive(): "recursive",
    }
    assert {strategy: strategy.label for strategy in labels} == labels


# Wrong arguments


@pytest.mark.parametrize("wrong", [True, False, 2.0, "2", None])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda wrong: Selective(wrong), "checkpoint_every"),
        (lambda wrong: Chunked(wrong), "num_checkpoints"),
        (lambda wrong: KeepAll().plan(wrong), "n_blocks"),
        (lambda wrong: FullCheckpoint().plan(wrong), "n_blocks"),
        (lambda wrong: Selective(2).plan(wrong), "n_blocks"),
        (lambda wrong: SelectiveOps().plan(wrong), "n_blocks"),
        (lambda wrong: Chunked(1).plan(wrong), "n_blocks"),
        (lambda wrong: Recursive().plan(wrong), "n_blocks"),
        (lambda wrong: Chunked.best(wrong, 2, 1), "n_blocks"),
        (lambda wrong: Chunked.best(2, wrong, 1), "block_bytes"),
        (lambda wrong: Chunked.best(2, 2, wrong), "checkpoint_bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_is_not_a_whole_number_is_refused(make, name, wrong):
    with pytest.raises(TypeError, match=rf"^{name} .* whole number of at least 1, got {re.escape(repr(wrong))}"):
        make(wrong)


@pytest.mark.parametrize("wrong", [0, -1])
@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda wrong: Selective(wrong), "checkpoint_every"),
        (lambda wrong: Chunked(wrong), "num_checkpoints"),
        (lambda wrong: Recursive().plan(wrong), "n_blocks"),
        (lambda wrong: Chunked.best(2, wrong, 1), "block_bytes"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_numbers_below_one_are_refused(make, name, wrong):
    with pytest.raises(ValueError, match=rf"^{name} must be .*at least 1, got {wrong}"):
        make(wrong)


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SelectiveOps("gelu"), ValueError, "got 'gelu'; it knows 'attention', 'activation', 'norm'"),
        (lambda: SelectiveOps(("norm", 3)), ValueError, "got 3; it knows"),
        (lambda: SelectiveOps(()), ValueError, "recomputes nothing"),
        (lambda: SelectiveOps(("norm", "norm")), ValueError, "names an operation twice"),
        (
            lambda: Chunked(13).plan(12),
            ValueError,
            r"Chunked\(num_checkpoints=13\) needs at least 13 blocks, this stack has 12: choose 1 to 12 chunks",
        ),
        (lambda: Chunked(2, recompute_last=1), TypeError, "recompute_last is True or False, got 1"),
    ],
    ids=["unknown", "no name", "none", "twice", "too many chunks", "not a bool"],
)
def test_other_wrong_arguments_are_refused(make, error, message):
    with pytest.raises(error, match=message):
        make()


@pytest.mark.parametrize("strategy", [Selective(2), Chunked(2), SelectiveOps(), KeepAll()], ids=lambda s: s.label)
def test_strategies_cannot_be_changed(strategy):
    with pytest.raises(AttributeError):
        strategy.checkpoint_every = strategy.recompute = 3


def test_strategies_import_no_torch():
    code = "import sys, memsave_lib.strategies, memsave_lib.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
