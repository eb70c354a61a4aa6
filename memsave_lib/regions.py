"""A region: a function of which only the inputs survive forward, and which backward runs again.

PyTorch's ``checkpoint`` does the work. What is added here: every tensor argument reaches it, regions nest, each run
knows whether it is the first one, and a second run that could not repeat the first is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from memsave_lib import _compat
from memsave_lib.plan import Segment

# Autograd starts a recomputation from inside backward, where the caller's objects are out of reach.
_recomputing: ContextVar[bool] = ContextVar("memsave_recomputing", default=False)


def is_recomputing() -> bool:
    """Whether the code that asks is being run a second time, in backward.

    For blocks with side effects: ``if not is_recomputing(): self.auxiliary_losses.append(loss)``.
    """
    return _recomputing.get()


@dataclass
class Counts:
    region_forwards: int = 0
    region_recomputes: int = 0
    block_recomputes: int = 0


@dataclass
class Region:
    """A function that ``checkpoint`` calls in forward and again in backward; it knows which of the two it is."""

    function: Callable[..., Any]
    arguments: tuple[tuple, dict[str, Any]] | None  # of the first run: the caller's own lists and dicts
    template: list[Any]  # leaves of (args, kwargs), for all other runs; None where a tensor goes
    spec: object
    tensor_slots: list[int]
    weights: Callable[[], Iterable[Tensor]]
    counts: Counts
    read: list[tuple[Tensor, int] | None] | None = None  # weights of the first run, and their versions

    def __call__(self, *tensors: Tensor) -> Any:
        if self.arguments is not None:
            (args, kwargs), self.arguments = self.arguments, None
            read = [(weight, _version(weight)) for weight in self.weights()]
            self.counts.region_forwards += not is_recomputing()
            output = self.function(*args, **kwargs)
            # A buffer that the block itself changes (batch-norm statistics) is its own business.
            self.read = [
                (weight, version)
                if isinstance(weight, nn.Parameter) or (now is weight and _version(now) == version)
                else None
                for now, (weight, version) in zip(self.weights(), read, strict=True)
            ]
            return output
        self._check_weights()
        leaves = list(self.template)
        for slot, tensor in zip(self.tensor_slots, tensors, strict=True):
            leaves[slot] = tensor
        args, kwargs = _compat.tree_unflatten(leaves, self.spec)
        self.counts.region_recomputes += 1
        token = _recomputing.set(True)
        try:
            return self.function(*args, **kwargs)
        finally:
            _recomputing.reset(token)

    def _check_weights(self) -> None:
        """Without recomputation autograd itself notices a weight that changes before backward has used it."""
        if self.read is None:  # the function runs backward through itself: its first run has not ended
            return
        for now, noted in zip(self.weights(), self.read, strict=True):
            weight, version = noted or (now, _version(now))
            if now is not weight and not _are_shared_out(now, weight):
                how = "replaced"
            elif _version(weight) != version:
                how = "modified by an inplace operation"
            else:
                how = ""
            if how:
                raise RuntimeError(
                    f"one of the weights needed to recompute a block has been {how} since forward: {list(now.shape)} "
                    f"of {now.dtype}; run backward before the optimizer step, and inside torch.func.functional_call"
                )


def run_region(
    counts: Counts, weights: Callable[[], Iterable[Tensor]], function: Callable[..., Any], *args: Any, **kwargs: Any
) -> Any:
    """Call ``function`` so that only its tensor arguments survive until backward, which calls it again.

    Every tensor, keyword arguments and nested ones included, reaches ``checkpoint`` by position: only those
    pass through saved-tensor hooks and tell it which device's random state to keep.

    Args:
        weights: gives the tensors that ``function`` reads besides its arguments, as far as known.
    """
    leaves, spec = _compat.tree_flatten((args, kwargs))
    slots = [slot for slot, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    template = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    region = Region(function, (args, kwargs), template, spec, slots, weights, counts)
    tensors = [leaves[slot] for slot in slots]
    versions = [_version(tensor) for tensor in tensors]
    output = checkpoint(region, *tensors, use_reentrant=False, preserve_rng_state=True)
    for tensor, version in zip(tensors, versions, strict=True):
        if _version(tensor) != version and _needs_backward(output):
            raise RuntimeError(
                f"a recomputed block changed its input in place ({list(tensor.shape)} of {tensor.dtype}), so nothing "
                f"is left to recompute it from: let its first operation work out of place, or keep this block"
            )
    return output


def tensors_of(block: nn.Module) -> Iterator[Tensor]:
    yield from block.parameters()
    yield from block.buffers()


def _are_shared_out(*weights: Tensor) -> bool:
    """Whether FSDP2 exchanges a rank's part of a weight for the gathered whole, and back: one stands for the other."""
    return any(map(_compat.is_sharded, weights))


def _version(tensor: Tensor) -> int:
    # Tensors made in inference mode have no version, and cannot be saved for backward either.
    return 0 if tensor.is_inference() else tensor._version


def _needs_backward(output: Any) -> bool:
    return any(isinstance(leaf, Tensor) and leaf.requires_grad for leaf in _compat.tree_flatten(output)[0])


@dataclass(frozen=True)
class Stack:
    """Blocks as regions see them."""

    call: Callable[..., Any]  # (block index, state, *fixed) -> state
    blocks: Sequence[object]
    counts: Counts

    def weights(self, segment: Segment) -> Iterator[Tensor]:
        """Parameters of the segment's blocks; of plain functions none are known."""
        for block in self.blocks[segment.start : segment.stop]:
            if isinstance(block, nn.Module):
                yield from tensors_of(block)


def run_segments(segments: Sequence[Segment], stack: Stack, state: Any, *fixed: Any) -> Any:
    """Send ``state`` through all blocks of ``segments``, each region under checkpoint; nested regions nest."""
    for segment in segments:
        if segment.recompute:
            body = partial(run_segments, segment.body(), stack)
            state = run_region(stack.counts, partial(stack.weights, segment), body, state, *fixed)
        else:
            for index in range(segment.start, segment.stop):
                stack.counts.block_recomputes += is_recomputing()
                state = stack.call(index, state, *fixed)
    return state


class AttentionRegions(TorchFunctionMode):
    """Runs every call of scaled_dot_product_attention as a small region, whoever makes it."""

    def __init__(self, counts: Counts) -> None:
        super().__init__()
        self.counts, self.entered = counts, 0

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        self.entered += 1
        return run_region(self.counts, tuple, function, *args, **(kwargs or {}))
