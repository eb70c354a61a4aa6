"""What notebook 04 asks: how many chunks."""

from __future__ import annotations

from memsave_lib.course.env import Setup
from memsave_lib.course.predictions import Question
from memsave_lib.formulas import BlockShape, block_saved_bytes, stack_peak_bytes
from memsave_lib.strategies import Chunked

BLOCKS = 12


def best_of_twelve(here: Setup) -> Question:
    """The number of chunks with the lowest peak, for twelve blocks of the learner's sizes."""
    shape = _shape(here)
    ratio = block_saved_bytes(shape) / shape.checkpoint_bytes
    return Question(
        "chunks with the lowest peak, for 12 blocks",
        {
            "√12 is 3.5, which is right where a block saves no more than its input. A block saves sixteen times as "
            "much: chunks should be smaller than that.": 3,
            f"Four chunks: √12, rounded up. They save 8 of 12 checkpoints, and backward brings back {_live(4, ratio)}: "
            "the block is what weighs.": 4,
            f"You halve the checkpoints, and for 6 fewer of these backward brings back {_live(6, ratio)}.": 6,
            f"Two chunks are few checkpoints, and half of the stack comes back at once: {_live(2, ratio)}.": 2,
            f"One chunk keeps one checkpoint, and then brings the whole stack back at once: {_live(1, ratio)}. That is "
            "the peak of keeping all.": 1,
            "√(12·16) is 13.9, the best number if it could be any. A chunk has one block at least.": 14,
        },
        "Write down L/m + 16m for m = 1, 2, 3, 4, 6 and 12 blocks in a chunk, and take the lowest.",
    )


def chunks_of_twelve(here: Setup) -> int:
    """The answer, by formula: of equal peaks the one with more chunks."""
    shape = _shape(here)
    peaks = {chunks: stack_peak_bytes(Chunked(chunks).plan(BLOCKS), shape) for chunks in range(BLOCKS, 0, -1)}
    return min(peaks, key=peaks.__getitem__)


def _live(chunks: int, ratio: float) -> str:
    """Saved bytes of a chunk, in words; ``ratio`` is a block's saved bytes by its input's."""
    blocks = BLOCKS // chunks
    return f"{blocks} blocks of {ratio:.0f} checkpoints each"


def _shape(here: Setup) -> BlockShape:
    return BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
