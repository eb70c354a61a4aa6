"""What could go wrong where nobody looks: memory with two counters, threads, Ctrl-C, fork, odd tensors, odd endings."""

from __future__ import annotations

import io
import os
import threading
import time
import warnings
import weakref
from collections.abc import Callable
from concurrent.futures import wait

import pytest
import torch
from torch import Tensor, nn

import memsave_lib as ms
from memsave_lib.stores import disk
from memsave_lib.stores.slab import Extent
from tests.offloading import offload

HIDDEN = 8
KINDS = ("host", "disk")


class Chain(nn.Module):
    """Blocks one after the other."""

    def __init__(self, make: Callable[[], nn.Module], n_blocks: int = 3) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(make() for _ in range(n_blocks))
        self.run_only = n_blocks

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks[: self.run_only]:
            x = block(x)
        return x


class Feedforward(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(HIDDEN, HIDDEN)
        self.scale = torch.rand(HIDDEN) + 0.5  # neither parameter nor buffer: nobody says that it belongs to the model

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.layer(x)) * self.scale


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.Module], dtype: torch.dtype) -> None:
        super().__init__()
        self.cell = kind(HIDDEN, HIDDEN, batch_first=True).to(dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.cell(x)[0]


def split_in_place(x: Tensor) -> Tensor:
    """The halves share memory, but not the count of its changes."""
    left, right = torch.unsafe_chunk(x * 2, 2, -1)
    return torch.cat([left.sigmoid_(), right.sigmoid_()], -1)


def gradients(model: nn.Module, x: Tensor, strategy: ms.Strategy) -> list[Tensor]:
    model.zero_grad()
    with ms.apply(model, strategy):
        model(x).square().sum().backward()
    return [parameter.grad for parameter in model.parameters() if parameter.grad is not None]


def assert_equal(ours: list[Tensor], theirs: list[Tensor]) -> None:
    assert len(ours) == len(theirs) > 0
    assert all(map(torch.equal, ours, theirs))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("cell", (nn.GRU, nn.LSTM, nn.RNN))
@pytest.mark.parametrize("dtype", (torch.float32, torch.float64))
def test_recurrent_blocks_work_in_place_on_parts_of_a_storage(kind: str, cell: type[nn.Module], dtype: torch.dtype):
    model, x = Chain(lambda: Recurrent(cell, dtype)), torch.randn(2, 5, HIDDEN, dtype=dtype)
    assert_equal(gradients(model, x, offload(store=kind)), gradients(model, x, ms.KeepAll()))


@pytest.mark.parametrize("kind", KINDS)
def test_memory_with_two_counters_is_sent_twice(kind: str):
    def gradient(strategy: ms.Strategy) -> Tensor:
        x = torch.linspace(-1, 1, 8).requires_grad_()
        ms.run([split_in_place], x * 3, strategy).sum().backward()
        return x.grad

    assert torch.equal(gradient(offload(store=kind)), gradient(ms.KeepAll()))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shared_graph", (True, False))
def test_threads(kind: str, shared_graph: bool):
    """Four threads run backward through one graph, or each through its own over tensors that all of them save."""
    model, x = Chain(Feedforward), torch.randn(4, HIDDEN)
    parameters = list(model.parameters())
    expected = torch.autograd.grad(model(x).sum(), parameters)
    wrong: list[object] = []

    def work(loss: Tensor | None) -> None:
        for _ in range(15):
            own = model(x).sum() if loss is None else loss
            found = torch.autograd.grad(own, parameters, retain_graph=loss is not None)
            if not all(map(torch.equal, found, expected)):
                wrong.append(found)

    with ms.apply(model, offload(store=kind)):
        loss = model(x).sum() if shared_graph else None
        threads = [threading.Thread(target=work, args=(loss,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
            assert not thread.is_alive()
    assert wrong == []


class SlowReads(ms.DiskStore):
    """Every read waits for ``go``."""

    def __init__(self) -> None:
        super().__init__()
        self.go, self._read = threading.Event(), self._slab.read
        self._slab.read = self.read

    def read(self, extent: Extent, memory: memoryview) -> None:
        assert self.go.wait(60)
        self._read(extent, memory)


def test_memory_outlives_a_wait_that_the_user_interrupts(monkeypatch: pytest.MonkeyPatch):
    """Ctrl-C while a deposit that is being read is closed: the read goes on, into memory that must still be there."""
    store = SlowReads()
    deposit = store.put(torch.arange(1000.0))
    deposit.let_go()
    memory = weakref.ref(deposit.start_back().untyped_storage())
    reading = deposit.back.copying
    while not reading.running():
        time.sleep(0.001)

    def interrupted(futures: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(disk, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        deposit.close()
    assert memory() is not None
    assert store.stored_bytes == 4000, "its place in the file is not free while it is being read"
    store.go.set()
    wait([reading])
    deadline = time.monotonic() + 60
    while store.stored_bytes and time.monotonic() < deadline:
        time.sleep(0.001)
    assert store.stored_bytes == 0
    assert memory() is None


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_process_does_not_write_into_its_parents_file():
    model, x = Chain(Feedforward), torch.randn(4, HIDDEN)
    expected = gradients(model, x, ms.KeepAll())
    expected = [gradient.clone() for gradient in expected]
    model.zero_grad()
    with ms.apply(model, offload(store="disk")):
        loss = model(x).square().sum()
        with warnings.catch_warnings(record=True):  # Python's own, about threads and fork
            child = os.fork()
        if child == 0:
            try:
                model(x)
            except RuntimeError as error:
                os._exit(0 if "apply the strategy after the fork" in str(error) else 1)
            os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        loss.backward()
    assert_equal([parameter.grad for parameter in model.parameters()], expected)


def test_forward_mode_tangents_of_nothing_stay():
    """Forward-mode differentiation saves zeros that have no memory."""
    model, x = Chain(Feedforward), torch.randn(4, HIDDEN)

    def tangent(strategy: ms.Strategy) -> Tensor:
        with ms.apply(model, strategy), torch.autograd.forward_ad.dual_level():
            dual = torch.autograd.forward_ad.make_dual(x, torch.ones_like(x))
            output = model(dual)
            output.sum().backward()
            return torch.autograd.forward_ad.unpack_dual(output).tangent.detach()

    assert torch.equal(tangent(offload(store="disk")), tangent(ms.KeepAll()))


def test_function_transforms_are_refused_in_words():
    model = Chain(Feedforward)
    with ms.apply(model, offload()), pytest.raises(RuntimeError, match=r"inside torch\.func transforms"):
        torch.vmap(model)(torch.randn(3, 4, HIDDEN))


class DifferentiatesItself(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.energy, self.layer = nn.Linear(HIDDEN, HIDDEN), Feedforward()

    def forward(self, x: Tensor) -> Tensor:
        at = x.detach().requires_grad_()
        (force,) = torch.autograd.grad(torch.tanh(self.energy(at)).square().sum(), at, create_graph=True)
        return self.layer(x) * force


@pytest.mark.parametrize("strategy", (ms.FullCheckpoint(), offload(), offload(ms.FullCheckpoint())), ids=str)
def test_a_block_may_differentiate_itself(strategy: ms.Strategy):
    model, x = Chain(DifferentiatesItself), torch.randn(4, HIDDEN)
    ours = [gradient.clone() for gradient in gradients(model, x, strategy)]
    assert_equal(ours, gradients(model, x, ms.KeepAll()))


def test_the_strategy_may_be_removed_while_a_forward_runs():
    model, x = Chain(Feedforward), torch.randn(4, HIDDEN)
    expected = [gradient.clone() for gradient in gradients(model, x, ms.KeepAll())]
    model.zero_grad()
    applied = ms.apply(model, offload())
    handle = model.blocks[1].layer.register_forward_pre_hook(lambda *_: applied.remove())
    model(x).square().sum().backward()
    handle.remove()
    assert_equal([parameter.grad for parameter in model.parameters()], expected)
    assert applied.report.offload.skipped["strategy was removed"].tensors > 0


@pytest.mark.parametrize("lane", ("_writer", "_reader"))
def test_what_cannot_start_takes_no_room(lane: str):
    """A thread that cannot be started, say."""

    def refuse(*_: object) -> None:
        raise RuntimeError("can't start new thread")

    model, x, store = Chain(Feedforward), torch.randn(4, HIDDEN), ms.DiskStore()
    before = getattr(store, lane).submit
    getattr(store, lane).submit = refuse
    with ms.apply(model, offload(store=store)):
        with pytest.raises(RuntimeError, match="can't start"):
            model(x).sum().backward()
        if lane == "_writer":
            assert store.stored_bytes == 0
        getattr(store, lane).submit = before
        model.zero_grad()
        model(x).sum().backward()


def test_a_model_that_leaves_out_its_last_blocks_holds_no_source():
    model, x = Chain(Feedforward, 4), torch.randn(4, HIDDEN)
    model.run_only = 3
    outputs = []
    for block in model.blocks:
        block.layer.register_forward_hook(lambda _, __, output: outputs.append(weakref.ref(output.untyped_storage())))
    with ms.apply(model, offload(prefetch=50)):
        loss = model(x).sum()
        assert all(output() is None for output in outputs)
        loss.backward()


def test_an_output_can_be_saved_without_a_warning():
    model, x = Chain(Feedforward), torch.randn(4, HIDDEN)
    with ms.apply(model, offload()):
        output = model(x)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.save(output, io.BytesIO())


def test_a_queue_is_no_store():
    with pytest.raises(ValueError, match="store is"):
        ms.Offload(store=threading.Event())
