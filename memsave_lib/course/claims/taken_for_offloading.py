"""Family A, what is taken for offloading (A6, A8, A9): a Module with ``backward``, streamed weights, FSDP's option."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, distributed, nn
from torch.autograd.graph import saved_tensors_hooks

import memsave_lib as ms
from memsave_lib.course.claims.finding import AS_STATED, Check, Finding, judged


def held_bytes(model: nn.Module, x: Tensor, run: Callable[[Tensor], Tensor] | None = None) -> int:
    """Bytes that a forward leaves alive for its backward: activations, and whatever else it made.

    ``run`` is that forward, when it is more than a call of ``model``.
    """
    model.zero_grad()
    with ms.MemoryMeter(model) as meter:
        x.sum()  # from here on the meter knows the input
        before = meter.live_bytes
        loss = (run or model)(x).sum()
        held = meter.live_bytes - before - loss.nbytes
        loss.backward()
    return held


class ModuleWithBackward(nn.Module):
    """What some explainers show as offloading: forward copies its output away, ``backward`` would bring it back."""

    def __init__(self, block: nn.Module) -> None:
        super().__init__()
        self.block, self.backward_calls = block, 0

    def forward(self, x: Tensor) -> Tensor:
        output = self.block(x)
        self.away = output.detach().to("cpu", copy=True)
        return output

    def backward(self, gradient: Tensor) -> Tensor:
        self.backward_calls += 1
        return gradient


def held_bytes_with_streamed_weights(stack: ms.BlockStack, x: Tensor) -> int:
    """The same for a stack whose blocks get their weights when they run, and lose them again.

    Raises RuntimeError when a gradient differs from that of plain training: then it was not the same step.
    """
    held_bytes(stack, x)
    expected = [parameter.grad for parameter in stack.parameters()]
    with _streamed(stack) as weights:

        def run(x: Tensor) -> Tensor:
            # A meter's own hooks must be the outer ones: these are entered inside it.
            with saved_tensors_hooks(weights.pack, weights.unpack):
                return stack(x)

        held = held_bytes(stack, x, run)
    gradients = [parameter.grad for parameter in stack.parameters()]
    if not all(map(torch.equal, gradients, expected)):
        raise RuntimeError("streaming the weights changed a gradient")
    return held


@contextmanager
def _streamed(stack: ms.BlockStack) -> Iterator[_StreamedWeights]:
    weights = _StreamedWeights(stack)
    hooks = [
        handle
        for block in stack.blocks
        for handle in (block.register_forward_pre_hook(weights.load), block.register_forward_hook(weights.drop))
    ]
    try:
        yield weights
    finally:
        for handle in hooks:
            handle.remove()
        weights.restore()


class _StreamedWeights:
    """Weights at home in NumPy arrays, which no meter of tensors sees."""

    def __init__(self, stack: nn.Module) -> None:
        self.home = {parameter: parameter.detach().numpy().copy() for parameter in stack.parameters()}
        self.loaded: dict[int, nn.Parameter] = {}  # address -> parameter
        for parameter in self.home:
            parameter.data = _placeholder(parameter)

    def load(self, block: nn.Module, *_: Any) -> None:
        for parameter in block.parameters():
            parameter.data = self._fetch(parameter)
            self.loaded[parameter.untyped_storage().data_ptr()] = parameter

    def drop(self, block: nn.Module, *_: Any) -> None:
        for parameter in block.parameters():
            del self.loaded[parameter.untyped_storage().data_ptr()]
            parameter.data = _placeholder(parameter)

    def restore(self) -> None:
        for parameter in self.home:
            parameter.data = self._fetch(parameter)

    def pack(self, tensor: Tensor) -> Any:
        """A weight is saved as where to find it, also when it is a transposed view; all else as it is."""
        parameter = self.loaded.get(tensor.untyped_storage().data_ptr())
        return tensor.detach() if parameter is None else (parameter, tensor.shape, tensor.stride())

    def unpack(self, packed: Any) -> Tensor:
        if isinstance(packed, Tensor):
            return packed
        parameter, shape, stride = packed
        return self._fetch(parameter).as_strided(shape, stride)

    def _fetch(self, parameter: nn.Parameter) -> Tensor:
        return torch.from_numpy(self.home[parameter]).clone()


def _placeholder(parameter: nn.Parameter) -> Tensor:
    """A tensor of the parameter's shape that holds one number."""
    return torch.empty(1).expand(parameter.shape)


