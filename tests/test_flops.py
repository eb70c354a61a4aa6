"""FLOPs of a whole step, counted by PyTorch, are keep-all's plus what the plan forecasts: no more, no less."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache, partial

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import set_checkpoint_early_stop

import memsave_lib as ms
from equality import ATTENTION_ONLY, INSIDE_BLOCKS, STRATEGIES, Build, build_gpt2, build_llama, build_tiny, label
from memsave_lib.flops import count_flops, profile_blocks
from memsave_lib.plan import BlockFlops, Plan, Segment
from memsave_lib.strategies import Strategy


def built(build: Build):
    torch.manual_seed(0)
    return build()


def counted(build: Build, strategy: Strategy | None, early_stop: bool = True) -> int:
    model, step = built(build)
    if strategy is None:
        return count_flops(step)
    with set_checkpoint_early_stop(early_stop), ms.apply(model, strategy):
        return count_flops(step)


@cache
def keep_all(build: Build) -> tuple[int, tuple[BlockFlops, ...]]:
    """FLOPs of the step as it is, and of each block; counted once for each ``build``."""
    return counted(build, None), profile_blocks(*built(build))


def forecast(build: Build, strategy: Strategy, early_stop: bool = True) -> int:
    plain, costs = keep_all(build)
    return plain + strategy.plan(len(costs)).extra_flops(costs, early_stop)


@cache
def with_options(build: Callable[..., object], **options: object) -> Build:
    """The same function for the same options, so that ``keep_all`` knows it again."""
    return partial(build, **options)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("strategy", (*STRATEGIES, *INSIDE_BLOCKS), ids=label)
def test_a_stack_costs_what_the_plan_forecasts(strategy, attention, dropout, early_stop):
    build = with_options(build_tiny, dropout=dropout, attention=attention)
    assert counted(build, strategy, early_stop) == forecast(build, strategy, early_stop)


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("build", [build_gpt2, build_llama], ids=lambda f: f.__name__)
@pytest.mark.parametrize("strategy", (*STRATEGIES, ATTENTION_ONLY), ids=label)
def test_hugging_face_models_cost_what_the_plan_forecasts(strategy, build, dropout, early_stop):
    build = with_options(build, dropout=dropout)
    assert counted(build, strategy, early_stop) == forecast(build, strategy, early_stop)


def stack_of(n_layers: int, dropout: float = 0.0, hidden: int = 8, seq_len: int = 6) -> Build:
    def build():
        stack = ms.BlockStack(n_layers, hidden, 2, dropout=dropout)
        x = torch.randn(2, seq_len, hidden, requires_grad=True)
        return stack, lambda: stack(x).sum().backward()

    return build


def in_block_forwards(strategy: Strategy, n_layers: int, dropout: float = 0.0) -> float:
    """Extra FLOPs of a step, in forwards of one block; the fused kernel is left out of all figures on CPU."""
    build = stack_of(n_layers, dropout)
    cost = profile_blocks(*built(build))[0].forward
    return (counted(build, strategy) - counted(build, None)) / cost


@pytest.mark.parametrize(
    ("strategy", "n_layers", "expected"),
    [
        (ms.FullCheckpoint(), 8, 8 * 2 / 3),
        (ms.Chunked(4), 8, 8 - 4 / 3),
        (ms.Chunked(3), 8, 7.0),
        (ms.Recursive(), 8, 12 - 7 / 3),
        (ms.Recursive(), 16, 27.0),
    ],
    ids=label,
)
def test_extra_forwards_are_the_figures_that_the_course_names(strategy, n_layers, expected):
    """5.333, 6.667, 7.0, 9.667 and 27 block forwards: the down-projection, a third of a block, ends each region."""
    assert in_block_forwards(strategy, n_layers) == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("dropout", "expected"), [(0.0, 11 / 9), (0.5, 4 / 3)])
def test_a_checkpointed_step_costs_eleven_ninths_or_four_thirds(dropout, expected):
    """1.2222 of a step; 1.3333 where dropout after the down-projection is the last to save something.

    Matrix products with weights only: forward is one part, backward two. With dropout the attention of a CPU falls
    back to matrix products of its own, so they are taken out of both figures.
    """
    build = stack_of(4, dropout)
    plain, ours = counted(build, None), counted(build, ms.FullCheckpoint())
    batch, seq_len, hidden, n_layers = 2, 6, 8, 4
    attention = 4 * batch * seq_len * seq_len * hidden * n_layers if dropout else 0
    assert (ours - 4 * attention) / (plain - 3 * attention) == pytest.approx(expected, abs=1e-12)


def test_a_kept_last_chunk_spends_less_for_the_same_peak():
    """With equal chunks."""
    build = stack_of(4, hidden=16, seq_len=32)
    peaks = {}
    for strategy in (ms.Chunked(2), ms.Chunked(2, recompute_last=False)):
        model, step = built(build)
        with ms.apply(model, strategy), ms.MemoryMeter(model) as meter:
            step()
        peaks[strategy.recompute_last] = meter.trace.peak_bytes
    assert peaks[True] == peaks[False]
    spent = [counted(build, ms.Chunked(2, recompute_last=last)) for last in (True, False)]
    cost = profile_blocks(*built(build))[0]
    assert spent[0] - spent[1] == 2 * cost.forward - cost.tail > 0


def test_cheap_operations_cost_no_matrix_product():
    build = stack_of(3)
    assert counted(build, ms.SelectiveOps(("activation", "norm"))) == counted(build, None)
    assert counted(build, ms.SelectiveOps(("activation", "norm")), early_stop=False) > counted(build, None)


def test_a_plan_needs_a_cost_for_every_block():
    costs = profile_blocks(*built(stack_of(3)))
    with pytest.raises(ValueError, match="costs has 3 entries for a plan of 4 blocks"):
        ms.FullCheckpoint().plan(4).extra_flops(costs)


def test_blocks_of_different_sizes_are_forecast_one_by_one():
    class Unequal(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(ms.TransformerBlock(8, 2, ffn_mult=mult) for mult in (1, 4, 2, 3, 5))

        def forward(self, x):
            for block in self.blocks:
                x = block(x)
            return x

    def build():
        model, x = Unequal(), torch.randn(2, 6, 8, requires_grad=True)
        return model, lambda: model(x).sum().backward()

    for strategy in STRATEGIES:
        assert counted(build, strategy) == forecast(build, strategy), strategy


def test_profile_leaves_the_model_as_it_was():
    model, step = built(build_tiny)
    kinds = [type(m) for m in model.modules()]
    profile_blocks(model, step)
    assert [type(m) for m in model.modules()] == kinds


def test_a_region_that_ends_in_a_region_starts_only_what_it_needs():
    """A plan of one's own: nested regions at the end, at the start, and in the middle of a region."""
    inner = (Segment(0, 1), Segment(1, 2, recompute=True), Segment(2, 3), Segment(3, 5, recompute=True))
    plan = Plan(6, (Segment(0, 5, recompute=True, inner=inner), Segment(5, 6)))

    class Own(Strategy):
        label = "own"

        def plan(self, n_blocks):
            return plan

    assert plan.recompute_counts() == (1, 2, 1, 1, 1, 0)
    assert counted(stack_of(6), Own()) == forecast(stack_of(6), Own())
    assert counted(stack_of(6), Own(), early_stop=False) == forecast(stack_of(6), Own(), early_stop=False)
