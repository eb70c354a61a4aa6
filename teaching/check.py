"""Is this machine ready for the course? A participant runs this at home, before the workshop.

    .venv/bin/python teaching/check.py

It prints the environment check of notebook 00, measures one training step of a small GPT and compares it with the
closed form, byte by byte. It exits with 1, and a sentence that says what to do, when something would stop the course.
It needs no network, no GPU, half a gigabyte of memory, and a few seconds after PyTorch is loaded.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from memsave_lib.course.env import EnvironmentReport

OLDEST_PYTHON = (3, 11)
#: What every notebook needs, here and on Colab.
PACKAGES = (
    "torch",
    "transformers",
    "ipywidgets",
    "ipykernel",
    "matplotlib",
    "numpy",
    "scipy",
    "pandas",
    "tqdm",
    "memsave_lib",
)
HOW_TO_INSTALL = "In the folder of the course run: make check (Windows and others: see README.md)."

LAYERS, HIDDEN, HEADS, BATCH, SEQ_LEN, VOCABULARY = 2, 64, 1, 2, 128, 1024


@dataclass(frozen=True)
class Count:
    """One number of bytes, by closed form and measured."""

    what: str
    formula: int
    measured: int

    @property
    def difference(self) -> int:
        return self.measured - self.formula

    def __str__(self) -> str:
        return (
            f"{self.what}: formula {self.formula:,} bytes, measured {self.measured:,} bytes, "
            f"difference {self.difference}"
        )


def missing_packages() -> list[str]:
    return [name for name in PACKAGES if importlib.util.find_spec(name) is None]


def measure_step() -> tuple[Count, Count]:
    """Saved bytes and peak of one training step of a small GPT, on the CPU, where they are known to the byte."""
    import torch

    import memsave_lib as ms
    from memsave_lib import formulas

    torch.manual_seed(0)
    size = {"n_layer": LAYERS, "n_embd": HIDDEN, "n_head": HEADS, "n_positions": SEQ_LEN, "vocab_size": VOCABULARY}
    model = ms.gpt2("tiny", **size)
    tokens = torch.randint(VOCABULARY, (BATCH, SEQ_LEN))
    labels = tokens.clone()
    with ms.MemoryMeter(model) as meter:
        model(input_ids=tokens, labels=labels, use_cache=False).loss.backward()
    plan, shape = ms.KeepAll().plan(LAYERS), formulas.BlockShape(BATCH, SEQ_LEN, HIDDEN, HEADS)
    return (
        Count("saved", sum(formulas.gpt2_terms(plan, shape, VOCABULARY).values()), meter.trace.saved_bytes),
        Count("peak", formulas.gpt2_peak_bytes(plan, shape, VOCABULARY, SEQ_LEN), meter.trace.peak_bytes),
    )


def stoppers(report: EnvironmentReport, counts: tuple[Count, ...]) -> list[str]:
    """What would stop the course, a sentence each. Little memory or disk does not: notebooks shrink their steps."""
    from memsave_lib.course.env import SUPPORTED

    found = [
        f"{line.topic} is {line.finding}: {line.advice}."
        for line in report.warnings
        if line.topic in ("Python", *SUPPORTED)
    ]
    if any(count.difference for count in counts):
        found.append(
            "Formula and measurement differ, which the course promises they do not: send the lines above to whoever "
            "gives the workshop."
        )
    return found


def cannot_begin() -> str | None:
    """Why nothing can be looked at at all: an old Python, a package that is not there or does not load."""
    if sys.version_info < OLDEST_PYTHON:
        found = ".".join(map(str, sys.version_info[:2]))
        return f"this is Python {found}, and the course needs {'.'.join(map(str, OLDEST_PYTHON))} or newer."
    if missing := missing_packages():
        return f"{', '.join(missing)} cannot be found by {sys.executable}. {HOW_TO_INSTALL}"
    try:
        importlib.import_module("torch")
    except (ImportError, OSError) as error:  # a library of the system is missing, or belongs to another machine
        return f"PyTorch is installed and does not load: {error}. {HOW_TO_INSTALL}"
    return None


def main() -> int:
    if (reason := cannot_begin()) is not None:
        print(f"Not ready: {reason}")
        return 1
    from memsave_lib.course.env import check_environment

    report = check_environment()
    print(report)
    counts = measure_step()
    print("\nOne training step of a small GPT:", *counts, sep="\n")
    if found := stoppers(report, counts):
        print("\nNot ready.", *found, sep="\n")
        return 1
    print("\nReady: you can take part.")
    if report.warnings:
        print("A line with WARN above slows you down; it does not stop you.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
