"""A strategy changes what is kept, and nothing else: values, gradients, random numbers, arguments, results, modes."""

from __future__ import annotations

import contextlib
import copy
import gc
import io
import pickle
import threading
import weakref
from functools import partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memsave_lib as ms
from equality import (
    ATTENTION_ONLY,
    BLOCK_BY_BLOCK,
    INSIDE_BLOCKS,
    RECOMPUTING,
    SEED,
    STRATEGIES,
    VARIANTS,
    Outcome,
    assert_equal_to_plain,
    assert_same,
    build_tiny,
    gradients,
    label,
    outcome,
)
from memsave_lib import is_recomputing

EVERY = (*STRATEGIES, *INSIDE_BLOCKS)

every_strategy = pytest.mark.parametrize("strategy", EVERY, ids=label)
every_plain_strategy = pytest.mark.parametrize("strategy", STRATEGIES, ids=label)


@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("variant", VARIANTS)
@every_strategy
def test_loss_gradients_and_random_state_are_those_of_plain(strategy, variant, dropout, attention):
    """OLMo-core#828, pytorch#14253 (dropout), transformers#21381, #23170 (frozen), trl#4247 (tied)."""
    assert_equal_to_plain(lambda: build_tiny(variant, dropout=dropout, attention=attention), strategy)


# Ways to use a graph


def stack_and_input(dropout: float = 0.5, attention: str = "math", n_layers: int = 4) -> tuple[nn.Module, Tensor]:
    stack = ms.BlockStack(n_layers, 8, 2, dropout=dropout, attention=attention)
    return stack, torch.randn(2, 5, 8, requires_grad=True)


