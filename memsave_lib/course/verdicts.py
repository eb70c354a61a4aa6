"""What the checks of exercises have in common: verdicts, stubs, and answers that are no number of bytes.

Checks take all of this from :mod:`memsave_lib.course.checks`, which says how a check works.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from itertools import combinations
from numbers import Integral
from types import MappingProxyType
from typing import Any, Concatenate, ParamSpec

import torch
from torch import Tensor

P = ParamSpec("P")


@dataclass(frozen=True)
class Verdict:
    """What a check found: ``passed`` is None for an untouched stub."""

    passed: bool | None
    text: str

    def __str__(self) -> str:
        return self.text

    __repr__ = __str__


NOT_TRIED = Verdict(None, "Not tried yet: replace the line that raises NotImplementedError, then run this cell again.")

NOT_FINISHED = Verdict(False, "Not finished: a part of it still raises NotImplementedError.")


def wrong(text: str) -> Verdict:
    return Verdict(False, f"Not yet. {text}")


def right(text: str) -> Verdict:
    return Verdict(True, f"Right. {text}")


def untouched_error(error: NotImplementedError) -> bool:
    """Whether it is a stub's own: PyTorch raises NotImplementedError too, for a module without forward, say."""
    text = str(error)
    return text == "your turn" or text.startswith("find the bugs")


def answered(
    check: Callable[Concatenate[Callable[..., Any], P], Verdict],
) -> Callable[Concatenate[Callable[..., Any], P], Verdict]:
    """Let a check answer to stubs: its first argument is the learner's function or class.

    A stub's own NotImplementedError at the first call makes :data:`NOT_TRIED`, and :data:`NOT_FINISHED` when a call
    has returned before. Making an object of a class is no call; calls of the object and of its methods are. Any other
    error goes through.

        @answered
        def check_double(function: Callable[[int], int]) -> Verdict:
            given = [function(number) for number in (0, 3)]
            return right("Six.") if given == [0, 6] else wrong(f"You get {given}.")
    """

    @wraps(check)
    def checked(function: Callable[..., Any], *arguments: P.args, **named: P.kwargs) -> Verdict:
        calls = _Calls()
        try:
            return check(calls.counting(function) if callable(function) else function, *arguments, **named)
        except NotImplementedError as error:
            if not untouched_error(error):
                raise
            return NOT_FINISHED if calls.returned else NOT_TRIED

    return checked


@dataclass
class _Calls:
    """How many calls of a learner's code have returned."""

    returned: int = 0

    def counting(self, function: Callable[..., Any]) -> Callable[..., Any]:
        if isinstance(function, type):
            return lambda *arguments, **named: _Answer(function(*arguments, **named), self)

        def counted(*arguments: object, **named: object) -> object:
            result = function(*arguments, **named)
            self.returned += 1
            return result

        return counted


@dataclass(frozen=True)
class _Answer:
    """An object of a learner's class: it does what that does, and its calls are counted."""

    _made: Any
    _calls: _Calls = field(repr=False)

    def __call__(self, *arguments: object, **named: object) -> object:
        return self._calls.counting(self._made)(*arguments, **named)

    def __getattr__(self, name: str) -> object:
        value = getattr(self._made, name)
        return self._calls.counting(value) if callable(value) else value


def shown(value: object) -> str:
    """What a function returned, in a line: short ones with their value."""
    kind = type(value).__name__
    if isinstance(value, int) and abs(value) >= 10**30:
        return f"one with more than thirty digits ({kind})"  # Python writes no longer ones than 4,300 digits
    text = repr(value)
    return f"{text} ({kind})" if len(text) <= 60 and "\n" not in text else f"an object of type {kind}"


def no_count(values: Iterable[object]) -> str | None:
    """What to say to the first of these answers that is no whole number of bytes; None if all are."""
    for value in values:
        if isinstance(value, Integral) and not isinstance(value, bool):
            continue
        said = f"A count of bytes is an int, and your function returned {shown(value)}"
        if value is None:
            return f"{said}: end it with return and the number."
        if isinstance(value, float) and value.is_integer():
            return f"{said}: a float is exact only up to a point. Divide with // if you divide, and write 4, not 4.0."
        if isinstance(value, Tensor) and value.numel() == 1:
            return f"{said}: use int(), which makes a Python number of it."
        return f"{said}."
    return None


def all_equal(found: Sequence[Tensor | None], expected: Sequence[Tensor | None]) -> bool:
    """Whether gradients are bit-equal, one by one; a missing one is equal to none."""
    pairs = zip(found, expected, strict=True)
    return all(one is not None and other is not None and torch.equal(one, other) for one, other in pairs)


def first_gap(cases: Sequence[object], given: Sequence[int], wanted: Sequence[int], truth: str) -> str:
    """By how much the first number that is wrong is wrong. ``truth`` says what is right: "PyTorch saves {:,}", say."""
    case, got, want = next(three for three in zip(cases, given, wanted, strict=True) if three[1] != three[2])
    way = "low" if got < want else "high"
    return f"For {case} you get {got:,} bytes, and {truth.format(want)}: you are {way} by {abs(want - got):,}."


def explain_gaps(
    gaps: Sequence[int],
    terms: Mapping[str, Sequence[int]],
    low: Mapping[str, Sequence[int]] = MappingProxyType({}),
    high: Mapping[str, Sequence[int]] = MappingProxyType({}),
) -> str | None:
    """What is missing or too much, if one term or two explain the gap of every case; None otherwise.

    Args:
        gaps: wanted minus given, one number a case.
        terms: a name, and its bytes in each case.
        low: such terms that can only be missing.
        high: such terms that can only be too much.
    """
    signed = {
        (word, name): [sign * size for size in sizes]
        for word, sign, of_its_own in (("low", 1, low), ("high", -1, high))
        for name, sizes in {**terms, **of_its_own}.items()
    }
    for count in (1, 2):
        for chosen in combinations(signed, count):
            if [sum(sizes) for sizes in zip(*(signed[key] for key in chosen), strict=True)] == list(gaps):
                return "You are " + "; and ".join(f"{word} by exactly {name}" for word, name in chosen) + "."
    return None
