"""What leaves is known before: by closed form for the course's blocks, by a profile for any model."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import memsave_lib as ms
from memsave_lib import formulas
from memsave_lib.formulas import BlockShape
from memsave_lib.profiling import block_costs
from memsave_lib.traffic import Traffic
from tests.equality import INSIDE_BLOCKS, STRATEGIES, build_gpt2, build_llama, build_tiny, label
from tests.helpers import build_input, build_stack, saved_bytes

SHAPES = (
    BlockShape(3, 10, 24, 4),
    BlockShape(1, 10, 24, 4, attention="math"),
    BlockShape(3, 10, 24, 1, attention="math"),
    BlockShape(3, 10, 24, 4, attention="math"),
    BlockShape(3, 10, 24, 4, dtype="bfloat16", attention="math"),
    BlockShape(2, 7, 16, 2, dtype="bfloat16", ffn_mult=2),
)


def traffic_of(model: torch.nn.Module, step: Callable[[], object], strategy: ms.Strategy) -> Traffic:
    with ms.apply(model, strategy) as applied:
        step()
    return applied.report.offload


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("strategy", (*STRATEGIES, *INSIDE_BLOCKS), ids=label)
def test_the_closed_form_is_exact(shape: BlockShape, strategy: ms.Strategy):
    stack, x = build_stack(shape, 5), build_input(shape)
    for keep_last, min_bytes in ((0, 0), (1, 500), (2, 3000), (1, 10**6)):
        offload = ms.Offload(strategy, keep_last=keep_last, min_bytes=min_bytes)
        plan = offload.plan(5)
        traffic = traffic_of(stack, lambda: stack(x).float().sum().backward(), offload)
        assert traffic.moved.bytes - formulas.offloaded_bytes(plan, shape, min_bytes) == 0
        assert traffic.returned.bytes == traffic.moved.bytes


@pytest.mark.parametrize("strategy", (*STRATEGIES, *INSIDE_BLOCKS), ids=label)
def test_what_stays_is_exact_too(strategy: ms.Strategy):
    shape = SHAPES[0]
    stack, x = build_stack(shape, 5), build_input(shape)
    offload = ms.Offload(strategy, min_bytes=500)
    with ms.apply(stack, offload), ms.MemoryMeter(stack) as meter:
        stack(x).sum().backward()
    assert meter.trace.saved_bytes - formulas.stack_saved_bytes(offload.plan(5), shape, min_bytes=500) == 0
    assert meter.trace.host_peak_bytes - formulas.offloaded_bytes(offload.plan(5), shape, min_bytes=500) == 0


def test_nothing_is_forecast_where_nothing_leaves():
    shape = SHAPES[0]
    assert formulas.offloaded_bytes(ms.FullCheckpoint().plan(5), shape) == 0
    stack, x = build_stack(shape, 5), build_input(shape)
    plain = saved_bytes(lambda: stack(x), stack)
    assert formulas.stack_saved_bytes(ms.KeepAll().plan(5), shape) == plain


def test_dropout_is_refused():
    with pytest.raises(ValueError, match="dropout 0"):
        formulas.offloaded_bytes(ms.Offload().plan(2), BlockShape(1, 4, 8, 2, dropout=0.5))


@pytest.mark.parametrize("build", (build_tiny, build_gpt2, build_llama))
@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
def test_a_profile_forecasts_other_models(build: Callable[..., tuple[torch.nn.Module, Callable[[], Tensor]]], strategy):
    model, step = build()
    costs = block_costs(model, step, min_bytes=100)
    offload = ms.Offload(strategy, min_bytes=100)
    forecast = offload.plan(4).offloaded_bytes([sum(cost.saved) for cost in costs], [c.checkpoint for c in costs])
    assert forecast > 0 or strategy == ms.Chunked(num_checkpoints=1)
    assert traffic_of(model, step, offload).moved.bytes - forecast == 0


def test_costs_must_fit_the_plan():
    with pytest.raises(ValueError, match="2 saved and 3 checkpoints for a plan of 3 blocks"):
        ms.Offload().plan(3).offloaded_bytes([1, 1], [1, 1, 1])
