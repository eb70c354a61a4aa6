"""The plan by hand in notebook 06: solution right, stub untried, each plausible mistake diagnosed."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import numpy as np
import pytest

from memsave_lib.course import placement_checks
from memsave_lib.course.placement_checks import Puzzle
from memsave_lib.strategies import ACTIONS


def unfinished(*arguments: object) -> Any:
    raise NotImplementedError("your turn")


SHORT = {"k": "keep", "r": "recompute", "o": "offload"}
#: The notebook's, and one where every second counts thrice and the link is a third as fast: the same plans are best.
PUZZLES = pytest.mark.parametrize("puzzle", [Puzzle(), Puzzle(forward=3, link=1)], ids=["notebook", "slow"])


def placed(letters: str) -> Callable[[], list[str]]:
    return lambda: [SHORT[letter] for letter in letters]


@PUZZLES
def test_placement_accepts_every_best_plan_and_knows_the_stub(puzzle: Puzzle) -> None:
    plans = ["".join(letters) for letters in product("kro", repeat=6)]
    right = {letters for letters in plans if placement_checks.check_placement(placed(letters), puzzle).passed}
    assert right == {"orokrk", "oorkrk", "ororkk", "oorrkk"}
    assert all(set(letters) == set("kro") for letters in right), "the best plans mix all three"
    assert placement_checks.check_placement(unfinished, puzzle).passed is None


WRONG_PLACEMENTS = {
    "no room for block 2: the blocks before it hold 12 GB, at work it needs 6 GB more": "kkkkkk",
    "no room for block 5: the blocks before it hold 10 GB": "rrrrkk",
    "while the link carries nothing": "rrrrrr",
    "what the last block sends has to leave": "oooooo",
    "with one sent away behind the other the link falls behind": "oooook",
    "block 3 is on its way still, and beside what the blocks hold there is no room for the rest": "rrrorr",
    "waiting at the turn, for what is still leaving": "ooorrk",
    "could one of them be kept, or sent away": "orrrrk",
}


@PUZZLES
@pytest.mark.parametrize(("reason", "letters"), WRONG_PLACEMENTS.items(), ids=WRONG_PLACEMENTS.values())
def test_placement_names_the_mistake(puzzle: Puzzle, reason: str, letters: str) -> None:
    found = placement_checks.check_placement(placed(letters), puzzle)
    assert found.passed is False
    assert reason in str(found)


@PUZZLES
def test_one_behind_the_other_is_said_of_such_plans_only(puzzle: Puzzle) -> None:
    for letters in map("".join, product("kro", repeat=6)):
        found = str(placement_checks.check_placement(placed(letters), puzzle))
        assert "oo" in letters or "with one sent away behind the other" not in found, letters
        still = [int(found[found.index(" is on") - 1])] if "is on its way still" in found else []
        assert all(letters[block] == "o" for block in still), letters


def test_a_plan_in_part_is_not_tried_and_other_errors_go_through() -> None:
    def of_others() -> list[str]:
        raise NotImplementedError("no such kernel")

    with pytest.raises(NotImplementedError, match="no such kernel"):
        placement_checks.check_placement(of_others)


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (["keep"] * 5, "Return a list of 6 words"),
        ("keep", "you returned 'keep'"),
        (None, "you returned None"),
        (["keep"] * 5 + ["drop"], "you have 'drop'"),
        (np.array(["keep"] * 6), "Return a list of 6 words"),
        ([np.array(["keep", "keep"])] * 6, "you have array(['keep', 'keep']"),
        ([3] * 6, "you have 3 (int)"),
        ([["keep"]] * 6, "you have ['keep'] (list)"),
    ],
    ids=["five", "word", "none", "unknown", "array", "arrays", "numbers", "lists"],
)
def test_placement_wants_six_known_words(answer: Any, reason: str) -> None:
    found = placement_checks.check_placement(lambda: answer)
    assert found.passed is False
    assert reason in str(found)


@pytest.mark.parametrize(
    "puzzle", [Puzzle(), Puzzle(forward=3, link=1), Puzzle(5, 1, 9, 2, 2, 20)], ids=["notebook", "slow", "large"]
)
def test_following_a_plan_costs_what_the_planner_says(puzzle: Puzzle) -> None:
    plans = list(product(range(3), repeat=puzzle.n_blocks))
    followed = [placement_checks.follow(puzzle, [ACTIONS[action] for action in plan]).seconds for plan in plans]
    assert followed == pytest.approx(puzzle.extra_seconds(plans), rel=1e-12, abs=1e-12)