def retained(stack, x):
    """guided-diffusion#144."""
    loss = stack(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    return loss


def grad_of_parameters(stack, x):
    loss = stack(x).square().sum()
    for parameter, gradient in zip(
        stack.parameters(), torch.autograd.grad(loss, list(stack.parameters())), strict=True
    ):
        parameter.grad = gradient
    return loss


def grad_of_some(stack, x):
    loss = stack(x).square().sum()
    chosen = stack.blocks[1].up.weight
    chosen.grad, x.grad = torch.autograd.grad(loss, [chosen, x])
    return loss


def backward_inputs(stack, x):
    loss = stack(x).square().sum()
    loss.backward(inputs=[stack.blocks[2].down.weight])
    return loss


def accumulated_one_by_one(stack, x):
    total = 0
    for scale in (1.0, 2.0):
        loss = (stack(x) * scale).square().sum()
        loss.backward()
        total = total + loss.detach()
    return total


def two_forwards_in_order(stack, x):
    """trl#4236, #4280."""
    first, second = stack(x).square().sum(), stack(2 * x).square().sum()
    first.backward()
    second.backward()
    return first + second


def two_forwards_in_reverse(stack, x):
    """trl#4236, #4280."""
    first, second = stack(x).square().sum(), stack(2 * x).square().sum()
    second.backward()
    first.backward()
    return first + second


def accumulated_in_one_graph(stack, x):
    loss = stack(x).square().sum() + stack(2 * x).square().sum()
    loss.backward()
    return loss


def unused_branch(stack, x):
    """trl#4280: a forward whose result takes no part in the loss."""
    kept = stack(x)
    stack(2 * x)
    loss = kept.square().sum()
    loss.backward()
    return loss


def double_backward(stack, x):
    loss = stack(x).square().sum()
    (gradient,) = torch.autograd.grad(loss, x, create_graph=True)
    gradient.square().sum().backward()
    return loss


def double_backward_after_backward(stack, x):
    loss = stack(x).square().sum()
    loss.backward(create_graph=True)
    second = x.grad.square().sum()
    x.grad = None
    second.backward()
    return loss


def input_without_gradient(stack, x):
    loss = stack(x.detach()).square().sum()
    loss.backward()
    return loss


def non_leaf_input(stack, x):
    loss = stack(x.transpose(0, 1).contiguous().transpose(0, 1)[:, 1:]).square().sum()
    loss.backward()
    return loss


def part_of_the_output(stack, x):
    loss = stack(x)[:, 1:, ::2].square().sum()
    loss.backward()
    return loss


def eval_mode_with_gradients(stack, x):
    """fairscale#709."""
    loss = stack.eval()(x).square().sum()
    loss.backward()
    return loss


def autocast_forward(stack, x):
    with torch.autocast("cpu", torch.bfloat16):
        loss = stack(x).square().sum()
    loss.backward()
    return loss


def autocast_forward_and_backward(stack, x):
    with torch.autocast("cpu", torch.bfloat16):
        loss = stack(x).square().sum()
        loss.backward()
    return loss


WAYS = [
    retained,
    grad_of_parameters,
    grad_of_some,
    backward_inputs,
    accumulated_one_by_one,
    two_forwards_in_order,
    two_forwards_in_reverse,
    accumulated_in_one_graph,
    unused_branch,
    double_backward,
    double_backward_after_backward,
    input_without_gradient,
    non_leaf_input,
    part_of_the_output,
    eval_mode_with_gradients,
    autocast_forward,
    autocast_forward_and_backward,
]


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@every_strategy
def test_every_way_to_use_a_graph_gives_what_plain_gives(strategy, way):
    """guided-diffusion#144, trl#4236, trl#4280, fairscale#709; dropout 0.5 in all of them."""

    def use(chosen: ms.Strategy | None) -> tuple[Outcome, Tensor | None]:
        torch.manual_seed(SEED)
        stack, x = stack_and_input()
        context = contextlib.nullcontext() if chosen is None else ms.apply(stack, chosen)
        with context:
            loss = way(stack, x)
        return Outcome(loss.detach(), gradients(stack), torch.get_rng_state()), x.grad

    plain, plain_x = use(None)
    ours, our_x = use(strategy)
    assert_same(ours, plain)
    assert (our_x is None) == (plain_x is None)
    assert plain_x is None or torch.equal(our_x, plain_x)


@every_strategy
def test_backward_may_come_after_the_strategy_was_removed(strategy):
    def use(chosen: ms.Strategy | None) -> Outcome:
        torch.manual_seed(SEED)
        stack, x = stack_and_input()
        with contextlib.nullcontext() if chosen is None else ms.apply(stack, chosen):
            loss = stack(x).square().sum()
        loss.backward()
        return Outcome(loss.detach(), gradients(stack), torch.get_rng_state())

    assert_same(use(strategy), use(None))


@pytest.mark.parametrize("needs_grad", [True, False])
@pytest.mark.parametrize("frozen", [True, False])
@every_strategy
def test_output_requires_grad_as_plain_does(strategy, frozen, needs_grad):
    """pytorch#7617, fairscale#787."""
    stack, x = stack_and_input(dropout=0.0)
    stack.requires_grad_(not frozen)
    x.requires_grad_(needs_grad)
    plain = stack(x)
    with ms.apply(stack, strategy):
        ours = stack(x)
    assert ours.requires_grad == plain.requires_grad == (needs_grad or not frozen)
    assert torch.equal(ours, plain)


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every_strategy
def test_without_gradients_nothing_is_saved_recomputed_or_counted(strategy, mode, recwarn):
    """trl#4636, diffusers#10107, fairscale#709, Megatron-LM#3043."""
    stack, x = stack_and_input(dropout=0.0)
    plain = stack(x)
    packed = []
    with ms.apply(stack, strategy) as applied:
        hooks = torch.autograd.graph.saved_tensors_hooks(packed.append, lambda t: t)
        with mode(), hooks:
            ours = [stack(x) for _ in range(3)]
    assert all(torch.equal(result, plain) and not result.requires_grad for result in ours)
    report = applied.report
    assert (report.region_forwards, report.region_recomputes, report.block_recomputes) == (0, 0, 0)
    assert not packed
    assert not recwarn.list


@every_strategy
def test_training_works_after_a_call_in_inference_mode(strategy):
    """unsloth#3828: nothing born in inference mode may stay behind."""

    def build():
        stack, x = stack_and_input()

        def step() -> Tensor:
            with torch.inference_mode():
                stack(x)
            loss = stack(x).square().sum()
            loss.backward()
            return loss

        return stack, step

    assert_equal_to_plain(build, strategy)


def test_forwards_without_backward_leave_nothing_alive():
    """Megatron-LM#3043, pytorch#84413: without the garbage collector's help."""
    stack, x = stack_and_input()
    gc.collect()
    gc.disable()
    try:
        for strategy in EVERY:
            alive = []
            with ms.apply(stack, strategy):
                for _ in range(3):
                    output = stack(x)
                    alive.append(weakref.ref(output.untyped_storage()))
                    del output
                assert [ref() for ref in alive] == [None] * 3, strategy
    finally:
        gc.enable()


# What is counted


@pytest.mark.parametrize("early_stop", [True, False])
@pytest.mark.parametrize("n_layers", [1, 2, 4, 5, 7])
@pytest.mark.parametrize(
    "strategy",
    [ms.KeepAll(), ms.FullCheckpoint(), ms.Selective(2), ms.Selective(3), ms.Recursive(), ms.Chunked(1)],
    ids=label,
)
def test_report_counts_what_the_plan_forecasts(strategy, n_layers, early_stop):
    stack, x = stack_and_input(n_layers=n_layers)
    plan = strategy.plan(n_layers)
    started = [0] * n_layers
    for index, block in enumerate(stack.blocks):
        block.register_forward_pre_hook(lambda *_, index=index: started.__setitem__(index, started[index] + 1))
    with torch.utils.checkpoint.set_checkpoint_early_stop(early_stop), ms.apply(stack, strategy) as applied:
        stack(x).sum().backward()
    report = applied.report
    assert report.region_forwards == plan.region_runs()
    if early_stop:
        assert tuple(count - 1 for count in started) == plan.recompute_counts()
        assert report.region_recomputes == plan.region_runs()
    assert sum(started) - n_layers == report.block_recomputes
    assert report.blocks_kept + report.blocks_recomputed == n_layers


def test_report_reads_as_a_sentence():
    stack, x = stack_and_input()
    with ms.apply(stack, ms.Chunked(num_checkpoints=2)) as applied:
        stack(x).sum().backward()
    assert str(applied.report) == (
        "2 chunks: 0 blocks kept, 4 recomputed; 2 regions in forward, 2 run again in backward (4 block forwards)"
    )


def test_a_block_can_ask_whether_it_runs_again():
    """pytorch#96136, Megatron-LM#1514: side effects once, although the block runs twice."""

    class Counting(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.asked = []

        def forward(self, x):
            self.asked.append(is_recomputing())
            return self.linear(x).tanh()

    blocks = nn.Sequential(*(Counting() for _ in range(3)))
    assert not is_recomputing()
    with ms.apply(blocks, ms.FullCheckpoint()):
        blocks(torch.randn(2, 4)).sum().backward()
    assert [block.asked for block in blocks] == [[False, True]] * 3
    assert not is_recomputing()


# Arguments and results


class Rich(nn.Module):
    """A block with every kind of argument and result; it checks what it gets on each run, the second one included."""

    def __init__(self, n: int):
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.n = n

    def forward(self, x, bias, flag, nothing, /, count, *, name, scale, nested, tail=()):
        assert (flag, nothing, count, name, tail) == (True, None, 3, "mode", (1, 2.5))
        assert type(flag) is bool and type(count) is int and type(tail) is tuple
        assert type(nested) is dict and type(nested["pair"]) is tuple and type(nested["list"]) is list
        assert nested["list"][1] is None and nested["pair"][1] == "text"
        assert nested["pair"][0].stride() == (1, 4) and nested["list"][0].storage_offset() == 2
        y = torch.tanh(self.linear(x) * scale + bias + nested["pair"][0].sum() + nested["list"][0].sum())
        return y, {"extra": y.sum() * self.n, "name": name}, [None, flag, y[:, 1:].t()], count


@every_plain_strategy
def test_arguments_and_results_keep_value_order_and_type(strategy):
    """DeepSpeed#8182, #660, #741, pytorch#79887, axolotl#2563, trl#5694."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Rich(n) for n in range(4))

        def forward(self, x, bias, scale, nested):
            extras = []
            for block in self.blocks:
                x, extra, more, count = block(
                    x, bias, True, None, 3, name="mode", scale=scale, nested=nested, tail=(1, 2.5)
                )
                assert extra["name"] == "mode" and more[:2] == [None, True] and count == 3
                assert more[2].stride() == (1, 4)
                extras.append(extra["extra"] + more[2].square().sum())
            return x, sum(extras)

    def use(chosen):
        torch.manual_seed(SEED)
        model = Model()
        leaves = [torch.randn(3, 4, requires_grad=True) for _ in range(5)]
        x, bias, scale, first, second = leaves
        nested = {"pair": (first.t(), "text"), "list": [second.flatten()[2:], None]}
        with contextlib.nullcontext() if chosen is None else ms.apply(model, chosen):
            y, extra = model(x, bias, scale, nested)
            loss = y.square().sum() + extra
            loss.backward()
        return Outcome(loss.detach(), gradients(model), torch.get_rng_state()), [leaf.grad for leaf in leaves]

    plain, plain_leaves = use(None)
    ours, our_leaves = use(strategy)
    assert_same(ours, plain)
    for mine, theirs in zip(our_leaves, plain_leaves, strict=True):
        assert torch.equal(mine, theirs)


@every_plain_strategy
def test_a_container_that_a_block_fills_is_the_callers_own(strategy):
    """Arguments reach the block as they are; a second run must not fill them a second time."""

    class Filling(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, notes, seen):
            x = self.linear(x).tanh()
            notes["last"] = x.detach()
            seen.append(len(seen))
            return x

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Filling() for _ in range(4))

        def forward(self, x, notes, seen):
            for block in self.blocks:
                x = block(x, notes, seen=seen)
            return x

    model, notes, seen = Model(), {"first": torch.ones(1)}, []
    with ms.apply(model, strategy):
        output = model(torch.randn(2, 4), notes, seen)
        output.sum().backward()
    assert torch.equal(notes["last"], output)
    assert seen == [0, 1, 2, 3]


@pytest.mark.parametrize("strategy", BLOCK_BY_BLOCK, ids=label)
def test_blocks_may_get_other_arguments_each(strategy):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.ModuleList([nn.Linear(4, 4)]) for _ in range(4))
            self.blocks = nn.ModuleList(Scaled() for _ in range(4))

        def forward(self, x):
            for number, block in enumerate(self.blocks):
                x = block(x, number + 1)
            return x

    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, scale):
            return (self.linear(x) * scale).tanh()

    def build():
        model, x = Model(), torch.randn(3, 4)

        def step():
            loss = model(x).square().sum()
            loss.backward()
            return loss

        return model, step

    assert_equal_to_plain(build, strategy)


def test_a_chunk_over_blocks_with_other_arguments_is_refused_by_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Pair() for _ in range(4))

        def forward(self, x):
            for number, block in enumerate(self.blocks):
                x = block(x, number)
            return x

    class Pair(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x, number):
            return self.linear(x) + number

    model = Model()
    with ms.apply(model, ms.Chunked(num_checkpoints=2)), pytest.raises(ValueError, match="blocks.1 got other arg"):
        model(torch.randn(2, 4))
    assert model(torch.randn(2, 4)).shape == (2, 4)


def test_a_chunk_whose_model_works_between_the_blocks_is_refused_by_name():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(4))

        def forward(self, x):
            for block in self.blocks:
                x = block(x) * 2
            return x

    model, x = Model(), torch.randn(2, 4)
    plain = model(x)
    with (
        ms.apply(model, ms.Chunked(num_checkpoints=2)),
        pytest.raises(ValueError, match="between blocks.0 and blocks.1"),
    ):
        model(x)
    with ms.apply(model, ms.FullCheckpoint()):
        assert torch.equal(model(x), plain)


@pytest.mark.parametrize("use", ["keep for later", "add up", "look at the shape"])
def test_a_block_output_that_no_longer_exists_cannot_be_used(use):
    """A skip connection or an auxiliary loss would silently read the whole region's output."""

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(4))

        def forward(self, x):
            kept, added = [], 0
            for block in self.blocks:
                x = block(x)
                kept.append(x)
                if use == "add up":
                    added = added + x.square().mean()
                assert x.shape == (2, 4) and x.size(1) == 4 and x.requires_grad
            return x + added + (sum(kept) if use == "keep for later" else 0)

    model, x = Model(), torch.randn(2, 4)
    plain = model(x)
    for strategy in (ms.Chunked(num_checkpoints=2), ms.Recursive()):
        with ms.apply(model, strategy):
            if use == "look at the shape":
                assert torch.equal(model(x), plain)
            else:
                with pytest.raises(ValueError, match="used by more than the next block"):
                    model(x)
    with ms.apply(model, ms.FullCheckpoint()):
        assert torch.equal(model(x), plain)


@pytest.mark.parametrize("change", ["in place", "replaced"])
def test_a_buffer_that_changes_before_backward_is_noticed(change):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.register_buffer("scale", torch.ones(1))

        def forward(self, x):
            return self.linear(x) * self.scale

    blocks = nn.Sequential(Block(), Block())
    for strategy in (ms.FullCheckpoint(), ms.Chunked(num_checkpoints=1)):
        loss = ms.run(list(blocks), torch.randn(2, 4), strategy).square().sum()
        if change == "in place":
            blocks[0].scale.mul_(3)
        else:
            blocks[0].scale = blocks[0].scale * 3
        with pytest.raises(RuntimeError, match="since forward"):
            loss.backward()


@pytest.mark.parametrize("kind", [tuple, list, dict])
@every_plain_strategy
def test_blocks_may_hand_on_a_tuple_a_list_or_a_dictionary(strategy, kind):
    """DeepSpeed#660, #741."""

    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, state):
            assert type(state) is kind
            x, mask, count = state.values() if kind is dict else state
            x = F.dropout((self.linear(x) * mask).tanh(), 0.5)
            return {"x": x, "mask": mask, "count": count + 1} if kind is dict else kind((x, mask, count + 1))

    def build():
        blocks, x, mask = nn.Sequential(*(Block() for _ in range(4))), torch.randn(3, 4), torch.rand(3, 1)
        first = {"x": x, "mask": mask, "count": 0} if kind is dict else kind((x, mask, 0))

        def step():
            x, _, count = blocks(first).values() if kind is dict else blocks(first)
            assert count == 4
            loss = x.square().sum()
            loss.backward()
            return loss

        return blocks, step

    assert_equal_to_plain(build, strategy)


