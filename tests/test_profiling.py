"""What ``model_costs`` reads off a model, against fake runs of plans it never saw, and against closed forms."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import memsave_lib as ms
from helpers import build_stack, saved_bytes
from memsave_lib import devices, estimation, fake
from memsave_lib.formulas import BlockShape
from memsave_lib.planner.chain import Chain
from memsave_lib.profiling import block_costs, model_costs
from memsave_lib.strategies import ACTIONS

MIN_BYTES = 256
BATCH, POSITIONS, N_BLOCKS = 2, 16, 4
TOKENS = torch.randint(64, (BATCH, POSITIONS), generator=torch.Generator().manual_seed(0))
LABELLED = {"input_ids": TOKENS, "labels": TOKENS.clone()}
HIDDEN = torch.randn(BATCH, POSITIONS, 32, generator=torch.Generator().manual_seed(0))
LLAMA = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": N_BLOCKS, "vocab_size": 64}

#: Five matrix products, half of each masked, where a forward has two; a block's backward is taken as twice its forward.
ATTENTION_BACKWARD = N_BLOCKS * BATCH * POSITIONS * POSITIONS * 32


def total(output: Tensor, batch: Tensor) -> Tensor:
    return output.sum()


MODELS: dict[str, tuple[Callable[[], nn.Module], Any, Any]] = {
    "stack": (lambda: ms.BlockStack(N_BLOCKS, 32, 4), HIDDEN, total),
    "stack-math": (lambda: ms.BlockStack(N_BLOCKS, 32, 4, attention="math", dropout=0.1), HIDDEN, total),
    "llama": (lambda: ms.llama(**LLAMA), LABELLED, None),
    "llama-bf16": (lambda: ms.llama(**LLAMA).to(torch.bfloat16), LABELLED, None),
}


@dataclass(frozen=True)
class Profiled:
    """A fake model, what its blocks cost, and the chain of them."""

    made: fake.FakeModel
    blocks: list[nn.Module]
    optimizer: Any
    costs: ms.ModelCosts

    @property
    def chain(self) -> Chain:
        return Chain.of(self.costs, devices.A100, "host")

    def said(self, plan: tuple[int, ...], prefetch: int) -> int:
        return self.chain.peak_bytes(plan, [block.saved for block in self.costs.blocks], prefetch)

    def run(self, plan: tuple[int, ...], prefetch: int) -> int:
        strategy = ms.PerBlock(tuple(ACTIONS[action] for action in plan), "host", MIN_BYTES, prefetch)
        with self.made.running():
            return estimation.run(self.made, strategy, self.optimizer, lambda _: self.blocks).peak_bytes


@cache
def profiled(name: str, optimizer: str | None) -> Profiled:
    build, batch, loss = MODELS[name]
    made = fake.copy_of(build(), batch, loss)
    blocks = ms.find_blocks(made.model)
    with made.running():
        chosen = estimation.optimizer_with_state(optimizer, made.model)
        return Profiled(made, blocks, chosen, model_costs(made.model, made.step, blocks, MIN_BYTES, chosen))


plans = st.tuples(*[st.integers(0, 2)] * N_BLOCKS)


@settings(max_examples=16)
@given(st.sampled_from(("stack", "stack-math")), st.sampled_from(("adamw", None)), st.tuples(*[st.integers(0, 1)] * 4))
def test_peaks_of_stacks_are_exact(name, optimizer, plan):
    model = profiled(name, optimizer)
    assert model.said(plan, 0) == model.run(plan, 0)


@settings(max_examples=16)
@given(st.sampled_from(("llama", "llama-bf16")), st.sampled_from(("adamw", None)), st.tuples(*[st.integers(0, 1)] * 4))
@example("llama-bf16", None, (0, 0, 1, 0))
def test_peaks_of_llamas_are_exact_but_for_the_positions(name, optimizer, plan):
    """Recomputed blocks share the positions, 8 bytes each; where block 0 is kept, nobody is charged for them."""
    model = profiled(name, optimizer)
    assert model.run(plan, 0) - model.said(plan, 0) in ((0, 8 * POSITIONS) if plan[0] == 0 and 1 in plan else (0,))


@settings(max_examples=30)
@given(st.sampled_from(tuple(MODELS)), st.sampled_from(("adamw", None)), plans, st.sampled_from((0, 1, 2, 5)))
def test_peaks_with_offloading_are_never_above_what_is_said(name, optimizer, plan, prefetch):
    """Nor far below: by less than one block's tensors, which the planner takes to be all there while it runs."""
    model = profiled(name, optimizer)
    real, said = model.run(plan, prefetch), model.said(plan, prefetch)
    positions = 8 * POSITIONS if "llama" in name else 0
    assert real - positions <= said <= real + sum(model.costs.blocks[1].saved)


