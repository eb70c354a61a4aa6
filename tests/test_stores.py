"""Stores by themselves: the host's pool, the file without a name, what they do when a copy goes wrong."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import signal
import stat
import subprocess
import sys
import textwrap
import time
import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch import Tensor

import memsave_lib as ms
from memsave_lib.stores import NullStore, Store
from memsave_lib.stores.slab import Extent, Slab
from offloading import NotingDiskStore, offload, open_files, threads

MAKE = {"host": ms.HostStore, "disk": ms.DiskStore, "null": NullStore}
every_store = pytest.mark.parametrize("kind", MAKE)
DTYPES = [torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.int64, torch.uint8, torch.bool]


def numbers(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(count).remainder(2 if dtype is torch.bool else 100).to(dtype)


@pytest.fixture(autouse=True, scope="module")
def no_thread_is_left() -> Iterator[None]:
    """Whatever goes wrong below. Of a backward that failed in other tests, PyTorch may hold a part."""
    gc.collect()
    before = len(threads())
    yield
    gc.collect()
    assert len(threads()) <= before


# All stores alike


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@every_store
def test_what_comes_back_is_what_was_put(kind, dtype):
    store, source = MAKE[kind](), numbers(1001, dtype)
    deposit = store.put(source.clone())
    assert store.stored_bytes == source.nbytes
    deposit.let_go()
    for _ in range(3):  # a retained graph asks again
        returned = deposit.take()
        assert returned.dtype == dtype and torch.equal(returned, source)
        assert store.stored_bytes == source.nbytes
    deposit.close()
    assert store.stored_bytes == 0


@every_store
def test_bytes_may_come_back_before_they_have_all_left(kind):
    store, source = MAKE[kind](), numbers(100_000)
    deposit = store.put(source.clone())
    returned = deposit.take()
    assert torch.equal(returned, source)
    deposit.close()


@every_store
def test_to_start_back_twice_is_to_start_once(kind):
    store = MAKE[kind]()
    deposit = store.put(numbers(10))
    assert deposit.start_back() is not None
    assert deposit.start_back() is None
    assert torch.equal(deposit.take(), numbers(10))
    assert deposit.start_back() is not None
    deposit.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_source_dies_when_it_is_let_go(kind):
    """fairscale#948, ColossalAI#643."""
    source = numbers(10).clone()
    alive = weakref.ref(source.untyped_storage())
    deposit = MAKE[kind]().put(source)
    del source
    deposit.let_go()
    assert alive() is None
    assert torch.equal(deposit.take(), numbers(10))
    deposit.close()


@pytest.mark.parametrize("kind", ["host", "disk"])
def test_a_closed_store_refuses_more_and_gives_back_what_it_has(kind):
    store = MAKE[kind]()
    deposit = store.put(numbers(10))
    store.close()
    with pytest.raises(RuntimeError, match=f"this {type(store).__name__} was closed: make a new one"):
        store.put(numbers(10))
    assert torch.equal(deposit.take(), numbers(10))
    deposit.close()
    assert store.stored_bytes == 0


# The host's pool


def test_buffers_of_the_same_size_and_type_are_used_again():
    store = ms.HostStore()
    for turn in range(3):
        deposits = [store.put(numbers(count, dtype)) for count, dtype in ((10, torch.float32), (10, torch.int64))]
        deposits += [store.put(numbers(20)), store.put(numbers(10))]
        assert (store.pool_hits, store.pool_misses) == (4 * turn, 4)
        assert store.stored_bytes == store.pool_bytes == 40 + 80 + 80 + 40
        for deposit in deposits:
            deposit.close()
        assert (store.stored_bytes, store.pool_bytes) == (0, 240)


def test_what_does_not_fit_is_not_taken_and_spare_buffers_make_room():
    store = ms.HostStore(max_bytes=100)
    first = store.put(numbers(10))
    assert store.put(numbers(16)) is None  # 40 + 64 bytes
    second = store.put(numbers(15))
    assert store.stored_bytes == 100
    assert store.put(numbers(1)) is None
    first.close()
    second.close()
    third = store.put(numbers(25))  # in place of both
    assert third is not None and store.pool_bytes == 100
    assert torch.equal(third.take(), numbers(25))


