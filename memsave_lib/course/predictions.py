"""Numbers that the learner predicts before they are measured, and a ledger of them for the end of a notebook.

ledger = Ledger()
print(ledger.check(question, 12, found))     # right, or by how much not and what is missing
print(ledger)                                # all of a notebook's predictions, as a table
ledger.plot()                                # and as a picture
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from numbers import Real

from memsave_lib import plots
from memsave_lib.course.checks import Verdict, right, shown, wrong

NOT_PREDICTED = Verdict(None, "Not tried yet: replace None by your number, then run this cell again.")


@dataclass(frozen=True)
class Question:
    """What is to be predicted.

    Args:
        name: of the number, as the ledger shows it: "hidden states that a block saves".
        mistakes: why one may come to a wrong number -> that number. The reason says what is missing, in a sentence.
        hint: what to think of when no mistake explains the prediction, in a sentence.
        within: relative error up to which a prediction is right.
        answer: what is right too, where the measurement counts more than was asked for; None where it does not.
    """

    name: str
    mistakes: Mapping[str, float]
    hint: str
    within: float = 0.02
    answer: float | None = None

    def judge(self, predicted: float | None, found: float) -> Verdict:
        """What to say to ``predicted``, None for an untouched stub, when ``found`` is what was measured."""
        if predicted is None:
            return NOT_PREDICTED
        value = _as_float(predicted)
        if value is None:
            return wrong(f"A prediction is a number such as 2.5; yours is {shown(predicted)}.")
        predicted, found = value, float(found)
        if self._meets(predicted, found) or (self.answer is not None and self._meets(predicted, self.answer)):
            return right(f"{self._compared(predicted, found)}.")
        return wrong(f"{self._compared(predicted, found)}. {self._reason(predicted, found)}")

    def _compared(self, predicted: float, found: float) -> str:
        said = f"You predicted {number(predicted)}, it is {number(found)}"
        if predicted == found:
            return f"{said}, exactly"
        way = "low" if predicted < found else "high"
        if not found:
            return f"{said}: too {way}"
        error = abs(relative_error(predicted, found))
        return f"{said}: {f'{error:.1%}' if error >= 0.0005 else 'less than 0.1%'} too {way}"

    def _reason(self, predicted: float, found: float) -> str:
        reason = min(self.mistakes, key=lambda reason: abs(self.mistakes[reason] - predicted), default=None)
        if reason is not None and self._meets(predicted, self.mistakes[reason]):
            return reason
        if found and self._meets(predicted, 100 * found):
            return "That is a hundred times as much: per cent, where the number itself is asked for?"
        if found and self._meets(100 * predicted, found):
            return "That is a hundredth: a fraction, where per cent are asked for?"
        return self.hint

    def _meets(self, predicted: float, value: float) -> bool:
        return abs(predicted - value) <= self.within * abs(value)


@dataclass(frozen=True)
class Entry:
    """One question of a ledger: the first prediction and the newest, None where there is none yet."""

    name: str
    found: float
    first: float | None = None
    newest: float | None = None


@dataclass
class Ledger:
    """The predictions of one notebook, in the order in which they were asked for."""

    entries: dict[str, Entry] = field(default_factory=dict)

    def check(self, question: Question, predicted: float | None, found: float) -> Verdict:
        """Judge a prediction and remember it: the first one stays, the newest is replaced when the cell runs again.

        Args:
            question: what was asked.
            predicted: the learner's number; None for an untouched stub.
            found: the number measured or computed.
        """
        verdict = question.judge(predicted, found)
        newest = _as_float(predicted)
        before = self.entries.get(question.name)
        first = newest if before is None or before.first is None else before.first
        self.entries[question.name] = Entry(question.name, found, first, newest)
        return verdict

    def __str__(self) -> str:
        """A table: question, first prediction, newest one, what was found, by how much the newest is off."""
        if not self.entries:
            return "No prediction has been asked for yet: run the cells above."
        names = max(len(entry.name) for entry in self.entries.values())
        rows = [f"{'':<{names}}{'first':>12}{'newest':>12}{'found':>12}{'newest is off by':>18}"]
        for entry in self.entries.values():
            cells = [number(value) if value is not None else "-" for value in (entry.first, entry.newest, entry.found)]
            error = "-"
            if entry.newest is not None and entry.found:
                off = relative_error(entry.newest, entry.found)
                error = f"{off:+.1%}" if abs(off) >= 0.0005 else "0.0%"
            rows.append(f"{entry.name:<{names}}" + "".join(f"{cell:>12}" for cell in cells) + f"{error:>18}")
        return "\n".join(rows)

    def plot(self) -> plots.Shown:
        """Each prediction as a multiple of what was found."""
        return plots.predictions(
            {entry.name: (entry.first, entry.newest, entry.found) for entry in self.entries.values()}
        )


def _as_float(value: object) -> float | None:
    """The number as a float; None if it is no number, or no finite one."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return None
    try:
        as_float = float(value)
    except OverflowError:
        return None
    return as_float if math.isfinite(as_float) else None


def apart_from(answer: float, within: float, mistakes: Mapping[str, float]) -> dict[str, float]:
    """The mistakes that are more than ``within`` from the answer, and a little, since it may be a few crumbs off."""
    return {
        reason: number for reason, number in mistakes.items() if abs(relative_error(number, answer)) > 1.05 * within
    }


def relative_error(predicted: float, found: float) -> float:
    """-0.25: a quarter too low."""
    return (predicted - found) / abs(found)


def number(value: float) -> str:
    """Four significant digits; whole numbers in full."""
    return f"{value:,.0f}" if value == round(value) and abs(value) < 1e15 else f"{value:,.4g}"
