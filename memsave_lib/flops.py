"""FLOPs, counted by PyTorch's own counter: of a whole step, and of each block as far as a recomputation repeats it.

``FlopCounterMode`` counts matrix products and convolutions. On CPU it does not count the fused attention kernel: there
the figures are those of the matrix products alone, unless ``attention=True`` asks for that kernel too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

from memsave_lib import interception
from memsave_lib.models import find_blocks
from memsave_lib.placement import has_regions
from memsave_lib.plan import BlockFlops, RegionFlops


def count_flops(step: Callable[[], Any], attention: bool = False) -> int:
    """FLOPs of everything that ``step()`` does, backward and recomputation included.

    Args:
        attention: count the CPU's fused attention kernel as well; where positions are masked, what it skips is not.
    """
    with _counter(attention) as counter:
        step()
    return counter.get_total_flops()


def profile_blocks(
    model: nn.Module, step: Callable[[], Any], blocks: Sequence[nn.Module] | None = None, attention: bool = False
) -> tuple[BlockFlops, ...]:
    """What each block costs, from one run of ``step()`` with nothing recomputed.

    With a plan this forecasts a strategy's step: ``count_flops(step) + plan.extra_flops(profile_blocks(model, step))``.

    Args:
        attention: as for :func:`count_flops`.

    Returns:
        One entry for each call of a block, in order: its forward FLOPs, the tail of them that lies behind the block's
        last saved tensor, and the same for the regions inside it that ``SelectiveOps`` knows.
    """
    recorder = _Recorder(_counter(attention))
    with ExitStack() as stack:
        for block in dict.fromkeys(find_blocks(model) if blocks is None else blocks):
            interception.intercept(block, recorder.members(block))
            stack.callback(interception.release, block)
        stack.enter_context(saved_tensors_hooks(recorder.note_saved, lambda tensor: tensor))
        stack.enter_context(recorder.counter)
        step()
    return tuple(recorder.blocks)


def _counter(attention: bool) -> FlopCounterMode:
    aten = torch.ops.aten
    kernels = {
        aten._scaled_dot_product_flash_attention_for_cpu: _attention_flops,
        aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward_flops,
    }
    return FlopCounterMode(display=False, custom_mapping=kernels if attention else {})


def _attention_flops(
    query: Sequence[int], key: Sequence[int], value: Sequence[int], dropout: float = 0.0, causal: bool = False, **_: Any
) -> int:
    """Scores and weighted sum: a matrix product each; half of it where later positions are skipped."""
    batch, heads, length, size = query
    flops = 2 * batch * heads * length * key[2] * (size + value[3])
    return flops // 2 if causal else flops


def _attention_backward_flops(
    gradient: Sequence[int],
    query: Sequence[int],
    key: Sequence[int],
    value: Sequence[int],
    output: Sequence[int],
    log_sum_exp: Sequence[int],
    dropout: float = 0.0,
    causal: bool = False,
    **_: Any,
) -> int:
    """The scores once more, and the gradients of weights, values, queries and keys: five matrix products."""
    batch, heads, length, size = query
    flops = 2 * batch * heads * length * key[2] * (3 * size + 2 * value[3])
    return flops // 2 if causal else flops


class _Span:
    """A stretch of the forward pass: FLOPs counted at its start, at its last saved tensor, and at its end."""

    def __init__(self, start: int) -> None:
        self.start = self.last_saved = self.end = start
        self.regions: dict[str, list[_Span]] = {}

    def flops(self) -> RegionFlops:
        return RegionFlops(forward=self.end - self.start, tail=self.end - self.last_saved)

    def block_flops(self) -> BlockFlops:
        regions = {op: tuple(span.flops() for span in spans) for op, spans in self.regions.items()}
        return BlockFlops(forward=self.end - self.start, tail=self.end - self.last_saved, regions=regions)


class _Recorder:
    """Watches block calls and, inside them, the calls of their small regions."""

    def __init__(self, counter: FlopCounterMode) -> None:
        self.counter = counter
        self.blocks: list[BlockFlops] = []
        self._open: list[_Span] = []

    def note_saved(self, tensor: Tensor) -> Tensor:
        for span in self._open:
            span.last_saved = self.counter.get_total_flops()
        return tensor.detach()

    def members(self, block: nn.Module) -> dict[str, Callable[..., Any]]:
        """Overrides for one block: its call, and each method that it names as a region."""
        kind = type(block)

        def call(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with ExitStack() as stack:
                span = stack.enter_context(self._span())
                if not has_regions(block):
                    stack.enter_context(_AttentionSpans(self))
                output = kind.__call__(block, *args, **kwargs)
            self.blocks.append(span.block_flops())
            return output

        regions = kind.recompute_regions if has_regions(block) else {}
        methods = {name: self._recorded(op, getattr(kind, name)) for op, names in regions.items() for name in names}
        return {"__call__": call, **methods}

    def region_span(self, op: str) -> Any:
        return self._span(self._open[0].regions.setdefault(op, []))

    def _recorded(self, op: str, method: Callable[..., Any]) -> Callable[..., Any]:
        def recorded(block: nn.Module, *args: Any, **kwargs: Any) -> Any:
            with self.region_span(op):
                return method(block, *args, **kwargs)

        return recorded

    @contextmanager
    def _span(self, spans: list[_Span] | None = None) -> Iterator[_Span]:
        span = _Span(self.counter.get_total_flops())
        self._open.append(span)
        try:
            yield span
        finally:
            self._open.pop()
            span.end = self.counter.get_total_flops()
            if spans is not None:
                spans.append(span)


class _AttentionSpans(TorchFunctionMode):
    """Records scaled_dot_product_attention as the block's attention core, whoever calls it."""

    def __init__(self, recorder: _Recorder) -> None:
        super().__init__()
        self.recorder = recorder

    def __torch_function__(
        self, function: Callable[..., Any], types: Sequence[type], args: tuple = (), kwargs: dict | None = None
    ) -> Any:
        if function is not F.scaled_dot_product_attention:
            return function(*args, **(kwargs or {}))
        with self.recorder.region_span("attention"):
            return function(*args, **(kwargs or {}))
