"""A region: a function of which only the inputs survive forward, and which backward runs again.

PyTorch's ``checkpoint`` does the work. What is added here: every tensor argument reaches it, regions nest, and each run
knows whether it is the first one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextvars import ContextVar
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor
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
    template: list[Any]  # leaves of (args, kwargs); None where a tensor goes
    spec: object
    tensor_slots: list[int]
    counts: Counts
    runs: int = 0

    def __call__(self, *tensors: Tensor) -> Any:
        leaves = list(self.template)
        for slot, tensor in zip(self.tensor_slots, tensors, strict=True):
            leaves[slot] = tensor
        args, kwargs = _compat.tree_unflatten(leaves, self.spec)
        self.runs += 1
        if self.runs == 1:
            self.counts.region_forwards += not is_recomputing()
            return self.function(*args, **kwargs)
        self.counts.region_recomputes += 1
        token = _recomputing.set(True)
        try:
            return self.function(*args, **kwargs)
        finally:
            _recomputing.reset(token)


def run_region(counts: Counts, function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call ``function`` so that only its tensor arguments survive until backward, which calls it again.

    Every tensor, keyword arguments and nested ones included, reaches ``checkpoint`` by position: only those
    pass through saved-tensor hooks and tell it which device's random state to keep.
    """
    leaves, spec = _compat.tree_flatten((args, kwargs))
    slots = [slot for slot, leaf in enumerate(leaves) if isinstance(leaf, Tensor)]
    template = [None if isinstance(leaf, Tensor) else leaf for leaf in leaves]
    region = Region(function, template, spec, slots, counts)
    return checkpoint(region, *(leaves[slot] for slot in slots), use_reentrant=False, preserve_rng_state=True)


BlockCall = Callable[..., Any]  # (block index, state, *fixed) -> state


def run_segments(segments: Sequence[Segment], call: BlockCall, counts: Counts, state: Any, *fixed: Any) -> Any:
    """Send ``state`` through all blocks of ``segments``, each region under checkpoint; nested regions nest."""
    for segment in segments:
        if segment.recompute:
            state = run_region(counts, partial(run_segments, segment.body(), call, counts), state, *fixed)
        else:
            for index in range(segment.start, segment.stop):
                counts.block_recomputes += is_recomputing()
                state = call(index, state, *fixed)
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
        return run_region(self.counts, function, *args, **(kwargs or {}))
