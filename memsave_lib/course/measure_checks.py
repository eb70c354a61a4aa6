"""Check of the exercise of notebook 01 that mends a function which measures a training step with three accidents.

Follows :mod:`memsave_lib.course.checks`. What every accident would give, and several of them, is measured too
(:mod:`memsave_lib.course.accidents`), so the check can say what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn
from torch.optim import Optimizer

from memsave_lib.course.accidents import CASES, HONEST, suspects
from memsave_lib.course.checks import NOT_TRIED, Verdict, no_count, right, wrong
from memsave_lib.meter import MemoryMeter
from memsave_lib.trace import Trace

#: A loss that some name still holds, or a sum of detached ones, is alive indeed: a few numbers of 4 bytes each.
CRUMBS = 32


def check_honest_peak(function: Callable[[nn.Module, Optimizer, list[Tensor]], int]) -> Verdict:
    """The exercise: ``function(model, optimizer, batches)`` is the peak of a step in the middle of training.

    It gets small models whose gradients nobody cleared, and optimizers that have never stepped.
    """
    given: list[int] = []
    for case in CASES:
        model, optimizer, batches = case.fresh()
        try:
            value = function(model, optimizer, batches)
        except NotImplementedError:
            return NOT_TRIED
        if complaint := _no_peak(value):
            return wrong(complaint)
        if not _has_trained(model, optimizer):
            return wrong(
                "Your function has not trained the model that it was given. Use its arguments; this notebook's "
                "training_step uses the model and the optimizer outside."
            )
        given.append(int(value))
    return _judge(given)


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


def _has_trained(model: nn.Module, optimizer: Optimizer) -> bool:
    """Whether anything has happened to a fresh model: a step, a gradient, or a zero_grad() that took the old ones."""
    return bool(optimizer.state) or any(p.grad is None or bool(p.grad.any()) for p in model.parameters())


def _same(given: Iterable[int], wanted: Iterable[int]) -> bool:
    """Whether all numbers agree but for crumbs; measures no further than the first that does not."""
    return all(abs(one - other) <= CRUMBS for one, other in zip(given, wanted, strict=True))


def _listed(sizes: Sequence[int]) -> str:
    return " and ".join(f"{size:,} bytes" for size in sizes)
