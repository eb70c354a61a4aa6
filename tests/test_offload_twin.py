"""The offload engine on a twin of an accelerator: whatever the order of copies, gradients stay bit-equal."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from functools import cache

import pytest
import torch
from torch import Tensor, nn

import memsave_lib as ms
from twin import (
    BACK_AFTER_OUT,
    COPY_AFTER_COMPUTATION,
    END_AFTER_COPY,
    READ_AFTER_COPY_BACK,
    SOURCE_AFTER_COPY_OUT,
    WRITE_AFTER_READ,
    Twin,
    TwinStore,
)

N_BLOCKS = 3
SCHEDULES = 1000
BATCHES = 20
SLOW = 2e-3  # seconds; slower than Python, so that what does not wait comes too early


@pytest.fixture(autouse=True, scope="module")
def no_garbage_collector() -> Iterator[None]:
    """A lane of the twin that came to collect a dropped graph would wait for itself; a device's queue never does."""
    # PyTorch's first checkpoint imports a great deal, and the imports' own garbage holds on to whoever called.
    with ms.apply(stack_and_input()[0], ms.FullCheckpoint()):
        gradients_of(step)
    gc.collect()
    gc.disable()
    yield
    gc.enable()


class Block(nn.Module):
    """Saves four tensors, of which an operation inside can be recomputed."""

    recompute_regions = {"attention": ("core",), "activation": (), "norm": ()}

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(4, 4), nn.Linear(4, 4)

    def core(self, x: Tensor) -> Tensor:
        return x * x.tanh()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.out(self.core(self.into(x)))


class Stack(nn.Module):
    """Blocks, with an error on demand before the last one."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(N_BLOCKS))
        self.fails = False

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            if self.fails and number == N_BLOCKS - 1:
                raise KeyError("on purpose")
            x = block(x)
        return x


@cache
def stack_and_input() -> tuple[Stack, Tensor]:
    torch.manual_seed(0)
    return Stack(), torch.randn(2, 4)


def step(stack: Stack, x: Tensor) -> None:
    stack(x).square().sum().backward()


def retained(stack: Stack, x: Tensor) -> None:
    loss = stack(x).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def some_then_all(stack: Stack, x: Tensor) -> None:
    loss = stack(x).square().sum()
    torch.autograd.grad(loss, stack.blocks[1].out.weight, retain_graph=True)
    loss.backward()


def dropped(stack: Stack, x: Tensor) -> None:
    stack(x)
    step(stack, x)


def dropped_in_backward(stack: Stack, x: Tensor) -> None:
    torch.autograd.grad(stack(x).square().sum(), stack.blocks[2].out.weight)
    step(stack, x)


def failed(stack: Stack, x: Tensor) -> None:
    stack.fails = True
    with pytest.raises(KeyError, match="on purpose"):
        stack(x)
    stack.fails = False
    step(stack, x)


def two_in_order(stack: Stack, x: Tensor) -> None:
    first, second = stack(x).square().sum(), stack(2 * x).square().sum()
    first.backward()
    second.backward()


def two_in_reverse(stack: Stack, x: Tensor) -> None:
    first, second = stack(x).square().sum(), stack(2 * x).square().sum()
    second.backward()
    first.backward()


WAYS = (step, step, retained, some_then_all, dropped, dropped_in_backward, failed, two_in_order, two_in_reverse)
STRATEGIES = (
    ms.KeepAll(),
    ms.KeepAll(),
    ms.FullCheckpoint(),
    ms.Selective(checkpoint_every=2),
    ms.SelectiveOps("attention"),
    ms.Chunked(num_checkpoints=2),
    ms.Recursive(),
)


@cache
def expected(way: Callable[[Stack, Tensor], None]) -> list[Tensor]:
    """The gradients of the step without the library."""
    return gradients_of(way)


def gradients_of(way: Callable[[Stack, Tensor], None]) -> list[Tensor]:
    stack, x = stack_and_input()
    stack.zero_grad()
    way(stack, x)
    return [parameter.grad for parameter in stack.parameters()]


@dataclass(frozen=True)
class Found:
    """What was wrong after a schedule."""

    violations: list[str]
    wrong_gradients: int
    copies: int
    left_bytes: int

    def __bool__(self) -> bool:
        return bool(self.violations or self.wrong_gradients or self.left_bytes)


def run_schedule(seed: int, left_out: Collection[str] = (), slowest: float = 2e-4) -> Found:
    """Two steps of one kind, so that buffers are used again, with everything else drawn from ``seed``."""
    draw = random.Random(seed)
    strategy = draw.choice(STRATEGIES)
    way = draw.choice(WAYS)
    plain = expected(way)
    twin = Twin(seed, left_out, slowest=(slowest,) * 3)
    store = TwinStore(twin, max_bytes=draw.choice((None, None, 256)))
    options = {"prefetch": draw.choice((0, 1, 2, 5)), "keep_last": draw.choice((0, 1, 2)), "min_bytes": 1}
    try:
        with ms.apply(stack_and_input()[0], ms.Offload(strategy, store, **options)):
            wrong = 0
            for _ in range(2):
                found = gradients_of(way)
                wrong += sum(not torch.equal(mine, theirs) for mine, theirs in zip(found, plain, strict=True))
    finally:
        twin.close()
    return Found(twin.violations, wrong, twin.copies, store.stored_bytes)


@pytest.mark.parametrize("batch", range(BATCHES))
def test_any_schedule_gives_the_gradients_of_plain(batch):
    """torchtitan#2379, DeepSpeed#8186, torchtune#1867, axolotl#3833: 1,000 schedules."""
    size = SCHEDULES // BATCHES
    copies = 0
    for seed in range(batch * size, (batch + 1) * size):
        found = run_schedule(seed)
        assert not found, f"seed {seed}: {found}"
        copies += found.copies
    assert copies > 10 * size


