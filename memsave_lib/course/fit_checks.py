"""Checks of the exercises of notebook 06: a plan by hand, the floor of a budget, and what to attack first.

They follow :mod:`memsave_lib.course.checks`: a :class:`Verdict` to print, "not tried yet" for an untouched stub, and
for a wrong answer the reason why it is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import product

import memsave_lib as ms
from memsave_lib.costs import BlockCosts, ModelCosts
from memsave_lib.course.checks import NOT_TRIED, Verdict, is_untouched, right, wrong
from memsave_lib.course.env import Setup
from memsave_lib.course.guide import STATE, bottleneck, state_share
from memsave_lib.devices import Device
from memsave_lib.estimation import Estimate
from memsave_lib.formulas import BlockShape, block_saved_bytes, block_storages, loss_peak_bytes, working_set_bytes
from memsave_lib.planner.chain import Chain
from memsave_lib.strategies import ACTIONS, MIN_BYTES
from memsave_lib.units import exact_bytes

# A plan by hand

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


def check_placement(function: Callable[[], Sequence[str]], puzzle: Puzzle = Puzzle()) -> Verdict:
    """``function()`` says for each block "keep", "recompute" or "offload": the fastest plan within the budget."""
    if is_untouched(function):
        return NOT_TRIED
    given = function()
    if isinstance(given, str) or not isinstance(given, Sequence) or len(given) != puzzle.n_blocks:
        return wrong(f"Return a list of {puzzle.n_blocks} words, one for each block; you returned {given!r}.")
    if unknown := [word for word in given if word not in ACTIONS]:
        return wrong(f"Each word is one of {', '.join(map(repr, ACTIONS))}; you have {unknown[0]!r}.")
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
    return (
        f"{largest:.2f} s of it are waiting in {phase}, the longest {longest}. {copy}: with one sent away behind the "
        "other the link falls behind."
    )


# The floor


@dataclass(frozen=True)
class FloorCase:
    """Arguments of the exercise.

    Args:
        held: bytes that each block holds for backward when it is kept, recomputed, offloaded.
        need: bytes while each block is at work, what it holds itself included.
        turn: bytes of head and loss between forward and backward.
    """

    held: tuple[tuple[int, int, int], ...]
    need: tuple[int, ...]
    turn: int

    def __str__(self) -> str:
        return f"held={list(self.held)}, need={list(self.need)}, turn={self.turn}"

    @property
    def least(self) -> list[int]:
        return [min(one) for one in self.held]

    def before(self, least: Sequence[int]) -> list[int]:
        """What the blocks before each block hold; the last entry is what all hold."""
        return [sum(least[:number]) for number in range(len(least) + 1)]

    def floor(self, least: Sequence[int] | None = None, *, turn: bool = True, blocks: bool = True) -> int:
        held = self.before(self.least if least is None else least)
        at_work = [there + need for there, need in zip(held, self.need, strict=False)] if blocks else []
        return max([*at_work, *([held[-1] + self.turn] if turn else [])])


def check_floor(function: Callable[[list[tuple[int, int, int]], list[int], int], int], here: Setup) -> Verdict:
    """``function(held, need, turn)``: the smallest budget that some plan fits, when every copy is waited for."""
    yours = _your_floor(here)
    if is_untouched(function, list(yours.held), list(yours.need), yours.turn):
        return NOT_TRIED
    cases = (*_FLOOR_CASES, yours)
    given = [function(list(case.held), list(case.need), case.turn) for case in cases]
    if bad := [value for value in given if type(value) is not int]:
        return wrong(f"A count of bytes is an int, and your function returned {bad[0]!r} ({type(bad[0]).__name__}).")
    wanted = [case.floor() for case in cases]
    if given == wanted:
        return right(f"{len(_FLOOR_CASES)} small chains agree, and your stack's floor is {exact_bytes(wanted[-1])}.")
    for reason, mistake in _FLOOR_MISTAKES.items():
        if given == [mistake(case) for case in cases]:
            return wrong(reason)
    case, found, expected = next(row for row in zip(cases, given, wanted, strict=True) if row[1] != row[2])
    return wrong(f"For {case} you get {found:,}; the smallest budget is {expected:,}.")


def _your_floor(here: Setup) -> FloorCase:
    """The notebook's stack with a head of 1,024 tokens behind it."""
    shape = BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
    kept = block_saved_bytes(shape)
    stays = sum(size for size in block_storages(shape) if size < MIN_BYTES)
    held = (kept, shape.checkpoint_bytes, stays)
    need = kept + working_set_bytes(shape)
    turn = loss_peak_bytes(here.batch_size, here.seq_len, 1024)
    return FloorCase((held,) * here.n_layers, (need,) * here.n_layers, turn)


