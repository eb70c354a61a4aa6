"""The meter against witnesses of its own: PyTorch's tracker, the allocator's events, saved-tensor hooks, arithmetic."""

from __future__ import annotations

import contextlib
import gc
import threading
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed._tools.mem_tracker import MemTracker
from torch.nn.modules import module as module_hooks
from torch.utils.checkpoint import checkpoint

import memsave_lib as ms
from equality import (
    INSIDE_BLOCKS,
    RECOMPUTING,
    STRATEGIES,
    TinyLanguageModel,
    build_gpt2,
    build_llama,
    build_tiny,
    gradients,
    label,
    outcome,
)
from helpers import saved_bytes
from memsave_lib.log import Log
from memsave_lib.meter import MemoryMeter, Stopped
from memsave_lib.models import hugging_face_checkpointing
from memsave_lib.trace import CATEGORIES, PHASES, Place, Trace

EVERY = (*STRATEGIES, *INSIDE_BLOCKS)
OPTIMIZERS: dict[str, Callable] = {
    "none": lambda parameters: None,
    "sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "adamw-foreach": lambda parameters: torch.optim.AdamW(parameters, foreach=True),
    "adamw-loop": lambda parameters: torch.optim.AdamW(parameters, foreach=False),
    "adamw-fused": lambda parameters: torch.optim.AdamW(parameters, fused=True),
}


class Training:
    """A model, its optimizer, and a step."""

    def __init__(self, optimizer: str = "none", attention: str = "math", seq_len: int = 5, **options: object):
        torch.manual_seed(0)
        self.model = TinyLanguageModel(attention=attention, **options)
        self.optimizer = OPTIMIZERS[optimizer](list(self.model.parameters()))
        self.tokens = torch.randint(11, (2, seq_len))

    def step(self) -> Tensor:
        logits = self.model(self.tokens)
        loss = nn.functional.cross_entropy(logits.flatten(0, 1), self.tokens.flatten())
        del logits
        loss.backward()
        if self.optimizer is not None:
            self.optimizer.step()
            self.optimizer.zero_grad()
        return loss

    def metered(self, strategy: ms.Strategy | None = None, **options: object) -> Trace:
        with applied(self.model, strategy), MemoryMeter(self.model, self.optimizer, **options) as meter:
            self.step()
        return meter.trace


def applied(model: nn.Module, strategy: ms.Strategy | None) -> contextlib.AbstractContextManager:
    return contextlib.nullcontext() if strategy is None else ms.apply(model, strategy)


def nbytes(*tensors: Tensor) -> int:
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


# Witnesses


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("strategy", [None, ms.FullCheckpoint(), ms.Chunked(2), ms.Recursive()], ids=label)
def test_the_peak_is_that_of_pytorchs_tracker(strategy, optimizer):
    """To the byte, on a training step with written-out attention; the optimizer's first step, which makes its state."""
    ours = Training(optimizer).metered(strategy)
    other = Training(optimizer)
    tracker = MemTracker()
    tracker.track_external(*(part for part in (other.model, other.optimizer, other.tokens) if part is not None))
    with applied(other.model, strategy), tracker:
        other.step()
    (snapshot,) = tracker.get_tracker_snapshot("peak").values()
    assert ours.peak_bytes == snapshot["Total"]


@pytest.mark.parametrize("optimizer", ["none", "sgd", "momentum"])
@pytest.mark.parametrize("variant", [{}, {"dropout": 0.5}, {"tied": True}])
def test_the_peak_is_that_of_the_allocator(variant, optimizer):
    """Written-out attention takes no workspace, so the profiler's allocation events show the same bytes."""
    trace = Training(optimizer, **variant).metered(audit=True)
    assert trace.start_bytes + trace.audit.peak_bytes == trace.peak_bytes
    assert trace.explained_share == 1.0


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name.startswith("adamw")])
@pytest.mark.parametrize("strategy", [None, ms.FullCheckpoint()], ids=label)
def test_the_audit_of_adam_differs_by_its_numbers_only(strategy, optimizer):
    """AdamW's kernels take a few numbers of eight bytes or less within themselves."""
    trace = Training(optimizer).metered(strategy, audit=True)
    assert 0 <= trace.start_bytes + trace.audit.peak_bytes - trace.peak_bytes <= 32


def test_the_audit_shows_what_a_kernel_takes_and_returns_within_itself():
    stack, x = ms.BlockStack(2, 64, 2), torch.randn(1, 512, 64, requires_grad=True)
    with MemoryMeter(stack, audit=True) as meter:
        stack(x).sum().backward()
    trace = meter.trace
    assert 0.5 < trace.explained_share < 1
    assert trace.start_bytes + trace.audit.peak_bytes > trace.peak_bytes
    assert len(trace.audit.seconds) == len(trace.audit.live_bytes) > 100
    assert (trace.audit.seconds[1:] >= trace.audit.seconds[:-1]).all()


