"""The lab on ``checkpoint_every``."""

from __future__ import annotations

import torch

from memsave_lib import formulas
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
        n_layers, hidden, heads: of the :class:`~memsave_lib.BlockStack`.
        batch_size: sequences in the step.
        seq_len, checkpoint_every: where the sliders start; they reach from a quarter to four times ``seq_len``, and
            from 1 to the number of blocks.
        device: where the step runs. The peak is predicted on a CPU only.
    """
    stack = StackStep(n_layers, hidden, heads, batch_size, torch.device(device))
    model = stack.build()
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def predict(values: Values) -> Prediction:
        plan = Selective(values["checkpoint_every"]).plan(n_layers)
        shape = stack.shape(values["seq_len"])
        saved = formulas.stack_saved_bytes(plan, shape)
        if stack.device.type != "cpu":
            return Prediction(saved, None, needed_bytes=saved + parameter_bytes)
        step = formulas.stack_peak_bytes(plan, shape, loss="sum", input_requires_grad=False, new_gradients=True)
        return Prediction(saved, parameter_bytes + step, needed_bytes=step)

    def prepare(values: Values) -> Job:
        return Job(model, Selective(values["checkpoint_every"]), stack.prepare(model, values["seq_len"]))

    sliders = (
        Slider("seq_len", lengths_around(seq_len), seq_len),
        Slider("checkpoint_every", range(1, max(n_layers, checkpoint_every, 2) + 1), checkpoint_every),
    )
    return Lab(LabConfig(sliders, "checkpoint_every", predict, prepare, stack.free_bytes))