_FLOOR_CASES = (
    FloorCase(((90, 7, 2), (80, 6, 11), (70, 5, 3)), (101, 95, 84), 40),  # the first block sets it
    FloorCase(((30, 9, 4), (30, 8, 21), (50, 10, 5), (30, 7, 1)), (33, 37, 71, 45), 61),  # a block in the middle
    FloorCase(((20, 6, 1), (25, 3, 8), (20, 5, 2)), (23, 29, 31), 57),  # the turn
    FloorCase(((12, 5, 3), (14, 4, 9)), (17, 41), 13),  # the last block
)

_FLOOR_MISTAKES: dict[str, Callable[[FloorCase], int]] = {
    "You forgot the turn: between forward and backward head and loss need `turn` bytes beside all that is held.": (
        lambda case: case.floor(turn=False)
    ),
    "You forgot the block at work: each needs `need[i]` bytes beside what the blocks before it hold.": (
        lambda case: case.floor(blocks=False)
    ),
    "You took every block recomputed: an offloaded block may hold less, and for some blocks a recomputed one does.": (
        lambda case: case.floor([one[1] for one in case.held])
    ),
    "You took every block offloaded: what is too small to leave may be more than the block's input. Take the least of "
    "the three.": lambda case: case.floor([one[2] for one in case.held]),
    "You took every block kept: that is the budget from which nothing needs to be done, not the smallest.": (
        lambda case: case.floor([one[0] for one in case.held])
    ),
    "You chose one action for all blocks: each block may have its own.": (
        lambda case: min(case.floor([one[action] for one in case.held]) for action in range(3))
    ),
    "You let all blocks hold while one is at work: in its forward only those before it hold anything, and in its "
    "backward those behind it have let go.": lambda case: max(case.turn, *case.need) + sum(case.least),
    "You count a block twice: `need[i]` holds what block i itself holds.": (
        lambda case: max(
            *(need + there for need, there in zip(case.need, case.before(case.least)[1:], strict=True)),
            case.turn + sum(case.least),
        )
    ),
    "You added up the needs of all blocks: they work one after the other, so take the largest moment.": (
        lambda case: sum(case.need) + case.turn
    ),
    "You left out what is held: checkpoints, and what is too small to leave, pile up in front of each block.": (
        lambda case: max(case.turn, *case.need)
    ),
}

# What to attack first

ATTACKS = ("blocks", "weights", "loss")


