"""How much memory a process really takes while a stack of blocks trains, as the system counts it.

    python -m memsave_lib.course.disk_memory disk '{"n_layers": 8, ...}'

Each case runs in a process of its own: memory that one has returned would otherwise be used by the next. The C library
keeps freed memory for itself unless each large block is mapped by itself, which ``MALLOC_MMAP_THRESHOLD_`` asks for; it
must be in the environment when a process starts.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

STATUS = Path("/proc/self/status")
CASES = ("keep all", "disk")


@dataclass(frozen=True)
class Size:
    """A stack of blocks, and the input that it trains on."""

    n_layers: int = 8
    hidden: int = 512
    batch: int = 4
    seq_len: int = 512


@dataclass(frozen=True)
class Growth:
    """Resident bytes of a process, above what it had before the step."""

    after_forward: int
    after_step: int
    saved_bytes: int  # of the blocks, by closed form
    offloaded_bytes: int


def why_not() -> str | None:
    """A sentence, where the system does not tell what a process has in memory."""
    return None if STATUS.exists() else "this system has no /proc/self/status that tells the memory of a process"


def measure(case: str, size: Size | None = None, directory: str | None = None) -> Growth:
    """Run one step in a process of its own, keeping all or with everything but the last block on disk.

    Args:
        case: ``"keep all"`` or ``"disk"``.
        size: of the stack.
        directory: for the disk store's file.
    """
    if case not in CASES:
        raise ValueError(f"case is one of {', '.join(map(repr, CASES))}, got {case!r}")
    environment = {**os.environ, "MALLOC_MMAP_THRESHOLD_": "1048576"}
    command = [sys.executable, "-m", "memsave_lib.course.disk_memory", case, json.dumps(asdict(size or Size()))]
    done = subprocess.run(
        [*command, *([directory] if directory else [])], env=environment, capture_output=True, text=True
    )
    if done.returncode:
        raise RuntimeError(f"the measurement of {case!r} ended with an error:\n{done.stderr.strip()}")
    return Growth(**json.loads(done.stdout))


def resident_bytes() -> int:
    """What this process has in memory."""
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith("VmRSS:"))
    return int(line.split()[1]) * 1024


def _run(case: str, size: Size, directory: str | None) -> Growth:
    import torch

    import memsave_lib as ms
    from memsave_lib import formulas

    model = ms.BlockStack(size.n_layers, size.hidden, heads=8)
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)  # they would come during the step, and hide what leaves
    ms.BlockStack(1, size.hidden, heads=8)(torch.randn(1, 8, size.hidden)).sum().backward()
    x = torch.randn(size.batch, size.seq_len, size.hidden)
    strategy = ms.KeepAll() if case == "keep all" else ms.Offload(store=ms.DiskStore(directory))
    with ms.apply(model, strategy):
        before = resident_bytes()
        loss = model(x).sum()
        after_forward = resident_bytes() - before
        loss.backward()
        del loss
        after_step = resident_bytes() - before
    shape = formulas.BlockShape(size.batch, size.seq_len, size.hidden, 8)
    plan = strategy.plan(size.n_layers)
    saved = formulas.stack_saved_bytes(ms.KeepAll().plan(size.n_layers), shape)
    return Growth(after_forward, after_step, saved, formulas.offloaded_bytes(plan, shape))


if __name__ == "__main__":
    case, size, *directory = sys.argv[1:]
    print(json.dumps(asdict(_run(case, Size(**json.loads(size)), directory[0] if directory else None))))
