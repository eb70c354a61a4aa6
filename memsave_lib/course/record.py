"""Measure experiments at full size and write them to ``data/records``: ``make record``, or

python -m memsave_lib.course.record                 every experiment
python -m memsave_lib.course.record gpt2_chunks     some
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memsave_lib.course import experiments, records, torch_budget
from memsave_lib.course.long_text import long_text


@dataclass(frozen=True)
class Experiment:
    """What is run at full size, and a sentence that says so."""

    about: str
    run: Callable[[], list[dict[str, Any]]]


EXPERIMENTS = {
    "gpt2_chunks": Experiment(
        "GPT-2 with 124M parameters and dropout 0.1 for 10 steps of AdamW, 4 x 128 tokens each.",
        experiments.gpt2_chunks,
    ),
    "long_text": Experiment(
        "GPT-2 with 124M parameters (random weights, dropout 0) for 3 steps of AdamW on 8,192 tokens of a long text; "
        "what is offloaded goes to disk.",
        lambda: [row.figures() for row in long_text("small", seq_len=8192, steps=3, store="disk")],
    ),
    "torch_budget": Experiment(
        "A step of a stack of 6 blocks and of GPT-2 mini, both of width 256 and with 4 x 256 tokens, under torch's "
        "activation_memory_budget (backend aot_eager) and under this course's strategies; bytes and FLOPs, no times.",
        torch_budget.full_size,
    ),
}


def main(arguments: list[str] | None = None, folder: Path | None = None) -> int:
    parser = argparse.ArgumentParser(description="Measure experiments at full size and keep the results.")
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXPERIMENTS)}; all without")
    names = parser.parse_args(arguments).names or list(EXPERIMENTS)
    if unknown := [name for name in names if name not in EXPERIMENTS]:
        print(f"there is no experiment {unknown[0]!r}; there are {', '.join(EXPERIMENTS)}", file=sys.stderr)
        return 2
    for name in names:
        print(f"{name}: {EXPERIMENTS[name].about}", flush=True)
        rows = EXPERIMENTS[name].run()
        record = records.new(name, EXPERIMENTS[name].about, rows)
        print(f"{name}: {len(rows)} variants written to data/records/{records.save(record, folder).name}", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
