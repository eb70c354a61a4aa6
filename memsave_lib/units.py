"""Bytes as people read and write them: ``human_bytes(28311552) == "27.0 MiB"``, ``parse_bytes("14 GiB")``."""

from __future__ import annotations

import re
from fractions import Fraction

_BINARY = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
_SIZES = {unit: 1024**power for power, unit in enumerate(_BINARY)} | {
    unit: 1000**power for power, unit in enumerate(("kB", "MB", "GB", "TB", "PB"), start=1)
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([A-Za-z]+)")


def human_bytes(count: int) -> str:
    """Bytes with a binary unit and few digits: ``"512 B"``, ``"2.25 MiB"``, ``"27.0 MiB"``, ``"576.8 MiB"``."""
    if isinstance(count, bool) or not isinstance(count, int):
        raise TypeError(f"a count of bytes is a whole number, got {count!r}")
    if count < 0:
        return f"-{human_bytes(-count)}"
    if count < 1024:
        return f"{count} B"
    for unit in _BINARY[1:]:
        value = count / _SIZES[unit]
        text = f"{value:.2f}" if round(value, 2) < 10 else f"{value:.1f}"
        if float(text) < 1024:  # what rounds up to 1024 belongs to the next unit
            break
    return f"{text} {unit}"


def exact_bytes(count: int) -> str:
    """For sentences that must hold the very number: ``"27.0 MiB (28,311,552 bytes)"``."""
    human = human_bytes(count)
    return human.replace("B", "bytes") if abs(count) < 1024 else f"{human} ({count:,} bytes)"


def unit_for(largest: int) -> tuple[str, int]:
    """Name and size of the binary unit in which numbers up to ``largest`` bytes read well on an axis."""
    unit = next((unit for unit in reversed(_BINARY) if largest >= _SIZES[unit]), "B")
    return unit, _SIZES[unit]


def parse_bytes(size: int | str) -> int:
    """Bytes of a size given as a number of bytes or as a string such as ``"14 GiB"``, ``"1.5 GB"`` or ``"512 B"``.

    KiB, MiB, GiB, ... are powers of 1024; kB, MB, GB, ... powers of 1000. Fractions of a byte are dropped.

    Raises:
        TypeError: neither a whole number nor a string.
        ValueError: negative, no unit, or a unit that does not exist.
    """
    if isinstance(size, bool) or not isinstance(size, int | str):
        raise TypeError(f'a size is a number of bytes or a string such as "14 GiB", got {size!r}')
    if isinstance(size, int):
        if size < 0:
            raise ValueError(f"a size cannot be negative, got {size}")
        return size
    match = _SIZE.fullmatch(size.strip())
    if match is None:
        raise ValueError(f'a size is a number and a unit, such as "14 GiB" or "800 MB", got {size!r}')
    number, unit = match.groups()
    if unit not in _SIZES:
        near = [known for known in _SIZES if known.lower() == unit.lower()]
        hint = f'did you mean "{number} {near[0]}"?' if near else f"units are {', '.join(_SIZES)}"
        raise ValueError(f"{size!r} has the unknown unit {unit!r}: {hint}")
    return int(Fraction(number) * _SIZES[unit])
