"""The lab on what a step holds when nothing is done about it."""

from __future__ import annotations

from dataclasses import replace

import torch

from memsave_lib.labs.component import Lab
from memsave_lib.labs.config import Job, LabConfig, Prediction, Slider, Values
from memsave_lib.labs.stack_step import StackStep, lengths_around, up_to_twice
from memsave_lib.strategies import KeepAll

#: What the course calls the two ways to compute attention, and what the block calls them.
ATTENTION = {"fused": "sdpa", "math": "math"}


def activations_lab(
    n_layers: int, hidden: int, heads: int, batch_size: int, seq_len: int, device: str | torch.device = "cpu"
) -> Lab:
    """``KeepAll()`` on a stack of blocks: one step of forward and backward, without an optimizer.

    Args:
        hidden, heads: of the :class:`~memsave_lib.BlockStack`.
        n_layers, batch_size, seq_len: where the sliders start; the first two reach from 1 to twice that, ``seq_len``
            from a quarter to four times.
        device: where the step runs. The peak is predicted on a CPU only.
    """
    start = StackStep.on(device, n_layers, hidden, heads, batch_size, seq_len)

    def chosen(values: Values) -> StackStep:
        sizes = {name: values[name] for name in ("seq_len", "n_layers", "batch_size")}
        return replace(start, attention=ATTENTION[values["attention"]], **sizes)

    def predict(values: Values) -> Prediction:
        return chosen(values).predict(KeepAll().plan(values["n_layers"]))

    def prepare(values: Values) -> Job:
        return chosen(values).job(KeepAll())

    sliders = (
        Slider("seq_len", lengths_around(seq_len), seq_len),
        Slider("n_layers", up_to_twice(n_layers), n_layers),
        Slider("batch_size", up_to_twice(batch_size), batch_size),
        Slider("attention", tuple(ATTENTION), "fused"),
    )
    return Lab(LabConfig(sliders, "seq_len", predict, prepare, start.free_bytes, recomputes=False))
