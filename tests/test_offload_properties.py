"""Any plan on any stack: bit-equal, and as many bytes leave as PyTorch's own hooks count."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given, settings
from hypothesis import strategies as st

import memsave_lib as ms
from equality import assert_same, outcome
from memsave_lib.plan import Plan, Segment
from memsave_lib.strategies import Offloading, Strategy
from offloading import STORES, NotingNullStore, a_store, forecast
from test_properties import Model, models, segments_between, strategies_for

EXAMPLES = 60


@dataclass(frozen=True)
class Sent(Strategy):
    """Any plan at all, with any of its segments sent away."""

    segments: tuple[Segment, ...]
    options: Offloading
    label = "sent"

    @property
    def offloading(self) -> Offloading:
        return self.options

    def plan(self, n_blocks: int) -> Plan:
        return Plan(n_blocks, self.segments)


@st.composite
def drawn(draw: st.DrawFn) -> tuple[Model, str, dict, Strategy | tuple[Segment, ...], int]:
    model = draw(models())
    n_blocks = len(model.widths)
    options = {"min_bytes": draw(st.sampled_from([1, 97, 200])), "prefetch": draw(st.integers(0, 5))}
    if draw(st.booleans()):
        rule = draw(strategies_for(n_blocks))
    else:
        segments = draw(segments_between(0, n_blocks))
        rule = tuple(Segment(s.start, s.stop, s.recompute, s.inner, draw(st.booleans())) for s in segments)
    return model, draw(st.sampled_from(STORES)), options, rule, draw(st.integers(0, 2))


def build_strategy(rule: Strategy | tuple[Segment, ...], store: object, keep_last: int, options: dict) -> Strategy:
    if isinstance(rule, Strategy):
        return ms.Offload(rule, store, keep_last, **options)
    return Sent(rule, Offloading(store, **options))


@settings(max_examples=EXAMPLES)
@given(drawn())
def test_any_plan_on_any_stack_leaves_the_step_as_it_was(given_):
    model, store, options, rule, keep_last = given_
    strategy = build_strategy(rule, a_store(store), keep_last, options)
    assert_same(outcome(model.build, strategy), outcome(model.build, None))


@settings(max_examples=EXAMPLES)
@given(drawn())
def test_as_many_bytes_leave_as_plain_hooks_count(given_):
    model, _, options, rule, keep_last = given_
    store = NotingNullStore()
    strategy = build_strategy(rule, store, keep_last, options)
    stack, x = model.parts()
    expected = forecast(stack, stack.blocks, strategy.plan(len(model.widths)), x, options["min_bytes"])
    with ms.apply(stack, strategy) as applied:
        output = stack(x)
        traffic = applied.report.offload
    assert traffic.moved.bytes == store.put_bytes == expected.bytes
    assert traffic.moved.tensors == len(expected.storages)
    parts = (traffic.moved, traffic.deduplicated, *traffic.skipped.values())
    assert traffic.packed.tensors == sum(part.tensors for part in parts)
    assert traffic.packed.bytes == sum(part.bytes for part in parts)
    del output
    assert store.stored_bytes == 0
