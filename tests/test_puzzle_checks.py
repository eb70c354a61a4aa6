"""The puzzle of notebook 03: one answer at every set of parameters, and each plausible mistake has its diagnosis."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace
from functools import cache

import numpy as np
import pytest
import torch

import memsave_lib as ms
from memsave_lib.course import puzzle_checks
from memsave_lib.course.env import Setup
from memsave_lib.course.puzzles import Puzzle, checkpoint_puzzle
from tests.asking import double_precision

DEFAULTS = Setup(512, 2, 6, 256, 2, 2, torch.device("cpu"))
ODD = Setup(96, 5, 7, 256, 3, 2, torch.device("cpu"), seed=3)
SMALLEST = Setup(8, 1, 1, 64, 1, 1, torch.device("cpu"))
LARGE = Setup(8192, 2, 24, 1024, 32, 2, torch.device("cpu"))
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST, LARGE], ids=["defaults", "odd", "smallest", "large"])
SOLUTION = ("keep", "recompute", "keep", "keep", "recompute", "keep")


@cache
def puzzle_of(here: Setup) -> Puzzle:
    """Made once for all tests of a setup."""
    return checkpoint_puzzle(here)


def again(*blocks: int) -> tuple[str, ...]:
    return tuple("recompute" if i in blocks else "keep" for i in range(6))


@SETUPS
def test_has_one_answer(here: Setup) -> None:
    puzzle = checkpoint_puzzle(here)
    assert list(puzzle.answers()) == [SOLUTION]
    assert puzzle.budget == 2 * puzzle.saved_bytes(again()) // 3
    assert puzzle.extra_flops(SOLUTION) == puzzle.target


def test_the_default_type_does_not_matter() -> None:
    with double_precision():
        puzzle = checkpoint_puzzle(SMALLEST)
        assert puzzle_checks.check_placed(SOLUTION, puzzle).passed is True
    assert puzzle == checkpoint_puzzle(SMALLEST)


@SETUPS
def test_its_table_is_what_the_stack_does(here: Setup) -> None:
    puzzle = puzzle_of(here)
    stack, x = puzzle.stack()
    step = lambda: stack(x).sum().backward()  # noqa: E731 (a step is handed over)
    with ms.MemoryMeter(stack) as meter:
        step()
    assert meter.trace.saved_bytes == puzzle.saved_bytes(again())
    plain = ms.flops.count_flops(step)
    for i, block in enumerate(puzzle.blocks):
        with ms.apply(stack, ms.PerBlock(again(i)), blocks=list(stack)):
            with ms.MemoryMeter(stack) as meter:
                step()
            assert ms.flops.count_flops(step) - plain == block.again_flops
        assert meter.trace.saved_bytes == puzzle.saved_bytes(again(i))
        assert meter.trace.saved_bytes == puzzle.saved_bytes(again()) - block.given_back
        assert f"{block.saved_bytes:,}" in str(puzzle) and f"{block.again_flops:,}" in str(puzzle)


@SETUPS
@pytest.mark.parametrize(
    "answer",
    [SOLUTION, list(SOLUTION), ms.PerBlock(SOLUTION), np.array(SOLUTION)],
    ids=["tuple", "list", "strategy", "array"],
)
def test_accepts_the_solution(here: Setup, answer: Collection[str]) -> None:
    puzzle, state = puzzle_of(here), torch.get_rng_state()
    found = puzzle_checks.check_placed(answer, puzzle)
    assert found.passed is True, str(found)
    assert f"{puzzle.saved_bytes(SOLUTION):,} bytes are saved" in str(found)
    assert f"{puzzle.target:,} additional FLOPs" in str(found)
    assert torch.equal(torch.get_rng_state(), state)


@SETUPS
def test_knows_the_stub(here: Setup) -> None:
    untried = puzzle_checks.check_placed(None, puzzle_of(here))
    assert untried.passed is None
    assert str(untried).startswith("Not tried yet")


WRONG = {
    "All blocks are kept": again(),
    "All blocks are recomputed": again(*range(6)),
    "Did you forget that a recomputed block still holds its input?": again(0, 1),
    "You recompute the blocks that save most. Think of a swap: block 2": again(2, 4),
    "Think of a swap: block 0 gives back": again(0, 4),
    "Think of a swap: block 3 gives back": again(1, 3, 5),
    "block 4, which you keep,": again(1, 2),
    "Block 5 need not be recomputed": again(1, 4, 5),
    "There is more to recompute: of those that you keep, block 1 gives back most": again(4),
    "block 4 gives back most for a FLOP": again(1),
    "yours has 5.": SOLUTION[:5],
    "yours has 0.": (),
    "yours is 'keep' (str)": "keep",
    "(dict)": dict.fromkeys(SOLUTION),
    "yours is 3 (int)": 3,
    "Block 1 has 'recomputed'": ("keep", "recomputed", *SOLUTION[2:]),
    "Block 0 has 'Keep'": ("Keep", *SOLUTION[1:]),
    "Block 0 has False": (False, True, False, False, True, False),
    "Block 0 has ['keep']": [["keep"], *SOLUTION[1:]],
    "Block 0 has an object of type ndarray; the words": [np.array(SOLUTION)] * 6,
    "Block 3: nothing can be sent away here": ("keep", "keep", "keep", "offload", "keep", "keep"),
}


@SETUPS
@pytest.mark.parametrize(("reason", "answer"), WRONG.items(), ids=WRONG)
def test_names_the_mistake(here: Setup, reason: str, answer: object) -> None:
    found = puzzle_checks.check_placed(answer, puzzle_of(here))
    assert found.passed is False
    assert reason in str(found)


@SETUPS
def test_says_by_how_much_it_misses(here: Setup) -> None:
    puzzle = puzzle_of(here)
    over = puzzle.saved_bytes(again()) - puzzle.budget
    assert f"{over:,} bytes over the budget, and {puzzle.target:,} FLOPs below" in said(again(), puzzle)
    dear = puzzle.extra_flops(again(2, 4)) - puzzle.target
    spare = puzzle.budget - puzzle.saved_bytes(again(2, 4))
    assert f"It fits, {spare:,} bytes below the budget, but {dear:,} FLOPs above the target." in said(
        again(2, 4), puzzle
    )


def test_misses_both_where_the_target_is_lower() -> None:
    puzzle = replace(puzzle_of(SMALLEST), target=1)
    over, dear = puzzle.saved_bytes(again(2)) - puzzle.budget, puzzle.extra_flops(again(2)) - 1
    assert f"{over:,} bytes over the budget, and {dear:,} FLOPs above the target. Think of a swap: block 2" in said(
        again(2), puzzle
    )


def said(actions: tuple[str, ...], puzzle: Puzzle) -> str:
    return str(puzzle_checks.check_placed(actions, puzzle))


@pytest.mark.parametrize(
    ("reason", "changed"),
    [("The output differs", {"output": torch.zeros(1)}), ("other gradients", {"gradients": [torch.zeros(1)]})],
    ids=["output", "gradients"],
)
def test_a_fault_of_the_library_is_not_the_learners(
    monkeypatch: pytest.MonkeyPatch, reason: str, changed: dict[str, object]
) -> None:
    run = puzzle_checks._run
    monkeypatch.setattr(
        puzzle_checks,
        "_run",
        lambda stack, x, actions: replace(run(stack, x, actions), **(changed if "recompute" in actions else {})),
    )
    found = puzzle_checks.check_placed(SOLUTION, puzzle_of(SMALLEST))
    assert found.passed is False
    assert reason in str(found)
    assert "please report it" in str(found)
