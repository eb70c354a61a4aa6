"""The lab on full checkpointing: the saw-tooth, and the peak that does not move."""

from __future__ import annotations

from dataclasses import replace

import torch

from memsave_lib.labs.component import Lab
from memsave_lib.labs.config import Job, LabConfig, Prediction, Slider, Values
from memsave_lib.labs.stack_step import StackStep, lengths_around, up_to_twice
from memsave_lib.strategies import FullCheckpoint, KeepAll

STRATEGIES = {"keep all": KeepAll(), "checkpoint": FullCheckpoint()}


def checkpointing_lab(
    n_layers: int, hidden: int, heads: int, batch_size: int, seq_len: int, device: str | torch.device = "cpu"
) -> Lab:
    """``KeepAll()`` or ``FullCheckpoint()`` on a stack of blocks: forward and backward, without an optimizer.

    Args:
        hidden, heads, batch_size: of the :class:`~memsave_lib.BlockStack` and its input.
        n_layers, seq_len: where the sliders start; the first reaches from 1 to twice that, ``seq_len`` from a sixteenth
            to four times, so that gradients can outweigh activations.
        device: where the step runs. The peak is predicted on a CPU only.
    """
    start = StackStep.on(device, n_layers, hidden, heads, batch_size, seq_len)

    def chosen(values: Values) -> StackStep:
        return replace(start, seq_len=values["seq_len"], n_layers=values["n_layers"])

    def predict(values: Values) -> Prediction:
        return chosen(values).predict(STRATEGIES[values["strategy"]].plan(values["n_layers"]))

    def prepare(values: Values) -> Job:
        return chosen(values).job(STRATEGIES[values["strategy"]])

    sliders = (
        Slider("strategy", tuple(STRATEGIES), "checkpoint"),
        Slider("seq_len", lengths_around(seq_len, halvings=4), seq_len),
        Slider("n_layers", up_to_twice(n_layers), n_layers),
    )
    return Lab(LabConfig(sliders, "seq_len", predict, prepare, start.free_bytes, same_scale="strategy"))
