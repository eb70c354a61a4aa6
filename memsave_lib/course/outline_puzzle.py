"""An exercise of notebook 04: which outline of memory against time belongs to which strategy?

The figure comes from closed forms, for twelve blocks of the learner's sizes, so it is the same each time. Letters are
dealt out by the notebook's parameters. The check follows :mod:`memsave_lib.course.checks`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, permutations

from memsave_lib.course.checks import Verdict, answered, right, shown, wrong
from memsave_lib.course.env import Setup
from memsave_lib.formulas import BlockShape, stack_forecast
from memsave_lib.plots.drawing import Shown
from memsave_lib.plots.outlines import Outline, outlines
from memsave_lib.strategies import Chunked, FullCheckpoint, KeepAll, Recursive, Strategy
from memsave_lib.units import human_bytes

BLOCKS = 12
LETTERS = "ABCD"
STRATEGIES: Mapping[str, Strategy] = {one.label: one for one in (KeepAll(), FullCheckpoint(), Chunked(3), Recursive())}
KEEP_ALL, FULL, CHUNKS, RECURSIVE = STRATEGIES
#: Below so many tokens for each unit of width the gradient of one weight is as large as a block, and hides its outline.
TOKENS_PER_WIDTH = 4


def _shape(here: Setup) -> BlockShape:
    """A block of the learner's sizes, with as many tokens as an outline needs to be read."""
    shortest = -(-TOKENS_PER_WIDTH * here.hidden // here.batch_size)
    return BlockShape(here.batch_size, max(here.seq_len, shortest), here.hidden, here.heads)


def _outline(strategy: Strategy, shape: BlockShape) -> Outline:
    forecast = stack_forecast(strategy.plan(BLOCKS), shape)
    forward = [stretch for stretch in forecast.stretches if stretch.phase == "forward" and stretch.block >= 0][-1]
    return Outline(
        work=tuple(done / forecast.plain_flops for done in forecast.work),
        live_bytes=tuple(moment.live_bytes for moment in forecast.moments),
        forward_ends=forward.end / forecast.plain_flops,
        held_bytes=[moment.live_bytes for moment in forecast.moments if moment.phase == "forward"][-1],
        surges=sum(phase == "recompute" for phase, _ in groupby(moment.phase for moment in forecast.moments)),
        total_work=forecast.flops_ratio,
    )


@dataclass(frozen=True)
class Puzzle:
    """Outlines by letter, and what they are.

    Args:
        answers: the name behind each letter.
        outlines: the memory of a step, by letter.
    """

    # Not in the repr: a cell that ends in the puzzle would print the answers.
    answers: Mapping[str, str] = field(repr=False)
    outlines: Mapping[str, Outline] = field(repr=False)

    @classmethod
    def of(cls, here: Setup) -> Puzzle:
        shape = _shape(here)
        orders = list(permutations(STRATEGIES))
        number = here.seq_len + here.hidden + here.batch_size + 5 * here.n_layers + here.checkpoint_every
        answers = dict(zip(LETTERS, orders[number % len(orders)], strict=True))
        return cls(answers, {letter: _outline(STRATEGIES[name], shape) for letter, name in answers.items()})

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(STRATEGIES)

    def picture(self) -> Shown:
        return outlines(self.outlines)

    def outline_of(self, name: str) -> Outline:
        return next(self.outlines[letter] for letter, other in self.answers.items() if other == name)


@answered
def check_outlines(function: Callable[[], Mapping[str, str]], puzzle: Puzzle) -> Verdict:
    """``function()`` says which of ``puzzle.names`` stands behind each letter."""
    given = function()
    if not isinstance(given, Mapping) or not all(isinstance(word, str) for pair in given.items() for word in pair):
        return wrong(f'Return a dict from letters to names, {{"A": "{KEEP_ALL}", ...}}; you returned {shown(given)}.')
    said = {letter.strip().upper(): " ".join(name.lower().split()) for letter, name in given.items()}
    if fault := _fault_in_form(said, puzzle):
        return wrong(fault)
    mistaken = [letter for letter in puzzle.answers if said[letter] != puzzle.answers[letter]]
    if not mistaken:
        return right(f"All {len(puzzle.answers)} outlines are read: " + _list(puzzle.answers) + ".")
    reasons = [f"{_seen(letter, puzzle)} {_would(said[letter], puzzle)}" for letter in mistaken]
    count = len(puzzle.answers) - len(mistaken)
    head = f"{count or 'None'} of {len(puzzle.answers)} {'is' if count < 2 else 'are'} right."
    return wrong("\n".join([head, *reasons]))


def _list(answers: Mapping[str, str]) -> str:
    return ", ".join(f"{letter} {name}" for letter, name in answers.items())


def _fault_in_form(said: Mapping[str, str], puzzle: Puzzle) -> str | None:
    """What keeps an answer from being compared, None when nothing does."""
    letters, names = ", ".join(puzzle.answers), ", ".join(map(repr, puzzle.names))
    if strange := [letter for letter in said if letter not in puzzle.answers]:
        return f"There is no outline {strange[0]!r}: the letters are {letters}."
    if missing := [letter for letter in puzzle.answers if letter not in said]:
        return f"You leave out {', '.join(missing)}: each letter gets a name."
    if unknown := [name for name in said.values() if name not in puzzle.names]:
        return f"There is no strategy {unknown[0]!r} here: the names are {names}."
    for name in puzzle.names:
        if len(twice := _letters_of(name, said)) > 1:
            return f"You say {name!r} for {', '.join(twice)}: each name belongs to one letter."
    return None


def _letters_of(name: str, said: Mapping[str, str]) -> Sequence[str]:
    return [letter for letter, other in said.items() if other == name]


def _seen(letter: str, puzzle: Puzzle) -> str:
    """What an outline shows, without its name."""
    one = puzzle.outlines[letter]
    sights = {
        KEEP_ALL: (
            f"{letter} climbs to {human_bytes(one.held_bytes)} until forward ends, and then falls block by block: "
            "nothing comes back to life."
        ),
        FULL: (
            f"{letter} climbs a little with each block in forward, and has {one.surges} narrow surges in backward at "
            "even distances: one checkpoint and one surge a block."
        ),
        CHUNKS: (
            f"{letter} has {one.surges} broad surges in backward, the highest to {human_bytes(one.peak_bytes)}: "
            "several blocks come back at once."
        ),
        RECURSIVE: (
            f"{letter} has {one.surges} surges in backward at uneven distances, with ripples between, and takes "
            f"{one.total_work:.2f} times the work of a plain step: blocks run again and again."
        ),
    }
    return sights[puzzle.answers[letter]]


def _would(name: str, puzzle: Puzzle) -> str:
    """What the outline of the name that was given would show."""
    one = puzzle.outline_of(name)
    peak, held = human_bytes(one.peak_bytes), human_bytes(one.held_bytes)
    return {
        KEEP_ALL: f"If all were kept, {held} would be alive when forward ends, and backward would not surge.",
        FULL: (
            f"Full checkpointing would surge {one.surges} times, evenly, and take {one.total_work:.2f} times the work."
        ),
        CHUNKS: f"Three chunks would surge {one.surges} times, to {peak}.",
        RECURSIVE: (
            f"Recursion would hold {held} when forward ends, for its last block is kept, and take "
            f"{one.total_work:.2f} times the work."
        ),
    }[name]