@pytest.mark.parametrize("what", ["state", "argument"])
def test_a_chunk_whose_model_changes_a_dictionary_between_the_blocks_is_refused(what):
    class Block(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, state, notes):
            state["x"] = self.linear(state["x"]) * notes["scale"]
            return state

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(Block() for _ in range(4))

        def forward(self, x):
            state, notes = {"x": x}, {"scale": 1.0}
            for block in self.blocks:
                state = block(state, notes)
                if what == "state":
                    state["x"] = state["x"] * 2
                else:
                    notes["scale"] += 1
            return state["x"]

    model, x = Model(), torch.randn(2, 4)
    plain = model(x)
    for strategy in RECOMPUTING:
        with ms.apply(model, strategy):
            if strategy in BLOCK_BY_BLOCK:
                assert torch.equal(model(x), plain)
            else:
                with pytest.raises(ValueError, match="cannot run as one region"):
                    model(x)


@pytest.mark.parametrize("left_out", [1, 3])
def test_a_chunk_whose_model_leaves_a_block_out_is_refused_by_name(left_out):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4)) for _ in range(4))

        def forward(self, x):
            for number, block in enumerate(self.blocks):
                if number != left_out:
                    x = block(x)
            return x

    model, x = Model(), torch.randn(2, 4)
    with ms.apply(model, ms.Chunked(num_checkpoints=2)):
        with pytest.raises(RuntimeError, match=f"blocks.{left_out} was not called"):
            model(x)
        with torch.no_grad():
            model(x)
    for strategy in BLOCK_BY_BLOCK:
        with ms.apply(model, strategy):
            model(x).sum().backward()
    assert model.blocks[left_out][0].weight.grad is None


