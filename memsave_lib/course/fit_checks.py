"""Checks of the exercises of notebook 06: the floor of a budget, and what to attack first.

They follow :mod:`memsave_lib.course.checks`: a :class:`Verdict` to print, "not tried yet" for an untouched stub, and
for a wrong answer the reason why it is wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import combinations

from memsave_lib.course.attack_cases import MADE_CASES, REAL_CASES, Pair
from memsave_lib.course.checks import Verdict, answered, no_count, right, shown, wrong
from memsave_lib.course.env import Setup
from memsave_lib.course.guide import STATE, WORTHWHILE, bottleneck, state_share
from memsave_lib.estimation import Estimate
from memsave_lib.formulas import BlockShape, block_saved_bytes, block_storages, loss_peak_bytes, working_set_bytes
from memsave_lib.strategies import MIN_BYTES
from memsave_lib.units import exact_bytes

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


@answered
def check_floor(function: Callable[[list[tuple[int, int, int]], list[int], int], int], here: Setup) -> Verdict:
    """``function(held, need, turn)``: the smallest budget that some plan fits, when every copy is waited for."""
    yours = _your_floor(here)
    cases = (*_FLOOR_CASES, yours)
    given = [function(list(case.held), list(case.need), case.turn) for case in cases]
    if complaint := no_count(given):
        return wrong(complaint)
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
Attack = Callable[[Estimate, Estimate], str]


@answered
def check_attack_first(function: Attack, kept: Estimate, checkpointed: Estimate) -> Verdict:
    """``function(kept, checkpointed)`` is "blocks", "weights" or "loss"; the estimates given are the learner's own."""
    of_yours = function(kept, checkpointed)
    cases = (*REAL_CASES, *MADE_CASES)
    pairs = [*(case.estimates() for case in cases), (kept, checkpointed)]
    given = [*(function(*pair) for pair in pairs[:-1]), of_yours]
    if bad := [answer for answer in given if not isinstance(answer, str) or answer not in ATTACKS]:
        return wrong(f"Return one of {', '.join(map(repr, ATTACKS))}; your function returned {shown(bad[0])}.")
    wanted = [bottleneck(*pair) for pair in pairs]
    if given == wanted:
        return right(f"All {len(cases)} models agree. For yours, attack the {wanted[-1]} first.")
    # The learner's own model, the last, may be one for which ways to the same mistake part.
    for reason, mistake in (*_ATTACK_MISTAKES, *_other_limits(pairs[:-1])):
        if given[:-1] == [mistake(*pair) for pair in pairs[:-1]]:
            return wrong(reason)
    names = [*map(str, cases), "your model"]
    name, found, expected, pair = next(row for row in zip(names, given, wanted, pairs, strict=True) if row[1] != row[2])
    return wrong(f"For {name} you say {found!r}, but {_argument(expected, *pair)}.")


def _argument(answer: str, kept: Estimate, checkpointed: Estimate) -> str:
    fall = f"checkpointing takes {1 - checkpointed.peak_bytes / kept.peak_bytes:.0%} off the peak"
    share = f"{state_share(checkpointed):.0%} of what is left is weights and their state"
    return fall if answer == "blocks" else f"{fall}, and {share}"


def _rest(share: float, limit: float = 0.5) -> str:
    return "weights" if share >= limit else "loss"


def _if_lower(kept: Estimate, checkpointed: Estimate, otherwise: str) -> str:
    return "blocks" if bottleneck(kept, checkpointed) == "blocks" else otherwise


def _by_largest(estimate: Estimate, weights: Sequence[str] = STATE) -> str:
    largest = max(estimate.at_peak, key=estimate.at_peak.get)
    return "weights" if largest in weights else "blocks" if largest in ("activation", "recomputed") else "loss"


def _part(names: tuple[str, ...]) -> Attack:
    return lambda kept, checkpointed: _if_lower(kept, checkpointed, _rest(state_share(checkpointed, names)))


