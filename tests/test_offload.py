"""Offloading changes where saved tensors are, and nothing else: values, gradients, random numbers, errors, lives."""

from __future__ import annotations

import contextlib
import copy
import gc
import pickle
import threading
import weakref
from collections.abc import Callable, Iterator
from functools import cache, partial

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import memsave_lib as ms
from equality import (
    SEED,
    VARIANTS,
    Outcome,
    assert_same,
    build_gpt2,
    build_llama,
    build_tiny,
    gradients,
    label,
    outcome,
)
from helpers import LiveBytes
from memsave_lib import is_recomputing
from memsave_lib.stores.slab import Slab
from offloading import (
    STORES,
    Before,
    NotingHostStore,
    a_store,
    in_flight,
    nameless_files,
    offload,
    threads,
)
from test_runner import WAYS, Failing, Methods, scaled, stack_and_input

UNDERNEATH = (
    ms.KeepAll(),
    ms.FullCheckpoint(),
    ms.Selective(checkpoint_every=2),
    ms.SelectiveOps("attention"),
    ms.Chunked(num_checkpoints=3),
    ms.Chunked(num_checkpoints=2, recompute_last=False),
    ms.Recursive(),
)
REAL_STORES = ("host", "disk")

every_strategy = pytest.mark.parametrize("strategy", UNDERNEATH, ids=label)
every_store = pytest.mark.parametrize("store", STORES)
every_real_store = pytest.mark.parametrize("store", REAL_STORES)


@pytest.fixture(autouse=True, scope="module")
def quick_garbage_collector() -> Iterator[None]:
    """Let it overlook what PyTorch and the tests' own imports hold, or looking for tickets takes most of the time."""
    for build in (build_tiny, build_gpt2, build_llama):  # the first checkpoint imports a great deal, and so do these
        outcome(build, ms.FullCheckpoint())
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(autouse=True)
def nothing_is_left_behind() -> Iterator[None]:
    """After every test here: no ticket, no parcel, no thread, no file."""
    before = Before()
    yield
    gc.collect()  # errors that a test has caught are garbage by now, and hold the step that they interrupted
    assert before.is_now()


# Equal to plain

BUILDS: dict[str, Callable[[str], tuple]] = {
    "sdpa": partial(build_tiny, attention="sdpa"),
    "sdpa-dropout": partial(build_tiny, attention="sdpa", dropout=0.5),
    "math-dropout": partial(build_tiny, attention="math", dropout=0.5),
    "gpt2": partial(build_gpt2, dropout=0.5),
    "llama": build_llama,
}


@cache
def plain_outcome(model: str, variant: str) -> Outcome:
    return outcome(lambda: BUILDS[model](variant), None)


@pytest.mark.parametrize("model", BUILDS)
@every_store
@every_strategy
def test_loss_gradients_and_random_state_are_those_of_plain(strategy, store, model):
    """All variants of the course's block; of the others one each, another for every strategy and store."""
    turn = UNDERNEATH.index(strategy) + STORES.index(store)
    variants = VARIANTS if model.startswith("math") else (VARIANTS[turn % len(VARIANTS)],)
    for variant in variants:
        plain = plain_outcome(model, variant)
        assert any(g is not None and g.count_nonzero() for g in plain.gradients.values())
        assert_same(outcome(lambda v=variant: BUILDS[model](v), offload(strategy, a_store(store))), plain)


@pytest.mark.parametrize("actions", ["offload keep recompute offload", "recompute offload offload keep"])
@every_store
def test_per_block_gives_what_plain_gives(actions, store):
    strategy = ms.PerBlock(tuple(actions.split()), a_store(store), min_bytes=1)
    for variant in VARIANTS:
        assert_same(
            outcome(lambda v=variant: BUILDS["math-dropout"](v), strategy), plain_outcome("math-dropout", variant)
        )