def test_a_chunk_needs_the_model_that_calls_its_blocks():
    stack, x = stack_and_input()
    with ms.apply(stack, ms.Chunked(num_checkpoints=2)):
        for _ in range(2):  # before any call of the model, and after one
            with pytest.raises(RuntimeError, match="blocks.0 was called without .* call BlockStack"):
                stack.blocks[0](x)
            stack(x).sum().backward()


class InPlace(nn.Module):
    """Works in place on its input, in the middle, or on its result."""

    def __init__(self, where: str):
        super().__init__()
        self.linear, self.where = nn.Linear(4, 4), where

    def forward(self, x):
        if self.where == "first":
            x = x.mul_(0.5)
        x = self.linear(x)
        if self.where == "middle":
            x = F.dropout(x.add_(1), 0.5, self.training)
        x = x * 2
        return F.relu(x, inplace=True) if self.where == "last" else x.tanh()


class Views(nn.Module):
    """Hands on a transposed, sliced, offset view."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 7)

    def forward(self, x):
        return self.linear(x.t().flatten()[:12].view(2, 6)).flatten()[2:14].view(6, 2)[::1].t().contiguous().t()


@pytest.mark.parametrize("where", ["middle", "last"])
@every_plain_strategy
def test_blocks_that_work_in_place(strategy, where):
    """ColossalAI#1460, pytorch#26546."""

    def build():
        blocks, x = nn.Sequential(*(InPlace(where) for _ in range(4))), torch.randn(3, 4)

        def step():
            loss = blocks(x).square().sum()
            loss.backward()
            return loss

        return blocks, step

    assert_equal_to_plain(build, strategy)


