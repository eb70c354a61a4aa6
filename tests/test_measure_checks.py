"""The exercise that mends a measurement: right answers in many forms, and what is said to each accident and pair."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.optim import Optimizer

import memsave_lib as ms
from memsave_lib.course import accidents, measure_checks
from memsave_lib.course.checks import NOT_FINISHED

Peak = Callable[[nn.Module, Optimizer, list[Tensor]], object]

STALE = "Gradients are alive when the measured step begins"
LATE = "zero_grad() comes only when the losses have been watched"
COLD = "The optimizer has no averages yet"
LIVE = "The sum of live losses keeps the graph of every batch"
LAST = "The last loss that was watched is still alive"
OUTPUT = "The last output that was watched is still alive"
NO_STEP = "optimizer.step() is not measured"
HELD_OUT = "A variable holds the model's output"
REASONS = (STALE, LATE, COLD, LIVE, LAST, OUTPUT, NO_STEP, HELD_OUT)


def loss_of(model: nn.Module, batch: Tensor) -> Tensor:
    return model(input_ids=batch, labels=batch).loss


def step(model: nn.Module, optimizer: Optimizer, batch: Tensor) -> None:
    loss_of(model, batch).backward()
    optimizer.step()


def measured(warm: bool = True, clear: bool = True, live: bool = False) -> Peak:
    """The function of the notebook with some of its accidents mended."""

    def function(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
        if warm:
            step(model, optimizer, batches[0])
        if clear:
            optimizer.zero_grad()
        with ms.MemoryMeter(model, optimizer) as meter:
            total = 0.0
            for batch in batches:
                total += loss_of(model, batch) if live else loss_of(model, batch).item()
            assert total < float("inf")
            step(model, optimizer, batches[0])
        return meter.trace.peak_bytes

    return function


def stub(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    raise NotImplementedError("find the bugs, then delete this line")


def test_the_stub_is_untried() -> None:
    verdict = measure_checks.check_honest_peak(stub)
    assert verdict.passed is None
    assert "not tried yet" in str(verdict).lower()


def test_pytorchs_own_error_goes_through() -> None:
    with pytest.raises(NotImplementedError, match="missing the required"):
        measure_checks.check_honest_peak(lambda model, optimizer, batches: nn.Module()(batches))


def test_an_answer_for_one_model_alone_is_unfinished() -> None:
    def in_part(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
        return measured()(model, optimizer, batches) if len(batches) == 2 else stub(model, optimizer, batches)

    assert measure_checks.check_honest_peak(in_part) is NOT_FINISHED


@pytest.mark.parametrize("answer", [stub, measured()], ids=["stub", "solution"])
def test_the_check_draws_no_random_numbers(answer: Peak) -> None:
    state = torch.get_rng_state()
    measure_checks.check_honest_peak(answer)
    assert torch.equal(torch.get_rng_state(), state)


def test_the_cases_know_their_parameters() -> None:
    for case in accidents.CASES:
        assert len(list(case.fresh()[0].parameters())) == case.n_parameters


def warm_loop(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    """Measures every step of a loop, and returns the last one."""
    for batch in batches:
        with ms.MemoryMeter(model, optimizer) as meter:
            optimizer.zero_grad()
            step(model, optimizer, batch)
    return meter.trace.peak_bytes


def without_watching(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> np.int64:
    """The optimizer steps on the gradients that are there; the meter is told of no optimizer; a numpy integer."""
    optimizer.step()
    optimizer.zero_grad()
    with ms.MemoryMeter(model) as meter:
        step(model, optimizer, batches[-1])
    return np.int64(meter.trace.peak_bytes)


def without_graphs(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    step(model, optimizer, batches[0])
    with ms.MemoryMeter(model, optimizer) as meter:
        optimizer.zero_grad()
        with torch.no_grad():
            sum(loss_of(model, batch).item() for batch in batches)
        step(model, optimizer, batches[0])
    return meter.trace.peak_bytes


def watched_before(let_go: bool = True, clear: bool = True, last: bool = False) -> Peak:
    """Live losses outside of the meter, before it, all of them or the last one."""

    def watched(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
        step(model, optimizer, batches[0])
        if clear:
            optimizer.zero_grad()
        losses = []
        for batch in batches:
            losses.append(loss_of(model, batch))
            if last:
                losses = losses[-1:]
        if let_go:
            losses = [loss.item() for loss in losses]
        with ms.MemoryMeter(model, optimizer) as meter:
            step(model, optimizer, batches[0])
        assert losses
        return meter.trace.peak_bytes

    return watched


def watched_after(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    """Live losses that come too late to disturb the step."""
    peak = measured()(model, optimizer, batches)
    total = sum(loss_of(model, batch) for batch in batches)
    assert total < float("inf")
    return peak


def warm_loss_in_a_variable(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    """Backward has let go of what its graph saved."""
    loss = loss_of(model, batches[0])
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    with ms.MemoryMeter(model, optimizer) as meter:
        step(model, optimizer, batches[0])
    assert loss.item() > 0
    return meter.trace.peak_bytes


@pytest.mark.parametrize(
    "answer",
    [
        measured(),
        warm_loop,
        without_watching,
        without_graphs,
        watched_before(),
        watched_after,
        warm_loss_in_a_variable,
    ],
    ids=lambda f: f.__name__,
)
def test_an_honest_peak_is_right_in_any_form(answer: Peak) -> None:
    verdict = measure_checks.check_honest_peak(answer)
    assert verdict.passed is True
    peaks = [accidents.HONEST.trace(case).peak_bytes for case in accidents.CASES]
    assert str(verdict).endswith(f"to the byte: {peaks[0]:,} bytes and {peaks[1]:,} bytes.")


def test_a_sum_of_detached_losses_is_right_but_for_its_four_bytes() -> None:
    def detached(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
        step(model, optimizer, batches[0])
        optimizer.zero_grad()
        with ms.MemoryMeter(model, optimizer) as meter:
            total = torch.zeros(())
            for batch in batches:
                total += loss_of(model, batch).detach()
            step(model, optimizer, batches[0])
        return meter.trace.peak_bytes

    verdict = measure_checks.check_honest_peak(detached)
    assert verdict.passed is True
    assert "4 bytes each" in str(verdict)


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        (measured(clear=False), [STALE]),
        (measured(warm=False), [COLD]),
        (measured(live=True), [LIVE]),
        (measured(clear=False, warm=False), [STALE, COLD]),
        (measured(clear=False, live=True), [STALE, LIVE]),
        (measured(warm=False, live=True), [COLD, LIVE]),
        (measured(clear=False, warm=False, live=True), [STALE, COLD, LIVE]),
    ],
    ids=["stale", "cold", "live", "stale, cold", "stale, live", "cold, live", "the notebook's"],
)
def test_the_check_names_every_accident_that_is_left(answer: Peak, left: list[str]) -> None:
    assert_left(answer, left)


def assert_left(answer: Peak, left: list[str]) -> None:
    verdict = measure_checks.check_honest_peak(answer)
    assert verdict.passed is False
    assert [reason for reason in REASONS if reason in str(verdict)] == [r for r in REASONS if r in left]
    counts = {1: "Not yet. ", 2: "Not yet. Two accidents are left. ", 3: "Not yet. Three accidents are left. "}
    assert str(verdict).startswith(counts[len(left)])


def kept_as_zeros(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    step(model, optimizer, batches[0])
    optimizer.zero_grad(set_to_none=False)
    with ms.MemoryMeter(model, optimizer) as meter:
        step(model, optimizer, batches[0])
    return meter.trace.peak_bytes


def cleared_late(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    step(model, optimizer, batches[0])
    with ms.MemoryMeter(model, optimizer) as meter:
        sum(loss_of(model, batch).item() for batch in batches)
        optimizer.zero_grad()
        step(model, optimizer, batches[0])
    return meter.trace.peak_bytes


def without_the_optimizer(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    step(model, optimizer, batches[0])
    optimizer.zero_grad()
    with ms.MemoryMeter(model, optimizer) as meter:
        loss_of(model, batches[0]).backward()
    return meter.trace.peak_bytes


def loss_in_a_variable(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    step(model, optimizer, batches[0])
    optimizer.zero_grad()
    with ms.MemoryMeter(model, optimizer) as meter:
        total = 0.0
        for batch in batches:
            loss = loss_of(model, batch)
            total += loss.item()
        step(model, optimizer, batches[0])
    del loss
    return meter.trace.peak_bytes


def loss_overwritten(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    step(model, optimizer, batches[0])
    optimizer.zero_grad()
    with ms.MemoryMeter(model, optimizer) as meter:
        total = 0.0
        for batch in batches:
            loss = loss_of(model, batch)
            total += loss.item()
        loss = loss_of(model, batches[0])
        loss.backward()
        optimizer.step()
    return meter.trace.peak_bytes


def output_in_a_variable(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    step(model, optimizer, batches[0])
    optimizer.zero_grad()
    with ms.MemoryMeter(model, optimizer) as meter:
        total = 0.0
        for batch in batches:
            out = model(input_ids=batch, labels=batch)
            total += out.loss.item()
        step(model, optimizer, batches[0])
    del out
    return meter.trace.peak_bytes


def output_overwritten(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    step(model, optimizer, batches[0])
    optimizer.zero_grad()
    with ms.MemoryMeter(model, optimizer) as meter:
        total = 0.0
        for batch in batches:
            out = model(input_ids=batch, labels=batch)
            total += out.loss.item()
        out = model(input_ids=batches[0], labels=batches[0])
        out.loss.backward()
        optimizer.step()
    return meter.trace.peak_bytes


def output_of_the_step(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    step(model, optimizer, batches[0])
    optimizer.zero_grad()
    with ms.MemoryMeter(model, optimizer) as meter:
        out = model(input_ids=batches[0], labels=batches[0])
        out.loss.backward()
        optimizer.step()
    return meter.trace.peak_bytes


@pytest.mark.parametrize(
    ("answer", "left"),
    [
        (kept_as_zeros, [STALE]),
        (cleared_late, [LATE]),
        (without_the_optimizer, [NO_STEP]),
        (loss_in_a_variable, [LAST]),
        (loss_overwritten, [LAST]),
        (output_in_a_variable, [OUTPUT]),
        (output_overwritten, [OUTPUT, HELD_OUT]),
        (output_of_the_step, [HELD_OUT]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_what_happens_in_mending_is_named_too(answer: Peak, left: list[str]) -> None:
    assert_left(answer, left)


BEFORE = "Graphs of losses from before the meter are still alive"


@pytest.mark.parametrize("last", [False, True], ids=["all", "the last"])
def test_live_losses_from_before_the_meter_are_found(last: bool) -> None:
    """The meter finds the honest peak: these were made before it started."""
    verdict = measure_checks.check_honest_peak(watched_before(let_go=False, last=last))
    assert verdict.passed is False
    assert str(verdict).startswith(f"Not yet. {BEFORE}")


def test_what_the_meter_sees_is_named_before_what_it_cannot() -> None:
    verdict = measure_checks.check_honest_peak(watched_before(let_go=False, clear=False))
    assert verdict.passed is False
    assert str(verdict).startswith(f"Not yet. {STALE}") and BEFORE in str(verdict)


def backward_in_watching(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    step(model, optimizer, batches[0])
    optimizer.zero_grad()
    with ms.MemoryMeter(model, optimizer) as meter:
        for batch in batches:
            loss_of(model, batch).backward()
        step(model, optimizer, batches[0])
    return meter.trace.peak_bytes


@pytest.mark.parametrize("answer", [kept_as_zeros, backward_in_watching], ids=lambda f: f.__name__)
def test_whoever_has_called_zero_grad_hears_where_else_gradients_come_from(answer: Peak) -> None:
    text = str(measure_checks.check_honest_peak(answer))
    assert "zeros (set_to_none=False)" in text and "a backward in the watching loop" in text


def cold_with_averages(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    """Adds the averages by hand to a peak without them."""
    optimizer.zero_grad()
    with ms.MemoryMeter(model, optimizer) as meter:
        loss_of(model, batches[0]).backward()
    return meter.trace.peak_bytes + 2 * sum(p.nbytes for p in model.parameters())


def forward_only(clear: bool) -> Peak:
    def function(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
        if clear:
            optimizer.zero_grad()
        with ms.MemoryMeter(model, optimizer) as meter:
            loss_of(model, batches[0])
        return meter.trace.peak_bytes

    return function


def reads(read: Callable[[ms.Trace], object]) -> Peak:
    """An honest measurement of which something else is returned."""

    def function(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> object:
        step(model, optimizer, batches[0])
        optimizer.zero_grad()
        with ms.MemoryMeter(model, optimizer) as meter:
            step(model, optimizer, batches[0])
        return read(meter.trace)

    return function


def the_meter(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> ms.MemoryMeter:
    with ms.MemoryMeter(model, optimizer) as meter:
        step(model, optimizer, batches[0])
    return meter


def nothing_of_its_own(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
    """Measures a model of its own, as the notebook's training_step does."""
    return measured()(*accidents.CASES[0].fresh())