@pytest.mark.parametrize("keep_last", [0, 1, 2, 9])
@pytest.mark.parametrize("prefetch", [0, 1, 2, 5, 1000])
@every_real_store
def test_any_prefetch_and_any_keep_last_give_what_plain_gives(store, prefetch, keep_last):
    for strategy in (ms.KeepAll(), ms.FullCheckpoint()):
        sent = offload(strategy, store, prefetch=prefetch, keep_last=keep_last)
        assert_same(outcome(lambda: build_tiny(dropout=0.5), sent), plain_outcome("sdpa-dropout", "plain"))


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True:UserWarning")
@pytest.mark.parametrize("way", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize("strategy", [ms.KeepAll(), ms.Chunked(num_checkpoints=2), ms.SelectiveOps()], ids=label)
def test_every_way_to_use_a_graph_gives_what_plain_gives(strategy, way):
    """guided-diffusion#144, trl#4236, trl#4280: graphs retained, accumulated in either order, in parts, twice."""

    def use(chosen: ms.Strategy | None) -> tuple[Outcome, Tensor | None]:
        torch.manual_seed(SEED)
        stack, x = stack_and_input()
        with contextlib.nullcontext() if chosen is None else ms.apply(stack, chosen):
            loss = way(stack, x)
        return Outcome(loss.detach(), gradients(stack), torch.get_rng_state()), x.grad

    plain, plain_x = use(None)
    for store, prefetch in (("host", 0), ("host", 3), ("disk", 3)):
        ours, our_x = use(offload(strategy, store, prefetch=prefetch))
        assert_same(ours, plain)
        assert (our_x is None) == (plain_x is None)
        assert plain_x is None or torch.equal(our_x, plain_x)


@every_real_store
def test_a_part_first_and_then_all_and_all_again(store):
    """A retained graph of which one backward wants less than the next."""

    def use(chosen: ms.Strategy | None) -> list[Tensor]:
        torch.manual_seed(SEED)
        stack, x = stack_and_input()
        found = []
        with contextlib.nullcontext() if chosen is None else ms.apply(stack, chosen):
            output = stack(x)
            loss = output.square().sum()
            again = partial(torch.autograd.grad, loss, retain_graph=True)
            found += torch.autograd.grad(loss, output, retain_graph=True)  # not even into the stack
            for index in (3, 0, 2):
                found += again([stack.blocks[index].up.weight])
            found += again([x, *stack.parameters()])
            found += again([stack.blocks[1].up.weight])
            found += torch.autograd.grad(loss, [x, *stack.parameters()])
        return found

    plain = use(None)
    for prefetch in (0, 1, 5):
        ours = use(offload(ms.KeepAll(), store, prefetch=prefetch))
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))


class Doubling(torch.autograd.Function):
    """Asks for its saved tensors twice."""

    @staticmethod
    def forward(ctx, x: Tensor, y: Tensor) -> Tensor:
        ctx.save_for_backward(x, y)
        return x * y

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, Tensor]:
        return gradient * ctx.saved_tensors[1], gradient * ctx.saved_tensors[0]


class Own(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        return Doubling.apply(self.linear(x), torch.tanh(x))


def small_step(model: nn.Module, x: Tensor, chosen: ms.Strategy | None, **options: object) -> list[Tensor]:
    """Gradients of a step of any stack, input included where it wants one."""
    model.zero_grad()
    x.grad = None
    with contextlib.nullcontext() if chosen is None else ms.apply(model, chosen, **options):
        model(x).square().sum().backward()
    leaves = [*model.parameters(), *([x] if x.requires_grad else [])]
    return [leaf.grad for leaf in leaves if leaf.grad is not None]


def assert_small_step_is_plain(model: nn.Module, x: Tensor, **options: object) -> None:
    plain = small_step(model, x, None)
    assert plain
    for store in STORES:
        for prefetch in (0, 2):
            ours = small_step(model, x, offload(ms.KeepAll(), a_store(store), prefetch=prefetch), **options)
            assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))


def test_a_function_that_asks_twice_for_what_it_saved_gets_it_twice():
    assert_small_step_is_plain(nn.Sequential(*(Own() for _ in range(4))), torch.randn(3, 4, requires_grad=True))


@every_strategy
@every_real_store
def test_run_takes_plain_callables(strategy, store):
    if isinstance(strategy, ms.SelectiveOps):
        pytest.skip("needs modules: it looks inside the blocks")

    def use(chosen: ms.Strategy | None) -> Outcome:
        torch.manual_seed(SEED)
        holder, module, weight = Methods(), nn.Linear(4, 4), torch.randn(4, 4, requires_grad=True)
        weights = [torch.randn(4, 4, requires_grad=True) for _ in range(3)]
        closures = [lambda x, w=w: torch.sin(F.dropout(x @ w, 0.5)) for w in weights]
        blocks = [holder.first, partial(scaled, weight=weight, power=2), module, *closures, torch.tanh]
        y = x = torch.randn(3, 4, requires_grad=True)
        if chosen is None:
            for block in blocks:
                y = block(y)
        else:
            y = ms.run(blocks, x, chosen)
        loss = y.square().sum()
        loss.backward()
        leaves = [holder.weight, weight, *weights, x, *module.parameters()]
        return Outcome(loss.detach(), {str(i): t.grad for i, t in enumerate(leaves)}, torch.get_rng_state())

    assert_same(use(offload(strategy, store)), use(None))


