"""Check of the exercise of notebook 01 that mends a function which measures a training step with three accidents.

Follows :mod:`memsave_lib.course.checks`. What every accident would give, and several of them, is measured too
(:mod:`memsave_lib.course.accidents`), so the check can say what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.optim import Optimizer

from memsave_lib.course.accidents import CASES, HONEST, suspects
from memsave_lib.course.checks import Verdict, answered, no_count, right, wrong
from memsave_lib.meter import MemoryMeter
from memsave_lib.trace import Trace

#: A loss that some name still holds, or a sum of detached ones, is alive indeed: a few numbers of 4 bytes each.
CRUMBS = 32


@answered
def check_honest_peak(function: Callable[[nn.Module, Optimizer, list[Tensor]], int]) -> Verdict:
    """The exercise: ``function(model, optimizer, batches)`` is the peak of a step in the middle of training.

    It gets small models whose gradients nobody cleared, and optimizers that have never stepped.
    """
    given: list[int] = []
    graphs_before = 0
    with torch.random.fork_rng(devices=[]):
        for case in CASES:
            model, optimizer, batches = case.fresh()
            with _watching(model) as seen:
                value = function(model, optimizer, batches)
            if complaint := _no_peak(value) or _no_training(seen):
                return wrong(complaint)
            given.append(int(value))
            graphs_before = max(graphs_before, seen.graphs_before)
        verdict = _judge(given)
    if not graphs_before:
        return verdict
    return wrong(_GRAPHS_BEFORE) if verdict.passed else Verdict(False, f"{verdict} {_GRAPHS_BEFORE}")


_GRAPHS_BEFORE = (
    "Graphs of losses from before the meter are still alive when the measured step begins, with all that their forward "
    "saved. The meter cannot see them, since they were made before it started: take .item() of each loss, or let go of "
    "it, before the step."
)


@dataclass(eq=False)
class _Saved:
    """What autograd saved outside of every meter: alive as long as its graph."""

    tensor: Tensor


@dataclass
class _Seen:
    """What a learner's function does with the model that it is given."""

    forwards: int = 0
    backwards: int = 0
    saved: WeakSet[_Saved] = field(default_factory=WeakSet)
    packed: int = 0
    #: At the beginning of the newest forward: tensors saved before it and alive, and how many had been packed.
    alive: int = 0
    packed_before: int = 0
    #: Saved tensors of earlier graphs, outside of the meter, when the last measured forward began.
    graphs_before: int = 0

    def pack(self, tensor: Tensor) -> _Saved:
        self.packed += 1
        # Without its past: a saved output would keep its own graph alive for ever.
        self.saved.add(saved := _Saved(tensor.detach()))
        return saved

    def begin(self, *ignored: object) -> None:
        self.forwards += 1
        self.alive, self.packed_before = len(self.saved), self.packed

    def end(self, *ignored: object) -> None:
        # The meter's own hooks cover these: what packs nothing here, though it records, is measured.
        if torch.is_grad_enabled() and self.packed == self.packed_before:
            self.graphs_before = self.alive

    def backward(self, parameter: Tensor) -> None:
        self.backwards += 1


@contextmanager
def _watching(model: nn.Module) -> Iterator[_Seen]:
    seen = _Seen()
    handles = [
        model.register_forward_pre_hook(seen.begin),
        model.register_forward_hook(seen.end),
        next(model.parameters()).register_post_accumulate_grad_hook(seen.backward),
    ]
    try:
        with saved_tensors_hooks(seen.pack, lambda saved: saved.tensor):
            yield seen
    finally:
        for handle in handles:
            handle.remove()


def _no_training(seen: _Seen) -> str | None:
    """What to say when nothing has gone backward through the model."""
    if seen.backwards:
        return None
    if seen.forwards:
        return "Your function runs the model forward only: a training step is forward, backward and optimizer.step()."
    return (
        "Your function has not trained the model that it was given. Use its arguments; this notebook's training_step "
        "uses the model and the optimizer outside."
    )


def _judge(given: Sequence[int]) -> Verdict:
    traces = [HONEST.trace(case) for case in CASES]
    wanted = [trace.peak_bytes for trace in traces]
    if given == wanted:
        return right(f"On both models of this check your function finds the peak to the byte: {_listed(wanted)}.")
    if _same(given, wanted):
        return right(
            f"On both models your function finds the peak, {_listed(wanted)}, but for a loss or two that a name keeps: "
            "4 bytes each."
        )
    for accidents in suspects():
        if _same(given, (accidents.trace(case).peak_bytes for case in CASES)):
            count = len(accidents.reasons)
            left = "" if count == 1 else f"{('Two', 'Three', 'Four')[count - 2]} accidents are left. "
            return wrong(left + " ".join(accidents.reasons))
    for reason, others in _other_numbers(traces).items():
        if _same(given, others):
            return wrong(reason)
    return wrong(_apart(given, traces))


def _other_numbers(traces: Sequence[Trace]) -> dict[str, list[int]]:
    """What an honest trace says that is not its peak."""
    return {
        "Those are the saved bytes, at the end of forward; the exercise asks for peak_bytes.": [
            trace.saved_bytes for trace in traces
        ],
        "You subtracted what was there when the meter started. Parameters and averages are alive at the peak as well: "
        "return meter.trace.peak_bytes.": [trace.peak_bytes - trace.start_bytes for trace in traces],
        "That is what the meter found at its start; the exercise asks for peak_bytes.": [
            trace.start_bytes for trace in traces
        ],
        "That is what is alive when the step is over; the exercise asks for peak_bytes.": [
            sum(trace.at_end.values()) for trace in traces
        ],
    }


def _apart(given: Sequence[int], traces: Sequence[Trace]) -> str:
    """By how much the first number that is wrong is wrong, in sizes that say what it may be."""
    number = next(n for n, trace in enumerate(traces) if abs(given[n] - trace.peak_bytes) > CRUMBS)
    trace, gap = traces[number], given[number] - traces[number].peak_bytes
    if gap == -4 * CASES[number].n_parameters:
        return (
            f"For {CASES[number]} you are {-gap} bytes low. AdamW keeps a step counter of 4 bytes for each parameter "
            f"tensor beside its averages: warm up with a whole step, and the meter finds them."
        )
    return (
        f"For {CASES[number]} you get {given[number]:,} bytes, and the peak is {trace.peak_bytes:,}: too "
        f"{'high' if gap > 0 else 'low'} by {abs(gap):,}, which is {abs(gap) / trace.at_peak['parameter']:.2f} times "
        f"the parameters or {abs(gap) / trace.saved_bytes:.2f} times the saved bytes."
    )


def _no_peak(value: object) -> str | None:
    """What to say to an answer that is no number of bytes."""
    if isinstance(value, Trace):
        return "You returned the whole Trace; the number asked for is its peak_bytes."
    if isinstance(value, MemoryMeter):
        return "You returned the whole MemoryMeter; the number asked for is its trace.peak_bytes."
    return no_count([value])


def _same(given: Iterable[int], wanted: Iterable[int]) -> bool:
    """Whether all numbers agree but for crumbs; measures no further than the first that does not."""
    return all(abs(one - other) <= CRUMBS for one, other in zip(given, wanted, strict=True))


def _listed(sizes: Sequence[int]) -> str:
    return " and ".join(f"{size:,} bytes" for size in sizes)
