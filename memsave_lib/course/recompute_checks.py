"""Checks of the exercises of notebooks 02 and 03: outputs first, then gradients, then random state and bytes.

They follow :mod:`memsave_lib.course.checks`: a :class:`Verdict` to print, "not tried yet" for an untouched stub, and
for a wrong answer the reason why it is wrong.
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
from memsave_lib.formulas import BlockShape, stack_saved_bytes
from memsave_lib.meter import MemoryMeter
from memsave_lib.models import BlockStack
from memsave_lib.strategies import Plan, Segment, Selective, SelectiveOps
from memsave_lib.units import human_bytes

Function = Callable[[Tensor], Tensor]

# 02: a block that draws the same random numbers when it is run again

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
        return function(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor]:
        (x,) = ctx.saved_tensors
        x = x.detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.function(x)
        # What the first call returned has this very node as its past: going backward through it would never end.
        if output.grad_fn is None or output.grad_fn.name() == f"{_RunAgain.__name__}Backward":
            raise _NothingRecorded
        output.backward(gradient)
        return None, x.grad


class _NothingRecorded(Exception):
    """The later run returned a tensor without a graph of its own."""


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
    if not all(map(torch.equal, found.gradients, expected.gradients)):
        for reason, mistake in _DICE_MISTAKES.items():
            known = _dice_outcome(stack, _under_checkpoint(mistake(), stack), x)
            if all(map(torch.equal, found.gradients, known.gradients)):
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


# 03: three tools' meanings of the same words

#: What each meaning recomputes: block i of a stack, with the number n of its tool.
WHOLE_BLOCKS: dict[str, Callable[[int, int], bool]] = {
    "course": lambda i, n: i % n != 0,
    "hugging face": lambda i, n: i % n == 0,
    "torchtitan": lambda i, n: (i + 1) % n == 0,
}
ATTENTION_CORE = "attention core"
#: Blocks and n: all three meanings differ in both.
_MEANING_CASES = ((7, 3), (6, 2))
_MEANING_SHAPE = BlockShape(2, 24, 64, 2, attention="math")


def check_meanings(function: Callable[[str, Sequence[nn.Module], Tensor, int], Tensor], here: Setup) -> Verdict:
    """The exercise of notebook 03: ``function(meaning, blocks, x, n)`` runs the blocks as that meaning's tool does."""
    if is_untouched(function, "course", [nn.Identity()], torch.zeros(1), 2):
        return NOT_TRIED
    with torch.random.fork_rng():
        for n_blocks, n in dict.fromkeys((*_MEANING_CASES, (here.n_layers, here.checkpoint_every))):
            torch.manual_seed(here.seed)
            stack = BlockStack(n_blocks, 64, 2, attention="math")
            x = torch.randn(_MEANING_SHAPE.batch, _MEANING_SHAPE.seq_len, 64)
            for meaning in (*WHOLE_BLOCKS, ATTENTION_CORE):
                if (fault := _fault(function, meaning, stack, x, n)) is not None:
                    return wrong(f"{meaning!r}, {n_blocks} blocks, n={n}: {fault}")
    return right(
        f"Four meanings, equal outputs and gradients. At your parameters ({here.n_layers} blocks, "
        f"n={here.checkpoint_every}) they recompute: "
        + "; ".join(f"{name!r} {_names(_wanted(name, here.n_layers, here.checkpoint_every))}" for name in WHOLE_BLOCKS)
        + f"; {ATTENTION_CORE!r} no whole block."
    )


def _fault(
    function: Callable[[str, Sequence[nn.Module], Tensor, int], Tensor],
    meaning: str,
    stack: BlockStack,
    x: Tensor,
    n: int,
) -> str | None:
    """What is wrong with one answer, None when nothing is."""
    expected, expected_gradients = stack(x), []
    expected.sum().backward()
    for block in stack.blocks:
        expected_gradients.append([parameter.grad for parameter in block.parameters()])
    stack.zero_grad()
    runs = [0] * len(stack.blocks)

    def count(block: nn.Module, inputs: object) -> None:
        runs[list(stack.blocks).index(block)] += 1

    handles = [block.register_forward_pre_hook(count) for block in stack.blocks]
    try:
        with MemoryMeter(stack) as meter:
            output = function(meaning, list(stack.blocks), x, n)
            if not isinstance(output, Tensor):
                return f"your function returned {output!r}, not the output of the last block."
            if not torch.equal(output, expected):
                return "the output differs from a plain run: every block must run once, in order, on the output before."
            output.sum().backward()
    finally:
        for handle in handles:
            handle.remove()
    gradients = [[parameter.grad for parameter in block.parameters()] for block in stack.blocks]
    stack.zero_grad()
    bad = [i for i, pair in enumerate(zip(gradients, expected_gradients, strict=True)) if not _all_equal(*pair)]
    if bad:
        return f"equal output, but the gradients of {_names(bad)} differ: {_why_gradients_differ(bad, runs)}"
    return _fault_in_blocks(meaning, [i for i, times in enumerate(runs) if times > 1], runs, n) or _fault_in_bytes(
        meaning, len(runs), n, meter.trace.saved_bytes
    )


def _all_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor]) -> bool:
    return all(one is not None and torch.equal(one, other) for one, other in zip(found, expected, strict=True))


def _why_gradients_differ(bad: Sequence[int], runs: Sequence[int]) -> str:
    if max(runs) > 2:
        return f"block {runs.index(max(runs))} ran {max(runs)} times. Does a lambda look up the loop variable too late?"
    return "is a part of the run cut off from autograd?"


def _fault_in_blocks(meaning: str, again: list[int], runs: Sequence[int], n: int) -> str | None:
    wanted = _wanted(meaning, len(runs), n)
    if again == wanted:
        return None
    if meaning == ATTENTION_CORE:
        return f"you run {_names(again)} again as a whole; only the attention core inside each is to be recomputed."
    others = [other for other in WHOLE_BLOCKS if other != meaning and again == _wanted(other, len(runs), n)]
    reason = f" That is what {others[0]!r} means." if others else ""
    if not again:
        reason = " Nothing is recomputed."
    return f"you recompute {_names(again)}; it recomputes {_names(wanted)}.{reason}"


def _fault_in_bytes(meaning: str, n_blocks: int, n: int, saved: int) -> str | None:
    if meaning == ATTENTION_CORE:
        plan = SelectiveOps("attention").plan(n_blocks)
    elif meaning == "course":
        plan = Selective(n).plan(n_blocks)
    else:
        chosen = _wanted(meaning, n_blocks, n)
        plan = Plan(n_blocks, tuple(Segment(i, i + 1, recompute=i in chosen) for i in range(n_blocks)))
    wanted = stack_saved_bytes(plan, _MEANING_SHAPE)
    if saved == wanted:
        return None
    kept_all = stack_saved_bytes(Selective(1).plan(n_blocks), _MEANING_SHAPE)
    reason = " Nothing is recomputed." if saved == kept_all else ""
    return f"equal gradients, but {saved:,} bytes are saved instead of {wanted:,}.{reason}"


def _wanted(meaning: str, n_blocks: int, n: int) -> list[int]:
    chosen = WHOLE_BLOCKS.get(meaning, lambda i, n: False)
    return [i for i in range(n_blocks) if chosen(i, n)]


def _names(blocks: Sequence[int]) -> str:
    if not blocks:
        return "no block"
    return f"block{'s' if len(blocks) > 1 else ''} {', '.join(map(str, blocks))}"
