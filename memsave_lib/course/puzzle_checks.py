"""The check of notebook 03's puzzle: it runs the learner's choice on the real stack, and says by how much it misses.

It follows :mod:`memsave_lib.course.checks`, and looks at outputs first, then at gradients, bytes and FLOPs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from memsave_lib.course.checks import Verdict, right, shown, wrong
from memsave_lib.course.puzzles import KEEP, RECOMPUTE, Puzzle
from memsave_lib.flops import count_flops
from memsave_lib.meter import MemoryMeter
from memsave_lib.runner import apply
from memsave_lib.strategies import PerBlock

NOT_CHOSEN = Verdict(None, "Not tried yet: replace None by a tuple of words, then run this cell again.")


@dataclass(frozen=True)
class _Run:
    """What one step on the real stack gave."""

    output: Tensor
    gradients: list[Tensor]
    saved_bytes: int
    flops: int


def check_placed(actions: Sequence[str] | PerBlock | None, puzzle: Puzzle) -> Verdict:
    """``actions`` says of each block of the puzzle whether it is kept or recomputed."""
    if actions is None:
        return NOT_CHOSEN
    if isinstance(actions, PerBlock):
        actions = actions.actions
    if isinstance(actions, np.ndarray):
        actions = actions.tolist()
    if (fault := _fault_in_form(actions, puzzle)) is not None:
        return wrong(fault)
    actions = tuple(actions)
    stack, x = puzzle.stack()
    kept, found = _run(stack, x, (KEEP,) * len(actions)), _run(stack, x, actions)
    if not torch.equal(found.output, kept.output):
        return wrong("The output differs from keep-all's: that is a fault of the library, please report it.")
    if not all(torch.equal(one, other) for one, other in zip(found.gradients, kept.gradients, strict=True)):
        return wrong("Equal output, but other gradients: that is a fault of the library, please report it.")
    over, extra = found.saved_bytes - puzzle.budget, found.flops - kept.flops
    if over <= 0 and extra <= puzzle.target:
        return right(
            f"Equal output and gradients. {found.saved_bytes:,} bytes are saved, {-over:,} below the budget, for "
            f"{extra:,} additional FLOPs; nothing that fits takes fewer."
        )
    return wrong(f"{_missed(over, extra - puzzle.target)} {_advice(actions, puzzle, over > 0, extra > puzzle.target)}")


def _fault_in_form(actions: object, puzzle: Puzzle) -> str | None:
    wanted = f"a tuple with {KEEP!r} or {RECOMPUTE!r} for each of the {len(puzzle.blocks)} blocks"
    if isinstance(actions, str) or not isinstance(actions, Sequence):
        return f"The answer is {wanted}; yours is {shown(actions)}."
    if len(actions) != len(puzzle.blocks):
        return f"The answer is {wanted}; yours has {len(actions)}."
    for number, action in enumerate(actions):
        if isinstance(action, str) and action == "offload":
            return f"Block {number}: nothing can be sent away here, only {KEEP!r} and {RECOMPUTE!r} are open."
        if not isinstance(action, str) or action not in (KEEP, RECOMPUTE):
            return f"Block {number} has {shown(action)}; the words are {KEEP!r} and {RECOMPUTE!r}."
    return None


def _run(stack: nn.Sequential, x: Tensor, actions: Sequence[str]) -> _Run:
    outputs: list[Tensor] = []

    def step() -> None:
        output = stack(x)
        outputs.append(output.detach())
        output.sum().backward()

    with apply(stack, PerBlock(tuple(actions)), blocks=list(stack)):
        stack.zero_grad()
        with MemoryMeter(stack) as meter:
            step()
        gradients = [parameter.grad for parameter in stack.parameters()]
        stack.zero_grad()
        flops = count_flops(step)
    return _Run(outputs[0], gradients, meter.trace.saved_bytes, flops)


def _missed(over_bytes: int, over_flops: int) -> str:
    bytes_said = (
        f"{over_bytes:,} bytes over the budget"
        if over_bytes > 0
        else f"It fits, {-over_bytes:,} bytes below the budget"
    )
    if over_flops <= 0:
        return f"{bytes_said}, and {-over_flops:,} FLOPs below the target." if over_flops else f"{bytes_said}."
    link = "and" if over_bytes > 0 else "but"
    return f"{bytes_said}, {link} {over_flops:,} FLOPs above the target."


def _advice(actions: tuple[str, ...], puzzle: Puzzle, too_large: bool, too_dear: bool) -> str:
    chosen = [i for i, action in enumerate(actions) if action == RECOMPUTE]
    kept = [i for i, action in enumerate(actions) if action == KEEP]
    if not chosen:
        return "All blocks are kept: recompute those that give back most bytes for a FLOP."
    if not kept:
        return "All blocks are recomputed: keep those that give back fewest bytes for a FLOP."
    if too_large and sum(puzzle.blocks[i].saved_bytes for i in kept) <= puzzle.budget:
        held = sum(puzzle.blocks[i].input_bytes for i in chosen)
        return f"Did you forget that a recomputed block still holds its input? These are {held:,} bytes."
    if too_dear and not too_large:
        needless = [i for i in chosen if puzzle.fits(_with(actions, i, KEEP))]
        if needless:
            return f"Block {needless[0]} need not be recomputed: without it the stack still fits."
        if set(chosen) == set(_by_size(puzzle)[: len(chosen)]):
            return f"You recompute the blocks that save most. {_swap(puzzle, chosen, kept)}"
    return _swap(puzzle, chosen, kept) if too_dear else _more(puzzle, kept)


def _with(actions: tuple[str, ...], number: int, action: str) -> tuple[str, ...]:
    return (*actions[:number], action, *actions[number + 1 :])


def _by_size(puzzle: Puzzle) -> list[int]:
    return sorted(range(len(puzzle.blocks)), key=lambda i: -puzzle.blocks[i].saved_bytes)


def _swap(puzzle: Puzzle, chosen: Sequence[int], kept: Sequence[int]) -> str:
    worst = min(chosen, key=lambda i: puzzle.blocks[i].bytes_per_megaflop)
    best = max(kept, key=lambda i: puzzle.blocks[i].bytes_per_megaflop)
    rates = [puzzle.blocks[i].bytes_per_megaflop for i in (worst, best)]
    return (
        f"Think of a swap: block {worst} gives back {rates[0]:,.0f} bytes for a million FLOPs, block {best}, which you "
        f"keep, {rates[1]:,.0f}."
    )


def _more(puzzle: Puzzle, kept: Sequence[int]) -> str:
    best = max(kept, key=lambda i: puzzle.blocks[i].bytes_per_megaflop)
    block = puzzle.blocks[best]
    return (
        f"There is more to recompute: of those that you keep, block {best} gives back most for a FLOP, "
        f"{block.given_back:,} bytes."
    )
