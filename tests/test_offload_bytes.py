"""What leaves and what does not, to the byte: witnesses are PyTorch's own hooks, weak references and a second count."""

from __future__ import annotations

import gc

import pytest
import torch
from torch import Tensor, nn

import memsave_lib as ms
from equality import build_gpt2, build_llama, build_tiny
from helpers import LiveBytes
from memsave_lib.stores import NullStore
from memsave_lib.traffic import Traffic
from offloading import STORES, NotingHostStore, NotingNullStore, a_store, forecast, offload
from test_offload import REAL_STORES, UNDERNEATH, every_real_store, every_store, every_strategy


def stack_and_input(**options: object) -> tuple[ms.BlockStack, Tensor]:
    torch.manual_seed(0)
    return ms.BlockStack(4, 8, 2, **options), torch.randn(2, 5, 8, requires_grad=True)


def assert_adds_up(traffic: Traffic) -> None:
    """Every saved tensor was moved, shared its storage with one that was, or was skipped for a reason."""
    parts = (traffic.moved, traffic.deduplicated, *traffic.skipped.values())
    assert traffic.packed.tensors == sum(part.tensors for part in parts)
    assert traffic.packed.bytes == sum(part.bytes for part in parts)


# What leaves


@pytest.mark.parametrize("options", [{"attention": "math", "dropout": 0.5}, {"attention": "sdpa"}], ids=str)
@pytest.mark.parametrize("keep_last", [0, 1, 2])
@every_strategy
def test_bytes_moved_are_those_that_plain_hooks_see(strategy, keep_last, options):
    stack, x = stack_and_input(**options)
    for min_bytes in (1, 400):
        store = NotingNullStore()
        sent = ms.Offload(strategy, store, keep_last=keep_last, min_bytes=min_bytes)
        expected = forecast(stack, stack.blocks, sent.plan(4), x, min_bytes)
        with ms.apply(stack, sent) as applied:
            stack(x).sum().backward()
        traffic = applied.report.offload
        assert traffic.moved.bytes == store.put_bytes == expected.bytes
        assert traffic.moved.tensors == len(store.puts) == len(expected.storages)
        assert_adds_up(traffic)


@pytest.mark.parametrize("build", [build_tiny, build_gpt2, build_llama])
@pytest.mark.parametrize("variant", ["plain", "tied", "frozen", "shared"])
def test_no_byte_of_a_parameter_leaves(build, variant):
    """trl#4247, torchtune#1847, llama-cookbook#115: views of weights, tied heads, frozen blocks."""
    torch.manual_seed(0)
    model, step = build(variant)
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers())}
    for strategy in UNDERNEATH:
        store = NotingNullStore()
        with ms.apply(model, offload(strategy, store)) as applied:
            step()
        assert store.puts and not owned & {put.address for put in store.puts}
        assert_adds_up(applied.report.offload)


class Odd(nn.Module):
    """Convolutions, a buffer, a weight that is no Parameter of its own, and one from a closure."""

    outside = nn.Parameter(torch.randn(6, 6), requires_grad=False)

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv1d(3, 3, 3, padding=1)
        self.linear = nn.Linear(6, 6)
        self.register_buffer("table", torch.rand(3, 6))

    def forward(self, x):
        x = self.conv(x) * self.table
        x = torch.nn.functional.linear(x, self.linear.weight.view(36)[:36].view(6, 6).t()) @ self.outside.t()
        return x.tanh()


def test_no_byte_of_a_convolution_a_buffer_or_a_closures_parameter_leaves():
    """trl#4247."""
    model, x, store = nn.Sequential(Odd(), Odd(), Odd()), torch.randn(2, 3, 6), NotingNullStore()
    owned = {t.untyped_storage().data_ptr() for t in (*model.parameters(), *model.buffers(), Odd.outside, x)}
    with ms.apply(model, offload(store=store)) as applied:
        model(x).sum().backward()
    assert store.puts and not owned & {put.address for put in store.puts}
    assert applied.report.offload.skipped["parameter"].tensors >= 3 * 4
    assert applied.report.offload.skipped["input"].tensors > 0
    weight = nn.Parameter(torch.randn(6, 6), requires_grad=False)
    store = NotingNullStore()
    leaf = torch.randn(2, 6, requires_grad=True)
    ms.run([lambda y: torch.tanh(y @ weight.t()), nn.Linear(6, 6)], leaf, offload(store=store)).sum().backward()
    assert {put.nbytes for put in store.puts} == {2 * 6 * 4}