def _other_limits(pairs: Sequence[Pair]) -> Iterator[tuple[str, Attack]]:
    """Right answers but for a limit: whichever it is, it lies between the numbers of two cases."""
    for limit in (0.0, *sorted({done.peak_bytes / kept.peak_bytes for kept, done in pairs}), math.inf):
        if not limit:
            reason = 'You never say "blocks": first compare the two peaks, and the smaller one is under checkpointing.'
        elif limit < 1 - WORTHWHILE:
            reason = "You ask for more than a tenth: where checkpointing takes a tenth off the peak, start with blocks."
        else:
            reason = "You ask for less than a tenth, and recomputing costs a fifth to a third of a step."
        yield reason, partial(_with_limits, peaks=limit, share=0.5)
    for limit in (0.0, *sorted({state_share(done) for _, done in pairs}), math.inf):
        reason = "more than half. Half of what is left is enough" if limit > 0.5 else "less than half of what is left"
        yield (
            f"You say weights only at {reason}." if limit > 0.5 else f"You say weights at {reason}, too.",
            partial(_with_limits, peaks=1 - WORTHWHILE, share=limit),
        )


def _with_limits(kept: Estimate, checkpointed: Estimate, *, peaks: float, share: float) -> str:
    lower = checkpointed.peak_bytes / kept.peak_bytes <= peaks
    return "blocks" if lower else _rest(state_share(checkpointed), share)


_ANY_FALL = "You call any fall of the peak worthwhile: recomputing costs a fifth to a third of a step. Ask for a tenth."
_MADE_OF = (
    "You go by what the peak is made of: even where most of it is weights and their state, checkpointing may take off "
    "more than a tenth. Compare the two peaks first."
)
_ATTACK_MISTAKES: tuple[tuple[str, Attack], ...] = (
    (
        "You compare saved bytes: they always fall. The question is whether the peak does.",
        lambda kept, checkpointed: "blocks",
    ),
    *[
        (
            _ANY_FALL,
            lambda kept, checkpointed, rest=rest: "blocks" if checkpointed.peak_bytes < kept.peak_bytes else rest,
        )
        for rest in ("weights", "loss")
    ],
    (_ANY_FALL, partial(_with_limits, peaks=math.nextafter(1.0, 0.0), share=0.5)),
    (
        "You go by the moment of the peak: at the loss, what the blocks saved is still there. What fills the peak, and "
        "does checkpointing lower it?",
        lambda kept, checkpointed: (
            "loss"
            if "softmax" in str(kept.peak_at)
            else _if_lower(kept, checkpointed, _rest(state_share(checkpointed)))
        ),
    ),
    (
        "You go by the moment of the peak: that the loss is at work does not say what is alive. Add up `at_peak`.",
        lambda kept, checkpointed: _if_lower(
            kept, checkpointed, "loss" if "softmax" in str(checkpointed.peak_at) else "weights"
        ),
    ),
    (
        _MADE_OF,
        lambda kept, checkpointed: (
            "weights" if state_share(kept) >= 0.5 else _if_lower(kept, checkpointed, _rest(state_share(checkpointed)))
        ),
    ),
    (
        _MADE_OF,
        lambda kept, checkpointed: "weights" if state_share(kept) >= 0.5 else _if_lower(kept, checkpointed, "loss"),
    ),
    *[
        (_MADE_OF, lambda *pair, which=which, weights=weights: _by_largest(pair[which], weights))
        for which in (0, 1)
        for weights in (STATE, ("optimizer",), ("parameter",), ("parameter", "optimizer"))
    ],
    (
        "You look for the largest category: parameters, gradients and optimizer state count together.",
        lambda kept, checkpointed: _if_lower(
            kept, checkpointed, "weights" if _by_largest(checkpointed) == "weights" else "loss"
        ),
    ),
    (
        "You take the state from keep-all's peak. What is left is what fills `checkpointed`'s.",
        lambda kept, checkpointed: _if_lower(kept, checkpointed, _rest(state_share(kept))),
    ),
    (
        "You compare the state with keep-all's peak: half of what is left is half of `checkpointed.peak_bytes`.",
        lambda kept, checkpointed: _if_lower(
            kept, checkpointed, _rest(state_share(checkpointed) * checkpointed.peak_bytes / kept.peak_bytes)
        ),
    ),
    *[
        ("You count only a part of parameters, gradients and optimizer state: add up all three.", _part(names))
        for count in (1, 2)
        for names in combinations(STATE, count)
    ],
    (
        "You swapped the two: the peak under checkpointing is the smaller one.",
        lambda kept, checkpointed: bottleneck(checkpointed, kept),
    ),
)
