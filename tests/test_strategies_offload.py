"""Offload and PerBlock as data: plans, words, equality, and what they refuse. No model runs here."""

from __future__ import annotations

import copy
import pickle
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memsave_lib as ms
from memsave_lib.plan import Plan, Segment
from memsave_lib.strategies import MIN_BYTES, Offloading

UNDERNEATH = (
    ms.KeepAll(),
    ms.FullCheckpoint(),
    ms.Selective(checkpoint_every=2),
    ms.SelectiveOps("norm"),
    ms.Chunked(num_checkpoints=2),
    ms.Chunked(num_checkpoints=2, recompute_last=False),
    ms.Recursive(),
)
any_strategy = st.sampled_from(UNDERNEATH)
actions = st.lists(st.sampled_from(["keep", "recompute", "offload"]), min_size=1, max_size=9).map(tuple)


# Plans


def test_offload_over_keep_all_sends_every_block_but_the_last():
    plan = ms.Offload().plan(4)
    assert plan.actions == ("offload", "offload", "offload", "keep")
    assert plan.segments == tuple(Segment(i, i + 1, offload=i < 3) for i in range(4))
    assert plan.offloads and not plan.has_chunks
    assert (plan.n_regions, plan.region_runs(), plan.recompute_counts()) == (0, 0, (0,) * 4)


def test_keep_last_counts_regions_and_blocks_where_blocks_are_kept():
    def sent(strategy: ms.Strategy, keep_last: int) -> list[tuple[int, int]]:
        plan = ms.Offload(strategy, keep_last=keep_last).plan(6)
        return [(segment.start, segment.stop) for segment in plan.segments if segment.offload]

    assert sent(ms.Chunked(num_checkpoints=3), 1) == [(0, 2), (2, 4)]
    assert sent(ms.Chunked(num_checkpoints=3, recompute_last=False), 1) == [(0, 2), (2, 4), (4, 5)]
    assert sent(ms.FullCheckpoint(), 2) == [(0, 1), (1, 2), (2, 3), (3, 4)]
    assert sent(ms.Recursive(), 1) == [(0, 3), (3, 5)]
    assert sent(ms.KeepAll(), 6) == sent(ms.KeepAll(), 7) == []


@given(any_strategy, st.integers(2, 12), st.integers(0, 13))
def test_what_is_recomputed_does_not_change(strategy, n_blocks, keep_last):
    plain, sent = strategy.plan(n_blocks), ms.Offload(strategy, keep_last=keep_last).plan(n_blocks)
    assert sent.recompute_counts() == plain.recompute_counts()
    assert sent.region_runs() == plain.region_runs()
    assert sent.recompute_ops == plain.recompute_ops
    assert [a == "recompute" for a in sent.actions] == [a == "recompute" for a in plain.actions]
    units = len(sent.segments)
    assert [segment.offload for segment in sent.segments] == [i < units - keep_last for i in range(units)]
    assert sent.offloads is (keep_last < units)
    assert all(segment.recompute or segment.n_blocks == 1 for segment in sent.segments)
    assert not any(inner.offload for segment in sent.segments for inner in segment.inner)


@given(actions)
def test_per_block_does_to_each_block_what_it_says(chosen):
    strategy = ms.PerBlock(chosen)
    plan = strategy.plan(len(chosen))
    assert plan.actions == chosen
    assert plan.recompute_counts() == tuple(int(action == "recompute") for action in chosen)
    assert plan.offloads is ("offload" in chosen) is (strategy.offloading is not None)
    for wrong in (len(chosen) - 1, len(chosen) + 1):
        if wrong:
            with pytest.raises(ValueError, match=f"names {len(chosen)} actions, this stack has {wrong} blocks"):
                strategy.plan(wrong)


def test_plans_describe_what_is_sent_away():
    assert ms.Offload().plan(2).describe() == "block  0: offload\nblock  1: keep"
    assert ms.Offload(ms.Chunked(num_checkpoints=2)).plan(4).describe() == (
        "block  0: recompute, region of blocks 0-1, input offloaded\n"
        "block  1: recompute, region of blocks 0-1\n"
        "block  2: recompute, region of blocks 2-3\n"
        "block  3: recompute, region of blocks 2-3"
    )
    assert ms.Offload(ms.SelectiveOps("norm")).plan(2).describe() == (
        "block  0: offload, recomputing inside: norm\nblock  1: keep, recomputing inside: norm"
    )


def test_nothing_inside_a_region_can_be_offloaded():
    inner = (Segment(0, 1, offload=True), Segment(1, 2))
    with pytest.raises(ValueError, match="nothing inside a region is kept until backward"):
        Plan(2, (Segment(0, 2, recompute=True, inner=inner),))


def test_bytes_follow_from_the_plan():
    saved, checkpoints = (100, 200, 300, 400), (1, 2, 3, 4)
    assert ms.Offload().plan(4).offloaded_bytes(saved, checkpoints) == 600
    assert ms.Offload(ms.FullCheckpoint(), keep_last=0).plan(4).offloaded_bytes(saved, checkpoints) == 10
    assert ms.Offload(ms.Chunked(num_checkpoints=2), keep_last=0).plan(4).offloaded_bytes(saved, checkpoints) == 4
    assert ms.PerBlock(("keep", "offload", "recompute", "offload")).plan(4).offloaded_bytes(saved, checkpoints) == 600
    assert ms.KeepAll().plan(4).offloaded_bytes(saved, checkpoints) == 0
    with pytest.raises(ValueError, match="3 saved and 4 checkpoints for a plan of 4 blocks"):
        ms.Offload().plan(4).offloaded_bytes(saved[:3], checkpoints)


