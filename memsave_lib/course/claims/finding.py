"""What a check returns, and how a verdict follows from its numbers.

A claim is looked at in several *cases*: what its words may mean, or circumstances that it leaves out. In each case it
is true or false as a whole: a claim of two numbers is true where both are. The verdict counts the cases.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

HOLDS, HOLDS_WHEN, DOES_NOT_HOLD = "holds", "holds when", "does not hold"
VERDICTS = (HOLDS, HOLDS_WHEN, DOES_NOT_HOLD)
#: The one case of a claim that leaves nothing open.
AS_STATED = "as stated"


@dataclass(frozen=True)
class Finding:
    """What the check of one claim found: ``figure`` is a sentence with the numbers, ``condition`` completes "when"."""

    id: str
    figure: str
    verdict: str
    condition: str = ""

    @property
    def words(self) -> str:
        """The verdict with its condition."""
        return f"{self.verdict} {self.condition}".strip()


def _nothing_missing() -> str:
    return ""


@dataclass(frozen=True)
class Check:
    """Computes or measures what one claim is about.

    ``why_not()`` says in a sentence why it cannot run here, a tool that is missing, and "" where it can.
    """

    id: str
    run: Callable[[], Finding]
    why_not: Callable[[], str] = _nothing_missing

    @property
    def needs_tool(self) -> bool:
        """Whether it needs what may be missing."""
        return self.why_not is not _nothing_missing


def judged(id: str, cases: Mapping[str, bool], figure: str) -> Finding:
    """The finding that follows from whether the claim is true in each case.

    A case is named so that it completes "when".
    True in all of them, it holds; in none, it does not; else it holds when one of the true ones is given.
    """
    if not cases:
        raise ValueError(f"claim {id} is judged by no case at all")
    true = [case for case, is_true in cases.items() if is_true]
    if len(true) == len(cases):
        return Finding(id, figure, HOLDS)
    if not true:
        return Finding(id, figure, DOES_NOT_HOLD)
    return Finding(id, figure, HOLDS_WHEN, " or ".join(true))


def near(number: float, claimed: float, tolerance: float = 0.1) -> bool:
    """Whether a number differs from the claimed one by a tenth of it at most."""
    return abs(number - claimed) <= tolerance * abs(claimed)


def gigabytes(nbytes: float, digits: int = 1) -> str:
    """Decimal gigabytes, which claims are made in: ``"8.6 GB"``."""
    return f"{nbytes / 1e9:.{digits}f} GB"


def percent(share: float, sign: str = "") -> str:
    """``"54 %"``; with ``sign="+"``: ``"+23 %"``."""
    return f"{100 * share:{sign}.0f} %"
