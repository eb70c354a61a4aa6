"""A check of an exercise of notebook 06: which blocks to keep, to recompute and to offload, by hand.

It follows :mod:`memsave_lib.course.checks`: a :class:`Verdict` to print, "not tried yet" for an untouched stub, and for
a wrong answer the reason why it is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise, product

from memsave_lib.costs import BlockCosts, ModelCosts
from memsave_lib.course.checks import Verdict, answered, right, shown, wrong
from memsave_lib.devices import Device
from memsave_lib.planner.chain import Chain
from memsave_lib.strategies import ACTIONS

GB = 10**9


@dataclass(frozen=True)
class Puzzle:
    """Equal blocks under a budget: seconds and gigabytes of each, gigabytes a second of the link, either way.

    Backward of a block takes twice as long as its forward. A kept block holds ``saved``, a recomputed one ``inputs``,
    an offloaded one sends ``saved`` away and holds nothing; each needs room for ``saved`` while its backward runs.
    """

    n_blocks: int = 6
    forward: int = 1
    saved: int = 6
    inputs: int = 1
    link: int = 3
    budget: int = 14

    def __str__(self) -> str:
        return (
            f"{self.n_blocks} blocks: {self.forward} s forward, {2 * self.forward} s backward, {self.saved} GB saved, "
            f"{self.inputs} GB of input; the link carries {self.link} GB/s each way; the budget is {self.budget} GB"
        )

    @property
    def chain(self) -> Chain:
        """What the planner makes of it."""
        forward = float(self.forward * GB)
        block = BlockCosts(forward, 2 * forward, None, (self.saved * GB,), self.inputs * GB)
        device = Device("puzzle", flops=GB, copy_out=self.link * GB, copy_in=self.link * GB)
        return Chain.of(ModelCosts((block,) * self.n_blocks), device, "host")

    def extra_seconds(self, plans: Sequence[Sequence[int]]) -> list[float]:
        """Of each plan, a row of places in ``ACTIONS``; ``inf`` where there is no room."""
        return [float(seconds) for seconds in self.chain.extra_seconds(plans, self.budget * GB)]

    def best(self) -> float:
        """The fewest extra seconds of any plan: all are tried."""
        return min(self.extra_seconds(list(product(range(len(ACTIONS)), repeat=self.n_blocks))))


@dataclass(frozen=True)
class Followed:
    """How a step goes under a plan: where there is no room, or what is waited for.

    Args:
        full: why there is no room, in words; empty where there is.
        recomputing: seconds.
        before_forward: seconds of waiting before each block's forward, for memory.
        after_backward: seconds of waiting after each block's backward, for what the block before it needs.
        turn: seconds of waiting between forward and backward: for the last to leave, and for the first to be back.
    """

    full: str
    recomputing: float
    before_forward: tuple[float, ...]
    after_backward: tuple[float, ...]
    turn: float

    @property
    def waiting(self) -> float:
        return sum(self.before_forward) + sum(self.after_backward) + self.turn

    @property
    def seconds(self) -> float:
        """Beyond the plain step."""
        return math.inf if self.full else self.recomputing + self.waiting


def follow(puzzle: Puzzle, actions: Sequence[str]) -> Followed:
    """The planner's model of a step, moment by moment; see :mod:`memsave_lib.planner.chain`."""
    held = leaving = ahead = recomputing = 0.0
    before_forward, after_backward = [], []
    for number, action in enumerate(actions):
        kept, again = action == "keep", action == "recompute"
        need = puzzle.saved
        if held + need > puzzle.budget:
            full = f"no room for block {number}: the blocks before it hold {held:g} GB, at work it needs {need} GB more"
            return Followed(full, 0.0, (), (), 0.0)
        free_forward, free_backward = (
            puzzle.budget - held - (puzzle.inputs if again else need),
            puzzle.budget - held - need,
        )
        before_forward.append(max(0.0, leaving - free_forward) / puzzle.link)
        after_backward.append(max(0.0, ahead - free_backward) / puzzle.link)
        sent = puzzle.saved if action == "offload" else 0
        seconds = puzzle.forward
        leaving = max(0.0, min(leaving, free_forward) - puzzle.link * seconds) + sent
        ahead = max(0.0, min(ahead, free_backward) - puzzle.link * (3 if again else 2) * seconds) + sent
        recomputing += seconds if again else 0
        held += puzzle.saved if kept else puzzle.inputs if again else 0
    turn = (leaving + ahead) / puzzle.link
    return Followed("", recomputing, tuple(before_forward), tuple(after_backward), turn)


