"""The ledger of predictions: what it says to a number, what it remembers, and how it shows that."""

from __future__ import annotations

import math
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsave_lib import plots
from memsave_lib.course.predictions import Ledger, Question, number
from tests.asking import assert_diagnoses

STATES = Question(
    "hidden states that a block saves",
    {"GELU keeps its input too, four more.": 12.0, "That is the input alone.": 1.0, "You counted twice.": 32.0},
    "Count tensor by tensor.",
)
FOUND = 15.98


def test_a_question_diagnoses() -> None:
    assert_diagnoses(STATES, FOUND, right=16)


@pytest.mark.parametrize(
    ("predicted", "passed", "text"),
    [
        (None, None, "Not tried yet: replace None by your number, then run this cell again."),
        (16, True, "Right. You predicted 16, it is 15.98: 0.1% too high."),
        (15.98, True, "Right. You predicted 15.98, it is 15.98, exactly."),
        (15.975, True, "Right. You predicted 15.97, it is 15.98: less than 0.1% too low."),
        (np.float64(15.9), True, "Right. You predicted 15.9, it is 15.98: 0.5% too low."),
        (
            12.1,
            False,
            "Not yet. You predicted 12.1, it is 15.98: 24.3% too low. GELU keeps its input too, four more.",
        ),
        (20, False, "Not yet. You predicted 20, it is 15.98: 25.2% too high. Count tensor by tensor."),
        (0, False, "Not yet. You predicted 0, it is 15.98: 100.0% too low. Count tensor by tensor."),
        (Fraction(16), True, "Right. You predicted 16, it is 15.98: 0.1% too high."),
        (np.uint8(3), False, "Not yet. You predicted 3, it is 15.98: 81.2% too low. Count tensor by tensor."),
        (
            1598,
            False,
            "Not yet. You predicted 1,598, it is 15.98: 9900.0% too high. That is a hundred times as much: per cent, "
            "where the number itself is asked for?",
        ),
        (
            0.16,
            False,
            "Not yet. You predicted 0.16, it is 15.98: 99.0% too low. That is a hundredth: a fraction, where per cent "
            "are asked for?",
        ),
        (
            10**400,
            False,
            "Not yet. A prediction is a number such as 2.5; yours is one with more than thirty digits (int).",
        ),
        (1j, False, "Not yet. A prediction is a number such as 2.5; yours is 1j (complex)."),
        ("16", False, "Not yet. A prediction is a number such as 2.5; yours is '16' (str)."),
        (True, False, "Not yet. A prediction is a number such as 2.5; yours is True (bool)."),
        (math.nan, False, "Not yet. A prediction is a number such as 2.5; yours is nan (float)."),
        (math.inf, False, "Not yet. A prediction is a number such as 2.5; yours is inf (float)."),
    ],
)
def test_a_prediction_is_answered(predicted: object, passed: bool | None, text: str) -> None:
    verdict = STATES.judge(predicted, FOUND)
    assert (verdict.passed, str(verdict)) == (passed, text)


@pytest.mark.parametrize(
    "predicted", [Fraction(16), np.uint8(16), np.float32(16)], ids=["fraction", "uint8", "float32"]
)
def test_the_ledger_keeps_plain_floats(predicted: float) -> None:
    ledger = Ledger()
    ledger.check(STATES, predicted, FOUND)
    ledger.check(STATES, 10**400, FOUND)
    entry = ledger.entries[STATES.name]
    assert (type(entry.first), entry.first, entry.newest) == (float, 16.0, None)
    assert "16" in str(ledger)
    assert "not predicted" not in ledger.plot().sentence


def test_a_number_that_python_does_not_write_is_none() -> None:
    assert "yours is one with more than thirty digits (int)" in str(STATES.judge(10**5000, FOUND))


def test_an_answer_that_thinking_gives_is_right_too() -> None:
    question = Question("FOUND and more", {"The wrong one.": 14.0}, "Think.", 0.02, answer=12.0)
    assert str(question.judge(12.1, FOUND)) == "Right. You predicted 12.1, it is 15.98: 24.3% too low."
    assert question.judge(16, FOUND).passed is True
    assert str(question.judge(14, FOUND)).endswith("The wrong one.")
    assert Question("FOUND", {}, "Think.").judge(12.1, FOUND).passed is False


def test_where_nothing_is_found_only_nothing_is_right() -> None:
    moved = Question("bytes by which the peak falls", {"It is somewhere else.": 100.0}, "Where is the peak?")
    assert str(moved.judge(0, 0)) == "Right. You predicted 0, it is 0, exactly."
    assert str(moved.judge(100, 0)) == "Not yet. You predicted 100, it is 0: too high. It is somewhere else."
    assert str(moved.judge(-1, 0)) == "Not yet. You predicted -1, it is 0: too low. Where is the peak?"


def test_the_ledger_keeps_the_first_prediction_and_the_newest() -> None:
    ledger, peak = Ledger(), Question("peak, times the parameters", {}, "Look again.")
    assert str(ledger) == "No prediction has been asked for yet: run the cells above."
    ledger.check(STATES, None, FOUND)
    assert str(ledger).splitlines()[1].split()[-4:] == ["-", "-", "15.98", "-"]
    for predicted in (12, "no number", 16):
        ledger.check(STATES, predicted, FOUND)
    ledger.check(peak, 4, 8)
    ledger.check(peak, None, 8)
    assert str(ledger) == (
        "                                       first      newest       found  newest is off by\n"
        "hidden states that a block saves          12          16       15.98             +0.1%\n"
        "peak, times the parameters                 4           -           8                 -"
    )
    assert ledger.plot().sentence == (
        "1 of 2 numbers predicted. hidden states that a block saves: 1.00 times; "
        "peak, times the parameters: 0.50 times."
    )


def test_two_ledgers_share_nothing() -> None:
    one, other = Ledger(), Ledger()
    one.check(STATES, 16, FOUND)
    assert other.entries == {}


@pytest.mark.parametrize(
    ("answer", "note"),
    [
        ((None, None, 4.0), "not predicted"),
        ((4.0, 4.0, 4.0), "exact"),
        ((0.0, 0.0, 4.0), "zero is not it"),
        ((-4.0, -4.0, 4.0), "another sign"),
        ((1.0, 1.0, 0.0), "it is zero"),
        ((0.0, 0.0, 0.0), "exact"),
        ((1e9, 1e9, 1.0), "far above"),
        ((1.0, 1.0, 1e9), "far below"),
        ((1.0, 3.0, 4.0), "0.75 times"),
        ((-2.0, -4.0, -2.0), "2.00 times"),
        ((None, 47.0, 2.0), "24 times"),
    ],
)
def test_the_picture_says_how_far_a_prediction_is_off(
    answer: tuple[float | None, float | None, float], note: str
) -> None:
    shown = plots.predictions({"a number": answer})
    assert shown.sentence.endswith(f"a number: {note}.")
    assert note in [text.get_text() for text in shown.figure.axes[0].texts]
    dots = [line for line in shown.figure.axes[0].lines if line.get_marker() == "o"]
    assert len(dots) == sum(value is not None for value in answer[:2])
    low, high = shown.figure.axes[0].get_xlim()
    assert all(low < float(dot.get_xdata()[0]) < high for dot in dots)


def test_no_answers_make_no_picture() -> None:
    with pytest.raises(ValueError, match="answers is empty"):
        Ledger().plot()


@given(st.floats(-1e15, 1e15, allow_nan=False))
def test_numbers_are_short(value: float) -> None:
    text = number(value)
    assert float(text.replace(",", "")) == pytest.approx(value, rel=1e-3)
