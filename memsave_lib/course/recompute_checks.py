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

from memsave_lib.course.checks import NOT_TRIED, Verdict, is_untouched, right, wrong
from memsave_lib.course.env import Setup
from memsave_lib.meter import MemoryMeter
from memsave_lib.models import BlockStack
from memsave_lib.units import human_bytes

Function = Callable[[Tensor], Tensor]

#: One hidden state takes 16 KiB: more than the copies of a random state (5 KiB) that a wrapper may keep.
_DICE_INPUT = (2, 32, 64)
_DICE_BLOCKS = 3
_DICE_SEED = 1


class _RunAgain(torch.autograd.Function):
    """The notebook's checkpoint by hand."""

    @staticmethod
    def forward(ctx: Any, function: Function, x: Tensor) -> Tensor:
        ctx.function = function
        ctx.save_for_backward(x)
        return _tensor(function(x))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = _tensor(ctx.function(x))
        # What the first call returned has this very node as its past: going backward through it would never end.
        if output.grad_fn is None or output.grad_fn.name() == f"{_RunAgain.__name__}Backward":
            raise _NothingRecorded
        output.backward(gradient)
        return None, x.grad


class _NothingRecorded(Exception):
    """The later run returned a tensor without a graph of its own."""


class _NoTensor(Exception):
    """A call returned the exception's argument, which is no tensor."""


def _tensor(output: object) -> Tensor:
    if not isinstance(output, Tensor):
        raise _NoTensor(output)
    return output


@dataclass(frozen=True)
class _DiceOutcome:
    """What a step left behind; ``held_bytes`` were alive between forward and backward, the parameters left out."""

    output: Tensor
    gradients: list[Tensor | None]
    random_state: Tensor
    held_bytes: int


def check_same_dice(wrapper: Callable[[nn.Module], Function], here: Setup) -> Verdict:
    """The exercise of notebook 02: ``wrapper(block)`` replays the random numbers of its first call in later ones."""
    with torch.random.fork_rng():
        # A wrapper that shares its state keeps that of this call; the runs below start from the same one.
        torch.manual_seed(_DICE_SEED)
        if is_untouched(lambda: wrapper(nn.Identity())(torch.zeros(1))):
            return NOT_TRIED
        torch.manual_seed(here.seed)
        stack = BlockStack(_DICE_BLOCKS, _DICE_INPUT[-1], 1, dropout=0.5)
        x = torch.randn(_DICE_INPUT)
        expected = _dice_outcome(stack, list(stack.blocks), x)
        try:
            found = _dice_outcome(stack, _under_checkpoint(wrapper, stack), x)
        except _NothingRecorded:
            return wrong(
                "The later call returned a tensor without a graph of its own, so nothing goes backward through it: run "
                "the block again instead of handing out what the first call computed."
            )
        except _NoTensor as error:
            return wrong(f"A call of your wrapper returned {error.args[0]!r}: both must return the block's output.")
        return _judge_dice(wrapper, stack, x, found, expected)


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
        return wrong(
            "The output differs from the plain block's: the first call must run the block with the random numbers that "
            "come next. Do you seed the generator, or draw something before?"
        )
    if not _all_equal(found.gradients, expected.gradients):
        for reason, mistake in _DICE_MISTAKES.items():
            known = _dice_outcome(stack, _under_checkpoint(mistake(), stack), x)
            if _all_equal(found.gradients, known.gradients):
                return wrong(f"Equal output, but the gradients differ: {reason}")
        return wrong("Equal output, but the gradients differ: the later call does not compute what the first one did.")
    if not torch.equal(found.random_state, expected.random_state):
        return wrong(
            "Output and gradients are equal, but the step leaves another random state behind: put back the state that "
            "the later call found, or the next step draws this step's numbers again."
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


def _all_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """A missing gradient is equal to none."""
    return all(
        one is not None and other is not None and torch.equal(one, other)
        for one, other in zip(found, expected, strict=True)
    )


def _under_checkpoint(wrapper: Callable[[nn.Module], Function], stack: BlockStack) -> list[Function]:
    return [partial(_RunAgain.apply, wrapper(block)) for block in stack.blocks]


def _dice_outcome(stack: BlockStack, functions: Sequence[Function], x: Tensor) -> _DiceOutcome:
    stack.zero_grad()
    torch.manual_seed(_DICE_SEED)
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


def _replay(keep: Callable[[dict[str, Tensor], Tensor, Tensor], None]) -> Callable[[nn.Module], Function]:
    """A wrapper for all blocks with one common state; ``keep`` chooses it from the states around a first call."""
    states: dict[str, Tensor] = {}

    def wrapper(block: nn.Module) -> Function:
        calls: list[Tensor] = []

        def function(x: Tensor) -> Tensor:
            if not calls:
                before = torch.get_rng_state()
                calls.append(block(x))
                keep(states, before, torch.get_rng_state())
                return calls[0]
            with torch.random.fork_rng():
                torch.set_rng_state(states["start"])
                return block(x)

        return function

    return wrapper


def _first_state_for_all() -> Callable[[nn.Module], Function]:
    return _replay(lambda states, before, after: states.setdefault("start", before))


def _last_state_for_all() -> Callable[[nn.Module], Function]:
    return _replay(lambda states, before, after: states.update(start=before))


def _state_after_the_call() -> Callable[[nn.Module], Function]:
    def wrapper(block: nn.Module) -> Function:
        return _replay(lambda states, before, after: states.update(start=after))(block)

    return wrapper


def _no_care() -> Callable[[nn.Module], Function]:
    return lambda block: block


def _no_dropout_later() -> Callable[[nn.Module], Function]:
    def wrapper(block: nn.Module) -> Function:
        calls: list[bool] = []

        def function(x: Tensor) -> Tensor:
            block.train(not calls)
            calls.append(True)
            output = block(x)
            block.train()
            return output

        return function

    return wrapper


_DICE_MISTAKES = {
    "the later call throws new dice. Bring back the random state of before the first call.": _no_care,
    "all wrappers replay the first block's dice. Keep the state in self, one for each wrapper.": _first_state_for_all,
    "all wrappers replay the last block's dice. Keep the state in self, one for each wrapper.": _last_state_for_all,
    "you kept the random state of after the first call; its dice come from the state before it.": _state_after_the_call,
    "the later call runs without dropout. It must drop what the first call dropped.": _no_dropout_later,
}
