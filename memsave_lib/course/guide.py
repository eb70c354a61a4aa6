"""The page to keep: what to attack first, what to try, and which function decides it, with a model's own numbers.

kept, checkpointed = (ms.estimate(build, batch, seq_len, strategy) for strategy in (ms.KeepAll(), ms.FullCheckpoint()))
for line in advise(kept, checkpointed, Sizes(batch, seq_len, hidden), devices.T4):
    print(line)
"""

from __future__ import annotations

import html
import re
import textwrap
from dataclasses import dataclass
from typing import TYPE_CHECKING

from memsave_lib.arguments import whole_number
from memsave_lib.devices import Device
from memsave_lib.estimation import Estimate
from memsave_lib.formulas import checkpointing_moves_peak, copy_hides, element_bytes
from memsave_lib.units import human_bytes, parse_bytes

if TYPE_CHECKING:
    import pandas as pd

#: Host memory of a free Colab machine.
COLAB_HOST = "12.7 GB"
#: What stays from step to step, or piles up to the same size.
STATE = ("parameter", "gradient", "optimizer")
#: A peak that falls by less is not worth a recomputation.
WORTHWHILE = 0.1


def bottleneck(kept: Estimate, checkpointed: Estimate) -> str:
    """What to attack first: "blocks" where checkpointing lowers the peak by a tenth; else what holds most of the rest.

    Args:
        kept, checkpointed: estimates of one step under ``KeepAll()`` and ``FullCheckpoint()``.

    Returns:
        ``"blocks"``, ``"weights"`` (with gradients and optimizer state) or ``"loss"``.
    """
    if checkpointed.peak_bytes <= (1 - WORTHWHILE) * kept.peak_bytes:
        return "blocks"
    return "weights" if state_share(checkpointed) >= 0.5 else "loss"


def state_share(estimate: Estimate, names: tuple[str, ...] = STATE) -> float:
    """Which share of the peak parameters, gradients and optimizer state are."""
    return sum(estimate.at_peak.get(name, 0) for name in names) / estimate.peak_bytes


@dataclass(frozen=True)
class Sizes:
    """What the rules of thumb ask for: sequences, positions, width of the residual stream, and its type."""

    batch: int
    seq_len: int
    hidden: int
    dtype: str = "float32"

    def __post_init__(self) -> None:
        for name in ("batch", "seq_len", "hidden"):
            whole_number(name, getattr(self, name))
        element_bytes(self.dtype)

    @property
    def elements(self) -> int:
        return self.batch * self.seq_len * self.hidden


@dataclass(frozen=True)
class Advice:
    """One line of the page: what to do and why, and which function says so."""

    text: str
    decided_by: str

    def __str__(self) -> str:
        return textwrap.fill(f"{self.text} [{self.decided_by}]", 100, initial_indent="- ", subsequent_indent="  ")


def advise(
    kept: Estimate, checkpointed: Estimate, sizes: Sizes, device: Device, host: int | str = COLAB_HOST
) -> tuple[Advice, ...]:
    """The lines of the guide that apply to one model, with its numbers.

    Args:
        kept, checkpointed: estimates of one step under ``KeepAll()`` and ``FullCheckpoint()``.
        sizes: of that step.
        device: with FLOPs and a link to the host.
        host: memory for what is sent away.

    Raises:
        ValueError: ``checkpointed`` is not an estimate under ``FullCheckpoint()``.
    """
    blocks = checkpointed.report.blocks_recomputed if checkpointed.report else 0
    if not blocks or kept.report and kept.report.blocks_recomputed:
        raise ValueError(
            f"advise wants estimates under KeepAll() and FullCheckpoint(), got {kept.strategy} and "
            f"{checkpointed.strategy}"
        )
    lines = [_bother(sizes), _first(kept, checkpointed)]
    if bottleneck(kept, checkpointed) == "blocks":
        inputs = element_bytes(sizes.dtype) * sizes.elements
        block = (kept.saved_bytes - checkpointed.saved_bytes) // blocks + inputs
        lines += [_next(checkpointed), _hides(sizes, block, device), _host(block, inputs, blocks, parse_bytes(host))]
    return tuple(lines)


