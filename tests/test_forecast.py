"""The memory of a step over its work: bytes as of the timeline, FLOPs as of the plan, places as of a real trace."""

from __future__ import annotations

from itertools import groupby, pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

import memsave_lib as ms
from helpers import build_input, build_stack
from memsave_lib import formulas
from memsave_lib.flops import count_flops
from memsave_lib.formulas import BlockShape, stack_forecast, step_moments
from memsave_lib.formulas.forecast import block_flops, down_projection_flops
from memsave_lib.formulas.offloading import CAUSAL_ATTENTION, FULL_ATTENTION
from memsave_lib.formulas.script import Moment
from memsave_lib.plan import BlockFlops, Plan, RegionFlops, Segment
from memsave_lib.plots import pace_of
from memsave_lib.trace import Trace

FLOOR = 1_000_003
LOSS = {"loss": "sum", "input_requires_grad": False, "new_gradients": True}
SHAPES = {
    "fused": BlockShape(2, 24, 32, 2),
    "written out": BlockShape(3, 8, 32, 4, attention="math"),
    "one head, wide": BlockShape(1, 16, 32, 1, causal=False, ffn_mult=3),
}
STRATEGIES = {
    "keep all": ms.KeepAll(),
    "full": ms.FullCheckpoint(),
    "every 2": ms.Selective(2),
    "every 3": ms.Selective(3),
    "1 chunk": ms.Chunked(1),
    "2 chunks": ms.Chunked(2),
    "2 chunks, last kept": ms.Chunked(2, recompute_last=False),
    "recursive": ms.Recursive(),
    "core": ms.SelectiveOps("attention"),
    "activation": ms.SelectiveOps("activation"),
    "norm": ms.SelectiveOps("norm"),
    "ops": ms.SelectiveOps(),
}
EVERY_SHAPE = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
EVERY_STRATEGY = pytest.mark.parametrize("strategy", STRATEGIES.values(), ids=STRATEGIES)
DEPTHS = pytest.mark.parametrize("n_layers", [2, 3, 6])


def attention_flops(shape: BlockShape) -> float:
    return (CAUSAL_ATTENTION if shape.causal else FULL_ATTENTION) * shape.elements * shape.seq_len


def extra_flops(plan: Plan, shape: BlockShape) -> int:
    """What the plan says about recomputation: only what stands before the last saved tensor of a region runs again."""
    down, core = int(down_projection_flops(shape)), int(attention_flops(shape))
    regions = {"attention": (RegionFlops(core),), "activation": (RegionFlops(down, down),), "norm": ()}
    return plan.extra_flops((BlockFlops(int(block_flops(shape)), down, regions),) * plan.n_blocks)


def check(plan: Plan, shape: BlockShape) -> None:
    forecast = stack_forecast(plan, shape, FLOOR, **LOSS)
    assert list(forecast.moments) == [
        Moment(one.phase, one.block, one.op, FLOOR + one.live_bytes) for one in step_moments(plan, shape, **LOSS)
    ]
    assert forecast.peak.live_bytes == FLOOR + formulas.stack_peak_bytes(plan, shape, **LOSS)
    assert forecast.peak in forecast.moments

    assert len(forecast.work) == len(forecast.moments)
    assert all(before <= after for before, after in pairwise(forecast.work))
    assert forecast.stretches[0].start == 0 and forecast.stretches[-1].end == forecast.flops
    assert all(before.end == after.start for before, after in pairwise(forecast.stretches)), "no gaps"
    assert all(stretch.start <= stretch.end for stretch in forecast.stretches)

    kept = 3 * plan.n_blocks * block_flops(shape)
    assert forecast.flops == kept + extra_flops(plan, shape)
    assert forecast.flops_ratio == pytest.approx(1 + extra_flops(plan, shape) / kept, rel=1e-12)
    assert forecast.checkpoints == tuple(one.start for one in plan.segments if one.recompute)


@EVERY_SHAPE
@EVERY_STRATEGY
@DEPTHS
def test_a_forecast_is_the_timeline_over_the_plans_flops(n_layers: int, strategy: ms.Strategy, shape: BlockShape):
    check(strategy.plan(n_layers), shape)


@st.composite
def segments(draw: st.DrawFn, start: int, stop: int, depth: int = 2) -> tuple[Segment, ...]:
    """Blocks ``start`` to ``stop``, cut anywhere; some parts kept, some regions, with regions inside."""
    inside = range(start + 1, stop)
    cuts = sorted(draw(st.sets(st.sampled_from(inside)))) if inside else []
    parts = []
    for left, right in pairwise([start, *cuts, stop]):
        again = draw(st.booleans())
        nested = again and depth > 0 and right - left > 1 and draw(st.booleans())
        inner = draw(segments(left, right, depth - 1)) if nested else ()
        parts.append(Segment(left, right, again, inner))
    return tuple(parts)


@given(st.integers(1, 7).flatmap(lambda n: segments(0, n)), st.sampled_from(list(SHAPES.values())))
def test_any_plan_has_such_a_forecast(parts: tuple[Segment, ...], shape: BlockShape):
    check(Plan(parts[-1].stop, parts), shape)


def test_flops_by_hand():
    """8h + 4f + 2s a token and channel (causal attention), of which 2f is the down-projection."""
    shape = BlockShape(2, 24, 32, 2)
    assert block_flops(shape) == 2 * 24 * 32 * (8 * 32 + 4 * 128 + 2 * 24) == 1_253_376
    assert down_projection_flops(shape) == 2 * 2 * 24 * 32 * 128 == 393_216
    forecast = stack_forecast(ms.FullCheckpoint().plan(3), shape, **LOSS)
    assert forecast.flops == 3 * (4 * 1_253_376 - 393_216)
    assert f"{forecast.flops_ratio:.3f}" == "1.229"


