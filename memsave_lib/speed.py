"""How fast this machine multiplies, copies and writes: the pieces of work that ``devices.measure`` repeats.

Each is a function without arguments that does something and says how much it was: FLOPs or bytes.
"""

from __future__ import annotations

import os
import statistics
import tempfile
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack

import torch
from torch import Tensor

Work = Callable[[], int]
MIB = 2**20


def in_turns(
    work: Mapping[str, Work], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> dict[str, list[float]]:
    """What each piece of work gets done per second, in each of at least three repeats; a first run is not counted.

    They take turns, so that another program that disturbs for a moment does not spoil all repeats of one of them.

    Args:
        work: name -> function.
        seconds: after which no further turn starts.
        clock: seconds.
    """
    for do in work.values():
        do()
    rates: dict[str, list[float]] = {name: [] for name in work}
    end, turns = clock() + seconds, 0
    while turns < 3 or clock() < end:
        for name, do in work.items():
            start = clock()
            done = do()
            rates[name].append(done / (clock() - start))
        turns += 1
    return rates


def spread(rates: list[float]) -> float:
    """Width of the middle four fifths of the repeats, as a share of their median."""
    tenths = statistics.quantiles(rates, n=10, method="inclusive")
    return (tenths[-1] - tenths[0]) / statistics.median(rates)


def products(where: torch.device) -> dict[str, Work]:
    """The matrix product of a block's up-projection; FLOPs."""
    on_cpu = where.type == "cpu"
    tokens, hidden = (512, 512) if on_cpu else (4096, 4096)
    options = {
        "dtype": torch.float32 if on_cpu else _half(),
        "device": where,
        # Random, because a GPU multiplies constants faster; its own numbers, because torch's belong to the caller.
        "generator": torch.Generator(where).manual_seed(0),
    }
    left, right = torch.randn(tokens, hidden, **options), torch.randn(hidden, 4 * hidden, **options)
    product = left @ right

    def multiply() -> int:
        torch.mm(left, right, out=product)
        _finish(where)
        return 2 * tokens * hidden * 4 * hidden

    return {"flops": multiply}


def copies(where: torch.device) -> dict[str, Work]:
    """A copy out of the device's memory, and one back; bytes."""
    on_cpu = where.type == "cpu"
    nbytes = (32 if on_cpu else 128) * MIB
    here = torch.ones(nbytes, dtype=torch.uint8, device=where)
    host = torch.ones(nbytes, dtype=torch.uint8, pin_memory=not on_cpu)

    def copy(source: Tensor, destination: Tensor) -> int:
        destination.copy_(source, non_blocking=True)
        _finish(where)
        return nbytes

    return {"copy_out": lambda: copy(here, host), "copy_in": lambda: copy(host, here)}


def disk(directory: str | os.PathLike[str] | None, held: ExitStack) -> dict[str, Work]:
    """A write to a temporary file without a name, which is closed with ``held``, and a read of it; bytes."""
    # As large as a tensor of a small model; random, because some file systems do not store what is all alike.
    content = memoryview(bytearray(os.urandom(MIB) * 16))
    file = tempfile.TemporaryFile(dir=directory, buffering=0)  # noqa: SIM115 - the caller's stack closes it
    held.enter_context(file)

    def move(transfer: Callable[[memoryview], int]) -> int:
        file.seek(0)
        done = 0
        while done < len(content):
            done += transfer(content[done:])
        return done

    return {"disk_write": lambda: move(file.write), "disk_read": lambda: move(file.readinto)}


def host_memory() -> int | None:
    """Bytes of RAM; None where the system does not say."""
    if "SC_PHYS_PAGES" not in getattr(os, "sysconf_names", {}):
        return None
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _half() -> torch.dtype:
    """The half precision that the GPU computes in: a T4 only emulates bf16."""
    return torch.bfloat16 if torch.cuda.is_bf16_supported(including_emulation=False) else torch.float16


def _finish(where: torch.device) -> None:
    """Wait until the device has done what it was asked for; a CPU has, when the call returns."""
    if where.type != "cpu":
        torch.accelerator.synchronize(where)