OTHER_ANSWERS: dict[str, Peak] = {
    "You returned the whole Trace; the number asked for is its peak_bytes.": reads(lambda trace: trace),
    "You returned the whole MemoryMeter; the number asked for is its trace.peak_bytes.": the_meter,
    "returned None (NoneType): end it with return and the number.": reads(lambda trace: None),
    "Divide with // if you divide": reads(lambda trace: float(trace.peak_bytes)),
    "an int, and your function returned 2.6": reads(lambda trace: trace.peak_bytes / 2**20),
    "Those are the saved bytes": reads(lambda trace: trace.saved_bytes),
    "You subtracted what was there": reads(lambda trace: trace.peak_bytes - trace.start_bytes),
    "That is what the meter found at its start": reads(lambda trace: trace.start_bytes),
    "That is what is alive when the step is over": reads(lambda trace: sum(trace.at_end.values())),
    "too high by 1,000, which is 0.00 times the parameters or": reads(lambda trace: trace.peak_bytes + 1000),
    "too low by 2,819,395, which is 8.10 times the parameters or 2.25 times the saved bytes.": reads(lambda trace: 5),
    "has not trained the model that it was given": nothing_of_its_own,
    "runs the model forward only: a training step is": forward_only(clear=False),
    "runs the model forward only": forward_only(clear=True),
    "you are 64 bytes low. AdamW keeps a step counter of 4 bytes for each": cold_with_averages,
}