# Words and equality


@pytest.mark.parametrize(
    ("strategy", "label"),
    [
        (ms.Offload(), "offload to host"),
        (ms.Offload(store="disk"), "offload to disk"),
        (ms.Offload(ms.FullCheckpoint(), store="disk"), "full checkpoint, offload to disk"),
        (ms.Offload(ms.Selective(checkpoint_every=3)), "selective, k=3, offload to host"),
        (ms.Offload(store=ms.HostStore()), "offload to HostStore"),
        (ms.PerBlock(("keep", "offload", "offload")), "per block: 1 keep, 2 offload"),
        (ms.PerBlock(("recompute",)), "per block: 1 recompute"),
    ],
    ids=str,
)
def test_labels_are_a_few_words(strategy, label):
    assert strategy.label == label


def test_strategies_are_equal_by_what_they_say():
    assert ms.Offload(min_bytes="64 KiB") == ms.Offload() == ms.Offload(ms.KeepAll(), "host", 1, MIN_BYTES, 2)
    assert hash(ms.Offload(min_bytes="64 KiB")) == hash(ms.Offload())
    assert ms.PerBlock(["keep", "offload"]) == ms.PerBlock(("keep", "offload"))
    assert len({ms.Offload(), ms.Offload(store="disk"), ms.Offload(prefetch=3), ms.Offload(keep_last=2)}) == 4
    assert ms.Offload(store=ms.HostStore()) != ms.Offload(store=ms.HostStore()), "two stores are two places"
    for strategy in (ms.Offload(ms.Recursive(), "disk", 0, 1, 0), ms.PerBlock(("offload", "keep"), prefetch=1)):
        assert copy.deepcopy(strategy) == pickle.loads(pickle.dumps(strategy)) == strategy
        assert eval(repr(strategy), {**vars(ms), **{n: getattr(ms, n) for n in ms.__all__}}) == strategy


def test_sizes_may_be_written_as_people_write_them():
    assert ms.Offload(min_bytes="1 MiB").min_bytes == ms.PerBlock(("offload",), min_bytes="1 MiB").min_bytes == 1 << 20
    assert ms.Offload(min_bytes=0).min_bytes == 0


# What is refused, with its value


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ({"strategy": "keep"}, TypeError, "strategy is a strategy such as KeepAll(), got 'keep'"),
        ({"strategy": ms.KeepAll}, TypeError, "strategy is a strategy such as KeepAll(), got <class"),
        ({"strategy": ms.Offload()}, ValueError, "offloads already: hand it to apply() as it is"),
        ({"strategy": ms.PerBlock(("offload",))}, ValueError, "offloads already"),
        ({"store": "gpu"}, ValueError, "got 'gpu'"),
        ({"store": "Host"}, ValueError, "got 'Host'"),
        ({"store": None}, ValueError, "got None"),
        ({"store": ms.HostStore}, ValueError, "got <class"),
        ({"keep_last": -1}, ValueError, "keep_last must be a whole number of at least 0, got -1"),
        ({"keep_last": True}, TypeError, "keep_last must be a whole number of at least 0, got True (bool)"),
        ({"keep_last": 1.0}, TypeError, "got 1.0 (float)"),
        ({"prefetch": -1}, ValueError, "prefetch must be a whole number of at least 0, got -1"),
        ({"prefetch": False}, TypeError, "prefetch must be a whole number of at least 0, got False (bool)"),
        ({"prefetch": "2"}, TypeError, "got '2' (str)"),
        ({"min_bytes": -1}, ValueError, "a size cannot be negative, got -1"),
        ({"min_bytes": True}, TypeError, "got True"),
        ({"min_bytes": 1.5}, TypeError, "got 1.5"),
        ({"min_bytes": "1 Mib"}, ValueError, 'did you mean "1 MiB"?'),
    ],
    ids=str,
)
def test_wrong_arguments_are_refused_at_construction(arguments, error, message):
    with pytest.raises(error, match=re.escape(message)):
        ms.Offload(**arguments)
    if not {"strategy", "keep_last"} & set(arguments):
        with pytest.raises(error, match=re.escape(message)):
            ms.PerBlock(("offload",), **arguments)
        with pytest.raises(error, match=re.escape(message)):
            Offloading(**{"store": "host", "min_bytes": 1, "prefetch": 2, **arguments})


@pytest.mark.parametrize("wrong", ["keep", ("keep", "drop"), ("keep", None), ("Offload",), (True,)])
def test_per_block_refuses_actions_that_it_does_not_know(wrong):
    with pytest.raises(ValueError, match=re.escape(f"'keep', 'recompute', 'offload', got {wrong!r}")):
        ms.PerBlock(wrong)


def test_per_block_refuses_to_say_nothing():
    with pytest.raises(ValueError, match="actions is empty"):
        ms.PerBlock(())


def test_a_strategy_underneath_that_does_not_fit_says_so_itself():
    with pytest.raises(ValueError, match="choose 1 to 2 chunks"):
        ms.Offload(ms.Chunked(num_checkpoints=3)).plan(2)
    with pytest.raises(TypeError, match="n_blocks must be a whole number"):
        ms.Offload().plan(True)