@pytest.mark.filterwarnings("error:.*data pointer of FakeTensor")
@pytest.mark.parametrize("attention", ["sdpa", "math"])
@pytest.mark.parametrize("strategy", [ms.KeepAll(), ms.Chunked(3), ms.Recursive(), ms.SelectiveOps()], ids=label)
def test_a_fake_step_takes_the_bytes_of_a_real_one(strategy, attention):
    """Nothing is allocated under FakeTensorMode; runner and meter do the same work."""
    traces = []
    for mode in (FakeTensorMode(), contextlib.nullcontext()):
        with mode:
            traces.append(Training("momentum", attention=attention).metered(strategy))
    fake, real = traces
    assert list(fake.frame()["total"]) == list(real.frame()["total"])
    assert fake.at_peak == real.at_peak and str(fake.peak_at) == str(real.peak_at)
    assert fake.saved_bytes == real.saved_bytes


def test_no_audit_no_share():
    trace = Training().metered()
    assert trace.audit is None and trace.explained_share is None


@pytest.mark.parametrize("early", [True, False])
def test_the_audit_leaves_strangers_out(early):
    """Blocks that were there before the step and die during it, without ever taking part in it."""
    training, strangers = Training(), [torch.empty(1000) for _ in range(50)]

    def step():
        if early:
            strangers.clear()
        training.step()
        strangers.clear()

    with MemoryMeter(training.model, audit=True) as meter:
        step()
    assert meter.trace.explained_share == 1.0


def test_the_audit_knows_a_stranger_whose_place_was_taken_by_its_size():
    """A block unknown to the meter dies, and a tensor that the meter learns of only later gets its address."""
    log = Log(None, None, None, audit=True)
    log._initial_blocks[64] = 8
    audit = log._audit([(0, 64, -16), (1, 64, 8), (2, 128, 4), (3, 64, -8)])
    assert audit.peak_bytes == 12 and list(audit.live_bytes) == [8, 12, 4]


@pytest.mark.parametrize("build", [build_tiny, build_gpt2, build_llama], ids=lambda f: f.__name__)
@pytest.mark.parametrize("dropout", [0.0, 0.5])
@pytest.mark.parametrize("strategy", STRATEGIES, ids=label)
def test_saved_bytes_are_those_of_independent_hooks(strategy, dropout, build):
    torch.manual_seed(0)
    model, step = build(dropout=dropout)
    losses = []
    with ms.apply(model, strategy):
        # Half of a step: what the loss still holds at the end of forward.
        expected = saved_bytes(lambda: losses.append(forward_only(model)), model)
        losses.clear()
        with MemoryMeter(model) as meter:
            forward_only(model).backward()
    assert meter.trace.saved_bytes == expected


def forward_only(model: nn.Module) -> Tensor:
    tokens = torch.arange(10).view(2, 5)
    if isinstance(model, TinyLanguageModel):
        return nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
    return model(input_ids=tokens, labels=tokens).loss


@pytest.mark.parametrize("strategy", EVERY, ids=label)
def test_metering_changes_nothing(strategy):
    def metered():
        model, step = build_tiny(dropout=0.5)

        def run() -> Tensor:
            with MemoryMeter(model):
                return step()

        return model, run

    plain, ours = outcome(lambda: build_tiny(dropout=0.5), strategy), outcome(metered, strategy)
    assert torch.equal(plain.loss, ours.loss) and torch.equal(plain.random_state, ours.random_state)
    assert all(torch.equal(ours.gradients[name], gradient) for name, gradient in plain.gradients.items())


# A step known by heart


def test_every_category_of_a_small_step():
    weight, bias = nn.Parameter(torch.randn(4, 4)), nn.Parameter(torch.randn(4))
    x, shift = torch.randn(2, 4), torch.randn(2, 4)
    with MemoryMeter() as meter:
        h = torch.addmm(bias, x, weight)  # x is saved, for the weight's gradient
        y = (h + shift).tanh()  # tanh saves its result; the sum dies at once
        del h
        loss = y.sum()
        loss.backward()
    trace = meter.trace
    assert trace.saved_bytes == nbytes(x, y) == 64
    at_end = {
        "parameter": 64 + 16,
        "gradient": 64 + 16,
        "activation": nbytes(x, y),
        "input": nbytes(shift),
        "output": nbytes(loss),
    }
    assert trace.at_end == dict.fromkeys(CATEGORIES, 0) | at_end
    assert trace.start_bytes == 64 + 16 + nbytes(x, shift)
    # Highest when addmm's result, the sum and tanh's result are alive; all of backward stays below that.
    frame = trace.frame()
    assert list(frame["total"][:4]) == [144 + 32, 144 + 64, 144 + 96, 144 + 64]
    assert list(frame["op"][:4]) == ["addmm", "add", "tanh", "tanh"]
    assert list(frame["phase"].unique()) == ["forward", "backward"]


def test_tensors_made_from_numbers_are_born_where_they_are_made():
    with MemoryMeter() as meter:
        x = torch.tensor([1.0, 2.0, 3.0])
        y = x * x
    assert meter.trace.start_bytes == 0
    assert meter.trace.peak_bytes == nbytes(x, y)


def test_views_count_once_and_expansions_what_they_occupy():
    """DeepSpeed#8387: storages, not sizes of views."""
    with MemoryMeter() as meter:
        base = torch.zeros(10, 10)
        views = [base[2:], base.t(), base.view(-1)[::3], torch.ones(1).expand(1000), base.reshape(100)]
        del base
    assert meter.trace.peak_bytes == meter.trace.at_end["output"] == 400 + 4
    del views


