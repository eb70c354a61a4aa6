"""What the blocks of a real model cost, measured once: the input of forecasts, simulations and plans."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import numpy as np
from torch import Tensor, nn
from torch.optim import Optimizer

from memsave_lib import _compat
from memsave_lib.costs import BlockCosts, ModelCosts, Needs
from memsave_lib.flops import count_flops, profile_blocks
from memsave_lib.meter import MemoryMeter
from memsave_lib.models import find_blocks
from memsave_lib.regions import is_recomputing
from memsave_lib.runner import apply
from memsave_lib.stores import NullStore
from memsave_lib.strategies import MIN_BYTES, FullCheckpoint, KeepAll, Offload, Strategy

Step = Callable[[], Any]


def block_costs(
    model: nn.Module,
    step: Step,
    blocks: Sequence[nn.Module] | None = None,
    min_bytes: int | str = MIN_BYTES,
    attention: bool = False,
) -> tuple[BlockCosts, ...]:
    """FLOPs of each block, and the bytes that it would send away, from a few runs of ``step()``.

    The offload engine itself tells what would leave, with a store that moves nothing: parameters, what the first block
    is handed and tensors below ``min_bytes`` are no part of it. What the backward of a block costs is taken as twice
    its forward, as it is for matrix products with weights; the steps that measure are plain ones.

    Args:
        model, blocks: as for :func:`memsave_lib.apply`.
        step: forward and backward of ``model``. Gradients add up, as in any step.
        min_bytes: of the strategy to be forecast.
        attention: whether to count the FLOPs of the CPU's fused attention, which PyTorch's counter leaves out.

    Raises:
        ValueError: a step calls more blocks than there are, or fewer: it runs the model twice, say.
    """
    found = find_blocks(model) if blocks is None else list(blocks)
    flops = profile_blocks(model, step, found, attention)
    _check_calls(len(flops), len(found))
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


def model_costs(
    model: nn.Module,
    step: Step,
    blocks: Sequence[nn.Module] | None = None,
    min_bytes: int | str = MIN_BYTES,
    optimizer: Optimizer | None = None,
) -> ModelCosts:
    """FLOPs, and bytes of every moment of a training step, from a few runs of ``step()``: what a planner needs.

    A step is metered twice, with all blocks kept and with each recomputed, and the history of live bytes is cut where
    one block hands over to the next. So the needs are those of the whole process: parameters, gradients and optimizer
    state count. On fake tensors (:mod:`memsave_lib.fake`) all of that costs nothing.

    Args:
        model, step, blocks, min_bytes: as for :func:`block_costs`; ``step()`` must find gradients to be None, so that
            they pile up as in training. They are None again afterwards.
        optimizer: steps after each ``step()``, if there is one.
    """
    found = find_blocks(model) if blocks is None else list(blocks)
    plain = block_costs(model, step, found, min_bytes, attention=True)
    total = count_flops(step, attention=True)
    kept, recomputed = (_cut(model, step, found, strategy, optimizer) for strategy in (KeepAll(), FullCheckpoint()))
    turn = min(kept.turn, recomputed.turn)
    kept, recomputed = kept.with_turn(turn), recomputed.with_turn(turn)
    costs = tuple(
        replace(
            cost,
            held=max(kept.held[i], sum(cost.saved)),
            held_recomputed=max(recomputed.held[i], 0),
            needs=Needs(kept.forward[i], kept.backward[i], recomputed.forward[i], recomputed.backward[i]),
        )
        for i, cost in enumerate(plain)
    )
    inside = sum(block.forward + block.backward for block in costs)
    elsewhere = max(kept.elsewhere, recomputed.elsewhere)
    return ModelCosts(costs, turn=turn, elsewhere=elsewhere, flops=max(0, total - inside))


@dataclass(frozen=True)
class _Cut:
    """Live bytes of one step, cut at the blocks; the most of each stretch, less what earlier blocks hold."""

    held: list[int]
    forward: list[int]
    backward: list[int]
    turn: int
    elsewhere: int

    def with_turn(self, turn: int) -> _Cut:
        """What the turn needs beyond ``turn``, the first block holds: no other is held from forward to the very end.

        A model often refers to the first block's input itself until its forward ends. So only then does it show which
        blocks hold it: those that are recomputed, say, but not those that keep a float32 copy of it.
        """
        more = self.turn - turn
        held = [self.held[0] + more, *self.held[1:]]
        backward = [self.backward[0], *(need - more for need in self.backward[1:])]
        return replace(self, held=held, backward=backward, turn=turn)


def _cut(
    model: nn.Module, step: Step, blocks: Sequence[nn.Module], strategy: Strategy, optimizer: Optimizer | None
) -> _Cut:
    model.zero_grad(set_to_none=True)
    meter = MemoryMeter(model, optimizer)
    marks = _Marks(meter, len(blocks))
    with ExitStack() as stack:
        for block in dict.fromkeys(blocks):
            stack.callback(block.register_forward_pre_hook(marks.enter, with_kwargs=True).remove)
            stack.callback(block.register_forward_hook(marks.leave).remove)
        stack.enter_context(apply(model, strategy, blocks=blocks))
        stack.enter_context(meter)
        step()
        end_of_backward = meter.position
        if optimizer is not None:
            optimizer.step()
    model.zero_grad(set_to_none=True)
    return marks.cut(meter.trace.live_bytes, end_of_backward)


@dataclass
class _Marks:
    """Where in the meter's log each block's forward begins and ends, and where its backward begins."""

    meter: MemoryMeter
    n_blocks: int
    starts: list[int] = field(default_factory=list)
    end: int = 0
    gradients: dict[int, int] = field(default_factory=dict)  # of the place in front of each block

    def enter(self, block: nn.Module, args: tuple, kwargs: dict[str, Any]) -> None:
        if not is_recomputing():
            if not self.starts:
                self._listen(0, (args, kwargs))
            self.starts.append(self.meter.position)

    def leave(self, block: nn.Module, args: tuple, output: Any) -> None:
        if not is_recomputing():
            self.end = self.meter.position
            self._listen(len(self.starts), output)

    def _listen(self, place: int, tree: Any) -> None:
        tensors = (leaf for leaf in _compat.tree_flatten(tree)[0] if isinstance(leaf, Tensor))
        first = next((tensor for tensor in tensors if tensor.requires_grad), None)
        if first is not None:
            first.register_hook(partial(self._note_gradient, place))

    def _note_gradient(self, place: int, gradient: Tensor) -> None:
        self.gradients[place] = self.meter.position

    def cut(self, live: np.ndarray, end_of_backward: int) -> _Cut:
        _check_calls(len(self.starts), self.n_blocks)
        end = self.end
        while end + 1 < len(live) and live[end + 1] < live[end]:  # the caller takes the output, and drops the input
            end += 1
        bounds = [*self.starts, end]
        level = live[bounds]
        before = level[:-1] - level[0]
        # Where nothing needs a gradient, backward has ended before.
        turn = self.gradients.get(self.n_blocks, end_of_backward)
        back = [turn]
        for place in reversed(range(self.n_blocks)):
            back.append(self.gradients.get(place, end_of_backward))
        back.reverse()
        return _Cut(
            held=list(map(int, np.diff(level))),
            forward=[_most(live, a, b) - int(base) for a, b, base in zip(bounds, bounds[1:], before, strict=False)],
            backward=[_most(live, b, a) - int(base) for a, b, base in zip(back, back[1:], before, strict=False)],
            turn=_most(live, end, turn) - int(level[-1] - level[0]),
            elsewhere=max(_most(live, 0, self.starts[0]), _most(live, back[0], len(live) - 1)),
        )


def _check_calls(n_calls: int, n_blocks: int) -> None:
    if n_calls != n_blocks:
        raise ValueError(f"the model called {n_calls} blocks in one step, not the {n_blocks} given")


def _most(live: np.ndarray, start: int, stop: int) -> int:
    return int(live[start : stop + 1].max())


def _would_leave(
    model: nn.Module, step: Step, blocks: list[nn.Module], strategy: Strategy, min_bytes: int | str
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
