"""Checks of the exercises of notebook 06: the floor of a budget, and what to attack first.

They follow :mod:`memsave_lib.course.checks`: a :class:`Verdict` to print, "not tried yet" for an untouched stub, and
for a wrong answer the reason why it is wrong.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import memsave_lib as ms
from memsave_lib.course.checks import NOT_TRIED, Verdict, is_untouched, right, wrong
from memsave_lib.course.env import Setup
from memsave_lib.course.guide import STATE, bottleneck, state_share
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
        # The learner's own model, the last, may be one for which ways to the same mistake part.
        if given[:-1] == [mistake(*pair) for pair in pairs[:-1]]:
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