def test_tuples_and_lists_count_all_of_their_tensors():
    """llm-compressor#3158."""
    x = torch.randn(6, 5)
    with MemoryMeter() as meter:
        values, indices = x.topk(3)
        parts = torch._foreach_add([values, values], 1.0)
        halves = torch.split(x, 3)
        frequencies = torch.linalg.svd(x)
    kept = (x, values, indices, *parts, *frequencies)
    assert sum(meter.trace.at_end.values()) == nbytes(*kept)
    del halves


def test_a_tensor_that_grows_or_is_exchanged_is_counted_at_its_new_size():
    with MemoryMeter() as meter:
        x = torch.empty(4)
        x.resize_(100)
        grown = meter.live_bytes
        out = torch.empty(0)
        torch.add(torch.ones(50), 1, out=out)
        other = torch.zeros(7)
        x.set_(other)
        exchanged = meter.live_bytes
    assert grown == 400
    assert exchanged == nbytes(out, other)
    assert meter.trace.at_end["output"] == nbytes(out, other)


class KeepsOnContext(torch.autograd.Function):
    """Saves nothing the official way; DeepSpeed's checkpointing keeps its boundaries like this."""

    @staticmethod
    def forward(ctx, x, release):
        ctx.kept, ctx.release = x.exp(), release
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        result = gradient * ctx.kept
        if ctx.release:
            del ctx.kept
        return result, None


@pytest.mark.parametrize("release", [True, False])
def test_a_tensor_kept_on_the_context(release):
    x = torch.randn(100, requires_grad=True)
    with MemoryMeter() as meter:
        loss = KeepsOnContext.apply(x, release).sum()
        after_forward = meter.live_bytes
        loss.backward()
    trace = meter.trace
    assert trace.saved_bytes == 0
    assert after_forward == nbytes(x, loss) + 400  # forward's result is gone: sum() needs only its shape
    kept = "activation" if release else "output"  # backward let go of it, or the graph still holds it
    # The loss and, until backward() returns, the gradient of one that it starts with are output too.
    assert trace.peak_of(kept) == 400 + (0 if release else 2 * nbytes(loss))
    assert trace.at_end["gradient"] == 400


def test_logits_that_the_caller_keeps_are_output():
    training = Training()
    kept = []
    training.model.register_forward_hook(lambda module, inputs, logits: kept.append(logits.detach().clone()))
    trace = training.metered()
    assert trace.at_end["output"] == nbytes(*kept)


def test_shared_weights_count_once():
    """accelerate#389: a tied head, a block used twice."""
    training = Training(tied=True)
    model = training.model
    model.stack.blocks[2] = model.stack.blocks[0]
    trace = training.metered()
    own = sum(parameter.nbytes for parameter in model.parameters())
    assert (
        own < sum(p.nbytes for block in model.stack.blocks for p in block.parameters()) + 2 * model.head.weight.nbytes
    )
    assert trace.at_end["parameter"] == trace.at_end["gradient"] == own


@pytest.mark.parametrize("optimizer", [name for name in OPTIMIZERS if name.startswith("adamw")])
def test_adam_counts_two_states_a_parameter_and_a_step_count_each(optimizer):
    training = Training(optimizer)
    parameters = list(training.model.parameters())
    own = sum(parameter.nbytes for parameter in parameters)
    for known in (False, True):
        with MemoryMeter(training.model, training.optimizer if known else None) as meter:
            training.step()
        end = meter.trace.at_end
        assert end["optimizer"] == 2 * own + 4 * len(parameters)
        assert (end["gradient"], end["temporary"], end["parameter"]) == (0, 0, own)
        assert meter.trace.peak_of("gradient") == own
        assert (meter.trace.start_bytes > 3 * own) == known
        # The fused kernel works in place: once the state is there, nothing appears or vanishes.
        assert ("optimizer" in set(meter.trace.frame()["phase"])) == (not known or optimizer != "adamw-fused")


def test_gradients_that_are_there_already_and_those_that_accumulate():
    training = Training()
    own = sum(parameter.nbytes for parameter in training.model.parameters())
    training.step()
    before = gradients(training.model)
    trace = training.metered()
    assert trace.at_end["gradient"] == trace.peak_of("gradient") == own
    assert trace.start_bytes >= 2 * own
    assert all(torch.equal(p.grad, 2 * before[name]) for name, p in training.model.named_parameters())


def test_gradients_that_go_before_anything_touches_them_were_there():
    training = Training()
    training.step()
    own = sum(parameter.nbytes for parameter in training.model.parameters())
    with MemoryMeter(training.model) as meter:
        training.model.zero_grad()
    assert meter.trace.start_bytes == 2 * own
    assert (meter.trace.peak_of("gradient"), meter.trace.at_end["gradient"]) == (own, 0)


def test_gradients_that_the_caller_replaces_stay_gradients():
    training = Training()
    optimizer = torch.optim.SGD(training.model.parameters(), lr=0.1)
    with MemoryMeter(training.model) as meter:
        training.step()
        for parameter in training.model.parameters():
            parameter.grad = parameter.grad * 0.5
        optimizer.step()
        optimizer.zero_grad()
    own = sum(parameter.nbytes for parameter in training.model.parameters())
    assert own < meter.trace.peak_of("gradient") <= own + max(p.nbytes for p in training.model.parameters())
    assert meter.trace.peak_of("temporary", "output") < own / 2
    assert meter.trace.at_end["gradient"] == 0


