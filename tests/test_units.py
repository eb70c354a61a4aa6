"""Sizes in, sizes out: what is printed can be read back, and what is misspelt is refused with advice."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from memsave_lib.units import exact_bytes, human_bytes, parse_bytes, unit_for

EXABYTES = 2**60


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (2359296, "2.25 MiB"),
        (10 * 1024**2 - 1, "10.0 MiB"),
        (28311552, "27.0 MiB"),
        (604_817_000, "576.8 MiB"),
        (1024**3 - 1, "1.00 GiB"),
        (5000 * 1024**5, "5000.0 PiB"),
        (-1536, "-1.50 KiB"),
    ],
)
def test_human_bytes(count: int, text: str) -> None:
    assert human_bytes(count) == text


@given(st.integers(0, EXABYTES))
def test_what_is_printed_reads_back(count: int) -> None:
    assert abs(parse_bytes(human_bytes(count)) - count) <= count / 200


@given(st.integers(0, EXABYTES))
def test_bytes_read_back_exactly(count: int) -> None:
    assert parse_bytes(count) == parse_bytes(f"{count} B") == parse_bytes(f"{count}B") == count


@given(st.integers(1, 1023), st.sampled_from(["KiB", "MiB", "GiB", "TiB", "PiB"]))
def test_whole_units_survive_the_round_trip(number: int, unit: str) -> None:
    written = human_bytes(parse_bytes(f"{number} {unit}"))
    assert written == (f"{number}.00 {unit}" if number < 10 else f"{number}.0 {unit}")


@given(st.integers(0, EXABYTES), st.integers(0, EXABYTES))
def test_printed_sizes_keep_their_order(one: int, other: int) -> None:
    smaller, larger = sorted((one, other))
    assert parse_bytes(human_bytes(smaller)) <= parse_bytes(human_bytes(larger))


@pytest.mark.parametrize(
    ("size", "count"),
    [
        ("14 GiB", 14 * 1024**3),
        ("800 MB", 800_000_000),
        (" 1.5GB ", 1_500_000_000),
        ("0.1 KiB", 102),
        ("2 kB", 2000),
        ("0.29 GB", 290_000_000),
    ],
)
def test_parse_bytes(size: str, count: int) -> None:
    assert parse_bytes(size) == count


@pytest.mark.parametrize(
    ("size", "error", "message"),
    [
        ("14 Gib", ValueError, r"'14 Gib' has the unknown unit 'Gib': did you mean \"14 GiB\"\?"),
        ("14 gb", ValueError, r"did you mean \"14 GB\"\?"),
        ("14 G", ValueError, "units are B, KiB, MiB"),
        ("14", ValueError, "a number and a unit"),
        ("-1 GiB", ValueError, "got '-1 GiB'"),
        ("1e3 MB", ValueError, "got '1e3 MB'"),
        ("nan GiB", ValueError, "got 'nan GiB'"),
        ("", ValueError, "got ''"),
        (-5, ValueError, "negative, got -5"),
        (True, TypeError, "got True"),
        (1.5, TypeError, "got 1.5"),
        (None, TypeError, "got None"),
    ],
)
def test_wrong_sizes_are_refused(size: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        parse_bytes(size)


@pytest.mark.parametrize("count", [True, 1.0, "5"])
def test_only_whole_numbers_are_counts(count: object) -> None:
    with pytest.raises(TypeError, match="whole number"):
        human_bytes(count)


def test_exact_bytes_and_axis_units() -> None:
    assert exact_bytes(28311552) == "27.0 MiB (28,311,552 bytes)"
    assert exact_bytes(0) == "0 bytes"
    assert unit_for(28311552) == ("MiB", 1024**2)
    assert unit_for(0) == ("B", 1)
