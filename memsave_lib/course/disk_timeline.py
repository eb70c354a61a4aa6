"""Is the simulated timeline right? A step that offloads to this machine's disk, predicted and then measured.

    print(compare(prefetch=0).sentence)

The prediction knows three things: what steps of the same stack take when nothing leaves, how fast this machine writes
and reads a file, and the plan. Copies and their order must come out equal. Seconds need not, and the ways in which the
model is wrong on a CPU are known:

- A copy is work for a core. Computing gets one core here, so that a copy finds another; the model lets both run at full
  speed even where they share memory, or where there is no other.
- Small files stay in the page cache, so the "disk" is memory: its rate depends on what lies in the processor's caches.
- Hooks and tickets take time for each tensor, whatever its size, and so does waking a thread for each copy; the model
  has no such overhead. The hooks' share is measured, with a store that moves nothing.
- On a busy machine a step takes longer now than it did a moment ago. Medians and turns help, but only so far.
"""

from __future__ import annotations

import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn

from memsave_lib import devices
from memsave_lib.costs import BlockCosts
from memsave_lib.course.costs import stack_costs
from memsave_lib.devices import Device
from memsave_lib.formulas import BlockShape
from memsave_lib.lanes import Lanes, Span, StreamTimeline
from memsave_lib.models import BlockStack
from memsave_lib.runner import apply
from memsave_lib.simulation import simulate
from memsave_lib.stores import DiskStore, NullStore
from memsave_lib.strategies import MIN_BYTES, KeepAll, Offload, Strategy
from memsave_lib.units import human_bytes

#: Small enough for a notebook, large enough that computing outweighs what hooks cost.
SHAPE = BlockShape(batch=2, seq_len=256, hidden=128, heads=4)
N_LAYERS = 4
MIN_TURNS = 3


@dataclass(frozen=True)
class Step:
    """One measured training step, in seconds; ``lanes`` where something left."""

    forward: float
    backward: float
    lanes: Lanes | None = None

    @property
    def seconds(self) -> float:
        return self.forward + self.backward


@dataclass(frozen=True)
class Comparison:
    """A step that offloads to disk, predicted and measured.

    Args:
        predicted: the simulated step.
        measured: the median step.
        kept: the median of the steps that keep all, taken in turns with those.
        hooks: the median of steps under the same strategy with a store that moves nothing.
        device: what the prediction was made for: this stack's FLOP/s, and the disk.
        prefetch: how many tensors may be under way.
    """

    predicted: StreamTimeline
    measured: Step
    kept: Step
    hooks: Step
    device: Device
    prefetch: int

    @property
    def error(self) -> float:
        """Predicted over measured seconds of the step, less 1: negative where the prediction is too short."""
        return self.predicted.step_seconds / self.measured.seconds - 1

    @property
    def predicted_copies(self) -> tuple[tuple[str, int, int], ...]:
        """Each copy as ("out" or "in", block, bytes), in the order of starting."""
        return _copies(self.predicted)

    @property
    def measured_copies(self) -> tuple[tuple[str, int, int], ...]:
        """The same of the measured step."""
        return _copies(self.measured.lanes)

    @property
    def same_copies(self) -> bool:
        """Whether the same bytes left and came back, of the same blocks, in the same order."""
        return self.predicted_copies == self.measured_copies

    @property
    def slowdown(self) -> float:
        """How many times as long as in a step that keeps all the measured step computed: 1.0 in the model."""
        return (self.measured.seconds - self.measured.lanes.stall_seconds) / self.kept.seconds

    @property
    def hooks_slowdown(self) -> float:
        """The part of it that hooks and tickets account for, without any copy."""
        return self.hooks.seconds / self.kept.seconds

    @property
    def copy_rates(self) -> tuple[float, float]:
        """Bytes per second that the step's own copies reached, out and back."""
        return _rate(self.measured.lanes.copy_out), _rate(self.measured.lanes.copy_in)

    @property
    def sentence(self) -> str:
        """The result in words, with its seconds."""
        off = "too short" if self.error < 0 else "too long"
        order = "as predicted" if self.same_copies else "NOT as predicted"
        lanes, rates = self.measured.lanes, self.copy_rates
        writing, reading = rates[0] / self.device.need("disk_write"), rates[1] / self.device.need("disk_read")
        return (
            f"prefetch={self.prefetch}: predicted {_ms(self.predicted.step_seconds)}, measured "
            f"{_ms(self.measured.seconds)}: {abs(self.error):.0%} {off}. Copies: {len(lanes.copy_out)} out, "
            f"{len(lanes.copy_in)} back, {order}. Waiting: predicted {_ms(self.predicted.stall_seconds)}, measured "
            f"{_ms(lanes.stall_seconds)}. Computing took {self.slowdown:.2f} times as long as in a step that keeps all "
            f"({self.hooks_slowdown:.2f} times with hooks but no copies); copies ran {writing:.1f} times (writing) and "
            f"{reading:.1f} times (reading) as fast as measured alone."
        )


