"""What the library costs, as ratios within one run: `make bench`.

Two ways of doing the same work take turns, A B A B ..., and the median of the pairwise ratios is printed: what drifts
on a busy machine drifts for both. Nothing here is a test; a ratio above its aim is printed, not raised.
"""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed._tools.mem_tracker import MemTracker
from torch.utils.checkpoint import checkpoint

import memsave_lib as ms
from memsave_lib._compat import TorchDispatchMode
from memsave_lib.costs import ModelCosts
from memsave_lib.course.costs import llama_costs
from memsave_lib.formulas import LlamaShape
from memsave_lib.models import hugging_face_checkpointing
from memsave_lib.planner.chain import Chain
from memsave_lib.planner.labels import fastest
from memsave_lib.planner.programs import mixed_integer_program
from memsave_lib.stores import NullStore
from memsave_lib.stores.slab import Extent, Slab

Work = Callable[[], object]


@dataclass(frozen=True)
class Ratio:
    what: str
    value: float
    spread: tuple[float, float]
    aim: float
    unit: str = "x"

    def __str__(self) -> str:
        verdict = "" if self.value <= self.aim else "  (above the aim)"
        low, high = self.spread
        return f"{self.what:<76} {self.value:6.3f} {self.unit:<2} ({low:.3f} to {high:.3f}), aim {self.aim}{verdict}"


def seconds(work: Work) -> float:
    begin = time.perf_counter()
    work()
    return time.perf_counter() - begin


def paired(what: str, work: Work, reference: Work, aim: float, pairs: int = 15) -> Ratio:
    """The median of work / reference over alternating runs, after two of each to warm up."""
    for warm_up in (work, reference) * 2:
        warm_up()
    ratios = sorted(seconds(work) / seconds(reference) for _ in range(pairs))
    quarter = pairs // 4
    return Ratio(what, statistics.median(ratios), (ratios[quarter], ratios[-quarter - 1]), aim)


def train_step(model: torch.nn.Module, forward: Callable[[], Tensor]) -> Work:
    def step() -> None:
        model.zero_grad(set_to_none=True)
        forward().backward()

    return step


def against_hand_written_loop() -> Ratio:
    model, x = ms.BlockStack(8, 256, 4), torch.randn(4, 128, 256)
    hand_model = ms.BlockStack(8, 256, 4)

    def by_hand() -> Tensor:
        hidden = x
        for block in hand_model.blocks:
            hidden = checkpoint(block, hidden, use_reentrant=False)
        return hidden.square().mean()

    with ms.apply(model, ms.FullCheckpoint()):
        return paired(
            "step: apply(FullCheckpoint) / loop over torch.utils.checkpoint",
            train_step(model, lambda: model(x).square().mean()),
            train_step(hand_model, by_hand),
            aim=1.02,
        )


def against_hugging_face_switch() -> Ratio:
    ours, theirs = ms.gpt2("mini"), ms.gpt2("mini")
    hugging_face_checkpointing(theirs)
    theirs.config.use_cache = False
    ids = torch.randint(0, 1024, (2, 256))
    with ms.apply(ours, ms.FullCheckpoint()):
        return paired(
            "step: apply(FullCheckpoint) on GPT-2 / Hugging Face's own switch",
            train_step(ours, lambda: ours(ids, labels=ids).loss),
            train_step(theirs, lambda: theirs(ids, labels=ids).loss),
            aim=1.02,
        )


@contextmanager
def mem_tracker(model: torch.nn.Module, x: Tensor):
    tracker = MemTracker()
    tracker.track_external(model, x)
    with tracker:
        yield


class OpCounter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.ops = 0

    def __torch_dispatch__(self, op, types, args=(), kwargs=None):
        self.ops += 1
        return op(*args, **(kwargs or {}))