def test_a_full_pool_leaves_the_rest_on_the_device():
    stack, x = ms.BlockStack(3, 8, 2), torch.randn(2, 5, 8)
    with ms.apply(stack, offload(store=ms.HostStore(max_bytes="2 KiB"))) as applied:
        stack(x).sum().backward()
    traffic = applied.report.offload
    assert 0 < traffic.moved.bytes <= 2048
    assert traffic.skipped["store is full"].tensors > 0


def test_wrong_arguments_are_refused_with_their_value():
    with pytest.raises(TypeError, match="pin is True, False or None, got 1"):
        ms.HostStore(pin=1)
    with pytest.raises(ValueError, match='did you mean "4 GiB"'):
        ms.HostStore(max_bytes="4 Gib")
    with pytest.raises(ValueError, match="cannot be negative, got -1"):
        ms.HostStore(max_bytes=-1)
    if not torch.accelerator.is_available():
        with pytest.raises(ValueError, match="pin=True needs an accelerator"):
            ms.HostStore(pin=True)


# The file


def descriptor_of(directory: Path) -> int:
    """The only descriptor that is open on a file in ``directory``."""
    found = []
    for link in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the listing's own
            if os.readlink(link).startswith(f"{directory}/"):
                found.append(int(link.name))
    (descriptor,) = found
    return descriptor


def test_the_file_has_no_name_and_nobody_else_may_read_it(tmp_path):
    """axolotl#3738: on disk, truly, with the right number of bytes; trl#5700: and gone afterwards."""
    stack, x = ms.BlockStack(3, 8, 2), torch.randn(2, 5, 8)
    store = NotingDiskStore(tmp_path)
    with ms.apply(stack, offload(store=store)) as applied:
        loss = stack(x).sum()
        status = os.fstat(descriptor_of(tmp_path))
        assert stat.S_ISREG(status.st_mode) and stat.S_IMODE(status.st_mode) == 0o600
        assert status.st_nlink == 0 and list(tmp_path.iterdir()) == []
        moved = applied.report.offload.moved.bytes
        assert status.st_size == store.stored_bytes == store.file_bytes == moved == store.put_bytes > 0
        loss.backward()
    store.close()
    assert store.file_bytes == 0
    assert not [name for name in open_files() if name.startswith(str(tmp_path))]


def test_a_file_does_not_grow_from_step_to_step():
    stack, x = ms.BlockStack(3, 8, 2, dropout=0.1), torch.randn(2, 5, 8)
    store = ms.DiskStore()
    sizes = []
    with ms.apply(stack, offload(store=store)):
        for _ in range(5):
            stack(x).sum().backward()
            sizes.append(store.file_bytes)
    assert len(set(sizes)) == 1 and sizes[0] > 0


def test_space_is_used_again_merged_and_split(tmp_path):
    slab = Slab(tmp_path)
    extents = [slab.reserve(100) for _ in range(4)]
    assert [extent.offset for extent in extents] == [0, 100, 200, 300] and slab.used_bytes == 400
    for extent in (extents[2], extents[0], extents[1]):
        slab.give_back(extent)
    assert slab.used_bytes == 100
    assert slab.reserve(300) == Extent(0, 300)  # the three of them are one
    slab.give_back(Extent(0, 300))
    assert [slab.reserve(120), slab.reserve(180)] == [Extent(0, 120), Extent(120, 180)]
    slab.give_back(extents[3])
    assert slab.reserve(250) == Extent(300, 250)  # a free end is made longer
    assert slab.used_bytes == 550
    slab.close()


def test_many_threads_never_get_the_same_space(tmp_path):
    slab, taken, wrong = Slab(tmp_path), {}, []

    def work(number: int) -> None:
        for turn in range(1500):
            extent = slab.reserve(1 + (turn * 7 + number) % 50)
            for place in range(extent.offset, extent.stop):
                if taken.setdefault(place, number) != number:
                    wrong.append(place)
            for place in range(extent.offset, extent.stop):
                taken.pop(place, None)
            slab.give_back(extent)

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)  # threads take turns in the middle of everything
    try:
        with ThreadPoolExecutor(4) as workers:
            list(workers.map(work, range(4)))
    finally:
        sys.setswitchinterval(interval)
    assert not wrong and slab.used_bytes == 0
    slab.close()


