"""The explainers' experiment: train GPT-2 on long text with checkpointing, with offloading, and with both.

GPT-2 has 1,024 positions; here the model is built with a position table as long as the text. Weights are random unless
the published ones are asked for (their table is then repeated): what is compared is memory, time, and whether anything
else changes.
"""

from __future__ import annotations

import math
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

import memsave_lib as ms
from memsave_lib.course.texts import batches, load_text
from memsave_lib.models import GPT2_SIZES
from memsave_lib.strategies import Strategy


@dataclass(frozen=True)
class LongTextRow:
    """One strategy: what it needed, and what it had learned."""

    label: str
    peak_bytes: int  # of the last step: parameters, gradients and optimizer state included
    peak_at: str
    host_bytes: int  # at most, sent away
    disk_bytes: int
    step_seconds: tuple[float, ...]  # of each training step, the first one included
    perplexity: float  # of text that it was not trained on, after these steps

    def figures(self) -> dict[str, Any]:
        """As a row of a record: the median of the seconds, and their spread."""
        seconds = self.step_seconds
        spread = {"step_seconds_min": min(seconds), "step_seconds_max": max(seconds)}
        return asdict(self) | {"step_seconds": statistics.median(seconds), **spread}


def long_text_strategies(store: str = "disk") -> dict[str, Strategy]:
    """The four of the experiment, by what the plots call them."""
    return {
        "keep all": ms.KeepAll(),
        "checkpointing": ms.FullCheckpoint(),
        "offloading": ms.Offload(store=store),
        "both": ms.Offload(ms.FullCheckpoint(), store=store),
    }


def long_text(
    size: str = "mini",
    seq_len: int = 1024,
    steps: int = 3,
    store: str = "disk",
    labels: Sequence[str] | None = None,
    device: str | torch.device = "cpu",
    source: str = "embedded",
    pretrained: bool = False,
) -> list[LongTextRow]:
    """Train a fresh, equal model for ``steps`` steps under each strategy.

    Args:
        size: of :func:`memsave_lib.gpt2`.
        seq_len: tokens of the one sequence in each step, and positions of the model.
        steps: AdamW steps; the last one is metered.
        store: where offloading sends tensors.
        labels: some of :func:`long_text_strategies`; default: all.
        device: where to train.
        source: of the text, as for :func:`memsave_lib.course.texts.load_text`.
        pretrained: start from the published weights (needs network).
    """
    strategies = long_text_strategies(store)
    if unknown := set(labels or ()) - strategies.keys():
        raise ValueError(f"labels are some of {', '.join(strategies)}; got {', '.join(sorted(unknown))}")
    if size not in GPT2_SIZES:
        ms.gpt2(size)  # says which sizes there are
    text, vocabulary = load_text(source).content, GPT2_SIZES[size]["vocab_size"]
    data = [b.to(device) for b in batches(text, seq_len, 1, vocab_size=vocabulary, steps=steps + 1)]
    return [_train(label, strategies[label], size, data, device, pretrained) for label in labels or tuple(strategies)]


def _train(
    label: str, strategy: Strategy, size: str, data: list[Tensor], device: str | torch.device, pretrained: bool
) -> LongTextRow:
    torch.manual_seed(0)
    model = ms.gpt2(size, n_positions=data[0].shape[1], pretrained=pretrained).to(device).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    *training, unseen = data

    def step(tokens: Tensor) -> None:
        optimizer.zero_grad(set_to_none=True)
        model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
        optimizer.step()

    seconds = []
    with ms.apply(model, strategy):
        for tokens in training[:-1]:
            seconds.append(_seconds(step, tokens))
        with ms.MemoryMeter(model, optimizer) as meter:
            seconds.append(_seconds(step, training[-1]))
    with torch.no_grad():
        loss = model(input_ids=unseen, labels=unseen, use_cache=False).loss
    trace = meter.trace
    away = (trace.host_peak_bytes, trace.disk_peak_bytes)
    return LongTextRow(label, trace.peak_bytes, str(trace.peak_at), *away, tuple(seconds), math.exp(loss.item()))


def _seconds(step: Callable[[Tensor], None], tokens: Tensor) -> float:
    begin = time.perf_counter()
    step(tokens)
    if tokens.device.type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter() - begin
