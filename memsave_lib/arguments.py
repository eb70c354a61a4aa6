"""What callers hand in, checked once and refused in the same words everywhere."""

from __future__ import annotations


def whole_number(name: str, value: object, *, at_least: int = 1, multiple_of: int = 1) -> int:
    """``value`` if it is an int of at least ``at_least`` and a multiple of ``multiple_of``.

    Raises:
        TypeError: anything else than an int; a bool is none.
        ValueError: an int that is too small or no multiple.
    """
    wanted = f"a whole number of at least {at_least}"
    if multiple_of > 1:
        wanted += f" and a multiple of {multiple_of}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} must be {wanted}, got {value!r} ({type(value).__name__})")
    if value < at_least or value % multiple_of:
        raise ValueError(f"{name} must be {wanted}, got {value}")
    return value