@every_plain_strategy
def test_blocks_that_hand_on_views(strategy):
    """trl#5694, DeepSpeed#8387."""

    def build():
        blocks, x = nn.Sequential(*(Views() for _ in range(4))), torch.randn(6, 2)

        def step():
            loss = blocks(x).square().sum()
            loss.backward()
            return loss

        return blocks, step

    assert_equal_to_plain(build, strategy)


# Plain callables


class Methods:
    """Blocks that are bound methods."""

    def __init__(self):
        self.weight = torch.randn(4, 4, requires_grad=True)

    def first(self, x):
        return torch.tanh(x @ self.weight)


def scaled(x, weight, *, power):
    return torch.tanh(x @ weight) ** power


@every_plain_strategy
def test_run_takes_any_callable(strategy):
    """axolotl#2563, unsloth-zoo#1038; pytorch#11944: a loop variable in a closure recomputes the wrong block."""

    def use(chosen):
        torch.manual_seed(SEED)
        holder, module, weight = Methods(), nn.Linear(4, 4), torch.randn(4, 4, requires_grad=True)
        weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
        closures = [lambda x, w=w: torch.sin(F.dropout(x @ w, 0.5)) for w in weights]
        blocks = [holder.first, partial(scaled, weight=weight, power=2), module, *closures, torch.tanh]
        x = torch.randn(3, 4, requires_grad=True)
        if chosen is None:
            y = x
            for block in blocks:
                y = block(y)
        else:
            y = ms.run(blocks, x, chosen)
        loss = y.square().sum()
        loss.backward()
        leaves = [holder.weight, weight, *weights, x, *module.parameters()]
        return Outcome(loss.detach(), {str(i): t.grad for i, t in enumerate(leaves)}, torch.get_rng_state())

    assert_same(use(strategy), use(None))


@every_strategy
def test_run_takes_a_list_of_modules(strategy):
    def use(chosen):
        torch.manual_seed(SEED)
        stack, x = stack_and_input()
        y = stack(x) if chosen is None else ms.run(list(stack.blocks), x, chosen)
        loss = y.square().sum()
        loss.backward()
        return Outcome(loss.detach(), gradients(stack), torch.get_rng_state())

    assert_same(use(strategy), use(None))


@every_plain_strategy
def test_run_hands_on_whatever_a_block_returns(strategy):
    """DeepSpeed#660, #741: the state may be a tuple or a dictionary."""
    weights = [torch.randn(4, 4, requires_grad=True) for _ in range(4)]

    def block(state, weight):
        (x, count), names = state["pair"], state["names"]
        assert type(names) is list
        return {"pair": (torch.tanh(x @ weight), count + 1), "names": [*names, "more"]}

    blocks = [partial(block, weight=weight) for weight in weights]
    x = torch.randn(2, 4, requires_grad=True)
    plain = {"pair": (x, 0), "names": []}
    for each in blocks:
        plain = each(plain)
    ours = ms.run(blocks, {"pair": (x, 0), "names": []}, strategy)
    assert ours["pair"][1] == 4 and ours["names"] == ["more"] * 4
    expected = torch.autograd.grad(plain["pair"][0].sum(), [x, *weights])
    found = torch.autograd.grad(ours["pair"][0].sum(), [x, *weights])
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_run_without_gradients_saves_nothing():
    x = torch.randn(2, 4)
    with torch.no_grad():
        assert not ms.run([nn.Linear(4, 4)] * 2, x, ms.FullCheckpoint()).requires_grad


def test_run_refuses_what_it_cannot_do():
    x = torch.randn(2, 4)
    with pytest.raises(ValueError, match="blocks is empty"):
        ms.run([], x, ms.FullCheckpoint())
    with pytest.raises(TypeError, match=r"blocks\[1\] cannot be called: 3"):
        ms.run([torch.tanh, 3], x, ms.FullCheckpoint())
    with pytest.raises(TypeError, match="must be a strategy such as FullCheckpoint.., got <class"):
        ms.run([torch.tanh], x, ms.FullCheckpoint)
    with pytest.raises(TypeError, match="must be a strategy .* got 'full'"):
        ms.run([torch.tanh], x, "full")
    with pytest.raises(TypeError, match="looks inside the blocks, and block 1 is no nn.Module"):
        ms.run([ms.TransformerBlock(4, 2), torch.tanh], x, ms.SelectiveOps())
    with pytest.raises(ValueError, match="choose 1 to 1 chunks"):
        ms.run([torch.tanh], x, ms.Chunked(num_checkpoints=2))


