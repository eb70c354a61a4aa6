"""What a rank does in a :class:`memsave_lib.course.rank_jobs.Partitioning`: DeepSpeed shares checkpoints out."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, distributed, nn

from memsave_lib.course import deepspeed_peer
from memsave_lib.course.rank_jobs import ENDS, Partitioning
from memsave_lib.meter import MemoryMeter
from memsave_lib.models import BlockStack


class ModelParallel:
    """What DeepSpeed asks about ranks that hold the same hidden states: here, all of them."""

    def get_model_parallel_rank(self) -> int:
        return distributed.get_rank()

    def get_model_parallel_world_size(self) -> int:
        return distributed.get_world_size()

    def get_model_parallel_group(self) -> distributed.ProcessGroup:
        return distributed.group.WORLD


class Chunks(nn.Module):
    """A stack whose chunks are run by DeepSpeed's checkpoint, or by whatever is handed to ``forward``."""

    def __init__(self, job: Partitioning, end: str) -> None:
        super().__init__()
        self.entry = nn.Parameter(torch.zeros(job.hidden))
        self.chunks = nn.ModuleList(
            nn.Sequential(
                *BlockStack(job.blocks_in_chunk, job.hidden, job.heads).blocks,
                *[nn.Linear(job.hidden, job.hidden)] * (end == "a Linear"),
            )
            for _ in range(job.n_chunks)
        )

    def forward(self, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> Tensor:
        x = x + self.entry  # not the caller's own: DeepSpeed takes the memory of what it is given
        for chunk in self.chunks:
            x = run(chunk, x)
        return x


def rows(job: Partitioning) -> list[dict[str, Any]]:
    deepspeed = _load()
    found = []
    for end in ENDS:
        torch.manual_seed(job.seed)
        model, x = Chunks(job, end), torch.randn(job.batch_size, job.seq_len, job.hidden)
        _, expected = _step(model, x, lambda chunk, x: chunk(x))
        for partitioned in (False, True):
            deepspeed.checkpointing.configure(ModelParallel(), partition_activations=partitioned)
            held, gradients = _step(model, x, deepspeed.checkpointing.checkpoint)
            equal = all(map(torch.equal, gradients, expected))
            found.append({"end": end, "partitioned": partitioned, "held_bytes": held, "equals_plain": equal})
    return found


def _load() -> ModuleType:
    deepspeed = deepspeed_peer.load("cpu")
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled first: 38 seconds
    deepspeed.init_distributed("gloo")
    return deepspeed


def _step(model: Chunks, x: Tensor, run: Callable[[nn.Module, Tensor], Tensor]) -> tuple[int, list[Tensor]]:
    """Bytes alive after forward beyond those before it, loss included; and the loss with every gradient."""
    model.zero_grad()
    with MemoryMeter(model) as meter:
        x.add_(0)  # the meter counts what is there once an operation has taken it
        before = meter.live_bytes
        loss = model(x, run).square().mean()
        held = meter.live_bytes - before
        loss.backward()
    return held, [loss.detach(), *(parameter.grad for parameter in model.parameters())]
