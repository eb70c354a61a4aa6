"""What every question of the course must do, whatever it asks for."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from memsave_lib.course.predictions import Ledger, Question


def assert_diagnoses(question: Question, found: float, right: float | None = None) -> None:
    """An untouched stub, the answer, and at least three wrong answers, each with a reason of its own.

    Args:
        question: at some parameters.
        found: the number that the notebook measures or computes at these.
        right: what a learner who is right predicts; ``found`` itself if None.
    """
    right = found if right is None else right
    untried = question.judge(None, found)
    assert untried.passed is None and "Not tried yet" in str(untried)
    assert Ledger().check(question, right, found).passed is True
    assert str(question.judge(right, found)).startswith("Right. You predicted")
    assert len(question.mistakes) >= 3
    assert "\n" not in question.name and len(question.name) <= 44, "it has to fit beside the ledger's picture"
    for reason, mistaken in question.mistakes.items():
        verdict = question.judge(mistaken, found)
        assert verdict.passed is False, f"{mistaken} is as good as {found}: {reason}"
        assert str(verdict).endswith(reason), f"{mistaken} is taken for another mistake than {reason}"
        assert reason.endswith((".", "?")), reason
    far = 3 * max(abs(found), *map(abs, question.mistakes.values())) + 1
    verdict = question.judge(far, found)
    assert verdict.passed is False and str(verdict).endswith(question.hint)
    assert "is a number such as" in str(question.judge("12", found))


@contextmanager
def double_precision() -> Iterator[None]:
    """With float64 as the default type, as a learner may have set it."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)
