"""The homework of the explainers that this course follows, as functions: small in a notebook, full size for a record.

Each returns rows for :mod:`memsave_lib.course.records`, one a variant. Seconds are of steps without a meter, bytes of
steps of their own. All bytes are beyond those that are alive before a step, which are the parameters, the optimizer's
averages and, where it says so, the gradients.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from memsave_lib.course import deepspeed_peer, texts
from memsave_lib.meter import MemoryMeter
from memsave_lib.models import gpt2, hugging_face_checkpointing
from memsave_lib.runner import apply
from memsave_lib.strategies import Chunked, FullCheckpoint, KeepAll, Strategy
from memsave_lib.trace import Trace

SEED = 0
LEARNING_RATE = 5e-5
LossOf = Callable[[nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Sizes:
    """What a run of GPT-2 depends on; ``config`` holds fields of its configuration that differ from the named size."""

    batch_size: int
    seq_len: int
    steps: int
    size: str = "small"
    dropout: float = 0.1
    device: torch.device = torch.device("cpu")
    config: tuple[tuple[str, int], ...] = ()

    def build(self) -> nn.Module:
        """The model, equal each time."""
        torch.manual_seed(SEED)
        dropout = dict.fromkeys(("attn_pdrop", "resid_pdrop", "embd_pdrop"), self.dropout)
        return gpt2(self.size, **dropout, **dict(self.config)).to(self.device).train()

    def batches(self) -> list[Tensor]:
        """A batch of text for each step, and one more for the metered steps.

        Tokens are bytes, which are legal tokens in every vocabulary; no byte count depends on which tokens they are.
        """
        text, steps = texts.load_text().content, self.steps + 1
        found = texts.batches(text, self.seq_len, self.batch_size, steps=steps, seed=SEED)
        # They are views of one tensor, and the meter counts whole storages: copy.
        return [batch.to(self.device, copy=True) for batch in found]


def gpt2_chunks(sizes: Sizes | None = None, chunks: int = 3) -> list[dict[str, Any]]:
    """GPT-2 for some steps: keep all, chunks, every block, Hugging Face's switch, and DeepSpeed's checkpoint in chunks.

    The default is the explainers' size: 124M parameters, 10 steps of 4 x 128 tokens, with GPT-2's own dropout of 0.1.

    Raises RuntimeError when the last losses are not bit-equal: then one of the variants trains another model.
    """
    sizes = sizes or Sizes(batch_size=4, seq_len=128, steps=10)
    batches = sizes.batches()
    rows = [
        _measure("keep all", sizes, batches, KeepAll()),
        _measure(Chunked(chunks).label, sizes, batches, Chunked(chunks)),
        _measure("full checkpoint", sizes, batches, FullCheckpoint()),
        _measure("Hugging Face's switch", sizes, batches, prepare=hugging_face_checkpointing),
    ]
    label = f"DeepSpeed, {Chunked(chunks).label}"
    if reason := deepspeed_peer.why_not():
        rows.append({"variant": label, "skipped": reason})
    else:
        checkpoint = deepspeed_peer.load(sizes.device.type).checkpointing.checkpoint
        rows.append(
            _measure(label, sizes, batches, loss_of=lambda m, x: deepspeed_peer.gpt2_loss(m, x, chunks, checkpoint))
        )
    losses = {row["variant"]: row["last_loss"] for row in rows if "skipped" not in row}
    if len(set(losses.values())) > 1:
        raise RuntimeError(f"the variants must train the same model, and their last losses differ: {losses}")
    return rows


def _own_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    return model(tokens, labels=tokens, use_cache=False).loss


def _measure(
    label: str,
    sizes: Sizes,
    batches: list[Tensor],
    strategy: Strategy | None = None,
    prepare: Callable[[nn.Module], object] = lambda model: None,
    loss_of: LossOf = _own_loss,
) -> dict[str, Any]:
    """Train a fresh model for some steps, timed; then meter two more, without an update."""
    model = sizes.build()
    prepare(model)
    *batches, last = batches
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    seconds: list[float] = []
    with _applied(model, strategy):
        torch.manual_seed(SEED + 1)
        for batch in batches:
            begin = time.perf_counter()
            optimizer.zero_grad()
            loss = loss_of(model, batch)
            loss.backward()
            optimizer.step()
            last_loss = loss.item()  # a GPU answers only when it is done
            seconds.append(time.perf_counter() - begin)
            del loss
        optimizer.zero_grad()
        trace, held = _metered(model, optimizer, last, loss_of)
        again, _ = _metered(model, optimizer, last, loss_of)  # gradients are there now
    return {
        "variant": label,
        "step_seconds": statistics.median(seconds),
        "step_seconds_min": min(seconds),
        "step_seconds_max": max(seconds),
        "live_bytes": held,
        "peak_bytes": trace.peak_bytes - trace.start_bytes,
        "peak_at": str(trace.peak_at),
        "peak_bytes_gradients_kept": again.peak_bytes - again.start_bytes,
        "peak_at_gradients_kept": str(again.peak_at),
        "last_loss": last_loss,
    }


def _metered(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Tensor, loss_of: LossOf) -> tuple[Trace, int]:
    """The trace of one forward and backward, and the bytes that are alive between the two beyond those before."""
    with MemoryMeter(model, optimizer) as meter:
        before = meter.live_bytes
        loss = loss_of(model, batch)
        held = meter.live_bytes - before
        loss.backward()
    return meter.trace, held


@contextmanager
def _applied(model: nn.Module, strategy: Strategy | None) -> Iterator[None]:
    if strategy is None:
        yield
        return
    with apply(model, strategy):
        yield
