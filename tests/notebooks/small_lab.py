"""A lab for notebooks of the tests' own: a step of one small block, which may fail. ``cell`` is it as a code cell."""

from pathlib import Path

import torch

from memsave_lib.labs import Job, Lab, LabConfig, Prediction, Slider
from memsave_lib.models import BlockStack
from memsave_lib.strategies import KeepAll


def small_lab(error: str = "") -> Lab:
    """With an ``error``, the worker raises it as a RuntimeError in the middle of the step."""
    model = BlockStack(n_layers=1, hidden=8, heads=1)

    def prepare(values: dict[str, int]) -> Job:
        def step() -> None:
            loss = model(torch.ones(1, values["seq_len"], 8)).sum()
            if error:
                raise RuntimeError(error)
            loss.backward()

        return Job(model, KeepAll(), step)

    config = LabConfig(
        sliders=(Slider("seq_len", (2, 4, 8), 4), Slider("checkpoint_every", range(1, 4), 1)),
        along="checkpoint_every",
        predict=lambda values: Prediction(16 * values["seq_len"], None, needed_bytes=1000),
        prepare=prepare,
        free_bytes=lambda: None,
    )
    return Lab(config)


def cell(error: str = "") -> str:
    source = Path(__file__).read_text(encoding="utf-8")
    return f"{source[: source.index('def cell')].strip()}\n\n\nlab = small_lab({error!r})\nlab"