def test_buffers_are_named():
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    with MemoryMeter(model) as meter:
        model(torch.randn(8, 4)).sum().backward()
    assert meter.trace.at_end["buffer"] == sum(buffer.nbytes for buffer in model.buffers()) == 4 * 8 + 8


# Several steps, several threads


@pytest.mark.parametrize("strategy", [None, ms.FullCheckpoint(), ms.Chunked(2)], ids=label)
def test_two_steps_in_one_meter_are_two_steps_one_after_the_other(strategy):
    alone = Training("adamw-foreach")
    first, second = alone.metered(strategy), alone.metered(strategy)
    both = Training("adamw-foreach")
    with applied(both.model, strategy), MemoryMeter(both.model, both.optimizer) as meter:
        both.step()
        after_first = len(meter.progress(max_points=10**9))
        both.step()
    trace = meter.trace
    totals = trace.frame()["total"]
    assert totals[:after_first].max() == first.peak_bytes
    assert totals[after_first:].max() == second.peak_bytes == trace.peak_bytes
    assert trace.saved_bytes == first.saved_bytes == second.saved_bytes
    for category in CATEGORIES:
        assert trace.at_end[category] == second.at_end[category], category
        assert trace.peak_of(category) == max(first.peak_of(category), second.peak_of(category)), category


def test_steps_stay_flat_without_the_garbage_collector():
    """pytorch#115255, pytorch#84413."""
    for strategy in (None, ms.FullCheckpoint(), ms.Chunked(2), ms.Recursive(), ms.SelectiveOps()):
        training, levels = Training("adamw-foreach"), []
        gc.collect()
        gc.disable()
        try:
            with applied(training.model, strategy), MemoryMeter(training.model, training.optimizer) as meter:
                for _ in range(5):
                    training.step()
                    levels.append(meter.live_bytes)
        finally:
            gc.enable()
        assert len(set(levels)) == 1, (strategy, levels)


@pytest.mark.parametrize("strategy", [None, *EVERY], ids=label)
def test_nothing_of_a_step_outlives_it(strategy):
    """fairscale#948, pytorch#115255: activations die with the graph, under the meter as without."""
    training, seen = Training(), []

    def note(module, inputs, output):
        seen.append(weakref.ref(output.untyped_storage()))

    for module in training.model.modules():
        module.register_forward_hook(note)
    gc.collect()
    gc.disable()
    try:
        with applied(training.model, strategy), MemoryMeter(training.model) as meter:
            training.step()
            assert len(seen) > 20 and not [ref for ref in seen if ref() is not None]
        alive = weakref.ref(meter._log)
        del meter
        assert alive() is None
    finally:
        gc.enable()


def read_in_mid_step(training: Training, meter: MemoryMeter, read: Callable[[], Any]) -> Any:
    """What another thread reads while the third block has just run; the step goes on when it has."""
    reached, answered, found = threading.Event(), threading.Event(), []

    def reader():
        assert reached.wait(timeout=30)
        found.append(read())
        answered.set()

    def pause(module, inputs, output):
        reached.set()
        assert answered.wait(timeout=30)

    training.model.stack.blocks[2].register_forward_hook(pause)
    thread = threading.Thread(target=reader)
    thread.start()
    with meter:
        training.step()
    thread.join()
    return found[0]


def test_live_bytes_and_progress_may_be_read_from_another_thread():
    training, here = Training(), []
    meter = MemoryMeter(training.model)
    assert meter.live_bytes == 0 and meter.progress() == []
    training.model.stack.blocks[2].register_forward_hook(lambda *called: here.append(meter.live_bytes))
    live, progress = read_in_mid_step(training, meter, lambda: (meter.live_bytes, meter.progress(max_points=7)))
    assert live == here[0] > meter.trace.start_bytes
    assert 0 < len(progress) <= 7
    assert max(bytes_ for _, bytes_ in progress) <= meter.trace.peak_bytes
    assert max(bytes_ for _, bytes_ in meter.progress()) == meter.trace.peak_bytes


def test_so_far_in_mid_step_is_the_beginning_of_the_trace():
    training = Training()
    meter = MemoryMeter(training.model)
    assert meter.so_far().events == () and list(meter.so_far().live_bytes) == [0]
    mid, whole = read_in_mid_step(training, meter, meter.so_far), meter.trace
    count = len(mid.events)
    assert 0 < count < len(whole.events)
    assert all(early is final for early, final in zip(mid.events, whole.events, strict=False))
    # Tokens and parameters have been seen by then, so nothing is added to the first row later on.
    assert list(mid.live_bytes) == list(whole.live_bytes[: count + 1])
    assert mid.events[-1].block == 2 and mid.peak_bytes <= whole.peak_bytes
    assert {event.phase for event in mid.events} == {"forward"} and mid.saved_bytes == 0
    end = meter.so_far()
    assert list(end.events) == list(whole.events) and list(end.live_bytes) == list(whole.live_bytes)
    assert (end.saved_bytes, end.at_peak, end.peak_at) == (whole.saved_bytes, whole.at_peak, whole.peak_at)