@dataclass(frozen=True)
class AttackCase:
    """A GPT-2 whose peak is made of one thing, or seems to be."""

    about: str
    layers: int
    hidden: int
    vocabulary: int
    batch: int
    seq_len: int

    def __str__(self) -> str:
        return (
            f"{self.about} ({self.layers} blocks of width {self.hidden}, vocabulary {self.vocabulary:,}, "
            f"{self.batch} x {self.seq_len} tokens)"
        )

    def estimates(self) -> tuple[Estimate, Estimate]:
        config = {"n_layer": self.layers, "n_embd": self.hidden, "n_head": self.hidden // 64}

        def build() -> object:
            return ms.gpt2("tiny", **config, vocab_size=self.vocabulary, n_positions=self.seq_len)

        return tuple(
            ms.estimate(build, self.batch, self.seq_len, strategy) for strategy in (ms.KeepAll(), ms.FullCheckpoint())
        )


_ATTACK_CASES = (
    AttackCase("a long text that peaks in the loss's backward", 4, 64, 512, 4, 256),
    AttackCase("a model of which more than half is weights", 4, 128, 64, 1, 96),
    AttackCase("a large vocabulary", 1, 64, 8192, 2, 128),
    AttackCase("a short text", 4, 128, 64, 1, 64),
    AttackCase("a shorter text", 2, 128, 256, 1, 48),
)


def check_attack_first(
    function: Callable[[Estimate, Estimate], str], kept: Estimate, checkpointed: Estimate
) -> Verdict:
    """``function(kept, checkpointed)`` is "blocks", "weights" or "loss"; the estimates given are the learner's own."""
    if is_untouched(function, kept, checkpointed):
        return NOT_TRIED
    pairs = [*(case.estimates() for case in _ATTACK_CASES), (kept, checkpointed)]
    given = [function(*pair) for pair in pairs]
    if bad := [answer for answer in given if answer not in ATTACKS]:
        return wrong(f"Return one of {', '.join(map(repr, ATTACKS))}; your function returned {bad[0]!r}.")
    wanted = [bottleneck(*pair) for pair in pairs]
    if given == wanted:
        return right(f"All {len(_ATTACK_CASES)} models agree. For yours, attack the {wanted[-1]} first.")
    for reason, mistake in _ATTACK_MISTAKES.items():
        if given == [mistake(*pair) for pair in pairs]:
            return wrong(reason)
    names = [*map(str, _ATTACK_CASES), "your model"]
    name, found, expected, pair = next(row for row in zip(names, given, wanted, pairs, strict=True) if row[1] != row[2])
    return wrong(f"For {name} you say {found!r}, but {_argument(expected, *pair)}.")


def _argument(answer: str, kept: Estimate, checkpointed: Estimate) -> str:
    fall = f"checkpointing takes {1 - checkpointed.peak_bytes / kept.peak_bytes:.0%} off the peak"
    share = f"{state_share(checkpointed):.0%} of what is left is weights and their state"
    return fall if answer == "blocks" else f"{fall}, and {share}"


def _rest(estimate: Estimate, names: tuple[str, ...] = STATE) -> str:
    return "weights" if state_share(estimate, names) >= 0.5 else "loss"


def _if_lower(kept: Estimate, checkpointed: Estimate, otherwise: str) -> str:
    return "blocks" if bottleneck(kept, checkpointed) == "blocks" else otherwise


_ATTACK_MISTAKES: dict[str, Callable[[Estimate, Estimate], str]] = {
    "You compare saved bytes: they always fall. The question is whether the peak does.": (
        lambda kept, checkpointed: "blocks"
    ),
    "You call any fall of the peak worthwhile: recomputing costs a fifth to a third of a step. Ask for a tenth.": (
        lambda kept, checkpointed: "blocks" if checkpointed.peak_bytes < kept.peak_bytes else _rest(checkpointed)
    ),
    "You go by the moment of the peak: at the loss, what the blocks saved is still there. What fills the peak, and "
    "does checkpointing lower it?": (
        lambda kept, checkpointed: (
            "loss" if "softmax" in str(kept.peak_at) else _if_lower(kept, checkpointed, _rest(checkpointed))
        )
    ),
    "You go by what the peak is made of: even where most of it is weights and their state, checkpointing may take off "
    "more than a tenth. Compare the two peaks first.": (
        lambda kept, checkpointed: "weights" if _rest(kept) == "weights" else _if_lower(kept, checkpointed, "loss")
    ),
    "You count parameters alone: their gradients and the optimizer's state are three times as much.": (
        lambda kept, checkpointed: _if_lower(kept, checkpointed, _rest(checkpointed, ("parameter",)))
    ),
    "You swapped the two: the peak under checkpointing is the smaller one.": (
        lambda kept, checkpointed: bottleneck(checkpointed, kept)
    ),
}