# Failures


class Failing(nn.Module):
    """Raises in a chosen call, counted over first runs and second runs."""

    def __init__(self):
        super().__init__()
        self.linear, self.fail_at, self.calls = nn.Linear(4, 4), None, 0

    def forward(self, x):
        self.calls += 1
        if self.calls == self.fail_at:
            raise KeyError("on purpose")
        return F.dropout(self.linear(x), 0.5).tanh()


@pytest.mark.parametrize("fail_at", [1, 2])
@every_plain_strategy
def test_the_model_is_usable_after_a_block_has_failed(strategy, fail_at):
    """In forward (first call) or, where it runs again, in backward."""

    def make():
        torch.manual_seed(SEED)
        return nn.Sequential(*(Failing() for _ in range(5))), torch.randn(3, 4)

    def step(model, x):
        torch.manual_seed(SEED + 1)
        loss = model(x).square().sum()
        loss.backward()
        return Outcome(loss.detach(), gradients(model), torch.get_rng_state())

    model, x = make()
    plain = step(model, x)
    model, x = make()
    recomputed = strategy.plan(5).recompute_counts()[1] > 0
    with ms.apply(model, strategy):
        model[1].fail_at = fail_at
        if fail_at == 1 or recomputed:
            with pytest.raises(KeyError, match="on purpose"):
                step(model, x)
            assert not is_recomputing()
        model.zero_grad()
        for block in model:
            block.fail_at = None
        assert_same(step(model, x), plain)
    model.zero_grad()
    assert_same(step(model, x), plain)


def test_an_exception_leaves_the_strategy():
    stack, x = stack_and_input()
    kinds = [type(module) for module in stack.modules()]
    with pytest.raises(KeyError), ms.apply(stack, ms.FullCheckpoint()):
        raise KeyError("outside")
    assert [type(module) for module in stack.modules()] == kinds
    with ms.apply(stack, ms.FullCheckpoint()) as applied:
        stack(x).sum().backward()
    assert applied.report.region_recomputes == 4


# The model stays what it was


@every_strategy
def test_names_classes_and_keys_stay(strategy):
    """pytorch#77224."""
    stack, _ = stack_and_input()
    names, keys = [name for name, _ in stack.named_modules()], list(stack.state_dict())
    members, parameters = [set(vars(m)) for m in stack.modules()], list(stack.parameters())
    kinds, text = [type(m) for m in stack.modules()], repr(stack)
    hooks = [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in stack.modules()]
    with ms.apply(stack, strategy):
        assert [name for name, _ in stack.named_modules()] == names
        assert list(stack.state_dict()) == keys
        assert [set(vars(m)) for m in stack.modules()] == members
        assert all(a is b for a, b in zip(stack.parameters(), parameters, strict=True))
        assert [len(m._forward_hooks) + len(m._forward_pre_hooks) for m in stack.modules()] == hooks
        assert repr(stack) == text
        for module, kind in zip(stack.modules(), kinds, strict=True):
            assert isinstance(module, kind)
            assert type(module).__name__ == kind.__name__ and type(module).__module__ == kind.__module__
    assert [type(m) for m in stack.modules()] == kinds
    assert [set(vars(m)) for m in stack.modules()] == members


def through_pickle(model):
    return pickle.loads(pickle.dumps(model))


def through_torch_save(model):
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    return torch.load(buffer, weights_only=False)


@pytest.mark.parametrize("make_copy", [copy.deepcopy, through_pickle, through_torch_save], ids=lambda f: f.__name__)
@every_strategy
def test_copies_made_meanwhile_are_independent_and_plain(strategy, make_copy):
    stack, x = stack_and_input(dropout=0.0)
    kinds = [type(m) for m in stack.modules()]
    with ms.apply(stack, strategy) as applied:
        twin = make_copy(stack)
        counted = applied.report
        assert [type(m) for m in twin.modules()] == kinds
        assert not {id(p) for p in twin.parameters()} & {id(p) for p in stack.parameters()}
        assert not {id(m) for m in twin.modules()} & {id(m) for m in stack.modules()}
        assert torch.equal(twin(x), stack(x))
        before = applied.report
        twin(x).sum().backward()
        assert applied.report == before
        assert counted.region_forwards == 0
        assert all(p.grad is None for p in stack.parameters())
        with torch.no_grad():
            for parameter in twin.parameters():
                parameter.zero_()
        assert all(p.count_nonzero() for p in stack.blocks[0].up.parameters())
        with ms.apply(twin, strategy) as second:  # a copy carries nothing over
            twin(x).sum().backward()
        assert second.report.blocks_kept == applied.report.blocks_kept
    assert torch.equal(make_copy(stack)(x), stack(x))