def test_a_directory_that_is_missing_or_none_is_refused_at_once(tmp_path):
    missing = tmp_path / "missing"
    with pytest.raises(FileNotFoundError, match=f"DiskStore.directory='{missing}'.: there is no such directory"):
        ms.DiskStore(str(missing))
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="no such directory"):
        ms.DiskStore(tmp_path / "file")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_a_directory_that_cannot_be_written_to_is_refused_at_once(tmp_path):
    tmp_path.chmod(0o500)
    try:
        with pytest.raises(PermissionError):
            ms.DiskStore(tmp_path)
    finally:
        tmp_path.chmod(0o700)


# What goes wrong


class Step:
    """A step that can be compared with one that has all its bytes."""

    def __init__(self, store: Store, prefetch: int = 2):
        torch.manual_seed(0)
        self.stack, self.x = ms.BlockStack(3, 8, 2), torch.randn(2, 5, 8)
        self.strategy = offload(store=store, prefetch=prefetch)
        self.stack(self.x).square().sum().backward()
        self.plain = self.gradients()

    def gradients(self) -> list[Tensor]:
        found = [parameter.grad for parameter in self.stack.parameters()]
        self.stack.zero_grad()
        return found

    def run(self) -> None:
        self.stack.zero_grad()
        self.stack(self.x).square().sum().backward()

    def assert_next_step_works(self) -> None:
        self.run()
        assert all(torch.equal(mine, theirs) for mine, theirs in zip(self.gradients(), self.plain, strict=True))


@pytest.fixture
def quickly() -> Iterator[None]:
    """An error within seconds, never a hang."""
    began = time.perf_counter()
    yield
    assert time.perf_counter() - began < 20


@pytest.mark.parametrize("call", [1, 2, 10, 30])
@pytest.mark.parametrize("prefetch", [0, 2, 100])
@pytest.mark.parametrize(("name", "error"), [("write", errno.ENOSPC), ("read", errno.EIO)])
def test_a_failing_copy_raises_and_the_next_step_works(monkeypatch, quickly, name, error, prefetch, call):
    """axolotl: a failed write hangs training."""
    plain, calls = getattr(Slab, name), []

    def failing(slab: Slab, extent: Extent, memory: memoryview) -> None:
        calls.append(extent)
        if len(calls) == call:
            raise OSError(error, os.strerror(error))
        plain(slab, extent, memory)

    step = Step(ms.DiskStore(), prefetch)
    with ms.apply(step.stack, step.strategy) as applied:
        monkeypatch.setattr(Slab, name, failing)
        with pytest.raises(OSError, match=os.strerror(error)) as raised:
            step.run()
        assert raised.value.errno == error
        assert len(calls) >= call
        assert applied.report.offload.stalls >= 0  # the timeline leaves out what never arrived
        step.assert_next_step_works()


@pytest.mark.parametrize("name", ["write", "read"])
def test_when_every_copy_fails_every_step_says_so(monkeypatch, quickly, name):
    def failing(*_: object) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    step = Step(ms.DiskStore())
    with ms.apply(step.stack, step.strategy):
        with monkeypatch.context() as patch:
            patch.setattr(Slab, name, failing)
            for _ in range(3):
                with pytest.raises(OSError, match=os.strerror(errno.EIO)):
                    step.run()
        step.assert_next_step_works()


def test_a_file_that_was_cut_short_raises(quickly, tmp_path):
    step = Step(ms.DiskStore(tmp_path))
    with ms.apply(step.stack, step.strategy):
        loss = step.stack(step.x).square().sum()
        os.ftruncate(descriptor_of(tmp_path), 100)
        with pytest.raises(OSError, match="ended early: .* bytes could be read"):
            loss.backward()
        del loss
        step.assert_next_step_works()


