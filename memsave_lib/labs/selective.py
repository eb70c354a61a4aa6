"""The lab on ``checkpoint_every``."""

from __future__ import annotations

import torch

from memsave_lib import formulas
from memsave_lib.course.env import look_at_machine
from memsave_lib.labs.component import Lab
from memsave_lib.labs.config import Job, LabConfig, Prediction, Slider, Values
from memsave_lib.models import BlockStack
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
    device = torch.device(device)
    model = BlockStack(n_layers, hidden, heads).to(device)
    parameter_bytes = sum(parameter.nbytes for parameter in model.parameters())

    def predict(values: Values) -> Prediction:
        plan = Selective(values["checkpoint_every"]).plan(n_layers)
        shape = formulas.BlockShape(batch_size, values["seq_len"], hidden, heads, device=device.type)
        saved = formulas.stack_saved_bytes(plan, shape)
        if device.type != "cpu":
            return Prediction(saved, None, needed_bytes=saved + parameter_bytes)
        step = formulas.stack_peak_bytes(plan, shape, loss="sum", input_requires_grad=False, new_gradients=True)
        return Prediction(saved, parameter_bytes + step, needed_bytes=step)

    def prepare(values: Values) -> Job:
        model.zero_grad(set_to_none=True)
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch_size, values["seq_len"], hidden, generator=generator).to(device)

        def step() -> torch.Tensor:
            loss = model(x).sum()
            loss.backward()
            return loss

        return Job(model, Selective(values["checkpoint_every"]), step)

    def free_bytes() -> int | None:
        machine = look_at_machine()
        return machine.gpu.free_bytes if device.type == "cuda" and machine.gpu else machine.host_free_bytes

    lengths = tuple(sorted({max(8, seq_len * part // 4) for part in (1, 2, 4, 8, 16)}))
    sliders = (
        Slider("seq_len", lengths, seq_len),
        Slider("checkpoint_every", range(1, max(n_layers, checkpoint_every, 2) + 1), checkpoint_every),
    )
    return Lab(LabConfig(sliders, "checkpoint_every", predict, prepare, free_bytes))
