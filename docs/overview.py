"""Draws the picture of the README: one training step under four strategies. `python docs/overview.py` rewrites it."""

from __future__ import annotations

from pathlib import Path

import torch

import memsave_lib as ms
from memsave_lib.course.env import use_figure_style

STRATEGIES = (ms.KeepAll(), ms.FullCheckpoint(), ms.Chunked(num_checkpoints=4), ms.Recursive())


def trace_of(strategy: ms.Strategy) -> ms.Trace:
    torch.manual_seed(0)
    stack = ms.BlockStack(n_layers=12, hidden=128, heads=2)
    x = torch.randn(8, 256, 128)
    with ms.apply(stack, strategy), ms.MemoryMeter(stack) as meter:
        stack(x).square().mean().backward()
    return meter.trace


def main() -> None:
    use_figure_style()
    traces = {strategy.label: trace_of(strategy) for strategy in STRATEGIES}
    shown = ms.plots.memory_timeline(traces, x="events", title="One training step of 12 transformer blocks")
    shown.figure.savefig(Path(__file__).with_name("overview.png"), dpi=150)
    print(shown.sentence)


if __name__ == "__main__":
    main()
