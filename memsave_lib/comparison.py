"""Strategies side by side: first equal results, then bytes, FLOPs and seconds."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from memsave_lib.flops import count_flops
from memsave_lib.meter import MemoryMeter
from memsave_lib.placement import check_strategy
from memsave_lib.runner import apply
from memsave_lib.strategies import KeepAll, Strategy
from memsave_lib.trace import Trace

if TYPE_CHECKING:
    import pandas as pd

    from memsave_lib.plots import Shown

Step = Callable[[], Tensor]


@dataclass(frozen=True)
class Measurement:
    """One strategy on one model."""

    strategy: Strategy
    label: str
    peak_bytes: int  # largest number of live bytes during the step; trace.peak_at says where
    saved_bytes: int  # held by autograd at the end of forward
    step_flops: int
    step_seconds: float | None  # median of the repeats; None when there were none
    trace: Trace
    equal_gradients: bool  # loss, every gradient and the random state afterwards are bit-equal to keep-all's


@dataclass(frozen=True)
class Comparison:
    """Several strategies on equal models, the reference first."""

    measurements: tuple[Measurement, ...]

    def frame(self) -> pd.DataFrame:
        """One row a strategy: peak and saved bytes, FLOPs and seconds; the ratios are to the first row."""
        import pandas as pd

        first = self.measurements[0]
        return pd.DataFrame(
            [
                {
                    "strategy": one.label,
                    "equal": one.equal_gradients,
                    "peak_bytes": one.peak_bytes,
                    "peak_at": str(one.trace.peak_at),
                    "saved_bytes": one.saved_bytes,
                    "saved_ratio": one.saved_bytes / first.saved_bytes if first.saved_bytes else None,
                    "step_flops": one.step_flops,
                    "flops_ratio": one.step_flops / first.step_flops if first.step_flops else None,
                    "step_seconds": one.step_seconds,
                }
                for one in self.measurements
            ]
        ).set_index("strategy")

    def plot(self) -> Shown:
        """Saved bytes against FLOPs, one point a strategy."""
        from memsave_lib.plots import trade_off

        return trade_off(self.measurements)


def measure(
    step: Step, model: nn.Module, strategy: Strategy, repeats: int = 5, blocks: Sequence[nn.Module] | None = None
) -> Measurement:
    """Run ``step()`` under a strategy: is it right, what does it hold, what does it cost?

    Loss, gradients and random state are compared with those of a run that keeps all, from the same start. The model's
    own gradients, buffers and the random state are put back afterwards. Gradients of inputs are the caller's affair.

    Args:
        step: forward and backward of ``model``; returns the loss and leaves parameters and gradients alone otherwise.
        strategy: what to apply.
        repeats: how many runs to time, without the meter; 0 for none.
        blocks: as in :func:`memsave_lib.apply`.

    Raises:
        ValueError: ``step()`` changes parameters (an optimizer inside it, say), or computes no gradients.
    """
    return _measure(step, model, strategy, repeats, blocks)[0]


def _measure(
    step: Step,
    model: nn.Module,
    strategy: Strategy,
    repeats: int,
    blocks: Sequence[nn.Module] | None = None,
    expected: _Outcome | None = None,
) -> tuple[Measurement, _Outcome]:
    """The measurement, and what keep-all left behind: ``expected`` where an equal model has shown it already."""
    check_strategy(strategy)
    if isinstance(repeats, bool) or not isinstance(repeats, int) or repeats < 0:
        raise ValueError(f"repeats is a whole number of at least 0, got {repeats!r}")
    with start_over(model) as restart:
        if expected is None:
            with apply(model, KeepAll(), blocks=blocks):
                expected = _outcome(step, model, restart)
        with apply(model, strategy, blocks=blocks):
            restart()
            with MemoryMeter(model) as meter:
                loss = step()
            found = _Outcome.of(loss, model)
            del loss
            restart()
            step_flops = count_flops(step)
            seconds = [step_seconds(step, restart) for _ in range(repeats)]
    trace = meter.trace
    measurement = Measurement(
        strategy=strategy,
        label=strategy.label,
        peak_bytes=trace.peak_bytes,
        saved_bytes=trace.saved_bytes,
        step_flops=step_flops,
        step_seconds=statistics.median(seconds) if seconds else None,
        trace=trace,
        equal_gradients=found.equals(expected),
    )
    return measurement, expected


def compare(
    make_step: Callable[[], tuple[nn.Module, Step]],
    strategies: Sequence[Strategy] | Mapping[str, Strategy],
    repeats: int = 5,
) -> Comparison:
    """Measure several strategies, each on a fresh model from the same random state, against one run that keeps all.

    Args:
        make_step: builds a model and its ``step()``, as :func:`measure` wants them.
        strategies: the first one is what ratios refer to; a mapping gives them labels of your own.
        repeats: timed runs of each.
    """
    if isinstance(strategies, Mapping):
        named = dict(strategies)
    else:
        named = {strategy.label: strategy for strategy in map(check_strategy, strategies)}
        if len(named) < len(strategies):
            raise ValueError("two strategies have the same label; name them with a mapping: {label: strategy, ...}")
    if not named:
        raise ValueError("strategies is empty: name at least one, KeepAll() for instance")
    start = torch.get_rng_state()
    measurements: list[Measurement] = []
    expected: _Outcome | None = None
    for label, strategy in named.items():
        torch.set_rng_state(start)
        model, step = make_step()
        measurement, expected = _measure(step, model, strategy, repeats, expected=expected)
        measurements.append(Measurement(**{**vars(measurement), "label": label}))
        del model, step
    return Comparison(tuple(measurements))


@dataclass(frozen=True)
class _Outcome:
    """What a step leaves behind; strategies must not change it by a single bit."""

    loss: Tensor
    gradients: dict[str, Tensor | None]
    random_state: Tensor

    @classmethod
    def of(cls, loss: Any, model: nn.Module) -> _Outcome:
        if not isinstance(loss, Tensor):
            raise ValueError(f"step() must return the loss, a tensor; it returned {loss!r}")
        gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
        if all(gradient is None for gradient in gradients.values()):
            raise ValueError("step() left no gradients: it must run forward and backward")
        return cls(loss.detach(), gradients, torch.get_rng_state())

    def equals(self, other: _Outcome) -> bool:
        return (
            _same_bits(self.loss, other.loss)
            and all(_same_bits(gradient, other.gradients[name]) for name, gradient in self.gradients.items())
            and torch.equal(self.random_state, other.random_state)
        )


def _same_bits(ours: Tensor | None, theirs: Tensor | None) -> bool:
    if ours is None or theirs is None:
        return ours is theirs
    return torch.allclose(ours, theirs, rtol=0.0, atol=0.0, equal_nan=True)


def _outcome(step: Step, model: nn.Module, restart: Callable[[], None]) -> _Outcome:
    restart()
    versions = [parameter._version for parameter in model.parameters()]
    outcome = _Outcome.of(step(), model)
    if versions != [parameter._version for parameter in model.parameters()]:
        raise ValueError("step() changed the model's parameters; it must be forward and backward only, no optimizer")
    return outcome


def step_seconds(step: Step, restart: Callable[[], None]) -> float:
    restart()
    begin = time.perf_counter()
    step()
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter() - begin


@contextmanager
def start_over(model: nn.Module) -> Iterator[Callable[[], None]]:
    """A function that puts gradients, buffers and the random state back to the start of every run."""
    gradients = [(parameter, parameter.grad) for parameter in model.parameters()]
    buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
    cpu_state = torch.get_rng_state()
    cuda_states = torch.cuda.get_rng_state_all() if torch.cuda.is_available() else []

    def restart() -> None:
        for parameter, _ in gradients:
            parameter.grad = None
        with torch.no_grad():
            for buffer, value in buffers:
                buffer.copy_(value)
        torch.set_rng_state(cpu_state)
        if cuda_states:
            torch.cuda.set_rng_state_all(cuda_states)

    try:
        yield restart
    finally:
        restart()
        for parameter, gradient in gradients:
            parameter.grad = gradient