def fsdp_option_fields() -> list[str]:
    """What can be set in FSDP's two options for offloading: ``CPUOffload`` and, of ``fully_shard``, its policy."""
    from torch.distributed.fsdp import CPUOffload, CPUOffloadPolicy

    return [field.name for option in (CPUOffload, CPUOffloadPolicy) for field in dataclasses.fields(option)]


def fsdp_saved_bytes(offload: bool) -> int:
    """Saved bytes of a small stack under ``fully_shard`` in a group of one process, with or without its offloading."""
    from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard

    torch.manual_seed(0)
    stack, x = ms.BlockStack(2, 64, 2), torch.randn(2, 64, 64)
    policy = CPUOffloadPolicy(pin_memory=False) if offload else OffloadPolicy()
    with _group_of_one():
        mesh = distributed.init_device_mesh("cpu", (1,))
        for block in stack.blocks:
            fully_shard(block, mesh=mesh, offload_policy=policy)
        with ms.MemoryMeter() as meter:
            stack(x).sum().backward()
    return meter.trace.saved_bytes


@contextmanager
def _group_of_one() -> Iterator[None]:
    """A process group of this process alone, without network; RuntimeError where there is another one already."""
    if distributed.is_initialized():
        raise RuntimeError("a process group exists already in this process: run the check in a process of its own")
    distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        distributed.destroy_process_group()


def a6() -> Finding:
    torch.manual_seed(0)
    block, x = ms.TransformerBlock(64, 2), torch.randn(2, 64, 64)
    module = ModuleWithBackward(block)
    plain, taught = held_bytes(block, x), held_bytes(module, x)
    with ms.apply(block, ms.Offload(keep_last=0, min_bytes=1), blocks=[block]):
        hooks = held_bytes(block, x)
    return judge_a6(module.backward_calls, plain, taught, hooks)


def judge_a6(calls: int, plain: int, taught: int, hooks: int) -> Finding:
    """Calls of the method, and bytes alive after forward: as usual, with such a Module, with saved-tensor hooks."""
    return judged(
        "A6",
        {AS_STATED: calls > 0 and taught < plain},
        f"Autograd calls it {calls} times, and the graph still holds every tensor: {taught:,} bytes are alive after "
        f"forward instead of {plain:,}, the copy on top. With saved-tensor hooks, which do offload, {hooks:,} stay.",
    )


def a8() -> Finding:
    torch.manual_seed(0)
    stack, x = ms.BlockStack(4, 64, 2), torch.randn(2, 64, 64)
    weights = sum(parameter.nbytes for parameter in stack.parameters())
    plain = held_bytes(stack, x)
    with ms.apply(stack, ms.Offload(ms.Chunked(2), keep_last=0, min_bytes=1)):
        checkpointed = held_bytes(stack, x)
    return judge_a8(weights, plain, held_bytes_with_streamed_weights(stack, x), checkpointed)


def judge_a8(weights: int, plain: int, streamed: int, checkpointed: int) -> Finding:
    """Bytes of activations alive after forward: as usual, with weights streamed, and with slices checkpointed away."""
    return judged(
        "A8",
        {
            "weights are streamed and no more, its default": streamed < plain,
            "checkpoint_activation=True is set": checkpointed < plain,
        },
        f"By default it streams weights: our twin drops all {weights:,} bytes of them and holds {streamed:,} of "
        f"activations, plain training {plain:,}. With that option slices are recomputed and their inputs sent: "
        f"{checkpointed:,} stay. FairScale itself demands CUDA: read, not run.",
    )


def why_no_fsdp(torch_version: str = torch.__version__) -> str:
    """Why FSDP cannot be measured here, as a sentence; "" when it can."""
    if not distributed.is_available():
        return "This build of torch has no torch.distributed."
    version = tuple(int(part) for part in torch_version.split(".")[:2])
    return "" if version >= (2, 7) else f"FSDP on a CPU was not tried with torch {torch_version}."


def a9() -> Finding:
    return judge_a9(fsdp_option_fields(), *(fsdp_saved_bytes(offload) for offload in (False, True)))


def judge_a9(fields: Sequence[str], plain: int, offloaded: int) -> Finding:
    """What can be set in FSDP's options, and bytes of activations saved without and with its offloading."""
    about_parameters = any("param" in name for name in fields) and not any("activation" in name for name in fields)
    return judged(
        "A9",
        {AS_STATED: about_parameters and offloaded == plain},
        f"Under fully_shard a small stack saves {offloaded:,} bytes of activations with it, {plain:,} without (one "
        f"process, CPU). Its settings are {' and '.join(fields)}. For activations PyTorch has offload_wrapper.",
    )


CHECKS = (Check("A6", a6), Check("A8", a8), Check("A9", a9, why_no_fsdp))
