"""The timelines to be read in notebook 04: every outline has its name, and each wrong name what speaks against it."""

from __future__ import annotations

from itertools import permutations
from typing import Any

import pytest
import torch
from matplotlib.text import Text

import memsave_lib as ms
from memsave_lib.course.env import Setup
from memsave_lib.course.outline_puzzle import STRATEGIES, Puzzle, check_outlines

CPU = torch.device("cpu")
DEFAULTS = Setup(256, 2, 12, 128, 2, 5, CPU)
ODD = Setup(96, 5, 7, 128, 3, 2, CPU, seed=3)
SMALLEST = Setup(8, 1, 1, 64, 1, 1, CPU)
WIDE = Setup(8, 1, 1, 1024, 1, 1, CPU)
SETUPS = pytest.mark.parametrize("here", [DEFAULTS, ODD, SMALLEST, WIDE], ids=["defaults", "odd", "smallest", "wide"])
ALL, FULL, CHUNKS, RECURSIVE = "keep all", "full checkpoint", "3 chunks", "recursive"


def by_surges(puzzle: Puzzle) -> dict[str, str]:
    """The notebook's solution."""
    names = {0: ALL, 3: CHUNKS, 11: RECURSIVE, 12: FULL}
    return {letter: names[outline.surges] for letter, outline in puzzle.outlines.items()}


def unfinished() -> Any:
    raise NotImplementedError("your turn")


@SETUPS
def test_the_stub_is_untried_and_the_solution_right(here: Setup) -> None:
    puzzle = Puzzle.of(here)
    assert check_outlines(unfinished, puzzle).passed is None
    found = check_outlines(lambda: by_surges(puzzle), puzzle)
    assert found.passed is True and str(found).startswith("Right. All 4 outlines are read: A ")


@SETUPS
def test_of_all_orders_one_is_right_and_each_letter_of_the_others_is_counted(here: Setup) -> None:
    puzzle = Puzzle.of(here)
    verdicts = {}
    for order in permutations(STRATEGIES):
        answer = dict(zip("ABCD", order, strict=True))
        verdicts[order] = str(check_outlines(lambda answer=answer: answer, puzzle))
        wrong = [letter for letter in "ABCD" if answer[letter] != puzzle.answers[letter]]
        if wrong:
            head, *reasons = verdicts[order].splitlines()
            right = 4 - len(wrong)
            assert head == f"Not yet. {right or 'None'} of 4 {'is' if right < 2 else 'are'} right."
            assert [reason[0] for reason in reasons] == wrong, "one line for each wrong letter, and no other"
            for reason, letter in zip(reasons, wrong, strict=True):
                assert len([other for other in STRATEGIES if other in reason]) <= 1, "does not name the right one"
                assert answer[letter] != puzzle.answers[letter]
    assert len(set(verdicts.values())) == len(verdicts), "each wrong order has its own diagnosis"


@pytest.mark.parametrize(
    ("said", "other", "reason"),
    [
        (ALL, RECURSIVE, "{ALL} climbs to 48.6 MiB until forward ends, and then falls block by block: nothing comes"),
        (CHUNKS, FULL, "{CHUNKS} has 3 broad surges in backward, the highest to 18.0 MiB: several blocks come back"),
        (CHUNKS, FULL, "Full checkpointing would surge 12 times, evenly, and take 1.24 times the work."),
        (
            FULL,
            CHUNKS,
            "{FULL} climbs a little with each block in forward, and has 12 narrow surges in backward at even",
        ),
        (FULL, CHUNKS, "Three chunks would surge 3 times, to 18.0 MiB."),
        (
            RECURSIVE,
            ALL,
            "{RECURSIVE} has 11 surges in backward at uneven distances, with ripples between, and takes 1.58",
        ),
        (RECURSIVE, ALL, "If all were kept, 48.6 MiB would be alive when forward ends, and backward would not surge."),
        (FULL, RECURSIVE, "Recursion would hold 5.26 MiB when forward ends, for its last block is kept, and take 1.58"),
    ],
)
def test_two_names_swapped_say_what_is_to_be_seen(said: str, other: str, reason: str) -> None:
    puzzle = Puzzle.of(DEFAULTS)
    letters = {name: letter for letter, name in puzzle.answers.items()}
    answer = {**puzzle.answers, letters[said]: other, letters[other]: said}
    found = check_outlines(lambda: answer, puzzle)
    assert found.passed is False and "Not yet. 2 of 4 are right." in str(found)
    expected = reason.format(ALL=letters[ALL], FULL=letters[FULL], CHUNKS=letters[CHUNKS], RECURSIVE=letters[RECURSIVE])
    assert expected in str(found)


@SETUPS
@pytest.mark.parametrize(
    ("changed", "reason"),
    [
        ({"D": None}, "You leave out D: each letter gets a name."),
        ({"E": ALL}, "There is no outline 'E': the letters are A, B, C, D."),
        (
            {"B": "chunks"},
            "There is no strategy 'chunks' here: the names are 'keep all', 'full checkpoint', '3 chunks', ",
        ),
    ],
    ids=["missing", "strange letter", "strange name"],
)
def test_an_answer_has_every_letter_and_no_strange_word(here: Setup, changed: dict[str, Any], reason: str) -> None:
    puzzle = Puzzle.of(here)
    answer = {letter: name for letter, name in {**puzzle.answers, **changed}.items() if name is not None}
    found = check_outlines(lambda: answer, puzzle)
    assert found.passed is False and reason in str(found)


