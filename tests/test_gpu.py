"""The self-test for an accelerator: `make unit ARGS="-m gpu"`, or notebook 00's cell on Colab.

What the rest of the suite proves on a CPU is asked here of the real thing: streams, page-locked buffers, the random
state of the device, the allocator's own count, and the formulas for CUDA. Not yet run on a GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import memsave_lib as ms
from memsave_lib import formulas
from memsave_lib.formulas import BlockShape
from memsave_lib.stores import NullStore
from memsave_lib.strategies import Strategy
from tests.equality import (
    INSIDE_BLOCKS,
    STRATEGIES,
    Outcome,
    assert_same,
    build_gpt2,
    build_llama,
    build_tiny,
    gradients,
    label,
)
from tests.helpers import build_input, build_stack, saved_bytes

pytestmark = pytest.mark.gpu
SEED = 5


@pytest.fixture
def device() -> torch.device:
    return torch.accelerator.current_accelerator()


def outcome(build: Callable[[], tuple[nn.Module, Tensor]], strategy: Strategy, device: torch.device) -> Outcome:
    """One step on the device; the random state compared is the device's."""
    torch.manual_seed(SEED)
    model, x = build()
    model, x = model.to(device), x.to(device)
    torch.manual_seed(SEED + 1)
    with ms.apply(model, strategy):
        loss = model(x).float().square().mean()
        loss.backward()
    return Outcome(loss.detach(), gradients(model), torch.get_device_module(device).get_rng_state(device))


def stack(dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> tuple[nn.Module, Tensor]:
    return ms.BlockStack(4, 64, 4, dropout=dropout).to(dtype), torch.randn(2, 128, 64, dtype=dtype)


@pytest.mark.parametrize("strategy", (*STRATEGIES, *INSIDE_BLOCKS), ids=label)
@pytest.mark.parametrize("dropout", (0.0, 0.3))
def test_strategies_are_bit_equal_and_leave_the_random_state(strategy: Strategy, dropout: float, device: torch.device):
    plain = outcome(lambda: stack(dropout), ms.KeepAll(), device)
    assert_same(outcome(lambda: stack(dropout), strategy, device), plain)


@pytest.mark.parametrize("store", ("host", "disk", NullStore()), ids=("host", "disk", "null"))
@pytest.mark.parametrize("prefetch", (0, 1, 2, 5))
@pytest.mark.parametrize("strategy", (ms.KeepAll(), ms.FullCheckpoint(), ms.Selective(2)), ids=label)
def test_streams_are_bit_equal(strategy: Strategy, prefetch: int, store: object, device: torch.device):
    """Twenty steps each: a race that is lost once in a while is lost here."""
    plain = outcome(lambda: stack(0.1, torch.float16), ms.KeepAll(), device)
    offload = ms.Offload(strategy, store=store, prefetch=prefetch, min_bytes=0)
    for _ in range(20):
        assert_same(outcome(lambda: stack(0.1, torch.float16), offload, device), plain)


def test_another_compute_stream_is_asked_for(device: torch.device):
    plain = outcome(stack, ms.KeepAll(), device)
    own = torch.Stream(device)
    before = torch.accelerator.current_stream(device)
    torch.accelerator.synchronize()
    torch.accelerator.set_stream(own)
    try:
        ours = outcome(stack, ms.Offload(min_bytes=0), device)
    finally:
        torch.accelerator.set_stream(before)
    torch.accelerator.synchronize()
    assert_same(ours, plain)


@pytest.mark.parametrize("pin", (True, False))
def test_with_and_without_page_locked_buffers(pin: bool, device: torch.device):
    store = ms.HostStore(pin=pin)
    plain = outcome(stack, ms.KeepAll(), device)
    for _ in range(3):
        assert_same(outcome(stack, ms.Offload(store=store, min_bytes=0), device), plain)
    assert store.stored_bytes == 0
    assert store.pool_hits == 2 * store.pool_misses  # the second and third step make no buffer


@pytest.mark.parametrize("build", (build_tiny, build_gpt2, build_llama))
def test_models_with_heads(build: Callable[..., tuple[nn.Module, Callable[[], Tensor]]], device: torch.device):
    def run(strategy: Strategy) -> dict[str, Tensor | None]:
        torch.manual_seed(SEED)
        model, _ = build()
        model.to(device)
        tokens = torch.arange(10, device=device).view(2, 5)
        with ms.apply(model, strategy):
            output = model(tokens)
            getattr(output, "logits", output).float().square().mean().backward()
        return gradients(model)

    plain = run(ms.KeepAll())
    for strategy in (ms.Offload(min_bytes=0), ms.Offload(ms.FullCheckpoint(), min_bytes=0)):
        ours = run(strategy)
        assert all(torch.equal(ours[name], gradient) for name, gradient in plain.items() if gradient is not None)


def test_the_meter_counts_what_was_requested_from_the_allocator(device: torch.device):
    """Its figure is that of tensors; kernels' workspaces come on top, so it may be below but never above."""
    if device.type != "cuda":
        pytest.skip("only CUDA's allocator tells the bytes that were requested")
    model, x = stack()
    model, x = model.to(device), x.to(device)
    for strategy in (ms.KeepAll(), ms.FullCheckpoint(), ms.Offload(min_bytes=0)):
        model.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with ms.apply(model, strategy), ms.MemoryMeter(model) as meter:
            model(x).sum().backward()
        torch.cuda.synchronize()
        requested = torch.cuda.memory_stats()["requested_bytes.all.peak"]
        assert 0.5 * requested <= meter.trace.peak_bytes <= requested


@pytest.mark.parametrize("attention", ("math", "sdpa"))
@pytest.mark.parametrize("dropout", (0.0, 0.1))
@pytest.mark.parametrize("dtype", ("float32", "float16"))
def test_the_formulas_for_cuda(dtype: str, dropout: float, attention: str, device: torch.device):
    if device.type != "cuda":
        pytest.skip("the formulas are those of CUDA's kernels")
    shape = BlockShape(2, 64, 128, 4, dtype=dtype, dropout=dropout, attention=attention, device="cuda")
    model, x = build_stack(shape, 3).to(device), build_input(shape).to(device)
    measured = saved_bytes(lambda: model(x), model)
    assert measured - formulas.stack_saved_bytes(ms.KeepAll().plan(3), shape) == 0


def test_offloading_lowers_the_allocators_peak(device: torch.device):
    if device.type != "cuda":
        pytest.skip("only CUDA's allocator tells the bytes that were requested")
    model, x = ms.BlockStack(8, 256, 4).to(device), torch.randn(8, 512, 256, device=device)
    peaks = {}
    for name, strategy in {"keep all": ms.KeepAll(), "offload": ms.Offload()}.items():
        model.zero_grad()
        gc.collect()
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        with ms.apply(model, strategy):
            model(x).sum().backward()
        torch.cuda.synchronize()
        peaks[name] = torch.cuda.memory_stats()["requested_bytes.all.peak"]
    assert peaks["offload"] < 0.6 * peaks["keep all"]
