"""What several tests share. Bytes are counted with PyTorch's own hooks: our meter is not its own witness."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from memsave_lib.formulas import BlockShape
from memsave_lib.models import BlockStack, TransformerBlock
from memsave_lib.plan import Plan, Segment


@dataclass
class Saved:
    """Unique storages that autograd saved. Holds them alive, so that no address is used twice."""

    leave_out: frozenset[int]
    storages: dict[int, torch.UntypedStorage] = field(default_factory=dict)

    def pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self.leave_out:
            self.storages[storage.data_ptr()] = storage
        return tensor.detach()

    @property
    def bytes(self) -> int:
        return sum(storage.nbytes() for storage in self.storages.values())


def saved_bytes(function: Callable[[], object], model: nn.Module) -> int:
    """Bytes that autograd holds after ``function()``, without the parameters and buffers of ``model``."""
    owned = frozenset(t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers()))
    saved = Saved(owned)
    with torch.autograd.graph.saved_tensors_hooks(saved.pack, lambda tensor: tensor):
        result = function()
    total = saved.bytes
    del result
    return total


def autocast(shape: BlockShape) -> contextlib.AbstractContextManager[object]:
    """The autocast that ``shape`` names, or nothing."""
    if shape.autocast is None:
        return contextlib.nullcontext()
    return torch.autocast("cpu", getattr(torch, shape.autocast))


def build_stack(shape: BlockShape, n_layers: int) -> BlockStack:
    """The stack of blocks that ``shape`` describes."""
    torch.manual_seed(0)
    stack = BlockStack(
        n_layers,
        shape.hidden,
        shape.heads,
        ffn_mult=shape.ffn_mult,
        dropout=shape.dropout,
        causal=shape.causal,
        attention=shape.attention,
    )
    return stack.to(getattr(torch, shape.dtype))


def build_input(shape: BlockShape, requires_grad: bool = True) -> Tensor:
    """A random hidden state of that shape."""
    x = torch.randn(shape.batch, shape.seq_len, shape.hidden, dtype=getattr(torch, shape.dtype))
    return x.requires_grad_(requires_grad)


def run_plan(stack: BlockStack, plan: Plan, x: Tensor) -> Tensor:
    """Run a plan with nothing but ``torch.utils.checkpoint``: what our runner must agree with."""

    def run_segments(segments: tuple[Segment, ...], x: Tensor) -> Tensor:
        for segment in segments:
            if segment.recompute:
                x = checkpoint(run_segments, segment.body(), x, use_reentrant=False)
            else:
                for block in stack.blocks[segment.start : segment.stop]:
                    x = block(x)
        return x

    with regions_recomputed(stack, plan.recompute_ops):
        return run_segments(plan.segments, x)


@contextlib.contextmanager
def regions_recomputed(stack: BlockStack, ops: tuple[str, ...]) -> Iterator[None]:
    """Checkpoint the methods that ``ops`` name in every block, while the context lasts."""
    names = [name for op in ops for name in TransformerBlock.recompute_regions[op]]
    for block in stack.blocks:
        for name in names:
            method = getattr(block, name)
            setattr(block, name, lambda *args, _m=method: checkpoint(_m, *args, use_reentrant=False))
    try:
        yield
    finally:
        for block in stack.blocks:
            for name in names:
                delattr(block, name)


class LiveBytes(TorchDispatchMode):
    """Bytes of all storages that operations return, until they are freed; those of ``known`` do not count.

    ``levels`` are the live bytes right after each operation that allocates.
    """

    def __init__(self, known: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.live = 0
        self.levels: list[int] = []
        self._known = [tensor.untyped_storage() for tensor in known]
        self._seen = {id(storage) for storage in self._known}

    @property
    def peak(self) -> int:
        return max(self.levels)

    def add(self, *tensors: Tensor) -> None:
        new = {id(tensor.untyped_storage()): tensor.untyped_storage() for tensor in tensors}
        new = {key: storage for key, storage in new.items() if key not in self._seen and storage.nbytes()}
        for key, storage in new.items():
            self._seen.add(key)
            self.live += storage.nbytes()
            weakref.finalize(storage, self._freed, key, storage.nbytes()).atexit = False
        if new:
            self.levels.append(self.live)

    def _freed(self, key: int, size: int) -> None:
        self._seen.remove(key)
        self.live -= size

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        output = op(*args, **(kwargs or {}))
        self.add(*(leaf for leaf in tree_leaves(output) if isinstance(leaf, Tensor)))
        return output