@pytest.mark.parametrize(
    "left_out", [COPY_AFTER_COMPUTATION, SOURCE_AFTER_COPY_OUT, READ_AFTER_COPY_BACK, END_AFTER_COPY]
)
def test_a_wait_that_is_left_out_is_noticed(left_out):
    assert any(run_schedule(seed, [left_out], slowest=SLOW) for seed in range(60))


@pytest.mark.parametrize("left_out", [SOURCE_AFTER_COPY_OUT, READ_AFTER_COPY_BACK])
def test_reading_too_early_gives_wrong_gradients(left_out):
    """The poison reaches the gradients: the notes of the twin are not its own only witness."""
    assert any(run_schedule(seed, [left_out], slowest=SLOW).wrong_gradients for seed in range(60))


class Steady(Twin):
    """Always as slow as it can be."""

    def delay(self, kind: int) -> float:
        return self.slowest[kind]


@pytest.mark.parametrize("left_out", [(), (WRITE_AFTER_READ,)], ids=["all waits", "one left out"])
def test_a_buffer_is_written_again_after_the_last_copy_that_read_it(left_out):
    """Two streams compute, one after the other without waiting: the second puts while the first still brings back."""
    twin = Steady(0, left_out, slowest=(0.0, 0.1, 0.0), run_ahead=True)
    store = TwinStore(twin)
    first, second = torch.full((8,), 1.0), torch.full((8,), 2.0)
    deposit = store.put(first)
    deposit.let_go()
    returned = deposit.take()
    deposit.close()
    again = store.put(second)
    assert (store.pool_hits, store.pool_misses) == (1, 1)
    twin.close()
    again.close()
    assert bool(twin.violations) is bool(left_out)
    assert torch.equal(returned, first) is not bool(left_out)


@pytest.mark.parametrize("left_out", [(), (BACK_AFTER_OUT,)], ids=["all waits", "one left out"])
def test_a_copy_back_begins_after_the_copy_out(left_out):
    """Bytes may be asked for while they are still leaving: a forward that never came to its last block."""
    twin = Steady(0, left_out, slowest=(0.1, 0.0, 0.0))
    source = torch.full((8,), 1.0)
    deposit = TwinStore(twin).put(source)
    returned = deposit.take()
    twin.close()
    deposit.close()
    assert not twin.violations
    assert torch.equal(returned, source) is not bool(left_out)


def test_the_twin_tells_when_copies_ran():
    """A timeline can be drawn from it: copies end after they began, and computation waits for some."""
    twin = Twin(0, slowest=(1e-3, 1e-3, 0.0))
    stack, _ = stack_and_input()
    with ms.apply(stack, ms.Offload(store=TwinStore(twin), keep_last=0, min_bytes=1)) as applied:
        gradients_of(step)
    lanes = applied.report.offload.lanes
    twin.close()
    assert not twin.violations
    assert len(lanes.copy_out) == applied.report.offload.moved.tensors
    assert len(lanes.copy_in) == applied.report.offload.returned.tensors
    assert all(span.end >= span.start for span in (*lanes.copy_out, *lanes.copy_in))
    assert applied.report.offload.stalls == len(lanes.stalls) > 0