@pytest.mark.parametrize("make_copy", [copy.deepcopy, through_pickle], ids=lambda f: f.__name__)
def test_copies_keep_attributes_hooks_and_sharing(make_copy):
    stack, x = stack_and_input()
    stack.blocks[2] = stack.blocks[0]
    stack.note, stack.blocks[1].note = {"a": [1, 2]}, "text"
    stack.blocks[3].up.weight = stack.blocks[1].up.weight
    with ms.apply(stack, ms.FullCheckpoint()):
        twin = make_copy(stack)
    assert twin.blocks[2] is twin.blocks[0]
    assert twin.blocks[3].up.weight is twin.blocks[1].up.weight
    assert twin.note == {"a": [1, 2]} and twin.note is not stack.note and twin.blocks[1].note == "text"
    assert vars(twin).keys() == vars(stack).keys()


def test_a_second_strategy_on_the_same_model_is_refused():
    stack, x = stack_and_input()
    with ms.apply(stack, ms.FullCheckpoint()) as applied:
        for again in (stack, nn.Sequential(stack)):
            with pytest.raises(ValueError, match="follows a strategy already.* before you apply KeepAll"):
                ms.apply(again, ms.KeepAll(), blocks=list(stack.blocks))
        stack(x).sum().backward()
        assert applied.report.region_recomputes == 4
    with ms.apply(stack, ms.KeepAll()):
        pass


def test_remove_may_be_called_twice():
    stack, _ = stack_and_input()
    applied = ms.apply(stack, ms.FullCheckpoint())
    applied.remove()
    applied.remove()
    assert type(stack) is ms.BlockStack


def test_a_block_that_cannot_be_intercepted_leaves_the_others_as_they_were():
    class Final(nn.Sequential):
        def __init_subclass__(cls):
            raise TypeError("this class is final")

    blocks = nn.ModuleList([nn.Sequential(nn.Linear(4, 4)), Final(nn.Linear(4, 4))])
    model = nn.Sequential(blocks)
    with pytest.raises(TypeError, match="this class is final"):
        ms.apply(model, ms.FullCheckpoint(), blocks=list(blocks))
    assert type(blocks[0]) is nn.Sequential and type(blocks[1]) is Final and type(model) is nn.Sequential


def test_a_compiled_model_is_refused():
    stack, _ = stack_and_input()
    compiled = torch.compile(stack, backend="eager")
    with pytest.raises(ValueError, match="is compiled"):
        ms.apply(compiled, ms.FullCheckpoint())
    stack.blocks[1].compile(backend="eager")
    with pytest.raises(ValueError, match="is compiled"):
        ms.apply(stack, ms.FullCheckpoint())


def test_what_does_not_fit_is_refused_with_a_sentence():
    """DeepSpeed#5704, sentence-transformers#2717: no switch without effect. DeepSpeed#8041, Megatron-LM#3562."""
    stack, _ = stack_and_input()
    with pytest.raises(ValueError, match="found no blocks in Linear"):
        ms.apply(nn.Linear(2, 2), ms.FullCheckpoint())
    with pytest.raises(ValueError, match="blocks is empty"):
        ms.apply(stack, ms.FullCheckpoint(), blocks=[])
    with pytest.raises(ValueError, match=r"blocks\[0\] \(Linear\) is not a part of BlockStack"):
        ms.apply(stack, ms.FullCheckpoint(), blocks=[nn.Linear(2, 2)])
    with pytest.raises(ValueError, match="this stack has 4: choose 1 to 4 chunks"):
        ms.apply(stack, ms.Chunked(num_checkpoints=5))
    with pytest.raises(TypeError, match="must be a strategy such as KeepAll"):
        ms.apply(stack, ms.KeepAll)
    plain = nn.Sequential(*(nn.Sequential(nn.Linear(2, 2)) for _ in range(3)))
    with pytest.raises(ValueError, match="can recompute 'attention' only"):
        ms.apply(plain, ms.SelectiveOps("norm"))
    bare = nn.ModuleList(stack.blocks)
    with pytest.raises(ValueError, match="use memsave_lib.run"):
        ms.apply(bare, ms.Chunked(num_checkpoints=2), blocks=list(stack.blocks))
    assert not any("intercepted" in name for m in stack.modules() for name in vars(type(m)))


def test_attention_that_is_never_called_is_reported():
    """DeepSpeed#5704: a strategy that finds nothing to do says so."""
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(2)))
    with (
        ms.apply(blocks, ms.SelectiveOps("attention")),
        pytest.raises(RuntimeError, match="0 never called F.scaled_dot_product_attention"),
    ):
        blocks(torch.randn(2, 4))


def test_nothing_keeps_a_model_alive_after_its_strategy_was_removed():
    """pytorch#84413: dropped without the garbage collector."""
    for strategy in EVERY:
        stack, x = stack_and_input()
        with ms.apply(stack, strategy):
            stack(x).sum().backward()
        parameter = weakref.ref(stack.blocks[0].up.weight)
        gc.disable()
        try:
            del stack
            assert parameter() is None, strategy
        finally:
            gc.enable()


def test_parts_taken_from_a_model_meanwhile_are_plain_afterwards():
    blocks = nn.Sequential(*(nn.Sequential(nn.Linear(4, 4)) for _ in range(4)))
    x = torch.randn(2, 4, requires_grad=True)
    plain = blocks(x)
    with ms.apply(blocks, ms.FullCheckpoint()) as applied:
        first, second = blocks[:2], blocks[2:]
        assert torch.equal(second(first(x)), plain)
        counted = applied.report
    assert torch.equal(second(first(x)), plain)
    assert applied.report == counted