@pytest.mark.parametrize("attention", ["sdpa", "math"])
def test_blocks_hold_what_independent_hooks_find(attention):
    """A kept block its saved tensors, a recomputed one a hidden state."""
    shape = BlockShape(BATCH, POSITIONS, 32, 4, attention=attention)
    made = fake.copy_of(build_stack(shape, 3), HIDDEN, total)
    with made.running():
        costs = model_costs(made.model, made.step, min_bytes=0)
    one = build_stack(shape, 1)
    x = HIDDEN.clone()
    held = saved_bytes(lambda: one(x), one)
    state = x.nbytes
    assert [block.held for block in costs.blocks] == [held, held, held]
    assert [block.held_recomputed for block in costs.blocks] == [state, state, state]
    assert [sum(block.saved) for block in costs.blocks[1:]] == [held, held]


def test_what_is_outside_of_blocks_is_counted():
    """Before the first block: parameters, optimizer state and tokens; after it, all gradients as well."""
    model = profiled("stack", "adamw")
    parameters = sum(parameter.nbytes for parameter in model.made.model.parameters())
    steps = 4 * len(list(model.made.model.parameters()))
    assert model.costs.elsewhere >= 4 * parameters + steps + HIDDEN.nbytes
    without = profiled("stack", None).costs
    assert 2 * parameters + HIDDEN.nbytes <= without.elsewhere < 3 * parameters
    assert min(vars(without.blocks[0].needs).values()) >= parameters + HIDDEN.nbytes
    assert without.flops == ATTENTION_BACKWARD


def test_flops_outside_of_blocks_are_those_of_the_head():
    """Logits: a matrix product forward, two backward. And what backward of attention costs beyond twice its forward."""
    costs = profiled("llama", None).costs
    assert costs.flops == 3 * 2 * BATCH * POSITIONS * 32 * 64 + ATTENTION_BACKWARD


def test_profiling_leaves_the_model_as_it_was():
    model = ms.BlockStack(3, 32, 4)
    kinds = [type(module) for module in model.modules()]
    model_costs(model, lambda: model(HIDDEN).sum().backward())
    assert [type(module) for module in model.modules()] == kinds
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_a_real_step_costs_what_a_fake_one_does():
    build, batch, loss = MODELS["stack"]
    model = build()
    real = model_costs(model, lambda: loss(model(batch), batch).backward(), min_bytes=MIN_BYTES)
    assert real == profiled("stack", None).costs


def test_a_failing_step_leaves_no_hooks():
    model = ms.BlockStack(2, 32, 4)

    def step() -> None:
        model(HIDDEN).sum().backward()
        if any(module._forward_pre_hooks for module in model.modules()):
            raise RuntimeError("in the middle")

    with pytest.raises(RuntimeError, match="in the middle"):
        model_costs(model, step)
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


def test_blocks_must_be_called_once_each():
    model = ms.BlockStack(3, 32, 4)

    def twice() -> None:
        (model(HIDDEN) + model(HIDDEN)).sum().backward()

    with pytest.raises(ValueError, match="the model called 6 blocks in one step, not the 3 given"):
        model_costs(model, twice, list(model.blocks))


def test_fused_attention_is_counted_where_it_is_asked_for():
    """Forward: two matrix products of s x s x h, half of them where positions are masked."""
    model = ms.BlockStack(2, 32, 4)

    def step() -> None:
        model(HIDDEN).sum().backward()

    plain, counted = (block_costs(model, step, attention=attention)[0] for attention in (False, True))
    product = 2 * BATCH * POSITIONS * POSITIONS * 32
    assert counted.forward - plain.forward == 2 * product // 2
