"""The check of notebook 02's dice: a block that draws the same random numbers when it is run again.

It follows :mod:`memsave_lib.course.checks`, and looks at outputs first, then at gradients, random state and bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from memsave_lib.course.checks import Verdict, all_equal, answered, right, shown, wrong
from memsave_lib.course.dice_mistakes import GRADIENT_MISTAKES, OUTPUT_MISTAKES, Function
from memsave_lib.course.env import Setup
from memsave_lib.meter import MemoryMeter
from memsave_lib.models import BlockStack
from memsave_lib.units import human_bytes

#: One hidden state takes 16 KiB: more than the copies of a random state (5 KiB) that a wrapper may keep.
_DICE_INPUT = (2, 32, 64)
_DICE_BLOCKS = 3
_DICE_SEED = 1
#: What the generator is seeded with when wrappers are made, so that a state taken then is known.
_MADE_SEED = 2


class _RunAgain(torch.autograd.Function):
    """The notebook's checkpoint by hand."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return _like(x, function(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = _like(x, ctx.function(x))
        # What the first call returned has this very node as its past: going backward through it would never end.
        if output.grad_fn is None or output.grad_fn.name() == f"{_RunAgain.__name__}Backward":
            raise _NothingRecorded
        output.backward(gradient)
        return None, x.grad


class _NothingRecorded(Exception):
    """The later run returned a tensor without a graph of its own."""


class _NoOutput(Exception):
    """A call returned what is no output of a block; the argument says what."""


def _like(x: Tensor, output: object) -> Tensor:
    """A block's output has its input's shape and type."""
    if not isinstance(output, Tensor):
        raise _NoOutput(shown(output))
    if (output.shape, output.dtype) != (x.shape, x.dtype):
        raise _NoOutput(f"a tensor of shape {tuple(output.shape)} and {output.dtype}")
    return output


@dataclass(frozen=True)
class _DiceOutcome:
    """What a step left behind; ``held_bytes`` were alive between forward and backward, the parameters left out."""

    output: Tensor
    gradients: list[Tensor | None]
    random_state: Tensor
    held_bytes: int


@answered
def check_same_dice(wrapper: Callable[[nn.Module], Function], here: Setup) -> Verdict:
    """The exercise of notebook 02: ``wrapper(block)`` replays the random numbers of its first call in later ones."""
    with torch.random.fork_rng():
        torch.manual_seed(here.seed)
        stack = BlockStack(_DICE_BLOCKS, _DICE_INPUT[-1], 1, dropout=0.5)
        x = torch.randn(_DICE_INPUT)
        expected = _dice_outcome(stack, list(stack.blocks), x)
        runs: list[object] = []
        handles = [block.register_forward_pre_hook(lambda *call: runs.append(None)) for block in stack.blocks]
        try:
            found = _dice_outcome(stack, _under_checkpoint(wrapper, stack), x)
        except _NothingRecorded:
            return wrong(_nothing_recorded(ran_again=len(runs) > _DICE_BLOCKS))
        except _NoOutput as error:
            return wrong(
                f"A call of your wrapper returned {error.args[0]}: every call must return the block's output, as it is."
            )
        finally:
            for handle in handles:
                handle.remove()
        return _judge_dice(wrapper, stack, x, found, expected)


def _nothing_recorded(ran_again: bool) -> str:
    advice = (
        "it runs the block again, but under no_grad(), or detached."
        if ran_again
        else "run the block again instead of handing out what the first call computed."
    )
    return f"The later call returned a tensor without a graph of its own, so nothing goes backward through it: {advice}"


def _judge_dice(
    wrapper: Callable[[nn.Module], Function],
    stack: BlockStack,
    x: Tensor,
    found: _DiceOutcome,
    expected: _DiceOutcome,
) -> Verdict:
    if not all(block.training for block in stack.blocks):
        stack.train()
        return wrong("Your wrapper left a block in eval mode, without dropout: the dice must fall again.")
    if not torch.equal(found.output, expected.output):
        return wrong(f"The output differs from the plain block's: {_why_output_differs(stack, x, found)}")
    if not all_equal(found.gradients, expected.gradients):
        for reason, mistake in GRADIENT_MISTAKES.items():
            known = _dice_outcome(stack, _under_checkpoint(mistake(), stack), x)
            if all_equal(found.gradients, known.gradients):
                return wrong(f"Equal output, but the gradients differ: {reason}")
        return wrong("Equal output, but the gradients differ: the later call does not compute what the first one did.")
    if not torch.equal(found.random_state, expected.random_state):
        return wrong(
            "Output and gradients are equal, but the step leaves another random state behind: put back the state that "
            "the later call found, or the next step draws this step's numbers again."
        )
    if (number := _other_dice(wrapper, stack.blocks[0], x)) is not None:
        return wrong(
            f"The {number} call of one wrapper gives another output than the first: what you keep of the first call "
            f"must be there, unchanged, for every later one."
        )
    inputs = _DICE_BLOCKS * x.nbytes
    too_much = found.held_bytes - (inputs + x.nbytes)  # the last block's output is alive too
    if too_much >= x.nbytes:
        return wrong(
            f"Output, gradients and random state are equal, but between forward and backward your wrappers hold "
            f"{human_bytes(too_much)} more than the {human_bytes(inputs)} of the blocks' inputs: keep no tensor of the "
            f"first call but the random state."
        )
    return right(
        f"Output, gradients and random state of {_DICE_BLOCKS} blocks with dropout are equal to keep-all's, and only "
        f"their inputs are held: {human_bytes(inputs)} instead of {human_bytes(expected.held_bytes - x.nbytes)}."
    )


def _why_output_differs(stack: BlockStack, x: Tensor, found: _DiceOutcome) -> str:
    for reason, mistake in OUTPUT_MISTAKES.items():
        if torch.equal(found.output, _dice_outcome(stack, _under_checkpoint(mistake(), stack), x).output):
            return reason
    return (
        "the first call must run the block with the random numbers that come next. Do you seed the generator, or draw "
        "something before?"
    )


def _other_dice(wrapper: Callable[[nn.Module], Function], block: nn.Module, x: Tensor) -> str | None:
    """Which of three calls of one wrapper throws other dice than the first: second, third or none."""
    function = wrapper(block)
    first = function(x).detach()
    for number in ("second", "third"):
        torch.rand(1)  # others draw numbers too
        if not torch.equal(function(x).detach(), first):
            return number
    return None


def _under_checkpoint(wrapper: Callable[[nn.Module], Function], stack: BlockStack) -> list[Function]:
    torch.manual_seed(_MADE_SEED)
    return [partial(_RunAgain.apply, wrapper(block)) for block in stack.blocks]


def _dice_outcome(stack: BlockStack, functions: Sequence[Function], x: Tensor) -> _DiceOutcome:
    stack.zero_grad()
    torch.manual_seed(_DICE_SEED)
    torch.rand(1)  # the generator has moved since it was seeded, as in training
    leaf = x.clone().requires_grad_()
    with MemoryMeter(stack) as meter:
        before = meter.live_bytes
        output = leaf
        for function in functions:
            output = function(output)
        held = meter.live_bytes - before
        output.sum().backward()
    gradients = [parameter.grad for parameter in stack.parameters()]
    return _DiceOutcome(output.detach(), gradients, torch.get_rng_state(), held)