def why_not() -> str | None:
    """A sentence, where the system lacks what a DiskStore needs."""
    return None if hasattr(os, "preadv") else "this system lacks os.preadv, which a DiskStore needs"


def compare(
    shape: BlockShape = SHAPE,
    n_layers: int = N_LAYERS,
    *,
    prefetch: int = 2,
    seconds: float = 0.75,
    directory: str | os.PathLike[str] | None = None,
    machine: Device | None = None,
) -> Comparison:
    """Predict a step of a stack that sends everything but its last block to disk, and measure it.

    Computing takes one thread meanwhile: threads that wait for each other would wait for the copies too. Steps that
    keep all, steps that offload, and steps whose hooks move nothing take turns; of each kind the median counts, and
    the first is left out.

    Args:
        shape, n_layers: of a :class:`~memsave_lib.BlockStack` and its input, on the CPU.
        prefetch: as in :class:`~memsave_lib.Offload`.
        seconds: after which no further turn starts; there are three at least, however long they take.
        directory: for the file; default: where Python puts temporary files.
        machine: whose disk rates are used, for more than one call; measured in half a second when not given.

    Raises:
        ValueError: the shape is not one for :func:`~memsave_lib.course.costs.stack_costs`, or nothing of it leaves.
    """
    store = DiskStore(directory)
    offload = Offload(store=store, prefetch=prefetch)
    paper, plan = stack_costs(shape, n_layers), offload.plan(n_layers)
    if plan.offloaded_bytes([sum(cost.saved) for cost in paper], [cost.checkpoint for cost in paper]) == 0:
        raise ValueError(
            f"nothing leaves: the last block stays, and so do tensors below {human_bytes(MIN_BYTES)}; got "
            f"n_layers={n_layers} and {shape}"
        )
    stack, x = _stack_and_input(shape, n_layers)
    machine = devices.measure("cpu", store.directory, seconds=0.5) if machine is None else machine
    strategies = (KeepAll(), offload, replace(offload, store=NullStore()))
    turns = []
    with _one_thread():
        end = time.perf_counter() + seconds
        while len(turns) < 1 + MIN_TURNS or time.perf_counter() < end:
            turns.append([_run(stack, x, strategy) for strategy in strategies])
    store.close()
    kept, measured, hooks = (median_step(kind) for kind in zip(*turns[1:], strict=True))
    costs, flops = calibrated(shape, n_layers, kept)
    device = replace(machine, name=f"{machine.name}, this stack", flops=flops)
    predicted = simulate(costs, plan, device, prefetch=prefetch, link="disk")
    return Comparison(predicted, measured, kept, hooks, device, prefetch)


def calibrated(shape: BlockShape, n_layers: int, kept: Step) -> tuple[list[BlockCosts], float]:
    """Costs of the blocks, and the FLOP/s at which they take as long as in a step that kept all.

    Forward sets the FLOP/s, far below those of a large matrix product: a block also normalizes, adds and moves.
    Backward gets as many FLOPs as it takes seconds at that rate.
    """
    costs = stack_costs(shape, n_layers)
    flops = sum(cost.forward for cost in costs) / kept.forward
    ratio = kept.backward / kept.forward
    return [replace(cost, backward=cost.forward * ratio) for cost in costs], flops


def median_step(steps: Sequence[Step]) -> Step:
    """The step in the middle, by its seconds; of two in the middle the faster."""
    return sorted(steps, key=lambda step: step.seconds)[(len(steps) - 1) // 2]


def _stack_and_input(shape: BlockShape, n_layers: int) -> tuple[BlockStack, Tensor]:
    """Random, without a trace in the caller's random numbers."""
    if shape.device != "cpu":
        raise ValueError(f"shape.device must be 'cpu', whose disk and cores are compared here, got {shape.device!r}")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {name: getattr(shape, name) for name in ("ffn_mult", "dropout", "causal", "attention")}
        stack = BlockStack(n_layers, shape.hidden, shape.heads, **options).to(getattr(torch, shape.dtype))
        x = torch.randn(shape.batch, shape.seq_len, shape.hidden, dtype=getattr(torch, shape.dtype))
    return stack, x


@contextmanager
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _run(stack: nn.Module, x: Tensor, strategy: Strategy) -> Step:
    with apply(stack, strategy) as applied:
        start = time.perf_counter()
        loss = stack(x).sum()
        middle = time.perf_counter()
        loss.backward()
        end = time.perf_counter()
        sent = applied.report.offload
    return Step(middle - start, end - middle, None if sent is None else sent.lanes)


def _copies(lanes: Lanes) -> tuple[tuple[str, int, int], ...]:
    return tuple((copy.kind, copy.block, copy.nbytes) for copy in (*lanes.copy_out, *lanes.copy_in))


def _rate(copies: Sequence[Span]) -> float:
    return sum(copy.nbytes for copy in copies) / sum(copy.seconds for copy in copies)


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"