def test_a_leaf_that_a_stack_hands_through_keeps_nothing():
    """A hook on somebody's own tensor would stay there for good, and with it every step so far."""
    leaf = torch.randn(3, 4, requires_grad=True)
    ms.run([lambda x: x, lambda x: x], leaf, offload())
    assert not leaf._backward_hooks


@every_strategy
@every_store
def test_backward_may_come_after_the_strategy_was_removed(strategy, store):
    def use(chosen: ms.Strategy | None) -> Outcome:
        torch.manual_seed(SEED)
        stack, x = stack_and_input()
        with contextlib.nullcontext() if chosen is None else ms.apply(stack, chosen):
            loss = stack(x).square().sum()
        loss.backward()
        return Outcome(loss.detach(), gradients(stack), torch.get_rng_state())

    assert_same(use(offload(strategy, a_store(store))), use(None))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@every_store
def test_without_gradients_nothing_leaves(store, mode, recwarn):
    """trl#4636, diffusers#10107."""
    stack, x = stack_and_input(dropout=0.0)
    plain = stack(x).detach()
    with ms.apply(stack, offload(ms.KeepAll(), a_store(store))) as applied, mode():
        assert torch.equal(stack(x), plain)
        assert torch.equal(ms.run(list(stack.blocks), x, offload(ms.KeepAll(), a_store(store))), plain)
    assert applied.report.offload.packed.tensors == 0
    assert not recwarn.list


@every_store
def test_eval_mode_with_gradients_offloads_too(store):
    """fairscale#709."""
    stack, x = stack_and_input()
    with ms.apply(stack.eval(), offload(ms.KeepAll(), a_store(store))) as applied:
        stack(x).sum().backward()
    assert applied.report.offload.moved.tensors > 0


