"""The package's own names: loaded on first use, and the same however often and in whatever order they are asked for."""

from __future__ import annotations

import subprocess
import sys

import memsave_lib as ms


def test_no_submodule_takes_the_place_of_a_public_name() -> None:
    names = [name for name in ms.__all__ if name not in ms._ROOMS]
    before = {name: getattr(ms, name) for name in names}
    for room in ms._ROOMS:
        getattr(ms, room)
    assert {name: getattr(ms, name) for name in names} == before


def test_compare_is_the_function_also_when_measure_was_loaded_first() -> None:
    program = "import memsave_lib as ms; ms.measure; print(ms.compare.__name__, callable(ms.compare))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "compare True\n"