@EVERY_STRATEGY
def test_torch_counts_the_same_recomputation(strategy: ms.Strategy):
    shape = SHAPES["fused"]

    def counted(strategy: ms.Strategy) -> int:
        stack, x = build_stack(shape, 3), build_input(shape)
        with ms.apply(stack, strategy):
            return count_flops(lambda: stack(x).sum().backward(), attention=True)

    forecast = stack_forecast(strategy.plan(3), shape, **LOSS)
    assert forecast.flops - 3 * 3 * block_flops(shape) == counted(strategy) - counted(ms.KeepAll())


def test_the_most_of_a_block_in_a_phase():
    forecast = stack_forecast(ms.FullCheckpoint().plan(3), SHAPES["fused"], FLOOR, **LOSS)
    for phase, block in {(moment.phase, moment.block) for moment in forecast.moments}:
        those = [one.live_bytes for one in forecast.moments if one.phase == phase and one.block == block]
        assert forecast.most(phase, block) == max(those)


def metered(strategy: ms.Strategy, shape: BlockShape, n_layers: int) -> Trace:
    stack, x = build_stack(shape, n_layers), build_input(shape, requires_grad=False)
    with ms.apply(stack, strategy), ms.MemoryMeter(stack) as meter:
        stack(x).sum().backward()
    return meter.trace


def places(trace: Trace, plan: Plan) -> list[tuple[str, int]]:
    """Operations that run again inside a block are part of its backward."""
    inside = {"recompute": "backward"} if plan.recompute_ops else {}
    return [(inside.get(event.phase, event.phase), event.block) for event in trace.events]


@EVERY_SHAPE
@EVERY_STRATEGY
def test_a_real_step_goes_through_the_same_blocks_in_the_same_order(strategy: ms.Strategy, shape: BlockShape):
    plan = strategy.plan(4)
    visited = places(metered(strategy, shape, 4), plan)
    last = max(i for i, (phase, _) in enumerate(visited) if phase == "backward")
    blocks = [place for place, _ in groupby(place for place in visited[: last + 1] if place[1] >= 0)]
    forecast = stack_forecast(plan, shape, **LOSS)
    assert blocks == [(one.phase, one.block) for one in forecast.stretches if one.block >= 0]


@EVERY_SHAPE
@EVERY_STRATEGY
def test_the_work_done_follows_a_real_step(strategy: ms.Strategy, shape: BlockShape):
    """At each event of a block it lies inside that block's stretch, and it never goes back."""
    plan = strategy.plan(4)
    visited = places(metered(strategy, shape, 4), plan)
    forecast = stack_forecast(plan, shape, **LOSS)
    last = max(i for i, (phase, _) in enumerate(visited) if phase == "backward")
    own = iter([one for one in forecast.stretches if one.block >= 0])
    here, done = None, [forecast.work_done(visited[: i + 1]) for i in range(len(visited))]
    for work, place in zip(done[: last + 1], visited, strict=False):
        if place[1] >= 0 and (here is None or place != (here.phase, here.block)):
            here = next(own)
        if place[1] >= 0:
            assert here.start <= work <= here.end
    assert all(before <= after for before, after in pairwise(done))
    end = forecast.stretches[-1]
    assert end.start <= done[-1] <= end.end


@EVERY_STRATEGY
def test_the_pace_of_a_step(strategy: ms.Strategy):
    shape, plan = SHAPES["fused"], strategy.plan(4)
    trace, forecast = metered(strategy, shape, 4), stack_forecast(plan, shape, **LOSS)
    assert pace_of(trace, forecast) == trace.seconds / forecast.flops
    for part in (len(trace.events) // 3, len(trace.events) - 8):
        begun = Trace(trace.events[:part], trace.initial, 0)
        assert pace_of(begun, forecast, running=True) == begun.seconds / forecast.work_done(places(begun, plan))
    assert pace_of(Trace((), (), 0), forecast) is None
    assert pace_of(Trace(trace.events[:1], (), 0), forecast, running=True) is None, "no time has passed"


def test_before_the_first_place_a_step_is_at_its_beginning():
    forecast = stack_forecast(ms.KeepAll().plan(2), SHAPES["fused"], **LOSS)
    assert 0 <= forecast.work_done([]) <= forecast.stretches[0].end


@pytest.mark.parametrize(
    ("path", "block"),
    [
        ("blocks.2.down", 2),
        ("transformer.h.11.attn", 11),
        ("blocks.0", 0),
        ("blocks.1.mlp.3", 1),
        ("head", -1),
        ("", -1),
    ],
)
def test_the_block_of_an_event(path: str, block: int):
    event = ms.trace.Event(0.0, ms.trace.StorageFacts(4), 4, "forward", path, "mm")
    assert event.block == block


def test_the_seconds_of_a_trace_are_from_its_first_change_to_its_last():
    facts = ms.trace.StorageFacts(4)
    events = [ms.trace.Event(seconds, facts, 4, "forward", "", "mm") for seconds in (0.5, 0.75, 2.0)]
    assert Trace(events, (), 0).seconds == 1.5
    assert Trace(events[:1], (), 0).seconds == Trace((), (), 0).seconds == 0.0
