"""A stack's costs on paper are what the profiler measures on fake tensors, to the byte."""

from __future__ import annotations

from functools import cache

import pytest
import torch

import memsave_lib as ms
from helpers import build_input, build_stack
from memsave_lib import fake, planner, profiling
from memsave_lib.course.costs import prices_to_recompute, stack_costs, stack_model_costs
from memsave_lib.devices import Device
from memsave_lib.flops import count_flops
from memsave_lib.formulas import BlockShape, block_saved_bytes

SHAPES = {
    "two heads": BlockShape(2, 24, 32, 2),
    "four heads": BlockShape(3, 8, 32, 4),
    "one sequence, one head": BlockShape(1, 64, 32, 1),
    "wider than long": BlockShape(2, 3, 64, 2),
    "one token": BlockShape(1, 1, 32, 2),
    "narrow inside": BlockShape(2, 24, 32, 2, ffn_mult=2),
    "tensors that travel": BlockShape(2, 256, 64, 2),
}
LOSSES = {"sum": lambda output, batch: output.sum(), "square": lambda output, batch: output.square().mean()}


@cache
def measured(shape: BlockShape, n_layers: int, loss: str = "sum") -> ms.ModelCosts:
    made = fake.copy_of(build_stack(shape, n_layers), build_input(shape, requires_grad=False), LOSSES[loss])
    with made.running():
        return profiling.model_costs(made.model, made.step)


@pytest.mark.parametrize(("n_layers", "loss"), [(1, "sum"), (3, "sum"), (2, "square")])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_paper_and_profiler_agree_to_the_byte(shape: BlockShape, n_layers: int, loss: str):
    paper, real = stack_model_costs(shape, n_layers, loss), measured(shape, n_layers, loss)
    assert len(paper.blocks) == len(real.blocks) == n_layers
    for ours, theirs in zip(paper.blocks, real.blocks, strict=True):
        assert (ours.held, ours.held_recomputed) == (theirs.held, theirs.held_recomputed)
        assert ours.needs == theirs.needs
        assert (ours.saved, ours.checkpoint) == (theirs.saved, theirs.checkpoint)
        assert (ours.forward, ours.backward) == (theirs.forward, theirs.backward)
        assert ours.recompute_flops == theirs.recompute_flops
    assert (paper.turn, paper.elsewhere) == (real.turn, real.elsewhere)


def test_by_hand():
    shape = SHAPES["two heads"]
    costs = stack_model_costs(shape, 3)
    assert {block.held for block in costs.blocks} == {block_saved_bytes(shape)} == {99_456}
    assert {block.held_recomputed for block in costs.blocks} == {shape.checkpoint_bytes} == {6_144}
    assert costs.elsewhere == 2 * 152_448 + 6_144, "parameters, gradients and the input"


@pytest.mark.parametrize("percent", [85, 90, 100])
def test_plans_on_paper_are_plans_of_the_model(percent: int):
    shape, device = SHAPES["two heads"], Device("any", flops=1.0)
    budget = max(block.needs.forward + 3 * block.held for block in measured(shape, 3).blocks) * percent // 100
    plans = [
        planner.plan_under_budget(costs, budget, device, actions=("keep", "recompute"))
        for costs in (stack_model_costs(shape, 3), measured(shape, 3))
    ]
    assert plans[0].actions == plans[1].actions


def test_what_travels_is_what_stack_costs_lists():
    shape = SHAPES["tensors that travel"]
    for ours, theirs in zip(stack_model_costs(shape, 3).blocks, stack_costs(shape, 3), strict=True):
        assert (ours.saved, ours.checkpoint) == (theirs.saved, theirs.checkpoint)
    assert all(block.saved for block in stack_costs(shape, 3))


def test_attention_that_is_written_out_is_refused():
    with pytest.raises(ValueError, match="attention='sdpa', dropout 0 and no autocast only"):
        stack_model_costs(BlockShape(2, 24, 32, 2, attention="math"), 3)


def test_the_loss_is_an_argument():
    shape = SHAPES["two heads"]
    assert stack_model_costs(shape, 3, "square").turn > stack_model_costs(shape, 3, "sum").turn


def test_prices_are_of_all_that_a_block_saves_but_its_input_and_numbers_a_row():
    s, b, h, a = 24, 2, 32, 2
    prices = prices_to_recompute(BlockShape(b, s, h, a))
    units = {name: size / (4 * s * b * h) for name, size, _ in prices}
    assert units == {
        "LayerNorm outputs": 2,
        "queries, keys, values": 3,
        "attention output": 1,
        "second LayerNorm's input": 1,
        "GELU input": 4,
        "GELU output": 4,
    }
    assert sum(size for _, size, _ in prices) == 60 * s * b * h
    assert block_saved_bytes(BlockShape(b, s, h, a)) == 64 * s * b * h + 16 * s * b + 4 * a * s * b


def test_prices_are_the_products_of_a_forward_but_the_last():
    """Counted: a block with attention written out, whose products the counter sees, less its down-projection."""
    s, b, h = 24, 2, 32
    block, x = ms.TransformerBlock(h, 2, attention="math"), torch.randn(b, s, h)
    prices = [flops for _, _, flops in prices_to_recompute(BlockShape(b, s, h, 2))]
    assert sum(prices) == count_flops(lambda: block(x)) - 2 * s * b * h * 4 * h