def test_nothing_under_min_bytes_leaves():
    stack, x = stack_and_input(attention="math")
    for min_bytes in (1, 160, 161, "1 KiB"):
        store = NotingNullStore()
        with ms.apply(stack, offload(store=store, min_bytes=min_bytes)) as applied:
            stack(x).sum().backward()
        limit = 1024 if isinstance(min_bytes, str) else min_bytes
        assert all(put.nbytes >= limit for put in store.puts)
        small = applied.report.offload.skipped.get("small")
        assert (small is None) == (limit == 1)


class Shapes(nn.Module):
    """Saves an expanded tensor, one storage in many views, and tensors of other types."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(6, 6)
        self.strides = []

    def forward(self, x):
        h = self.linear(x)
        wide = h[:, :1].sigmoid().expand(-1, 1000)  # 4 numbers, as large as 4,000
        y = (wide * wide).mean() + (h.t() * h[:, 1:5].t().flatten().view(4, 4)[:1, :1]).sum()
        y = y + (torch.view_as_complex(h.view(-1, 3, 2)) * torch.tensor(1j)).abs().sum()
        y = y + (h.to(torch.float64).exp()).sum().float() + h.to(torch.bfloat16).exp().sum().float()
        chosen = h.argmax(dim=-1)
        return h.tanh() + y * 1e-3 + h.gather(1, chosen[:, None])


@every_store
def test_views_other_types_and_expanded_tensors_come_back_as_they_were(store):
    """trl#5694, DeepSpeed#8387."""
    torch.manual_seed(0)
    model, x = nn.Sequential(Shapes(), Shapes()), torch.randn(4, 6, requires_grad=True)
    plain = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    with ms.apply(model, offload(store=a_store(store))) as applied:
        ours = torch.autograd.grad(model(x).sum(), [x, *model.parameters()])
    assert all(torch.equal(mine, theirs) for mine, theirs in zip(ours, plain, strict=True))
    traffic = applied.report.offload
    assert traffic.moved.bytes < 2 * 1000 * 4, "an expanded tensor was written out"
    assert traffic.deduplicated.tensors > 0
    assert_adds_up(traffic)


def test_strides_and_offsets_are_restored():
    """What backward is given has the very shape, strides and offset that were saved."""
    seen: list[tuple] = []

    class Looking(torch.autograd.Function):
        @staticmethod
        def forward(ctx, *views: Tensor) -> Tensor:
            ctx.save_for_backward(*views)
            seen.append(tuple((v.shape, v.stride(), v.storage_offset(), v.dtype, v.sum().item()) for v in views))
            return views[0].sum()

        @staticmethod
        def backward(ctx, gradient: Tensor) -> tuple:
            seen.append(
                tuple((v.shape, v.stride(), v.storage_offset(), v.dtype, v.sum().item()) for v in ctx.saved_tensors)
            )
            return (gradient.expand(seen[-1][0][0]), *[None] * (len(ctx.saved_tensors) - 1))

    linear = nn.Linear(6, 6)

    def block(x: Tensor) -> Tensor:
        h = linear(x)
        d = h.detach()
        views = (h.t(), d[1:, ::2], d[2:3].expand(5, 6), d.as_strided((2, 2), (7, 3), 4), d.view(torch.int32)[:, 2])
        return x + Looking.apply(*views)

    for store in STORES:
        seen.clear()
        ms.run([block, block], torch.randn(4, 6), offload(store=a_store(store))).sum().backward()
        assert seen[:2] == seen[:1:-1], store  # the second block's backward comes first
        assert seen[0] == seen[3]