@pytest.mark.parametrize("strategy", (None, *RECOMPUTING[:1]), ids=str)
def test_so_far_may_be_asked_for_again_and_again_while_the_step_goes_on(strategy):
    training = Training()
    training.step()  # from here on gradients are there, and no tensor is seen late
    meter, over, seen = MemoryMeter(training.model), threading.Event(), []

    def ask():
        while not over.is_set():
            seen.append(meter.so_far())

    def until_asked_once_more(module, inputs, output):
        before = len(seen)
        while thread.is_alive() and len(seen) < before + 2:
            pass

    for block in training.model.stack.blocks:
        block.register_forward_hook(until_asked_once_more)
    thread = threading.Thread(target=ask)
    thread.start()
    with applied(training.model, strategy), meter:
        training.step()
        training.step()
    over.set()
    thread.join()
    passed = list(meter.trace.live_bytes)
    known = {len(trace.events): trace for trace in seen if trace.events}
    assert len(known) >= 2 * len(training.model.stack.blocks)
    for count, trace in known.items():
        assert list(trace.live_bytes) == passed[: count + 1]


def test_a_tensor_that_was_there_and_grows_counts_its_growth_once():
    x = torch.ones(100)
    with MemoryMeter() as meter:
        y = x + 1
        x.resize_(1000)
        grown = meter.live_bytes
    assert grown == nbytes(x, y) == 4400
    assert list(meter.trace.live_bytes) == list(meter.so_far().live_bytes) == [400, 800, 4400]


def test_what_was_there_counts_from_the_beginning_once_it_has_been_seen():
    a, b = torch.ones(100), torch.ones(50)
    with MemoryMeter() as meter:
        y = a + 1
        assert list(meter.so_far().live_bytes) == [400, 800]
        z = b + y[:50]
        assert meter.live_bytes == nbytes(a, b, y, z)
    assert list(meter.trace.live_bytes) == [600, 1000, 1200]