def test_backward_hooks_of_blocks_fire_once():
    stack, x = stack_and_input()
    for strategy in STRATEGIES:
        fired: list[int] = []
        handles = [
            block.register_full_backward_hook(partial(lambda index, fired, *_: fired.append(index), index, fired))
            for index, block in enumerate(stack.blocks)
        ]
        with ms.apply(stack, strategy):
            stack(x).sum().backward()
        assert fired == [3, 2, 1, 0], strategy
        for handle in handles:
            handle.remove()


def test_two_threads_may_run_the_same_model():
    class Meeting(ms.BlockStack):
        def forward(self, x):
            for block in self.blocks:
                meet.wait(timeout=30)
                x = block(x)
            return x

    stack = Meeting(4, 8, 2)
    inputs = [torch.randn(2, 5, 8) for _ in range(2)]
    meet = threading.Barrier(1)
    plain = [stack(x) for x in inputs]
    meet = threading.Barrier(2)
    found: dict[int, Tensor] = {}

    def work(number: int) -> None:
        found[number] = stack(inputs[number])

    with ms.apply(stack, ms.Chunked(num_checkpoints=2)):
        threads = [threading.Thread(target=work, args=(number,)) for number in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert all(torch.equal(found[number], plain[number]) for number in range(2))


# What recomputation cannot do is said, not done wrongly


metered_or_not = pytest.mark.parametrize("metered", [False, True], ids=["bare", "metered"])


@metered_or_not
@every_strategy
def test_weights_changed_between_forward_and_backward_raise_as_plain_does(strategy, metered):
    """pytorch#128611: without this check the second run would use the new weights, and nobody would notice."""
    stack, x = stack_and_input(dropout=0.0)
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)
    with ms.apply(stack, strategy), ms.MemoryMeter(stack) if metered else contextlib.nullcontext():
        first, second = stack(x).sum(), stack(x).sum()
        first.backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            second.backward()


@metered_or_not
@every_strategy
def test_an_input_changed_between_forward_and_backward_raises_as_plain_does(strategy, metered):
    """pytorch#128611."""
    stack, _ = stack_and_input(dropout=0.0)
    x = torch.randn(2, 5, 8)
    with ms.apply(stack, strategy), ms.MemoryMeter(stack) if metered else contextlib.nullcontext():
        loss = stack(x).sum()
        x.mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@every_strategy
def test_weights_exchanged_for_one_call_only_are_refused(strategy):
    """A second run would find the model's own weights again: torch.func.functional_call around forward alone."""
    stack, x = stack_and_input(dropout=0.0)
    others = dict(stack_and_input(dropout=0.0)[0].named_parameters())  # the same versions, other tensors
    expected = torch.autograd.grad(torch.func.functional_call(stack, others, (x,)).sum(), list(others.values()))
    with ms.apply(stack, strategy) as applied:
        loss = torch.func.functional_call(stack, others, (x,)).sum()
        if applied.report.region_forwards == 0:
            loss.backward()
        elif strategy != ATTENTION_ONLY:  # the attention core reads no weights
            with pytest.raises(RuntimeError, match="has been replaced since forward"):
                loss.backward()
            stack.zero_grad()
            for other in others.values():
                other.grad = None

        class Step(nn.Module):
            def __init__(self):
                super().__init__()
                self.model = stack

            def forward(self, x):
                self.model(x).sum().backward()

        for other in others.values():
            other.grad = None
        torch.func.functional_call(Step(), {f"model.{name}": p for name, p in others.items()}, (x,))
    for other, gradient in zip(others.values(), expected, strict=True):
        assert torch.equal(other.grad, gradient)


def test_a_recomputed_block_that_changes_its_input_in_place_is_refused_in_forward():
    """ColossalAI#1460, pytorch#26546: nothing would be left to recompute it from."""
    blocks, x = nn.Sequential(*(InPlace("first") for _ in range(4))), torch.randn(3, 4)
    for strategy in RECOMPUTING:
        with (
            ms.apply(blocks, strategy),
            pytest.raises(RuntimeError, match=r"input in place \(\[3, 4\] of torch.float32"),
        ):
            blocks(x.clone())
        blocks.requires_grad_(False)
        plain = blocks(x.clone())
        with ms.apply(blocks, strategy):  # no gradient comes this way, so nothing will be recomputed
            assert torch.equal(blocks(x.clone()), plain)
        blocks.requires_grad_(True)


def test_outcomes_of_different_steps_differ():
    """The comparison itself can fail."""
    plain = outcome(lambda: build_tiny(dropout=0.5), None)
    other = outcome(lambda: build_tiny(dropout=0.25), None)
    with pytest.raises(AssertionError, match="loss"):
        assert_same(other, plain)
    missing = Outcome(plain.loss, {**plain.gradients, "head.weight": None}, plain.random_state)
    with pytest.raises(AssertionError, match="head.weight: gradient None"):
        assert_same(missing, plain)
    state = plain.random_state.clone()
    state[100] ^= 1
    with pytest.raises(AssertionError, match="random state"):
        assert_same(Outcome(plain.loss, plain.gradients, state), plain)