@pytest.mark.parametrize(("reason", "answer"), OTHER_ANSWERS.items(), ids=OTHER_ANSWERS)
def test_another_answer_gets_a_sentence(reason: str, answer: Peak) -> None:
    verdict = measure_checks.check_honest_peak(answer)
    assert verdict.passed is False
    assert reason in str(verdict)


def test_a_constant_that_fits_one_model_is_not_enough() -> None:
    peak = accidents.HONEST.trace(accidents.CASES[0]).peak_bytes
    assert measure_checks.check_honest_peak(reads(lambda trace: peak)).passed is False


def test_no_two_suspects_measure_the_same() -> None:
    """Else a diagnosis could be another's; and crumbs, which count as equal, must not bridge the gap."""
    found = sorted(
        tuple(suspect.trace(case).peak_bytes for case in accidents.CASES)
        for suspect in (accidents.HONEST, *accidents.suspects())
    )
    for one, other in pairwise(found):
        assert max(abs(a - b) for a, b in zip(one, other, strict=True)) > 2 * measure_checks.CRUMBS


def test_the_peaks_are_where_the_cases_say() -> None:
    at_loss, at_step = (accidents.HONEST.trace(case).peak_at for case in accidents.CASES)
    assert (at_loss.phase, at_loss.op) == ("backward", "_log_softmax_backward_data")
    assert at_step.phase == "optimizer"


def test_an_error_in_the_learners_function_is_the_learners_to_read() -> None:
    def broken(model: nn.Module, optimizer: Optimizer, batches: list[Tensor]) -> int:
        return undefined_name  # noqa: F821

    with pytest.raises(NameError, match="undefined_name"):
        measure_checks.check_honest_peak(broken)
