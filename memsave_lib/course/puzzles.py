"""A small stack of unequal blocks, a budget in bytes and a target in FLOPs: notebook 03's puzzle.

print(checkpoint_puzzle(here))     # what each block saves and costs to run again, and what is asked for
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import product

import torch
from torch import Tensor, nn

from memsave_lib.course.env import HEAD_SIZE, Setup
from memsave_lib.flops import profile_blocks
from memsave_lib.formulas import BlockShape, block_saved_bytes
from memsave_lib.models import TransformerBlock

KEEP, RECOMPUTE = "keep", "recompute"
#: Wider blocks teach nothing more and take longer.
_WIDEST = 128
_LARGEST_BATCH = 4
#: Width of the feed-forward layer in units of h, heads if the scores are written out and None if attention is fused.
#: With h/2 tokens a sequence the written-out scores of 16 heads take 8 hidden states, at any width.
_BLOCKS = ((4, None), (1, 16), (8, None), (2, 2), (4, 8), (1, None))


@dataclass(frozen=True)
class PuzzleBlock:
    """One block: what it is, what it saves if kept, and the FLOPs that running it again takes (with early stop)."""

    shape: BlockShape
    again_flops: int

    @property
    def saved_bytes(self) -> int:
        return block_saved_bytes(self.shape)

    @property
    def input_bytes(self) -> int:
        """What it holds even if it is recomputed."""
        return self.shape.checkpoint_bytes

    @property
    def given_back(self) -> int:
        """Bytes that recomputing it gives back."""
        return self.saved_bytes - self.input_bytes

    @property
    def bytes_per_megaflop(self) -> float:
        return self.given_back / self.again_flops * 1e6


@dataclass(frozen=True)
class Puzzle:
    """Keep or recompute each of ``blocks``: at most ``budget`` saved bytes, for at most ``target`` additional FLOPs."""

    blocks: tuple[PuzzleBlock, ...]
    budget: int
    target: int
    seed: int = 0

    def saved_bytes(self, actions: Sequence[str]) -> int:
        return sum(
            block.input_bytes if action == RECOMPUTE else block.saved_bytes
            for block, action in zip(self.blocks, actions, strict=True)
        )

    def extra_flops(self, actions: Sequence[str]) -> int:
        return sum(block.again_flops for block, action in zip(self.blocks, actions, strict=True) if action == RECOMPUTE)

    def fits(self, actions: Sequence[str]) -> bool:
        return self.saved_bytes(actions) <= self.budget

    def answers(self) -> Iterator[tuple[str, ...]]:
        """All that fit the budget and meet the target."""
        for actions in product((KEEP, RECOMPUTE), repeat=len(self.blocks)):
            if self.fits(actions) and self.extra_flops(actions) <= self.target:
                yield actions

    def stack(self) -> tuple[nn.Sequential, Tensor]:
        """The blocks, on the CPU, and an input for them; equal each time."""
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self.seed)
            return _stack_of([block.shape for block in self.blocks])

    def __str__(self) -> str:
        lines = ["block   feed-forward   attention       keeps, bytes   its input   to run again, FLOPs"]
        for number, block in enumerate(self.blocks):
            shape = block.shape
            attention = f"math, {shape.heads:>2} heads" if shape.attention == "math" else "sdpa"
            lines.append(
                f"{number:>5}   {shape.ffn_mult:>6}h wide   {attention:<14}{block.saved_bytes:>14,}"
                f"{block.input_bytes:>12,}{block.again_flops:>22,}"
            )
        whole, again = (
            sum(sizes) for sizes in zip(*((b.saved_bytes, b.again_flops) for b in self.blocks), strict=True)
        )
        lines.append(f"  all{'':<32}{whole:>14,}{'':<12}{again:>22,}")
        lines.append(f"Budget: {self.budget:,} saved bytes. Target: at most {self.target:,} additional FLOPs.")
        return "\n".join(lines)


def checkpoint_puzzle(here: Setup) -> Puzzle:
    """At the width and batch of a notebook's parameters, as far as they are small; h/2 tokens a sequence.

    The budget is two thirds of what all blocks save. The target is the fewest FLOPs for which that can be met.
    """
    hidden, batch = min(here.hidden, _WIDEST), min(here.batch_size, _LARGEST_BATCH)
    shapes = [
        BlockShape(
            batch,
            hidden // 2,
            hidden,
            heads or hidden // HEAD_SIZE,
            ffn_mult=ffn_mult,
            attention="math" if heads else "sdpa",
        )
        for ffn_mult, heads in _BLOCKS
    ]
    with torch.random.fork_rng(devices=[]):
        stack, x = _stack_of(shapes)
    costs = profile_blocks(stack, lambda: stack(x).sum().backward(), blocks=list(stack))
    blocks = tuple(
        PuzzleBlock(shape, cost.repeated(early_stop=True)) for shape, cost in zip(shapes, costs, strict=True)
    )
    unlimited = Puzzle(blocks, 2 * sum(block.saved_bytes for block in blocks) // 3, 0, here.seed)
    everything = product((KEEP, RECOMPUTE), repeat=len(blocks))
    return replace(
        unlimited, target=min(unlimited.extra_flops(actions) for actions in everything if unlimited.fits(actions))
    )


def _stack_of(shapes: Sequence[BlockShape]) -> tuple[nn.Sequential, Tensor]:
    blocks = (
        TransformerBlock(shape.hidden, shape.heads, ffn_mult=shape.ffn_mult, attention=shape.attention)
        for shape in shapes
    )
    first = shapes[0]
    # The bytes of its table are those of float32, whatever the default type is.
    x = torch.randn(first.batch, first.seq_len, first.hidden, dtype=torch.float32)
    return nn.Sequential(*blocks).to(torch.float32), x