def _bother(sizes: Sizes) -> Advice:
    tokens, limit = sizes.batch * sizes.seq_len, 0.75 * sizes.hidden
    if checkpointing_moves_peak(sizes.seq_len, sizes.batch, sizes.hidden):
        text = f"s*b = {tokens:,} is above 0.75h = {limit:,.0f}: a GPT's blocks save more than their gradients take."
    else:
        text = f"s*b = {tokens:,} is not above 0.75h = {limit:,.0f}: gradients hold the peak, leave the blocks alone."
    return Advice(text, "formulas.checkpointing_moves_peak")


def _first(kept: Estimate, checkpointed: Estimate) -> Advice:
    fall = f"checkpoints move the peak from {human_bytes(kept.peak_bytes)} to {human_bytes(checkpointed.peak_bytes)}"
    answer = bottleneck(kept, checkpointed)
    if answer == "blocks":
        return Advice(f"Attack the blocks: {fall}. Between the two, set a budget.", "ms.estimate, ms.fit")
    if answer == "weights":
        share = f"{state_share(checkpointed):.0%} of it are weights, gradients and optimizer state"
        return Advice(f"Attack the weights: {fall}, and {share}.", "ms.estimate(...).at_peak")
    text = f"Attack the loss: {fall}, in {checkpointed.peak_at}. Fewer tokens a step, or the loss in pieces."
    return Advice(text, "ms.estimate(...).peak_at")


def _next(checkpointed: Estimate) -> Advice:
    name = max(checkpointed.at_peak, key=checkpointed.at_peak.get)
    size = human_bytes(checkpointed.at_peak[name])
    text = f"With checkpoints the peak is in {checkpointed.peak_at}; its largest part is {name}, {size}: that is next."
    return Advice(text, "ms.estimate(...).peak_at")


def _hides(sizes: Sizes, block: int, device: Device) -> Advice:
    flops, link = device.need("flops"), device.need("copy_out")
    gammas = {"block inputs": element_bytes(sizes.dtype), "everything": block / sizes.elements}
    said = [
        f"{what} {'hides' if copy_hides(sizes.seq_len, sizes.hidden, gamma, flops, link) else 'does not hide'} "
        f"(from {gamma * flops / link:,.0f} on)"
        for what, gamma in gammas.items()
    ]
    left = 24 * sizes.hidden + 2 * sizes.seq_len
    text = f"Sent away, on {device.name}, with 24h + κs = {left:,}: {', '.join(said)}."
    return Advice(
        text.replace("inputs hides", "inputs hide").replace("inputs does", "inputs do"), "formulas.copy_hides"
    )


def _host(block: int, inputs: int, blocks: int, host: int) -> Advice:
    everything, checkpoints = (blocks - 1) * block, (blocks - 1) * inputs
    text = f"Sent away, everything takes {human_bytes(everything)}, checkpoints take {human_bytes(checkpoints)}"
    if everything <= host:
        text += f": both fit {human_bytes(host)} of host memory."
    elif checkpoints <= host:
        text += f": host memory of {human_bytes(host)} holds checkpoints only; for more there is the disk."
    else:
        text += f": host memory of {human_bytes(host)} holds neither; recompute in chunks, or use the disk."
    return Advice(text, "ms.estimate(..., ms.Offload()).host_peak_bytes")


@dataclass(frozen=True)
class LongTable:
    """A frame of long texts, nothing of which is cut: aligned to the left, or line by line where there is no HTML."""

    frame: pd.DataFrame

    def _repr_html_(self) -> str:
        head = "".join(_cell("th", name) for name in self.frame.columns)
        rows = ["".join(_cell("td", value) for value in row) for row in self.frame.itertuples(index=False)]
        body = "\n".join(f"<tr>{row}</tr>" for row in rows)
        return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"

    def __repr__(self) -> str:
        return "\n".join(" | ".join(map(str, row)) for row in self.frame.itertuples(index=False))


def _cell(tag: str, value: object) -> str:
    """What stands between backticks is code."""
    text = re.sub(r"`([^`]+)`", r"<code>\1</code>", html.escape(str(value), quote=False))
    return f'<{tag} style="text-align: left">{text}</{tag}>'
