"""What a rank does in a :class:`memsave_lib.course.rank_jobs.Training`, and what it finds."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

import memsave_lib as ms
from memsave_lib import _compat
from memsave_lib.course.rank_jobs import VOCABULARY, Run, Training
from memsave_lib.meter import MemoryMeter

#: PyTorch's names for what ranks do together, and everybody else's.
COLLECTIVES = {
    "_allgather_base_": "all-gather",
    "_reduce_scatter_base_": "reduce-scatter",
    "allreduce_": "all-reduce",
}


def rows(job: Training) -> list[dict[str, Any]]:
    """One row a run, with the fields of :class:`memsave_lib.course.rank_jobs.Outcome`."""
    known = {model: _Reference(job, model) for model in dict.fromkeys(run.model for run in job.runs)}
    return [known[run.model].row(run) for run in job.runs]


class _Reference:
    """The runs of one model, and the gradients that they are compared with."""

    def __init__(self, job: Training, model: str) -> None:
        self._job, self._model = job, model
        whole = _sequences(job, model)
        parts = whole.chunk(job.n_ranks)
        # A copy: half of a tensor would hold the memory of the whole one.
        self._mine = parts[distributed.get_rank()].clone()
        self._one_process = self._one_after_the_other(parts)
        self._whole_batch = self._one_after_the_other([whole])
        self._plain: dict[str, list[Tensor]] = {}  # by wrapper

    def row(self, run: Run) -> dict[str, Any]:
        if run.wrapper not in self._plain:
            wrapped = _wrap(_build(self._job, self._model), run.wrapper)
            _loss(wrapped, self._mine).backward()
            self._plain[run.wrapper] = _gathered_gradients(wrapped)
        row, gradients = _train(_build(self._job, self._model), run, self._mine)
        return {
            **row,
            "equals_plain": _equal(gradients, self._plain[run.wrapper]),
            "equals_one_process": _equal(gradients, self._one_process),
            "off_whole_batch": max(map(_relative_difference, gradients, self._whole_batch)),
        }

    def _one_after_the_other(self, parts: Sequence[Tensor]) -> list[Tensor]:
        model = _build(self._job, self._model)
        for part in parts:
            (_loss(model, part) / len(parts)).backward()
        return [parameter.grad for parameter in model.parameters()]


def _train(model: nn.Module, run: Run, mine: Tensor) -> tuple[dict[str, Any], list[Tensor]]:
    """What is measured in one step, and the gradients that it gave the whole model."""
    applied = ms.apply(model, run.strategy) if run.apply_first else None
    wrapped = _wrap(model, run.wrapper)
    optimizer = torch.optim.AdamW(wrapped.parameters())
    with applied or ms.apply(wrapped, run.strategy) as applied:
        watch = _Watch(ms.find_blocks(wrapped))
        with MemoryMeter(wrapped) as meter, watch:
            _loss(wrapped, mine).backward()
    gradients = _gathered_gradients(wrapped)
    optimizer.step()
    row = {
        "saved_bytes": meter.trace.saved_bytes,
        "parameter_bytes": _held_bytes(wrapped.parameters()),
        "gradient_bytes": _held_bytes(parameter.grad for parameter in wrapped.parameters()),
        "average_bytes": _held_bytes(_averages(optimizer)),
        "collectives": dict(watch.collectives),
        "gathered_bytes": watch.gathered_bytes,
        "whole_blocks": watch.whole_blocks,
        "block_recomputes": applied.report.block_recomputes,
    }
    return row, gradients


class _Watch(_compat.TorchDispatchMode):
    """Counts what ranks do together, and the blocks whose weights are whole, after every operation."""

    def __init__(self, blocks: Sequence[nn.Module]) -> None:
        super().__init__()
        self.collectives: Counter[str] = Counter()
        self.gathered_bytes = self.whole_blocks = 0
        self._blocks = blocks

    def __torch_dispatch__(
        self, op: torch._ops.OpOverload, types: Any, args: tuple = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        output = op(*args, **(kwargs or {}))
        if op.namespace == "c10d":
            name = op._schema.name.removeprefix("c10d::")
            self.collectives[COLLECTIVES.get(name, name)] += 1
            if COLLECTIVES.get(name) == "all-gather":
                self.gathered_bytes += args[0].nbytes
        whole = sum(not isinstance(next(block.parameters()), DTensor) for block in self._blocks)
        self.whole_blocks = max(self.whole_blocks, whole)
        return output


def _sequences(job: Training, model: str) -> Tensor:
    """The whole batch, the same in every rank: hidden states, or the tokens of a language model."""
    torch.manual_seed(job.seed + 1)
    shape = (job.n_ranks * job.batch_size, job.seq_len)
    return torch.randn(*shape, job.hidden) if model == "stack" else torch.randint(VOCABULARY, shape)


def _build(job: Training, model: str) -> nn.Module:
    torch.manual_seed(job.seed)
    if model == "stack":
        return ms.BlockStack(job.n_layers, job.hidden, job.heads)
    sizes = {"n_layer": job.n_layers, "n_embd": job.hidden, "n_head": job.heads, "vocab_size": VOCABULARY}
    return ms.gpt2("tiny", n_positions=job.seq_len, **sizes)


def _loss(model: nn.Module, sequences: Tensor) -> Tensor:
    if sequences.is_floating_point():
        return model(sequences).square().mean()
    return model(sequences, labels=sequences, use_cache=False).loss


def _wrap(model: nn.Module, wrapper: str) -> nn.Module:
    if wrapper == "DDP":
        return DistributedDataParallel(model)
    mesh = distributed.init_device_mesh("cpu", (distributed.get_world_size(),))
    for block in ms.find_blocks(model):
        fully_shard(block, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def _gathered_gradients(model: nn.Module) -> list[Tensor]:
    gradients = (parameter.grad for parameter in model.parameters())
    return [gradient.full_tensor() if isinstance(gradient, DTensor) else gradient.clone() for gradient in gradients]


def _averages(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    """Adam's state without its counters of steps."""
    for parameter, state in optimizer.state.items():
        yield from (value for value in state.values() if value.shape == parameter.shape)


def _held_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes that lie in this rank."""
    return sum((tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes for tensor in tensors)


def _equal(found: Sequence[Tensor], expected: Sequence[Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(found, expected, strict=True))


def _relative_difference(found: Tensor, expected: Tensor) -> float:
    scale = expected.abs().max().item()
    return (found - expected).abs().max().item() / scale if scale else 0.0