def test_one_copy_for_a_storage_that_is_saved_several_times():
    store = NotingNullStore()

    def block(x: Tensor) -> Tensor:
        y = x.sin()
        return y * y + y.view(-1).view_as(y) * y.t().t()

    leaf = torch.randn(4, 6, requires_grad=True)
    ms.run([block], leaf, offload(store=store)).sum().backward()
    assert [put.nbytes for put in store.puts] == [4 * 6 * 4]


def test_the_last_region_stays():
    """physicsnemo#722."""
    stack, x = stack_and_input()
    moved = []
    for keep_last in range(6):
        with ms.apply(stack, ms.Offload(keep_last=keep_last, min_bytes=1, store=NullStore())) as applied:
            stack(x).sum().backward()
        moved.append(applied.report.offload.moved.bytes)
    assert moved[0] > moved[1] > moved[2] > moved[3] > moved[4] == moved[5] == 0


def test_sparse_tensors_and_subclasses_stay_where_they_are():
    class Marked(Tensor):
        pass

    weight = torch.eye(6).to_sparse()
    marked = torch.rand(4, 6).as_subclass(Marked)

    def block(x: Tensor) -> Tensor:
        return torch.tanh((torch.sparse.mm(weight, x.t()).t() * marked).as_subclass(Tensor))

    leaf = torch.randn(4, 6, requires_grad=True)
    (plain,) = torch.autograd.grad(block(block(leaf)).sum(), leaf)
    for store in REAL_STORES:
        (ours,) = torch.autograd.grad(ms.run([block, block], leaf, offload(store=store)).sum(), leaf)
        assert torch.equal(ours, plain)


# Memory


@pytest.mark.parametrize("prefetch", [0, 1, 2, 5])
def test_sources_die_as_soon_as_prefetch_allows(prefetch):
    """fairscale#948, ColossalAI#643: weak references, and at every block as many as are on their way."""
    stack, x = stack_and_input(dropout=0.1)
    store, alive = NotingHostStore(), []
    for block in stack.blocks:
        block.register_forward_pre_hook(lambda *_: alive.append(store.alive))
    with ms.apply(stack, offload(store=store, prefetch=prefetch)):
        loss = stack(x).sum()
        assert alive == [0, *[prefetch] * 3]
        assert store.alive == 0
        loss.backward()
    assert sum(put.let_go for put in store.puts) == len(store.puts)


@every_real_store
def test_offloading_lowers_the_live_bytes_after_forward_by_what_left(store):
    stack, x = stack_and_input()

    def live(chosen: ms.Strategy) -> int:
        with ms.apply(stack, chosen), LiveBytes((*stack.parameters(), x)) as counted:
            loss = stack(x).sum()
            found = counted.live
            del loss
        return found

    with ms.MemoryMeter(stack) as meter, ms.apply(stack, offload(store=store)) as applied:
        loss = stack(x).sum()
        after = meter.live_bytes
        loss.backward()
    stack.zero_grad()
    x.grad = None
    with ms.MemoryMeter(stack) as plain, ms.apply(stack, ms.KeepAll()):
        loss = stack(x).sum()
        before = plain.live_bytes
        del loss
    assert before - after == applied.report.offload.moved.bytes
    if store == "disk":  # on the host it is memory of the same kind, and the witness counts the buffers too
        assert live(ms.KeepAll()) - live(offload(store=store)) == applied.report.offload.moved.bytes


def test_a_retained_graph_holds_nothing_that_came_back():
    """What a backward has had goes again, although the next one will ask for it."""
    stack, x = stack_and_input(dropout=0.1)
    with ms.apply(stack, offload(store="disk")), LiveBytes((*stack.parameters(), x)) as counted:
        stack(x).sum().backward()  # from here on there are gradients to add to
        loss = stack(x).sum()
        before = counted.live
        for _ in range(3):
            loss.backward(retain_graph=True)
            assert counted.live == before