@pytest.mark.parametrize("make_copy", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
@every_real_store
def test_copies_made_meanwhile_are_plain(store, make_copy):
    stack, x = stack_and_input(dropout=0.0)
    with ms.apply(stack, offload(ms.KeepAll(), store)) as applied:
        loss = stack(x).sum()  # tickets are out
        twin = make_copy(stack)
        moved = applied.report.offload.moved.tensors
        twin(x).sum().backward()
        assert applied.report.offload.moved.tensors == moved
        loss.backward()
    for mine, theirs in zip(twin.parameters(), stack.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_threads_may_share_a_model_and_its_store():
    stack = ms.BlockStack(3, 8, 2)
    inputs = [torch.randn(2, 5, 8, requires_grad=True) for _ in range(4)]
    plain = [torch.autograd.grad(stack(x).square().sum(), x)[0] for x in inputs]
    for store in REAL_STORES:
        found: dict[tuple[int, int], Tensor] = {}

        def work(number: int, found: dict = found) -> None:
            for turn in range(5):
                (found[number, turn],) = torch.autograd.grad(stack(inputs[number]).square().sum(), inputs[number])

        with ms.apply(stack, offload(ms.KeepAll(), store)):
            workers = [threading.Thread(target=work, args=(number,)) for number in range(len(inputs))]
            for worker in workers:
                worker.start()
            for worker in workers:
                worker.join()
        assert len(found) == 20
        assert all(torch.equal(gradient, plain[number]) for (number, _), gradient in found.items())


class Changing(nn.Module):
    """Saves a tensor, changes it in place, and saves it again where that is allowed."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        mask = torch.ones_like(h)
        y = h + 0 * mask
        y = y.mul(mask)  # saved at version 0 ...
        z = y.detach().clone()
        w = torch.sigmoid(h)
        with torch.no_grad():
            z.add_(1)
        return F.relu(w * z, inplace=True)  # ... z at version 1


def test_blocks_that_work_in_place_before_they_save():
    """ColossalAI#1460, pytorch#26546."""
    assert_small_step_is_plain(nn.Sequential(*(Changing() for _ in range(3))), torch.randn(3, 4, requires_grad=True))


class SavedTwice(nn.Module):
    """One storage, saved at two versions: it must leave twice."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x):
        h = self.linear(x)
        buffer = torch.full_like(h, 2.0, requires_grad=False)
        first = Loose.apply(h, buffer)
        buffer.add_(1)
        return first + h * buffer


class Loose(torch.autograd.Function):
    """Saves a tensor and does not need it: its later change is no error as long as nobody asks for it."""

    @staticmethod
    def forward(ctx, x: Tensor, factor: Tensor) -> Tensor:
        ctx.save_for_backward(factor)
        return x * 2

    @staticmethod
    def backward(ctx, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * 2, None


def test_a_storage_saved_at_two_versions_leaves_twice():
    model, x = nn.Sequential(*(SavedTwice() for _ in range(3))), torch.randn(3, 4, requires_grad=True)
    assert_small_step_is_plain(model, x)


# Errors


@pytest.mark.parametrize("fail_at", [1, 2])
@every_strategy
@every_real_store
def test_the_model_is_usable_after_any_block_has_failed(store, strategy, fail_at):
    """In forward (first call) or, where it runs again, in backward."""
    if isinstance(strategy, ms.SelectiveOps):
        pytest.skip("these blocks have no attention")

    def step(model: nn.Module, x: Tensor) -> Outcome:
        torch.manual_seed(SEED + 1)
        model.zero_grad()
        loss = model(x).square().sum()
        loss.backward()
        return Outcome(loss.detach(), gradients(model), torch.get_rng_state())

    torch.manual_seed(SEED)
    model, x = nn.Sequential(*(Failing() for _ in range(5))), torch.randn(3, 4)
    plain = step(model, x)
    counts = strategy.plan(5).recompute_counts()
    with ms.apply(model, offload(strategy, store)):
        for index, block in enumerate(model):
            block.calls, block.fail_at = 0, fail_at
            if fail_at == 1 or counts[index]:
                with pytest.raises(KeyError, match="on purpose"):
                    step(model, x)
            assert not is_recomputing()
            block.fail_at = None
            assert_same(step(model, x), plain)


# Nothing is left


@every_strategy
@every_real_store
def test_five_steps_stay_flat_without_the_garbage_collector(store, strategy):
    """pytorch#115255, pytorch#84413, trl#5700."""
    stack, x = stack_and_input()
    sent = offload(strategy, store)
    with ms.apply(stack, sent) as applied:
        stack(x).square().sum().backward()
        gc.collect()
        gc.disable()
        try:
            live, tickets = [], []
            with LiveBytes(stack.parameters()) as counted:
                for _ in range(5):
                    stack.zero_grad()
                    x.grad = None
                    stack(x).square().sum().backward()
                    live.append(counted.live)
                    tickets.append(in_flight())
        finally:
            gc.enable()
        assert len(set(live)) == 1 and set(tickets) == {0}
        traffic = applied.report.offload
    assert traffic.moved.tensors == traffic.returned.tensors > 0


@every_real_store
def test_forwards_without_backward_leave_nothing_alive(store):
    """Megatron-LM#3043, unsloth-zoo#435: without the garbage collector's help."""
    stack, x = stack_and_input()
    target = NotingHostStore() if store == "host" else ms.DiskStore()
    with ms.apply(stack, offload(ms.KeepAll(), target)):
        stack(x).sum().backward()
        gc.collect()
        gc.disable()
        try:
            for _ in range(3):
                output = stack(x)
                assert target.stored_bytes > 0 and in_flight() > 0
                del output
                assert (target.stored_bytes, in_flight()) == (0, 0)
        finally:
            gc.enable()


def test_nothing_is_stored_after_backward_after_an_error_and_after_the_end():
    """trl#5700, unsloth-zoo#435."""
    for target in (ms.HostStore(), ms.DiskStore()):
        model, x = nn.Sequential(*(Failing() for _ in range(3))), torch.randn(3, 4)
        with ms.apply(model, offload(ms.KeepAll(), target)):
            model(x).sum().backward()
            assert target.stored_bytes == 0
            model[2].fail_at = model[2].calls + 1
            with contextlib.suppress(KeyError):
                model(x)
            assert target.stored_bytes == 0
            retained = model(x).sum()
            assert target.stored_bytes > 0
        assert target.stored_bytes > 0
        retained.backward()
        assert target.stored_bytes == 0
        del retained, target


def test_the_store_ends_with_the_strategy_or_with_the_last_graph():
    stack, x = stack_and_input()
    before = len(nameless_files())
    with ms.apply(stack, offload(ms.KeepAll(), "disk")):
        stack(x).sum().backward()
        assert len(threads()) == 2 and len(nameless_files()) == before + 1
    assert not threads() and len(nameless_files()) == before
    with ms.apply(stack, offload(ms.KeepAll(), "disk")):
        loss = stack(x).sum()
    assert len(threads()) == 1 and len(nameless_files()) == before + 1  # the reader begins with the first that is asked
    loss.backward()
    assert not threads() and len(nameless_files()) == before
    ms.run(list(stack.blocks), x, offload(ms.KeepAll(), "disk")).sum().backward()
    assert not threads() and len(nameless_files()) == before


def test_fifty_disks_one_after_the_other_leave_nothing():
    stack, x = stack_and_input()
    before = Before()
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            with ms.apply(stack, offload(ms.KeepAll(), "disk")):
                stack(x).sum().backward()
        assert before.is_now()
    finally:
        gc.enable()


def test_nothing_keeps_a_model_alive_after_its_strategy_was_removed():
    for store in STORES:
        stack, x = stack_and_input()
        with ms.apply(stack, offload(ms.KeepAll(), a_store(store))) as applied:
            stack(x).sum().backward()
        traffic, parameter = applied.report.offload, weakref.ref(stack.blocks[0].up.weight)
        gc.disable()
        try:
            del stack, applied
            assert parameter() is None, store
        finally:
            gc.enable()
        assert traffic.moved.tensors > 0


# The garbage collector comes when it likes


@pytest.mark.parametrize("lane", ["write", "read"])
def test_the_garbage_collector_may_drop_a_graph_in_the_disks_own_threads(lane, monkeypatch):
    """A thread that waited there for its own copy would wait for ever, and so would the end of the process."""
    begun, garbage, collected = threading.Event(), threading.Event(), threading.Event()
    plain = getattr(Slab, lane)

    def collecting(slab: Slab, *arguments: object) -> None:
        if not begun.is_set():
            begun.set()
            assert garbage.wait(timeout=20)
            gc.collect()
            collected.set()
        plain(slab, *arguments)

    monkeypatch.setattr(Slab, lane, collecting)
    stack, x = stack_and_input()
    store = ms.DiskStore()
    gc.disable()
    try:
        deposit = store.put(torch.randn(1000))
        if lane == "read":
            deposit.start_back()
        assert begun.wait(timeout=20)
        held = Holder(deposit)
        held.itself = held
        del held, deposit
        garbage.set()
        assert collected.wait(timeout=20)
        with ms.apply(stack, offload(ms.KeepAll(), store)):
            stack(x).sum().backward()
        assert store.stored_bytes == 0
    finally:
        gc.enable()


class Holder:
    """A part of a cycle: closes what it holds when the garbage collector comes."""

    def __init__(self, deposit):
        self.deposit = deposit

    def __del__(self):
        self.deposit.close()


def test_an_input_that_dies_in_mid_forward_does_not_lend_its_number():
    """Storages are told apart while they live: a number alone may belong to another one by now."""

    class First(nn.Module):
        def forward(self, x):
            number.append(id(x.untyped_storage()))
            return x + 1

    class Later(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x):
            x, others = self.linear(x), []
            for _ in range(100_000):
                others.append(torch.empty(1, 8))
                if id(others[-1].untyped_storage()) == number[0]:
                    number.append(number[0])
                    return x * others[-1].fill_(2.0)
            return x * 2.0

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.blocks = nn.ModuleList([First(), Later(), Later()])

        def forward(self, x):
            x = x.clone()  # held by nobody after the first block
            for block in self.blocks:
                x = block(x)
            return x

    model, number = Model(), []
    with torch.no_grad():
        filler = [torch.empty(1).untyped_storage() for _ in range(50_000)]  # so that a free place is rare
    with ms.apply(model, offload(), blocks=list(model.blocks)) as applied:
        model(torch.randn(1, 8)).sum().backward()
    del filler
    assert "input" not in applied.report.offload.skipped