def overhead_an_op(pairs: int = 9) -> Ratio:
    """Tiny tensors, so that what is timed is the bookkeeping; (metered - plain) / (tracked - plain)."""
    model, x = ms.BlockStack(12, 16, 2), torch.randn(1, 4, 16)
    step = train_step(model, lambda: model(x).square().mean())

    def metered() -> None:
        with ms.MemoryMeter(model):
            step()

    def tracked() -> None:
        with mem_tracker(model, x):
            step()

    for warm_up in (step, metered, tracked):
        warm_up()
    with OpCounter() as counter:
        step()
    ratios, per_op = [], []
    for _ in range(pairs):
        plain = min(seconds(step) for _ in range(3))
        ours, theirs = seconds(metered) - plain, seconds(tracked) - plain
        ratios.append(ours / theirs)
        per_op.append(ours / counter.ops * 1e6)
    ratios.sort()
    what = f"overhead an op: meter ({statistics.median(per_op):.0f} us in this run) / MemTracker"
    return Ratio(what, statistics.median(ratios), (ratios[pairs // 4], ratios[-pairs // 4 - 1]), aim=0.15)


def metered_step() -> Ratio:
    model, x = ms.BlockStack(6, 256, 4), torch.randn(4, 256, 256)
    step = train_step(model, lambda: model(x).square().mean())

    def metered() -> None:
        with ms.MemoryMeter(model):
            step()

    return paired("step at the course's size: metered / plain", metered, step, aim=1.3, pairs=9)


def engine_alone() -> Ratio:
    """Every saved tensor goes through the offload engine, but none is copied."""
    model, x = ms.BlockStack(6, 256, 4), torch.randn(4, 256, 256)
    plain_model = ms.BlockStack(6, 256, 4)
    with ms.apply(model, ms.Offload(store=NullStore(), keep_last=0)):
        return paired(
            "step: Offload to a store that moves nothing / plain",
            train_step(model, lambda: model(x).square().mean()),
            train_step(plain_model, lambda: plain_model(x).square().mean()),
            aim=1.05,
        )


DISK_SHAPE = (4, 512, 512)  # batch, positions, width: saved tensors of 4 to 16 MiB


def beside_the_disk(step: Work, nbytes: int) -> tuple[float, float]:
    """Seconds of ``step`` while one thread writes ``nbytes`` to a file and another reads as many, and theirs together.

    The same work for processor, memory and disk as in a step that offloads, but nobody waits for anybody.
    """
    slab, chunk = Slab(Path(tempfile.gettempdir())), 8 * 2**20
    extent = slab.reserve(chunk)
    slab.write(extent, memoryview(bytearray(chunk)))

    def lane(move: Callable[[Extent, memoryview], None]) -> float:
        memory, begin = memoryview(bytearray(chunk)), time.perf_counter()
        for _ in range(round(nbytes / chunk)):
            move(extent, memory)
        return time.perf_counter() - begin

    with ThreadPoolExecutor(2) as threads:
        lanes = [threads.submit(lane, move) for move in (slab.write, slab.read)]
        computation = seconds(step)
        copies = sum(done.result() for done in lanes)  # in a step one follows the other
    slab.close()
    return computation, copies


def disk_step(pairs: int = 9) -> Ratio:
    """DiskStore's step / the longer of its computation and its copies, measured side by side without any waiting."""
    model, x = ms.BlockStack(6, DISK_SHAPE[-1], 8), torch.randn(DISK_SHAPE)
    step = train_step(model, lambda: model(x).square().mean())
    ratios = []
    for _ in range(pairs + 1):
        with ms.apply(model, ms.Offload(store="disk", prefetch=4)) as applied:
            step()
            ours = seconds(step)
        moved = applied.report.offload.moved.bytes // 2  # of one of the two steps
        with ms.apply(model, ms.Offload(store=NullStore())):
            ratios.append(ours / max(beside_the_disk(step, moved)))
    ratios = sorted(ratios[1:])
    what = f"DiskStore's step ({moved / 2**20:.0f} MiB out and back) / the ideal max(computation, copies)"
    return Ratio(what, statistics.median(ratios), (ratios[pairs // 4], ratios[-pairs // 4 - 1]), aim=1.2)


class FileOfOne:
    """A tensor in a file of its own that is deleted with the object, as PyTorch's tutorial on hooks has it."""

    def __init__(self, tensor: Tensor) -> None:
        self.name = os.path.join(tempfile.gettempdir(), f"memsave-bench-{uuid.uuid4()}")
        torch.save(tensor, self.name)

    def __del__(self) -> None:
        os.remove(self.name)

    def load(self) -> Tensor:
        return torch.load(self.name)


def against_files() -> Ratio:
    model, x = ms.BlockStack(4, DISK_SHAPE[-1], 8), torch.randn(DISK_SHAPE)
    files_model = ms.BlockStack(4, DISK_SHAPE[-1], 8)

    def with_files() -> None:
        files_model.zero_grad(set_to_none=True)
        with saved_tensors_hooks(FileOfOne, FileOfOne.load):
            loss = files_model(x).square().mean()
        loss.backward()

    with ms.apply(model, ms.Offload(store="disk", keep_last=0, min_bytes=0, prefetch=4)):
        return paired(
            "step: DiskStore / a file for each saved tensor, saved and loaded on the spot",
            train_step(model, lambda: model(x).square().mean()),
            with_files,
            aim=0.667,
            pairs=5,
        )


def host_pool() -> Ratio:
    """Buffers made after the first step / buffers used: the misses of the pool."""
    model, x = ms.BlockStack(6, 256, 4), torch.randn(4, 256, 256)
    step, store = train_step(model, lambda: model(x).square().mean()), ms.HostStore()
    with ms.apply(model, ms.Offload(store=store)):
        step()
        first = store.pool_misses
        for _ in range(4):
            step()
    missed = (store.pool_misses - first) / (store.pool_hits + store.pool_misses - first)
    return Ratio("HostStore: buffers made / buffers used, after the first step", missed, (missed, missed), aim=0.05)


def import_cost(pairs: int = 5) -> Ratio:
    def importing(modules: str) -> float:
        command = f"import time; t = time.perf_counter(); import {modules}; print(time.perf_counter() - t)"
        return float(subprocess.run([sys.executable, "-c", command], check=True, capture_output=True).stdout)

    extra = sorted(importing("torch, memsave_lib") - importing("torch") for _ in range(pairs))
    return Ratio("import memsave_lib beyond import torch", statistics.median(extra), (extra[0], extra[-1]), 0.15, "s")


@dataclass(frozen=True)
class Trained:
    """A model that trains here, and the letters that formulas want of it."""

    what: str
    build: Callable[[], torch.nn.Module]
    batch: int
    seq_len: int
    layers: int
    hidden: int
    heads: int
    language_model: bool = True

    def inputs(self, batch: int, seq_len: int) -> Tensor:
        return torch.randn(batch, seq_len, self.hidden)

    def loss(self, output: Tensor, inputs: Tensor) -> Tensor:
        return output.square().mean()

    def real_peak(self) -> int:
        """Live bytes at the peak of a step of AdamW from the middle of training."""
        torch.manual_seed(0)
        model = self.build().train()
        optimizer = torch.optim.AdamW(model.parameters())
        if self.language_model:
            tokens = torch.randint(model.config.vocab_size, (self.batch, self.seq_len))
            labels = tokens.clone()
            forward = lambda: model(input_ids=tokens, labels=labels, use_cache=False).loss  # noqa: E731
        else:
            x = self.inputs(self.batch, self.seq_len)
            forward = lambda: self.loss(model(x), x)  # noqa: E731

        def step() -> None:
            optimizer.zero_grad(set_to_none=True)
            forward().backward()
            optimizer.step()

        step()
        with ms.MemoryMeter(model, optimizer) as meter:
            step()
        return meter.trace.peak_bytes

    def estimated(self) -> int:
        functions = {} if self.language_model else {"inputs": self.inputs, "loss": self.loss}
        return ms.estimate(self.build, self.batch, self.seq_len, **functions).peak_bytes

    def by_parameters(self) -> int:
        """As ``accelerate estimate-memory`` for float32: model, gradients and Adam's two averages, no activations.

        Source: huggingface/accelerate, src/accelerate/commands/estimate.py, ``estimate_training_usage``, "step".
        """
        return 4 * sum(parameter.nbytes for parameter in self.build().parameters())

    def by_formula(self) -> int:
        """In the style of EleutherAI/cookbook, calc/calc_transformer_mem.py: states by parameter, activations by layer.

        sbh(34 + 5as/h) bytes a layer of Korthikanti et al., which it writes for any precision of p bytes as
        sbh(16p + 2 + (2p + 1)as/h): masks of dropout and the matrix of attention weights are in it. Adapted: p = 4 for
        float32, the true number of parameters, and 16 bytes for each of them: the calculator adds another float32 copy
        and comes to 20. Logits and loss are not in it.
        """
        sbh, p = self.seq_len * self.batch * self.hidden, 4
        attention = (2 * p + 1) * self.heads * self.seq_len / self.hidden
        activations = round(self.layers * sbh * (16 * p + 2 + attention))
        return 16 * sum(parameter.numel() for parameter in self.build().parameters()) + activations


SMALL_LLAMA = {
    "hidden_size": 256,
    "intermediate_size": 688,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "vocab_size": 1024,
}
TRAINED = (
    Trained("GPT-2 mini, 2 x 256", lambda: ms.gpt2("mini"), 2, 256, 6, 256, 4),
    Trained("Llama, 6 layers of width 256, 2 x 256", lambda: ms.llama(**SMALL_LLAMA), 2, 256, 6, 256, 4),
    Trained("stack of 8 blocks of width 256, 4 x 256", lambda: ms.BlockStack(8, 256, 4), 4, 256, 8, 256, 4, False),
)


def estimates() -> str:
    """Error of each estimator of the peak, in per cent of what the real step needed."""
    lines = ["peak of a step with AdamW, estimated / measured - 1:"]
    for model in TRAINED:
        real = model.real_peak()
        errors = {
            "ms.estimate": model.estimated(),
            "accelerate's 4 x parameters": model.by_parameters(),
            "the cookbook's sbh(66 + 9as/h) a layer + 16 bytes a parameter": model.by_formula(),
        }
        shown = "; ".join(f"{name} {nbytes / real - 1:+.2%}" for name, nbytes in errors.items())
        lines.append(f"  {model.what} ({real / 2**20:.1f} MiB): {shown}")
    return "\n".join(lines)


def planner() -> Ratio:
    """80 of Llama-2-7B's blocks at 32k tokens on an A100: both solvers prove the same plan."""
    costs = ModelCosts(llama_costs(LlamaShape(1, 32_768, 4096, 32, 32, 11_008), 80))
    chain = Chain.of(costs, ms.devices.A100, "host")
    return paired(
        "plan of 80 blocks, dynamic programme / mixed-integer program",
        partial(fastest, chain, 80e9),
        partial(mixed_integer_program, chain, 80e9),
        aim=1.0,
        pairs=3,
    )


def main() -> None:
    torch.manual_seed(0)
    torch.set_num_threads(min(2, torch.get_num_threads()))
    print(f"torch {torch.__version__}, {torch.get_num_threads()} threads; medians, with the middle half of the runs")
    benches = (
        against_hand_written_loop,
        against_hugging_face_switch,
        overhead_an_op,
        metered_step,
        engine_alone,
        disk_step,
        against_files,
        host_pool,
        import_cost,
        planner,
        estimates,
    )
    for bench in benches:
        print(bench(), flush=True)


if __name__ == "__main__":
    main()