@every_strategy
def test_the_meter_knows_what_is_away_and_gives_the_same_peak_every_time(strategy):
    stack, x = stack_and_input(dropout=0.5)
    with ms.apply(stack, strategy), ms.MemoryMeter(stack) as meter:
        stack(x).square().sum().backward()
    without, traces = meter.trace, {}
    for turn in range(2):
        for store in REAL_STORES:
            stack, x = stack_and_input(dropout=0.5)
            with ms.apply(stack, offload(strategy, store)) as applied, ms.MemoryMeter(stack) as meter:
                stack(x).square().sum().backward()
            trace = traces[turn, store] = meter.trace
            lane, other = trace.host_peak_bytes, trace.disk_peak_bytes
            if store == "disk":
                lane, other = other, lane
            assert lane == applied.report.offload.moved.bytes > 0 and other == 0
            assert trace.frame()[store].iloc[-1] == 0
            assert trace.at_end == without.at_end
    figures = {(trace.peak_bytes, trace.saved_bytes, str(trace.peak_at)) for trace in traces.values()}
    assert len(figures) == 1


@every_real_store
def test_saved_bytes_leave_out_what_is_away(store):
    stack, x = stack_and_input()

    def saved(strategy: ms.Strategy) -> tuple[int, int]:
        with ms.apply(stack, strategy) as applied, ms.MemoryMeter(stack) as meter:
            stack(x).sum().backward()
        traffic = applied.report.offload
        return meter.trace.saved_bytes, traffic.moved.bytes if traffic else 0

    kept, _ = saved(ms.KeepAll())
    for keep_last in (0, 1, 2):
        left, moved = saved(offload(store=store, keep_last=keep_last))
        assert left + moved == kept


# The report


@every_store
@every_strategy
def test_the_report_adds_up(strategy, store):
    stack, x = stack_and_input(dropout=0.5)
    with ms.apply(stack, offload(strategy, a_store(store))) as applied:
        for steps in (1, 2):
            stack(x).sum().backward()
            traffic = applied.report.offload
            assert_adds_up(traffic)
            assert traffic.moved == traffic.returned
            assert traffic.prefetch_hits + traffic.prefetch_misses == traffic.moved.tensors
            assert traffic.moved.tensors % steps == 0
    assert (traffic.to_host.bytes, traffic.to_disk.bytes) == (
        traffic.moved.bytes if store == "host" else 0,
        traffic.moved.bytes if store == "disk" else 0,
    )
    lanes = traffic.lanes
    assert len(lanes.copy_out) == len(lanes.copy_in) == traffic.moved.tensors / 2
    assert sum(span.nbytes for span in lanes.copy_out) == traffic.moved.bytes / 2
    gc.collect()


def test_a_report_is_of_its_moment():
    stack, x = stack_and_input()
    with ms.apply(stack, offload()) as applied:
        stack(x).sum().backward()
        first = applied.report
        text = str(first)
        stack(x).sum().backward()
        assert str(first) == text
        assert applied.report.offload.moved.bytes == 2 * first.offload.moved.bytes


# In-place changes


class Keeping(nn.Module):
    """Shows tensors that it saves."""

    def __init__(self):
        super().__init__()
        self.linear, self.seen = nn.Linear(4, 4), {}

    def forward(self, x):
        h = self.linear(x)
        first, second = h.sigmoid(), h.tanh()
        self.seen = {"offloaded": first, "deduplicated": h, "kept in place": x}
        return first * first + second * h * h.t()[:1].sum()


@pytest.mark.parametrize("which", ["offloaded", "deduplicated", "kept in place"])
@every_store
def test_an_in_place_change_before_backward_raises(store, which):
    """pytorch#128611: without the engine's check, a wrong gradient and no error."""
    model, x = nn.Sequential(Keeping(), Keeping()), torch.randn(3, 4)
    with ms.apply(model, offload(ms.KeepAll(), a_store(store))) as applied:
        loss = model(x).sum()
        traffic = applied.report.offload
        assert traffic.deduplicated.tensors > 0 and traffic.skipped["input"].tensors > 0
        with torch.no_grad():
            model[0].seen[which].mul_(2)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@every_store
def test_an_in_place_change_after_backward_is_nobodys_business(store):
    model, x = nn.Sequential(Keeping(), Keeping()), torch.randn(3, 4)
    with ms.apply(model, offload(ms.KeepAll(), a_store(store))):
        loss = model(x).sum()
        loss.backward()
        with torch.no_grad():
            for tensor in model[0].seen.values():
                tensor.mul_(2)
        model(x).sum().backward()
