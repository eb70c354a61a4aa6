"""What the blocks of a real model cost, measured once: the input of forecasts and simulations."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from torch import nn

from memsave_lib.flops import profile_blocks
from memsave_lib.models import find_blocks
from memsave_lib.runner import apply
from memsave_lib.simulation import BlockCosts
from memsave_lib.stores import NullStore
from memsave_lib.strategies import MIN_BYTES, FullCheckpoint, KeepAll, Offload, Strategy


def block_costs(
    model: nn.Module,
    step: Callable[[], Any],
    blocks: Sequence[nn.Module] | None = None,
    min_bytes: int | str = MIN_BYTES,
) -> tuple[BlockCosts, ...]:
    """FLOPs of each block, and the bytes that it would send away, from a few runs of ``step()``.

    The offload engine itself tells what would leave, with a store that moves nothing: parameters, what the first block
    is handed and tensors below ``min_bytes`` are no part of it. What the backward of a block costs is taken as twice
    its forward, as it is for matrix products with weights; the steps that measure are plain ones.

    Args:
        model, blocks: as for :func:`memsave_lib.apply`.
        step: forward and backward of ``model``. Gradients add up, as in any step.
        min_bytes: of the strategy to be forecast.
    """
    found = find_blocks(model) if blocks is None else list(blocks)
    flops = profile_blocks(model, step, found)
    saved = _would_leave(model, step, found, KeepAll(), min_bytes)
    checkpoints = _would_leave(model, step, found, FullCheckpoint(), min_bytes)
    return tuple(
        BlockCosts(
            forward=cost.forward,
            backward=2 * cost.forward,
            recompute=cost.forward - cost.tail,
            saved=tuple(saved[index]),
            checkpoint=sum(checkpoints[index]),
        )
        for index, cost in enumerate(flops)
    )


def _would_leave(
    model: nn.Module, step: Callable[[], Any], blocks: list[nn.Module], strategy: Strategy, min_bytes: int | str
) -> list[list[int]]:
    """Sizes of the storages that each block, or each region of one block, would send away, in that order."""
    offload = Offload(strategy, store=NullStore(), keep_last=0, min_bytes=min_bytes)
    with apply(model, offload, blocks=blocks) as applied:
        step()
    sizes: list[list[int]] = [[] for _ in blocks]
    for block, trip in applied.report.offload.last.trips:
        if not trip.back:
            sizes[block].append(trip.nbytes)
    return sizes
