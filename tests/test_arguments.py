"""Wrong numbers are refused with their name, their value and what would be right."""

from __future__ import annotations

import pytest

from memsave_lib.arguments import whole_number


def test_a_number_that_fits_is_given_back() -> None:
    assert whole_number("k", 1) == 1
    assert whole_number("seed", 0, at_least=0) == 0
    assert whole_number("hidden", 128, at_least=64, multiple_of=64) == 128


@pytest.mark.parametrize("value", [True, False, 2.0, "2", None])
def test_what_is_not_an_int_is_a_type_error(value: object) -> None:
    with pytest.raises(TypeError) as caught:
        whole_number("k", value)
    assert str(caught.value) == f"k must be a whole number of at least 1, got {value!r} ({type(value).__name__})"


@pytest.mark.parametrize("value", [0, 63, 65])
def test_a_number_that_does_not_fit_is_a_value_error(value: int) -> None:
    with pytest.raises(ValueError) as caught:
        whole_number("hidden", value, at_least=64, multiple_of=64)
    assert str(caught.value) == f"hidden must be a whole number of at least 64 and a multiple of 64, got {value}"
