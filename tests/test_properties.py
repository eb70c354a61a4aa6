"""Random stacks under random strategies: values bit-equal, counts and FLOPs exactly as forecast."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import memsave_lib as ms
from equality import SEED, Outcome, Step, assert_same, gradients, outcome
from memsave_lib.flops import count_flops, profile_blocks
from memsave_lib.plan import Plan, Segment
from memsave_lib.strategies import OPS, Strategy

EXAMPLES = 40


@dataclass(frozen=True)
class Drawn(Strategy):
    """Any plan at all: nested regions of any depth, anywhere."""

    segments: tuple[Segment, ...]
    label = "drawn"

    def plan(self, n_blocks: int) -> Plan:
        return Plan(n_blocks, self.segments)


@dataclass(frozen=True)
class Model:
    """What a stack is made of."""

    widths: tuple[int, ...]  # feed-forward width of each block, in units of the hidden width
    dropout: float
    attention: str
    causal: bool
    frozen: frozenset[int]
    shared: tuple[int, int] | None
    input_needs_grad: bool
    training: bool

    def parts(self) -> tuple[nn.Module, Tensor]:
        return Stack(self), torch.randn(2, 3, 4, requires_grad=self.input_needs_grad)

    def build(self) -> tuple[nn.Module, Step]:
        model, x = self.parts()

        def step() -> Tensor:
            loss = (model(x) * model.scale).square().sum()
            loss.backward()
            return loss

        return model, step


class Stack(nn.Module):
    def __init__(self, drawn: Model):
        super().__init__()
        options = {"dropout": drawn.dropout, "attention": drawn.attention, "causal": drawn.causal}
        self.blocks = nn.ModuleList(ms.TransformerBlock(4, 2, ffn_mult=width, **options) for width in drawn.widths)
        self.scale = nn.Parameter(torch.ones(4))
        for index in drawn.frozen:
            self.blocks[index].requires_grad_(False)
        if drawn.shared is not None:
            first, second = drawn.shared
            self.blocks[second] = self.blocks[first]
        self.train(drawn.training)

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@st.composite
def segments_between(draw: st.DrawFn, start: int, stop: int, depth: int = 2) -> tuple[Segment, ...]:
    """A cover of these blocks by kept and recomputed segments, some of them nested."""
    cuts = sorted(draw(st.sets(st.integers(start + 1, stop - 1)))) if stop - start > 1 else []
    found = []
    for begin, end in zip([start, *cuts], [*cuts, stop], strict=True):
        recompute = draw(st.booleans())
        nested = recompute and depth > 0 and end - begin > 1 and draw(st.booleans())
        inner = draw(segments_between(begin, end, depth - 1)) if nested else ()
        found.append(Segment(begin, end, recompute=recompute, inner=inner))
    return tuple(found)


def strategies_for(n_blocks: int) -> st.SearchStrategy[Strategy]:
    return st.one_of(
        st.just(ms.FullCheckpoint()),
        st.builds(ms.Selective, st.integers(1, n_blocks + 1)),
        st.builds(ms.SelectiveOps, st.sets(st.sampled_from(OPS), min_size=1).map(tuple)),
        st.builds(ms.Chunked, st.integers(1, n_blocks), st.booleans()),
        st.just(ms.Recursive()),
        st.builds(Drawn, segments_between(0, n_blocks)),
    )


@st.composite
def models(draw: st.DrawFn) -> Model:
    n_blocks = draw(st.integers(1, 7))
    indices = st.integers(0, n_blocks - 1)
    return Model(
        widths=tuple(draw(st.lists(st.integers(1, 3), min_size=n_blocks, max_size=n_blocks))),
        dropout=draw(st.sampled_from([0.0, 0.5])),
        attention=draw(st.sampled_from(["sdpa", "math"])),
        causal=draw(st.booleans()),
        frozen=draw(st.frozensets(indices, max_size=3)),
        shared=draw(st.none() | st.tuples(indices, indices)),
        input_needs_grad=draw(st.booleans()),
        training=draw(st.booleans()),
    )


@st.composite
def models_and_strategies(draw: st.DrawFn) -> tuple[Model, Strategy]:
    model = draw(models())
    return model, draw(strategies_for(len(model.widths)))


@settings(max_examples=EXAMPLES)
@given(models_and_strategies(), st.booleans())
def test_any_strategy_on_any_stack_leaves_the_step_as_it_was(drawn, early_stop):
    """pytorch#11944: distinct weights, every gradient compared."""
    model, strategy = drawn
    plain = outcome(model.build, None)
    with set_checkpoint_early_stop(early_stop):
        assert_same(outcome(model.build, strategy), plain)


@settings(max_examples=EXAMPLES)
@given(models_and_strategies(), st.booleans())
def test_run_does_what_apply_does(drawn, early_stop):
    model, strategy = drawn
    with set_checkpoint_early_stop(early_stop):
        applied = outcome(model.build, strategy)
        torch.manual_seed(SEED)
        stack, x = model.parts()
        torch.manual_seed(SEED + 1)
        loss = (ms.run(list(stack.blocks), x, strategy) * stack.scale).square().sum()
        loss.backward()
    assert_same(Outcome(loss.detach(), gradients(stack), torch.get_rng_state()), applied)


def all_trained(model: Model) -> Model:
    """Nothing frozen: where no gradient flows nothing is recomputed, and the plan forecasts too much."""
    return replace(model, frozen=frozenset(), input_needs_grad=True)


@settings(max_examples=EXAMPLES)
@given(models_and_strategies(), st.booleans())
def test_flops_and_counts_are_forecast_exactly(drawn, early_stop):
    model, strategy = all_trained(drawn[0]), drawn[1]
    plain_model, plain_step = model.build()
    costs = profile_blocks(plain_model, plain_step)
    plain = count_flops(plain_step)
    plan = strategy.plan(len(model.widths))
    ours, step = model.build()
    with set_checkpoint_early_stop(early_stop), ms.apply(ours, strategy) as applied:
        counted = count_flops(step)
    assert counted == plain + plan.extra_flops(costs, early_stop)
    if early_stop and not plan.recompute_ops:
        assert applied.report.block_recomputes == sum(plan.recompute_counts())
        assert applied.report.region_recomputes == plan.region_runs()


@settings(max_examples=EXAMPLES)
@given(models_and_strategies())
def test_the_report_and_the_plan_agree_on_what_is_kept(drawn):
    model, strategy = drawn
    plan = strategy.plan(len(model.widths))
    with ms.apply(model.build()[0], strategy) as applied:
        report = applied.report
    assert (report.blocks_kept, report.blocks_recomputed) == (
        plan.actions.count("keep"),
        plan.actions.count("recompute"),
    )
    assert len(plan.describe().splitlines()) == len(model.widths)