def test_a_meter_sees_its_own_thread_only():
    def work(number: int, found: dict[int, Trace], barrier: threading.Barrier) -> None:
        training = Training(seq_len=4 + number)
        training.model.stack.blocks[1].register_forward_hook(lambda *_: (barrier.wait(timeout=30), None)[1])
        found[number] = training.metered()

    alone: dict[int, Trace] = {}
    for number in range(2):
        work(number, alone, threading.Barrier(1))
    together: dict[int, Trace] = {}
    barrier = threading.Barrier(2)
    threads = [threading.Thread(target=work, args=(number, together, barrier)) for number in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for number in range(2):
        assert list(together[number].frame()["total"]) == list(alone[number].frame()["total"])
        assert list(together[number].frame()["module"]) == list(alone[number].frame()["module"])


def test_a_storage_may_die_in_another_thread():
    """pytorch#84413: a garbage collection there must not turn the step's backward into forward."""
    garbage = []

    def die(gradient):
        thread = threading.Thread(target=garbage.clear)
        thread.start()
        thread.join()

    x = torch.randn(10, requires_grad=True)
    with MemoryMeter() as meter:
        garbage.append(torch.zeros(1000))
        y = x.exp()
        y.register_hook(die)
        y.exp().sum().backward()
    trace = meter.trace
    assert [phase for phase, _, _ in trace.phases][:2] == ["forward", "backward"]
    frame = trace.frame()
    (death,) = frame.index[frame["total"].diff() == -4000]
    assert frame["phase"][death] == "backward" and death < frame.index[frame["phase"] == "backward"][-1]
    assert [phase for phase, _, _ in trace.phases].count("backward") == 1
    assert sum(trace.at_end.values()) == nbytes(x, y, x.grad)


# Phases and modules


@pytest.mark.parametrize("reentrant", [True, False])
def test_somebody_elses_checkpoint_is_labelled_as_ours_is(reentrant):
    training = Training()
    ours = training.metered(ms.FullCheckpoint())
    theirs = Training()
    stack = theirs.model.stack

    def forward(x):
        for block in stack.blocks:
            x = checkpoint(block, x, use_reentrant=reentrant)
        return x

    stack.forward = forward
    theirs = theirs.metered()
    assert theirs.peak_of("recomputed") > 0
    assert {"recompute", "backward", "forward"} == set(theirs.frame()["phase"])
    if reentrant:  # it recomputes whole blocks, and releases them in another order
        assert theirs.peak_of("recomputed") >= ours.peak_of("recomputed")
        assert theirs.saved_bytes == ours.saved_bytes
        return
    assert list(theirs.frame()["total"]) == list(ours.frame()["total"])
    assert list(theirs.frame()["recomputed"]) == list(ours.frame()["recomputed"])
    assert list(theirs.frame()["phase"]) == list(ours.frame()["phase"])


@pytest.mark.parametrize("build", [build_gpt2, build_llama], ids=lambda f: f.__name__)
def test_hugging_faces_own_switch_is_labelled_and_holds_the_same_bytes(build):
    traces = []
    for own in (True, False):
        torch.manual_seed(0)
        model, _ = build()
        model.config.use_cache = False
        if own:
            hugging_face_checkpointing(model, on=True)
        with applied(model, None if own else ms.FullCheckpoint()), MemoryMeter(model) as meter:
            forward_only(model).backward()
        traces.append(meter.trace)
    own, ours = traces
    assert own.peak_bytes == ours.peak_bytes
    # Llama's blocks get position ids and two tables by name; Hugging Face's switch holds those where no hook sees them.
    by_name = 0 if build is build_gpt2 else 5 * 8 + 2 * (5 * 4) * 4
    assert own.saved_bytes + by_name == ours.saved_bytes
    assert own.peak_of("recomputed") == ours.peak_of("recomputed") > 0
    assert [phase for phase, _, _ in own.phases] == [phase for phase, _, _ in ours.phases]
    assert [phase for phase, _, _ in ours.phases].count("recompute") == 4


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("strategy", [None, *RECOMPUTING], ids=label)
def test_a_graph_of_the_gradients_is_no_recomputation(strategy):
    training = Training()
    embedded = training.model.embedding.weight

    def step():
        (gradient,) = torch.autograd.grad(training.model(training.tokens).sum(), embedded, create_graph=True)
        gradient.square().sum().backward()

    step()
    plain = gradients(training.model)
    training.model.zero_grad()
    with applied(training.model, strategy), MemoryMeter(training.model) as meter:
        step()
    for name, gradient in gradients(training.model).items():
        assert (gradient is None) == (plain[name] is None) and (gradient is None or torch.equal(gradient, plain[name]))
    assert ("recompute" in set(meter.trace.frame()["phase"])) == (strategy is not None)
    assert (meter.trace.peak_of("recomputed") > 0) == (strategy is not None)


def test_events_name_the_module_at_work():
    training = Training("sgd")
    trace = training.metered(ms.FullCheckpoint())
    frame = trace.frame()
    names = {name for name, _ in training.model.named_modules()} | {
        name for name, _ in training.model.named_parameters()
    }
    assert set(frame["module"]) <= names
    forward = frame[(frame["phase"] == "forward") & (frame["op"] == "gelu")]
    assert list(forward["module"]) == [f"stack.blocks.{i}" for i in range(4)]
    backward = frame[(frame["phase"] == "backward") & (frame["op"] == "gelu_backward") & (frame["total"].diff() > 0)]
    assert list(backward["module"]) == [f"stack.blocks.{i}" for i in reversed(range(4))]
    products = frame[(frame["phase"] == "backward") & (frame["op"] == "mm") & (frame["total"].diff() > 0)]
    assert set(products["module"]) == {"head"} | {
        f"stack.blocks.{i}.{part}" for i in range(4) for part in ("qkv", "proj", "up", "down")
    }
    recomputed = frame[(frame["phase"] == "recompute") & (frame["op"] == "gelu")]
    assert list(recomputed["module"]) == [f"stack.blocks.{i}" for i in reversed(range(4))]


def test_without_a_model_modules_are_named_by_their_class():
    training = Training()
    with MemoryMeter() as meter:
        training.step()
    assert {"Embedding", "TransformerBlock", "Linear", "LayerNorm"} <= set(meter.trace.frame()["module"])
    assert meter.trace.at_end["parameter"] == sum(p.nbytes for p in training.model.parameters())
    assert meter.trace.at_end["gradient"] == meter.trace.at_end["parameter"]
    assert meter.trace.peak_bytes == Training().metered().peak_bytes


# Saved tensors


def change_a_saved_result(x):
    y = x.exp()
    y.add_(1)
    return y


def change_a_saved_input(x):
    h = x * 1
    y = h.square()
    h.mul_(2)
    return y


def change_through_a_view(x):
    y = x.exp()
    y.view(-1)[0] = 3.0
    return y * 1


def change_without_gradients(x):
    y = x.exp()
    with torch.no_grad():
        y.zero_()
    return y


@pytest.mark.parametrize(
    "function",
    [change_a_saved_result, change_a_saved_input, change_through_a_view, change_without_gradients],
    ids=lambda f: f.__name__,
)
def test_changing_a_saved_tensor_in_place_raises_as_without_the_meter(function):
    """pytorch#128611: under saved-tensor hooks PyTorch itself does not check."""
    x = torch.randn(5, requires_grad=True)
    messages = []
    for metered in (False, True):
        with MemoryMeter() if metered else contextlib.nullcontext():
            loss = function(x).sum()
            with pytest.raises(RuntimeError, match="modified by an inplace operation") as caught:
                loss.backward()
        messages.append(str(caught.value))
    plain, ours = (message.split("Hint:")[0].strip(" .;") for message in messages)
    version = ours.split("is at version")[1].split(";")[0]
    assert f"is at version{version}; expected version" in plain
    assert ours.startswith("one of the variables needed for gradient computation has been modified by an inplace oper")


def test_a_change_that_harms_nothing_is_allowed():
    x = torch.randn(5, requires_grad=True)
    found = []
    for metered in (False, True):
        with MemoryMeter() if metered else contextlib.nullcontext():
            h = x + 1
            h.mul_(2)  # nobody has saved it
            y = h.exp()
            z = y + 1
            z.zero_()  # addition saves nothing
            found.append(torch.autograd.grad((y + z).sum(), x)[0])
    assert torch.equal(*found)


def test_tensors_born_in_inference_mode_fail_as_without_the_meter():
    """unsloth#3828."""
    with torch.inference_mode():
        factor = torch.randn(5)
    x = torch.randn(5, requires_grad=True)
    for metered in (False, True):
        with MemoryMeter() if metered else contextlib.nullcontext():
            assert torch.equal((x + factor).detach(), x.detach() + factor.clone())
            with pytest.raises(RuntimeError, match="Inference tensors cannot be saved for backward"):
                x * factor


def test_what_no_graph_holds_at_the_end_of_forward_is_not_saved():
    x = torch.randn(50, requires_grad=True)
    with MemoryMeter() as meter:
        kept = x.exp().detach()  # saved, and its graph dropped at once
        (x * 2).sum().backward()
    assert meter.trace.saved_bytes == 0
    assert meter.trace.at_end["activation"] == nbytes(kept)


def test_retained_graphs_and_partial_backwards_stay_exact():
    """guided-diffusion#144, trl#4280."""
    training = Training(dropout=0.5)
    model, x = training.model, training.tokens

    def step():
        first, unused = model(x).sum(), model(x).sum()
        first.backward(retain_graph=True)
        first.backward()
        del first, unused

    torch.manual_seed(0)
    step()
    plain = gradients(model)
    model.zero_grad()
    torch.manual_seed(0)
    with MemoryMeter(model) as meter:
        step()
    assert all(torch.equal(mine, plain[name]) for name, mine in gradients(model).items())
    own = sum(parameter.nbytes for parameter in model.parameters())
    end = meter.trace.at_end
    assert sum(end.values()) == 2 * own + nbytes(x) and end["activation"] == nbytes(x)


def test_custom_functions_are_measured():
    class Scale(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x.sin())
            return x.cos()

        @staticmethod
        def backward(ctx, gradient):
            (kept,) = ctx.saved_tensors
            return -gradient * kept

    x = torch.randn(50, requires_grad=True)
    with MemoryMeter() as meter:
        y = Scale.apply(x)
        loss = y.sum()
        del y
        loss.backward()
    assert meter.trace.saved_bytes == 200
    assert meter.trace.peak_of("activation") == 200 and meter.trace.at_end["activation"] == 0
    assert torch.equal(x.grad, -x.detach().sin())


# Failures


def hooks_in_force() -> tuple[int, ...]:
    hooks = (module_hooks._global_forward_hooks, module_hooks._global_forward_pre_hooks)
    return tuple(map(len, hooks))


def leaf_hooks(model: nn.Module) -> int:
    return sum(len(p._post_accumulate_grad_hooks or ()) for p in model.parameters())


@pytest.mark.parametrize("strategy", [None, ms.FullCheckpoint(), ms.Chunked(2), ms.Recursive()], ids=label)
@pytest.mark.parametrize("where", ["forward", "backward", "optimizer"])
def test_an_exception_leaves_a_trace_and_nothing_else(where, strategy):
    training = Training("adamw-loop")
    before, hooks = {name: id(value) for name, value in vars(training.model).items()}, hooks_in_force()

    def fail(*_):
        raise KeyError("on purpose")

    block = training.model.stack.blocks[2]
    if where == "forward":
        handle = block.register_forward_hook(fail)
    elif where == "backward":
        handle = block.register_full_backward_hook(fail)
    else:
        handle = training.optimizer.register_step_post_hook(fail)
    with (
        pytest.raises(KeyError, match="on purpose"),
        applied(training.model, strategy),
        MemoryMeter(training.model, training.optimizer) as meter,
    ):
        training.step()
    phases = set(meter.trace.frame()["phase"])
    assert meter.trace.peak_bytes > meter.trace.start_bytes
    assert (where in phases) and (where == "optimizer") == ("optimizer" in phases)
    assert hooks_in_force() == hooks and leaf_hooks(training.model) == 0
    assert {name: id(value) for name, value in vars(training.model).items()} == before
    handle.remove()
    training.model.zero_grad()
    again = training.metered(strategy)
    assert set(again.frame()["module"]) <= {
        name for name, _ in (*training.model.named_modules(), *training.model.named_parameters())
    }
    fresh = Training("adamw-loop")
    if where == "optimizer":
        fresh.step()
    assert again.peak_bytes == fresh.metered(strategy).peak_bytes


def test_a_module_that_failed_is_left():
    training, x = Training(), torch.randn(5)
    handle = training.model.stack.blocks[2].register_forward_hook(lambda *_: 1 / 0)
    with MemoryMeter(training.model) as meter:
        with pytest.raises(ZeroDivisionError):
            training.step()
        handle.remove()
        y = x * 2
    last = meter.trace.events[-1]
    assert (last.op, last.module, last.delta) == ("mul", "", nbytes(y))


def test_an_audited_step_that_fails_leaves_its_audit():
    training = Training()
    training.model.stack.blocks[2].register_forward_hook(lambda *_: 1 / 0)
    with pytest.raises(ZeroDivisionError), MemoryMeter(training.model, audit=True) as meter:
        training.step()
    assert meter.trace.explained_share == 1.0
    assert Training().metered(audit=True).explained_share == 1.0  # the profiler is free again


def test_meters_do_not_nest():
    training = Training()
    with MemoryMeter(training.model) as meter:
        with pytest.raises(RuntimeError, match="meters do not nest"), MemoryMeter(training.model):
            pass
        training.step()
    assert meter.trace.peak_bytes == Training().metered().peak_bytes


def test_a_meter_may_be_used_again():
    training = Training()
    meter = MemoryMeter(training.model)
    with pytest.raises(RuntimeError, match="nothing to show yet"):
        meter.trace
    traces = []
    for _ in range(2):
        with meter:
            with pytest.raises(RuntimeError, match="nothing to show yet"):
                meter.trace
            training.step()
        training.model.zero_grad()
        traces.append(meter.trace)
    assert traces[0].peak_bytes == traces[1].peak_bytes and traces[0] is not traces[1]


@pytest.mark.parametrize(
    ("phase", "strategy"),
    [
        *(
            (phase, strategy)
            for phase in ("forward", "backward", "optimizer")
            for strategy in (None, ms.FullCheckpoint())
        ),
        ("recompute", ms.FullCheckpoint()),
    ],
    ids=label,
)
def test_a_step_is_stopped_between_two_operations(phase, strategy):
    training, stop = Training("adamw-loop"), threading.Event()

    def set_in_forward(*_):
        if ms.is_recomputing() == (phase == "recompute"):
            stop.set()

    handle = {
        "forward": lambda: training.model.stack.blocks[1].register_forward_hook(set_in_forward),
        "recompute": lambda: training.model.stack.blocks[1].register_forward_pre_hook(set_in_forward),
        "backward": lambda: training.model.stack.blocks[1].register_full_backward_hook(lambda *_: stop.set()),
        "optimizer": lambda: training.optimizer.register_step_pre_hook(lambda *_: stop.set()),
    }[phase]()
    with (
        pytest.raises(Stopped, match="the step was stopped"),
        applied(training.model, strategy),
        MemoryMeter(training.model, training.optimizer, stop=stop) as meter,
    ):
        training.step()
    seen = set(meter.trace.frame()["phase"])
    assert phase == "optimizer" or "optimizer" not in seen
    assert phase != "forward" or seen == {"forward"}
    handle.remove()
    training.model.zero_grad()
    training.step()


# What the trace shows


@pytest.mark.parametrize("optimizer", ["none", "adamw-foreach"])
@pytest.mark.parametrize("strategy", [None, ms.FullCheckpoint(), ms.Recursive()], ids=label)
def test_rows_add_up(strategy, optimizer):
    trace = Training(optimizer).metered(strategy)
    frame = trace.frame()
    assert list(frame.columns) == ["seconds", "phase", "module", "op", "total", *CATEGORIES, "host", "disk"]
    assert (frame[list(CATEGORIES)].sum(axis=1) == frame["total"]).all()
    assert (frame[list(CATEGORIES)] >= 0).all().all()
    assert frame["total"].max() == trace.peak_bytes == sum(trace.at_peak.values())
    assert frame["seconds"].is_monotonic_increasing and frame["seconds"].iloc[0] > 0
    row = frame.loc[frame["total"].idxmax()]
    assert trace.peak_at == Place(row["phase"], row["module"], row["op"])
    assert trace.at_peak == {name: row[name] for name in CATEGORIES}
    assert trace.at_end == {name: frame.iloc[-1][name] for name in CATEGORIES}
    assert (trace.host_peak_bytes, trace.disk_peak_bytes) == (0, 0)
    assert set(frame["phase"]) <= set(PHASES)
    spans = trace.phases
    changes = frame["phase"] != frame["phase"].shift()
    assert [phase for phase, _, _ in spans] == list(frame["phase"][changes])
    assert all(end == start for (_, _, end), (_, start, _) in zip(spans, spans[1:], strict=False))
    for names in (("activation",), ("activation", "recomputed"), CATEGORIES):
        assert trace.peak_of(*names) == frame[list(names)].sum(axis=1).max()


def test_a_thinned_curve_keeps_its_peak():
    trace = Training("adamw-loop").metered(ms.FullCheckpoint())
    assert len(trace.frame()) > 400
    for points in (1, 7, 400):
        curve = trace.curve(points)
        assert len(curve) == points and curve["total"].max() == trace.peak_bytes
        assert curve["seconds"].is_monotonic_increasing
    assert len(trace.curve(10**6)) == len(trace.frame())


def test_the_peak_says_where_it_is():
    trace = Training().metered()
    assert str(trace.peak_at) == f"backward, {trace.peak_at.module}, {trace.peak_at.op}"
    assert str(Place("backward", "blocks.5.mlp", "mm")) == "backward, blocks.5.mlp, mm"
    x = torch.randn(100)
    with MemoryMeter() as meter:
        x + 0
    with MemoryMeter() as idle:
        pass
    assert (idle.trace.peak_bytes, str(idle.trace.peak_at)) == (0, "before the step")
    assert idle.trace.frame().empty and idle.trace.phases == [] and idle.trace.saved_bytes == 0
    assert (meter.trace.peak_bytes, str(meter.trace.peak_at)) == (800, "forward, add")


def test_unknown_categories_are_refused():
    trace = Training().metered()
    with pytest.raises(ValueError, match="peak_of.'activations'.: name some of parameter, buffer"):
        trace.peak_of("activations")
    with pytest.raises(ValueError, match="name some of"):
        trace.peak_of()


def test_parameters_made_during_the_step_are_parameters():
    x = torch.randn(2, 8, 64)
    with MemoryMeter() as meter:
        stack = ms.BlockStack(2, 64, 1)
        stack(x).sum().backward()
    assert meter.trace.at_end["parameter"] == sum(parameter.nbytes for parameter in stack.parameters())
    assert meter.trace.saved_bytes == saved_bytes(lambda: stack(x), stack)


def test_thinning_to_no_points_is_refused():
    with MemoryMeter() as meter:
        torch.ones(2) + 1
    for thin in (meter.progress, meter.trace.curve):
        with pytest.raises(ValueError, match="max_points"):
            thin(0)
