"""The lab on chunks: one wave a chunk."""

from __future__ import annotations

from dataclasses import replace

import torch

from memsave_lib.arguments import whole_number
from memsave_lib.labs.component import Lab
from memsave_lib.labs.config import Job, LabConfig, Prediction, Slider, Values
from memsave_lib.labs.stack_step import StackStep, lengths_around
from memsave_lib.strategies import Chunked

#: What becomes of the last chunk, as a value of ``recompute_last``.
LAST_CHUNK = {"runs again": True, "is kept": False}


def chunks_lab(
    n_layers: int,
    hidden: int,
    heads: int,
    batch_size: int,
    seq_len: int,
    chunks: int,
    device: str | torch.device = "cpu",
) -> Lab:
    """``Chunked(chunks)`` on a stack of blocks: one step of forward and backward, without an optimizer.

    Args:
        n_layers, hidden, heads, batch_size: of the :class:`~memsave_lib.BlockStack` and its input.
        seq_len, chunks: where the sliders start; they reach from a quarter to four times ``seq_len``, and from 1 to the
            number of blocks.
        device: where the step runs. The peak is predicted on a CPU only.
    """
    whole_number("chunks", chunks)
    start = StackStep.on(device, n_layers, hidden, heads, batch_size, seq_len)

    def strategy(values: Values) -> Chunked:
        return Chunked(values["chunks"], recompute_last=LAST_CHUNK[values["the last chunk"]])

    def predict(values: Values) -> Prediction:
        if values["chunks"] > n_layers:
            return Prediction(
                0, None, 0, obstacle=f"{values['chunks']} chunks need as many blocks; this stack has {n_layers}."
            )
        return replace(start, seq_len=values["seq_len"]).predict(strategy(values).plan(n_layers))

    def prepare(values: Values) -> Job:
        return replace(start, seq_len=values["seq_len"]).job(strategy(values))

    sliders = (
        Slider("chunks", range(1, max(n_layers, 2) + 1), chunks),
        Slider("seq_len", lengths_around(seq_len), seq_len),
        Slider("the last chunk", tuple(LAST_CHUNK), "runs again"),
    )
    return Lab(LabConfig(sliders, "chunks", predict, prepare, start.free_bytes))