@answered
def check_placement(function: Callable[[], Sequence[str]], puzzle: Puzzle = Puzzle()) -> Verdict:
    """``function()`` says for each block "keep", "recompute" or "offload": the fastest plan within the budget."""
    given = function()
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != puzzle.n_blocks:
        return wrong(f"Return a list of {puzzle.n_blocks} words, one for each block; you returned {shown(given)}.")
    # A word first: an array would be compared element by element.
    if unknown := [word for word in given if not isinstance(word, str) or word not in ACTIONS]:
        return wrong(f"Each word is one of {', '.join(map(repr, ACTIONS))}; you have {_word(unknown[0])}.")
    step, best = follow(puzzle, given), puzzle.best()
    if step.full:
        return wrong(f"Over the budget of {puzzle.budget} GB, {step.full}.")
    plain = 3 * puzzle.forward * puzzle.n_blocks
    if step.seconds <= best + 1e-9:
        count = len(ACTIONS) ** puzzle.n_blocks
        return right(
            f"It fits, and adds {step.seconds / plain:.0%} to the step. Of all {count:,} plans none adds less."
        )
    slower = (plain + step.seconds) / (plain + best) - 1
    return wrong(
        f"It fits, and adds {step.seconds:.2f} s to the plain {plain} s: {slower:.0%} slower than the best plan. "
        f"{_where_it_goes(puzzle, given, step)}"
    )


def _word(value: object) -> str:
    return repr(value) if isinstance(value, str) else shown(value)


def _where_it_goes(puzzle: Puzzle, actions: Sequence[str], step: Followed) -> str:
    """The longest waiting, or where nobody waits, what else would lower the extra seconds."""
    forward, backward = sum(step.before_forward), sum(step.after_backward)
    if "offload" not in actions:
        return (
            f"All of it is recomputing, {step.recomputing:g} s, while the link carries nothing. Of which blocks could "
            "the bytes leave behind the computation of the next ones?"
        )
    if not step.waiting:
        return (
            f"All of it is recomputing, {step.recomputing:g} s, and nobody waits. Blocks that are recomputed give the "
            "link time: could one of them be kept, or sent away?"
        )
    largest = max(step.turn, forward, backward)
    copy = f"A block's copy takes {puzzle.saved / puzzle.link:g} s and its forward {puzzle.forward} s"
    if largest == step.turn and actions[-1] == "offload":
        return (
            f"{step.turn:.2f} s of it are waiting at the turn: what the last block sends has to leave, and to come "
            f"back, while nothing is left to compute. Keep it. ({copy}.)"
        )
    if largest == step.turn:
        return f"{step.turn:.2f} s of it are waiting at the turn, for what is still leaving when forward ends. {copy}."
    where, phase = (step.before_forward, "forward") if largest == forward else (step.after_backward, "backward")
    block = where.index(max(where))
    longest = f"before block {block}" if largest == forward else f"after block {block}"
    return f"{largest:.2f} s of it are waiting in {phase}, the longest {longest}. {copy}: {_why_wait(actions, block)}."


def _why_wait(actions: Sequence[str], block: int) -> str:
    """Why there is waiting for a copy where this block is at work: copies are of blocks before it."""
    sent = [number for number, action in enumerate(actions[:block]) if action == "offload"]
    if any(two == one + 1 for one, two in pairwise(sent)):
        return "with one sent away behind the other the link falls behind"
    return (
        f"block {sent[-1]} is on its way still, and beside what the blocks hold there is no room for the rest of it. "
        "Hold less, or send an earlier one"
    )
