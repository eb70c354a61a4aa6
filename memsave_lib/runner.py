"""Apply a strategy to a model and take it off again.

    with apply(model, Chunked(num_checkpoints=4)) as applied:
        loss = model(x).sum()
        loss.backward()
    print(applied.report)

While applied, every block's call is intercepted (:mod:`memsave_lib.interception`); parameters, names and
classes stay as they are. A block whose plan says *recompute* runs as a region (:mod:`memsave_lib.regions`): forward
keeps its input only, and backward runs it again with the same random numbers. For a chunk of several blocks the first
of them runs the whole chunk, and the others hand on what they are given, after checking that it is the chunk's output.

A recomputed block runs twice, and whatever it does besides returning a value (forward hooks, batch-norm statistics,
counters, auxiliary losses put on a list) happens twice, unless it asks :func:`is_recomputing` first. Where its value
depends on such a state (spectral norm's power iteration, a random generator of its own), the second run differs.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from types import TracebackType
from typing import Any

import torch
from torch import Tensor, nn

from memsave_lib import _compat, interception
from memsave_lib.chunks import Chunk, refuse_missing_hidden_states
from memsave_lib.models import find_blocks
from memsave_lib.offload import Offloader
from memsave_lib.placement import (
    BLOCK_BY_BLOCK,
    SWITCH_IS_ON,
    block_names,
    calling_module,
    check_applicable,
    check_blocks,
    check_strategy,
    has_regions,
)
from memsave_lib.plan import Plan, Segment
from memsave_lib.regions import AttentionRegions, Counts, Stack, is_recomputing, run_region, run_segments, tensors_of
from memsave_lib.strategies import Strategy
from memsave_lib.traffic import Traffic


@dataclass(frozen=True)
class Report:
    """What a strategy did to a model, since it was applied."""

    strategy: str
    blocks_kept: int
    blocks_recomputed: int
    blocks_offloaded: int  # blocks of which all saved tensors are sent away
    recompute_ops: tuple[str, ...]
    region_forwards: int  # regions run in forward
    region_recomputes: int  # regions run again in backward
    block_recomputes: int  # blocks started again in backward, SelectiveOps' small regions not counted
    offload: Traffic | None = None  # what was sent away; None when the strategy sends nothing

    def __str__(self) -> str:
        inside = f", inside each block: {', '.join(self.recompute_ops)}" if self.recompute_ops else ""
        sent = f", {self.blocks_offloaded} offloaded" if self.blocks_offloaded else ""
        return (
            f"{self.strategy}: {self.blocks_kept} blocks kept, {self.blocks_recomputed} recomputed{sent}{inside}; "
            f"{self.region_forwards} regions in forward, {self.region_recomputes} run again in backward "
            f"({self.block_recomputes} block forwards){'' if self.offload is None else f'; {self.offload}'}"
        )


def run(blocks: Sequence[Callable[[Any], Any]], x: Any, strategy: Strategy) -> Any:
    """``for block in blocks: x = block(x)``, with what the blocks save for backward managed by ``strategy``.

    Args:
        blocks: modules, functions, lambdas, partials or bound methods of one argument.
        x: a tensor, or nested tuples, lists and dicts of them; whatever a block returns is the next one's argument.
    """
    blocks = check_blocks(blocks)
    plan = check_strategy(strategy).plan(len(blocks))
    if not plan.recompute_ops:
        if not torch.is_grad_enabled():
            plan = Plan(plan.n_blocks, (Segment(0, plan.n_blocks),))
        stack = Stack(lambda index, state: blocks[index](state), blocks, Counts())
        offloader = _offloader(strategy, partial(stack.weights, Segment(0, plan.n_blocks)))
        for segment in plan.segments:
            with _unit(offloader, segment, segment.start, plan, x):
                x = run_segments((segment,), stack, x)
        if offloader is not None:
            offloader.watch(x)
        return x
    for index, block in enumerate(blocks):
        if not isinstance(block, nn.Module):
            raise TypeError(f"{strategy} looks inside the blocks, and block {index} is no nn.Module but {block!r}")
    with apply(nn.ModuleList(blocks), strategy, blocks=blocks):
        for block in blocks:
            x = block(x)
    return x


def apply(model: nn.Module, strategy: Strategy, blocks: Sequence[nn.Module] | None = None) -> Applied:
    """Make ``model`` follow ``strategy`` from now on, until the handle is removed or its ``with`` block ends.

    Args:
        model: any module that calls a stack of blocks; Hugging Face models work as they are.
        strategy: what to do with each block.
        blocks: the blocks, in the order in which the model calls them; found by :func:`find_blocks` when not given.

    Raises:
        ValueError: no blocks found, the strategy does not fit their number, the model is compiled, has a strategy
            already, or uses Hugging Face's own gradient checkpointing.
    """
    return Applied(model, strategy, find_blocks(model) if blocks is None else check_blocks(blocks))


@dataclass
class _Pass:
    """Where one call of the model stands."""

    cursor: int = 0
    chunk: Chunk | None = None  # one whose followers still have to be called


@dataclass
class _Passes(threading.local):
    stack: list[_Pass] = field(default_factory=list)
    outside: _Pass = field(default_factory=_Pass)  # for blocks called while the model itself is not running


class Applied:
    """A strategy on a model: context manager and removable handle."""

    def __init__(self, model: nn.Module, strategy: Strategy, blocks: list[nn.Module]) -> None:
        self.strategy = check_strategy(strategy)
        self.plan = strategy.plan(len(blocks))
        self.blocks = blocks
        self._counts = Counts()
        self._passes = _Passes()
        self._segments = {i: s for s in self.plan.segments for i in range(s.start, s.stop)}
        self._owner = calling_module(model, blocks)
        self._names = block_names(model, blocks)
        check_applicable(model, self.strategy, self.plan, blocks)
        self._offloader = _offloader(strategy, partial(tensors_of, model))
        self._intercepted: list[object] = []
        try:
            for block in dict.fromkeys(blocks):
                self._intercept(block, {"__call__": _as_method(self._call_block), **self._region_methods(block)})
            if self._owner is not None:
                self._intercept(self._owner, {"__call__": _as_method(self._call_owner)})
            for config in _compat.configs_with_cache(model):
                # The value in the configuration stays: a copy or a saved model must not find it changed.
                self._intercept(config, {"use_cache": property(lambda config: False, _set_use_cache)})
        except BaseException:
            self.remove()
            raise

    @property
    def report(self) -> Report:
        actions = self.plan.actions
        return Report(
            strategy=self.strategy.label,
            blocks_kept=actions.count("keep"),
            blocks_recomputed=actions.count("recompute"),
            blocks_offloaded=actions.count("offload"),
            recompute_ops=self.plan.recompute_ops,
            region_forwards=self._counts.region_forwards,
            region_recomputes=self._counts.region_recomputes,
            block_recomputes=self._counts.block_recomputes,
            offload=self._offloader and self._offloader.traffic.snapshot(),
        )

    def remove(self) -> None:
        """Give the model its own behavior back. Graphs built meanwhile still run their backward."""
        while self._intercepted:
            interception.release(self._intercepted.pop())
        if self._offloader is not None:
            self._offloader.close()

    def __enter__(self) -> Applied:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.remove()

    def _intercept(self, instance: object, members: dict[str, object]) -> None:
        interception.intercept(instance, members)
        self._intercepted.append(instance)

    def _call_owner(self, owner: nn.Module, *args: Any, **kwargs: Any) -> Any:
        """The module that calls the blocks: count its calls of them from zero."""
        current = _Pass()
        self._passes.stack.append(current)
        try:
            output = interception.original_class(owner).__call__(owner, *args, **kwargs)
        finally:
            self._passes.stack.pop()
        if current.chunk is not None:
            raise RuntimeError(current.chunk.skipped("the end of the model's call"))
        if self._offloader is not None:
            self._offloader.end_forward()  # of a model that left out its last blocks
        if self.plan.has_chunks:
            refuse_missing_hidden_states(output, self.strategy)
        return output

    def _call_block(self, block: nn.Module, *args: Any, **kwargs: Any) -> Any:
        current = self._passes.stack[-1] if self._passes.stack else self._passes.outside
        index = self._position(block, current)
        current.cursor = index + 1
        if current.chunk is None:
            output = self._lead(current, index, block, args, kwargs)
        else:
            output = current.chunk.follow(index, args, kwargs)
            if not current.chunk.rests:
                current.chunk = None
        if self._offloader is not None and index + 1 == self.plan.n_blocks:
            self._offloader.watch(output)
        return output

    def _lead(self, current: _Pass, index: int, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> Any:
        """Run a block, or the region that starts with it."""
        segment = self._segments[index]
        if not torch.is_grad_enabled():
            return self._original(index, *args, **kwargs)
        if _compat.hugging_face_switch_is_on(block) and block.training:
            raise RuntimeError(SWITCH_IS_ON)
        with _unit(self._offloader, segment, index, self.plan, (args, kwargs)):
            return self._act(current, segment, index, block, args, kwargs)

    def _act(
        self, current: _Pass, segment: Segment, index: int, block: nn.Module, args: tuple, kwargs: dict[str, Any]
    ) -> Any:
        """What the plan says for this block, or for the region that it leads."""
        if self.plan.recompute_ops and not has_regions(block):
            return self._with_attention_regions(index, args, kwargs)
        if not segment.recompute:
            return self._original(index, *args, **kwargs)
        if caches := list(_compat.caches_in(args, kwargs)):
            raise ValueError(
                f"{self._names[index]} got a key-value cache ({', '.join(caches)}) while gradients are on: "
                f"recomputing would append to it twice. Call the model with use_cache=False and without a cache"
            )
        if segment.n_blocks == 1:
            return run_region(
                self._counts, partial(tensors_of, block), partial(self._run_block, index), *args, **kwargs
            )
        if current is self._passes.outside or index != segment.start:
            raise RuntimeError(
                f"{self._names[index]} was called without the blocks before it, but {self.strategy} recomputes blocks "
                f"{segment.start} to {segment.stop - 1} as one region: call {type(self._owner).__name__}, which calls "
                f"them in order, or {BLOCK_BY_BLOCK}"
            )
        current.chunk, output = Chunk.run(segment, self._original, self.blocks, self._names, self._counts, args, kwargs)
        return output

    def _position(self, block: nn.Module, current: _Pass) -> int:
        """The block's place in the stack: the next one that holds it, so that a shared block has many."""
        places = [index for index, candidate in enumerate(self.blocks) if candidate is block]
        return next((index for index in places if index >= current.cursor), places[0])

    def _original(self, index: int, *args: Any, **kwargs: Any) -> Any:
        block = self.blocks[index]
        # After remove() a graph may still be waiting for its backward: the block has its own class back by then.
        return interception.original_class(block).__call__(block, *args, **kwargs)

    def _run_block(self, index: int, *args: Any, **kwargs: Any) -> Any:
        self._counts.block_recomputes += is_recomputing()
        return self._original(index, *args, **kwargs)

    def _with_attention_regions(self, index: int, args: tuple, kwargs: dict[str, Any]) -> Any:
        with AttentionRegions(self._counts) as regions:
            output = self._original(index, *args, **kwargs)
        if regions.entered == 0:
            raise RuntimeError(
                f"{self._names[index]} never called F.scaled_dot_product_attention, so there is no attention core to "
                f'recompute; where the model offers it: model.set_attn_implementation("sdpa")'
            )
        return output

    def _region_methods(self, block: nn.Module) -> dict[str, Callable[..., Any]]:
        """For SelectiveOps: the block's own small methods, each run as a region."""
        if not self.plan.recompute_ops or not has_regions(block):
            return {}

        def as_region(original: Callable[..., Any]) -> Callable[..., Any]:
            def method(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
                if not torch.is_grad_enabled():
                    return original(block, *args, **kwargs)
                return run_region(self._counts, partial(tensors_of, block), partial(original, block), *args, **kwargs)

            return method

        kind = type(block)
        names = [name for op in self.plan.recompute_ops for name in kind.recompute_regions[op]]
        return {name: as_region(getattr(kind, name)) for name in names}


def _offloader(strategy: Strategy, weights: Callable[[], Iterable[Tensor]]) -> Offloader | None:
    return None if strategy.offloading is None else Offloader(strategy.offloading, weights)


def _unit(
    offloader: Offloader | None, segment: Segment, index: int, plan: Plan, arguments: Any
) -> AbstractContextManager[None]:
    """Where what the segment keeps is sent away, if the plan says so."""
    if offloader is None:
        return nullcontext()
    last = (segment.stop if segment.recompute else index + 1) == plan.n_blocks
    return offloader.unit(index, segment.offload, last, _compat.tree_flatten(arguments)[0])


def _set_use_cache(config: Any, value: bool) -> None:
    vars(config)["use_cache"] = value


def _as_method(function: Callable[..., Any]) -> Callable[..., Any]:
    """A bound method of ours as a plain function, so that the class it is put into passes its instance along."""

    def method(instance: Any, *args: Any, **kwargs: Any) -> Any:
        return function(instance, *args, **kwargs)

    return method