@SETUPS
def test_a_name_is_used_once(here: Setup) -> None:
    found = check_outlines(lambda: dict.fromkeys("ABCD", ALL), Puzzle.of(here))
    assert found.passed is False
    assert "You say 'keep all' for A, B, C, D: each name belongs to one letter." in str(found)


@pytest.mark.parametrize("answer", [None, ALL, [ALL, FULL, CHUNKS, RECURSIVE], {"A": 3}, {1: ALL}], ids=repr)
def test_an_answer_is_a_dict_of_words(answer: Any) -> None:
    found = check_outlines(lambda: answer, Puzzle.of(DEFAULTS))
    assert found.passed is False
    assert 'Return a dict from letters to names, {"A": "keep all", ...}; you returned' in str(found)


def test_small_letters_and_capital_names_will_do() -> None:
    puzzle = Puzzle.of(DEFAULTS)
    answer = {letter.lower(): f" {name.title()} " for letter, name in puzzle.answers.items()}
    assert check_outlines(lambda: answer, puzzle).passed is True


def test_letters_are_dealt_out_by_the_parameters() -> None:
    orders = {tuple(Puzzle.of(here).answers.values()) for here in (DEFAULTS, ODD, SMALLEST)}
    assert len(orders) == 3
    assert tuple(STRATEGIES) not in orders, "the order in which the names are listed would be a hint"
    assert Puzzle.of(DEFAULTS) == Puzzle.of(DEFAULTS)


@SETUPS
def test_the_outlines_can_be_told_apart_by_eye(here: Setup) -> None:
    puzzle = Puzzle.of(here)
    found = {name: puzzle.outline_of(name) for name in puzzle.names}
    assert {name: one.surges for name, one in found.items()} == {ALL: 0, FULL: 12, CHUNKS: 3, RECURSIVE: 11}
    peaks = [found[name].peak_bytes for name in (RECURSIVE, FULL, CHUNKS, ALL)]
    assert all(high > 1.2 * low for low, high in zip(peaks, peaks[1:], strict=False))
    assert found[CHUNKS].peak_bytes > 4 * found[CHUNKS].held_bytes, "surges are no ripples, whatever the width"
    work = [found[name].total_work for name in (ALL, FULL, CHUNKS, RECURSIVE)]
    assert work[0] == 1.0 and work == sorted(work) and work[3] > 1.5
    assert all(one.forward_ends == pytest.approx(1 / 3) for one in found.values()), "a third of a plain step"
    held = [found[name].held_bytes for name in (CHUNKS, FULL, RECURSIVE, ALL)]
    assert held == sorted(held) and held[1] > 2 * held[0]


def test_the_outline_is_the_measured_one() -> None:
    """The closed forms behind the figure agree with a metered step of twelve blocks, to the byte."""
    here = Setup(256, 1, 1, 64, 1, 1, CPU)
    stack, x = ms.BlockStack(12, 64, 1), torch.randn(1, 256, 64, requires_grad=True)
    stack(x).square().mean().backward()
    stays = sum(2 * parameter.nbytes for parameter in stack.parameters()) + x.nbytes
    for name, strategy in STRATEGIES.items():
        with ms.apply(stack, strategy), ms.MemoryMeter(stack) as meter:
            stack(x).square().mean().backward()
        assert Puzzle.of(here).outline_of(name).peak_bytes == meter.trace.peak_bytes - stays, name


@SETUPS
def test_the_picture_says_what_is_seen_and_names_nothing(here: Setup) -> None:
    puzzle = Puzzle.of(here)
    shown = puzzle.picture()
    assert not any(name in shown.sentence for name in puzzle.names)
    assert [axes.get_title(loc="left") for axes in shown.figure.axes] == ["A", "B", "C", "D"]
    assert len({(axes.get_xlim(), axes.get_ylim()) for axes in shown.figure.axes}) == 1, "equal axes"
    words = [text.get_text() for text in shown.figure.findobj(Text)]
    assert not any(name in word for word in words for name in puzzle.names)


def test_the_sentence_of_the_picture() -> None:
    first, second = Puzzle.of(SMALLEST).picture().sentence.split(". ")[:2]
    seen = "A: 896.0 KiB alive when forward ends, 12 surges in backward, peak 2.07 MiB"
    assert first == f"{seen}, 1.25 times the work of a plain step"
    seen = "B: 12.2 MiB alive when forward ends, 0 surges in backward, peak 12.4 MiB"
    assert second == f"{seen}, 1.00 times the work of a plain step"


@SETUPS
def test_a_puzzle_as_the_last_line_of_a_cell_does_not_tell(here: Setup) -> None:
    puzzle = Puzzle.of(here)
    assert not any(name in f"{puzzle!r} {puzzle}" for name in puzzle.names)
    assert len(repr(puzzle)) < 100


def test_an_error_of_another_kind_is_the_learners() -> None:
    def unsupported() -> dict[str, str]:
        raise NotImplementedError("no such kernel")

    with pytest.raises(NotImplementedError, match="no such kernel"):
        check_outlines(unsupported, Puzzle.of(DEFAULTS))