def test_a_full_disk_is_noticed_before_anything_is_written(monkeypatch, quickly, tmp_path):
    step = Step(ms.DiskStore(tmp_path))
    room = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize = 1, 512

    with ms.apply(step.stack, step.strategy):
        with monkeypatch.context() as patch:
            patch.setattr(os, "fstatvfs", lambda descriptor: Full)
            with pytest.raises(OSError, match=r"needs .* more on this disk, .* are free: choose another") as raised:
                step.run()
        assert raised.value.errno == errno.ENOSPC and raised.value.filename == str(tmp_path)
        assert room.f_frsize > 0
        step.assert_next_step_works()


def test_a_small_disk_that_is_truly_full(quickly, tmp_path):
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=16k", "tmpfs", str(tmp_path)], capture_output=True, text=True, check=False
    )
    if mounted.returncode:
        pytest.skip(f"no file system can be mounted here: {mounted.stderr.strip()}")
    try:
        step = Step(ms.DiskStore(tmp_path))
        with ms.apply(step.stack, step.strategy), pytest.raises(OSError) as raised:
            for _ in range(3):
                big = torch.randn(200, 5, 8)
                step.stack(big).sum().backward()
        assert raised.value.errno == errno.ENOSPC
        del step, raised
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def test_a_killed_process_leaves_nothing(tmp_path):
    """trl#5700: nothing survives, however the process ends."""
    script = f"""
        import sys, torch, memsave_lib as ms
        stack = ms.BlockStack(2, 8, 2)
        store = ms.DiskStore({str(tmp_path)!r})
        with ms.apply(stack, ms.Offload(store=store, keep_last=0, min_bytes=1)):
            loss = stack(torch.randn(2, 5, 8)).sum()
            print(store.file_bytes, flush=True)
            sys.stdin.read()
    """
    child = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(script)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(ms.__file__).parents[1],
    )
    try:
        assert int(child.stdout.readline()) > 0
        assert list(tmp_path.iterdir()) == []
    finally:
        child.send_signal(signal.SIGKILL)
        child.communicate()
    assert child.returncode == -signal.SIGKILL
    assert list(tmp_path.iterdir()) == []


def test_a_process_that_ends_in_mid_step_ends(tmp_path):
    """With copies under way and a graph alive: no hang, no message, no file."""
    script = f"""
        import torch, memsave_lib as ms
        stack = ms.BlockStack(2, 8, 2)
        applied = ms.apply(stack, ms.Offload(store=ms.DiskStore({str(tmp_path)!r}), keep_last=0, min_bytes=1))
        loss = stack(torch.randn(2, 5, 8)).sum()
    """
    ended = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        capture_output=True,
        text=True,
        timeout=60,
        cwd=Path(ms.__file__).parents[1],
        check=False,
    )
    assert (ended.returncode, ended.stderr) == (0, "")
    assert list(tmp_path.iterdir()) == []


RESIDENT = """
    import os, sys, torch, memsave_lib as ms
    torch.set_num_threads(1)

    def resident():
        return int(open("/proc/self/statm").read().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    class Wide(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Parameter(torch.ones(1))

        def forward(self, x):
            return (x * self.scale).sigmoid()

    stack = torch.nn.ModuleList(Wide() for _ in range(64))
    x = torch.randn(2 << 20)
    strategy = ms.KeepAll() if sys.argv[1] == "keep" else ms.Offload(store="disk", keep_last=0)
    with torch.no_grad():
        ms.run(list(stack), x, ms.KeepAll())
    before = resident()
    loss = ms.run(list(stack), x, strategy).sum()
    print(resident() - before)
    loss.backward()
    del loss
    print(resident() - before)
"""


def test_the_memory_of_the_process_really_falls():
    """accelerate#4175, axolotl#3738: 512 MiB of activations, by the system's own account."""

    def growth(which: str) -> tuple[int, int]:
        ended = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(RESIDENT), which],
            capture_output=True,
            text=True,
            env={**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576", "OMP_NUM_THREADS": "1"},
            cwd=Path(ms.__file__).parents[1],
            timeout=120,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        forward, end = map(int, ended.stdout.split())
        return forward, end

    kept, sent = growth("keep"), growth("disk")
    assert kept[0] > 400 << 20, kept
    assert sent[0] < kept[0] / 4, (sent, kept)
    assert sent[1] < 64 << 20 and kept[1] < 64 << 20, (sent, kept)
