"""The lab on ``checkpoint_every``."""

from __future__ import annotations

from dataclasses import replace

import torch

from memsave_lib.arguments import whole_number
from memsave_lib.labs.component import Lab
from memsave_lib.labs.config import Job, LabConfig, Prediction, Slider, Values
from memsave_lib.labs.stack_step import StackStep, lengths_around
from memsave_lib.strategies import Selective


def selective_lab(
    n_layers: int,
    hidden: int,
    heads: int,
    batch_size: int,
    seq_len: int,
    checkpoint_every: int,
    device: str | torch.device = "cpu",
) -> Lab:
    """``Selective(checkpoint_every)`` on a stack of blocks: one step of forward and backward, without an optimizer.

    Args:
        n_layers, hidden, heads, batch_size: of the :class:`~memsave_lib.BlockStack` and its input.
        seq_len, checkpoint_every: where the sliders start; they reach from a quarter to four times ``seq_len``, and
            from 1 to the number of blocks.
        device: where the step runs. The peak is predicted on a CPU only.
    """
    whole_number("checkpoint_every", checkpoint_every)
    start = StackStep.on(device, n_layers, hidden, heads, batch_size, seq_len)

    def predict(values: Values) -> Prediction:
        plan = Selective(values["checkpoint_every"]).plan(n_layers)
        return replace(start, seq_len=values["seq_len"]).predict(plan)

    def prepare(values: Values) -> Job:
        return replace(start, seq_len=values["seq_len"]).job(Selective(values["checkpoint_every"]))

    sliders = (
        Slider("seq_len", lengths_around(seq_len), seq_len),
        Slider("checkpoint_every", range(1, max(n_layers, checkpoint_every, 2) + 1), checkpoint_every),
    )
    return Lab(
        LabConfig(sliders, "checkpoint_every", predict, prepare, start.free_bytes, same_scale="checkpoint_every")
    )
