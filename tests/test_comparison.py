"""Strategies side by side: equal results first, then bytes, FLOPs and seconds."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memsave_lib as ms
from memsave_lib.formulas import BlockShape, stack_saved_bytes

SHAPE = BlockShape(2, 8, 64, 1)


class Counted:
    """Builds equal stacks, and counts models and steps."""

    def __init__(self, dropout: float = 0.0) -> None:
        self.dropout, self.models, self.steps = dropout, 0, 0

    def __call__(self) -> tuple[nn.Module, Callable[[], Tensor]]:
        self.models += 1
        stack = ms.BlockStack(3, 64, 1, dropout=self.dropout)
        x = torch.randn(2, 8, 64)

        def step() -> Tensor:
            self.steps += 1
            loss = stack(x).sum()
            loss.backward()
            return loss

        return stack, step


class Drifts(nn.Module):
    """A block that computes something else each time it runs."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.runs = nn.Linear(64, 64), 0

    def forward(self, x: Tensor) -> Tensor:
        self.runs += 1
        return (self.linear(x) * self.runs).square()


def test_every_strategy_is_measured_on_its_own_model_against_one_reference() -> None:
    build = Counted(dropout=0.5)
    found = ms.compare(build, [ms.KeepAll(), ms.FullCheckpoint(), ms.Selective(2)], repeats=2)
    assert (build.models, build.steps) == (3, 1 + 3 * (2 + 2))  # the reference; metered, FLOPs counted, timed twice
    assert [one.equal_gradients for one in found.measurements] == [True, True, True]
    assert all(one.step_seconds > 0 for one in found.measurements)


def test_bytes_and_flops_are_those_of_the_formulas() -> None:
    strategies = [ms.KeepAll(), ms.FullCheckpoint(), ms.SelectiveOps(("activation", "norm"))]
    found = ms.compare(Counted(), strategies, repeats=0)
    assert [one.saved_bytes for one in found.measurements] == [stack_saved_bytes(s.plan(3), SHAPE) for s in strategies]
    keep, full, free = (one.step_flops for one in found.measurements)
    assert (full * 9, free) == (keep * 11, keep)
    assert [one.step_seconds for one in found.measurements] == [None] * 3


def test_a_frame_has_a_row_for_each_label_and_ratios_to_the_first() -> None:
    frame = ms.compare(Counted(), {"none": ms.KeepAll(), "full": ms.FullCheckpoint()}, repeats=0).frame()
    assert list(frame.index) == ["none", "full"]
    assert list(frame.flops_ratio.round(4)) == [1.0, 1.2222]
    assert frame.saved_ratio["full"] == frame.saved_bytes["full"] / frame.saved_bytes["none"]
    assert frame.peak_at["none"].startswith("backward, blocks.")


def test_models_that_differ_are_not_called_equal() -> None:
    scales = iter((1.0, 2.0))

    def make_step() -> tuple[nn.Module, Callable[[], Tensor]]:
        stack, scale = ms.BlockStack(2, 64, 1), next(scales)
        x = scale * torch.randn(2, 8, 64)

        def step() -> Tensor:
            loss = stack(x).sum()
            loss.backward()
            return loss

        return stack, step

    found = ms.compare(make_step, [ms.KeepAll(), ms.FullCheckpoint()], repeats=0)
    assert [one.equal_gradients for one in found.measurements] == [True, False]


def test_a_block_that_changes_between_its_runs_is_noticed() -> None:
    blocks = nn.ModuleList([Drifts()])
    x = torch.randn(2, 64)

    def step() -> Tensor:
        blocks[0].runs = 0
        loss = blocks[0](x).sum()
        loss.backward()
        return loss

    model = nn.Sequential(*blocks)
    assert ms.measure(step, model, ms.KeepAll(), repeats=0, blocks=list(blocks)).equal_gradients
    assert not ms.measure(step, model, ms.FullCheckpoint(), repeats=0, blocks=list(blocks)).equal_gradients


def test_measuring_leaves_gradients_and_random_state_as_they_were() -> None:
    stack, step = Counted(dropout=0.5)()
    step()
    before = [parameter.grad for parameter in stack.parameters()]
    values = [gradient.clone() for gradient in before]
    state = torch.get_rng_state()
    ms.measure(step, stack, ms.FullCheckpoint(), repeats=1)
    assert all(parameter.grad is gradient for parameter, gradient in zip(stack.parameters(), before, strict=True))
    assert all(map(torch.equal, before, values))
    assert torch.equal(torch.get_rng_state(), state)


def test_wrong_arguments_are_told() -> None:
    stack, step = Counted()()
    with pytest.raises(ValueError, match="strategies is empty"):
        ms.compare(Counted(), [])
    with pytest.raises(ValueError, match="repeats is a whole number of at least 0, got -1"):
        ms.measure(step, stack, ms.KeepAll(), repeats=-1)
    with pytest.raises(ValueError, match="must return the loss, a tensor; it returned None"):
        ms.measure(lambda: step() and None, stack, ms.KeepAll(), repeats=0)
    with pytest.raises(ValueError, match="left no gradients"):
        ms.measure(lambda: torch.zeros(1), stack, ms.KeepAll(), repeats=0)
    optimizer = torch.optim.SGD(stack.parameters(), lr=0.1)

    def trains() -> Tensor:
        loss = step()
        optimizer.step()
        return loss

    with pytest.raises(ValueError, match="changed the model's parameters"):
        ms.measure(trains, stack, ms.KeepAll(), repeats=0)


def test_equal_labels_are_refused_before_anything_runs():
    builder = Counted()
    with pytest.raises(ValueError, match="same label"):
        ms.compare(builder, [ms.KeepAll(), ms.KeepAll()])
    assert builder.models == 0
