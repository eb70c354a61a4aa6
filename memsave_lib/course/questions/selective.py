"""What notebook 03 asks for: the share of a block that is free to make again, and that of GPT-3's attention core."""

from __future__ import annotations

from memsave_lib.course.env import Setup
from memsave_lib.course.predictions import Question
from memsave_lib.formulas import BlockShape, block_saved_bytes

#: Tokens, width and heads of GPT-3, as section 4 of the notebook gives them.
GPT3 = (2048, 12288, 96)


def free_share(here: Setup) -> Question:
    """Per cent of a block's saved bytes behind no matrix product."""
    # Both LayerNorms' outputs and GELU's: six of sixteen hidden states.
    shape = BlockShape(here.batch_size, here.seq_len, here.hidden, here.heads)
    units = 100 * shape.checkpoint_bytes / block_saved_bytes(shape)
    return Question(
        name="per cent of a block that is nearly free",
        mistakes={
            "You left out the LayerNorms: each has an output, one hidden state wide.": 4 * units,
            "You left out GELU: its output is four hidden states wide.": 2 * units,
            "You counted one LayerNorm; a block has two.": 5 * units,
            "You counted GELU's output as one hidden state wide. It is four.": 3 * units,
            "Four hidden states too many. Perhaps GELU's input: it comes from a matrix product, the up-projection.": (
                10 * units
            ),
            "One hidden state too many. Perhaps the second LayerNorm's input, which lies behind the attention's "
            "projection, or attention's output, which is a matrix product's.": 7 * units,
            "These are units of one hidden state; asked are per cent of the block's sixteen.": 6.0,
            "This is the share as a fraction; asked are per cent.": 0.06 * units,
        },
        hint="Go through the block's sixteen hidden states. Which of them come out of a LayerNorm or a GELU?",
    )


def core_share() -> Question:
    """Per cent of the saved bytes of GPT-3's block that its attention core keeps, with the scores written out."""
    seq_len, hidden, heads = GPT3
    return Question(
        name="per cent of GPT-3's block in its core",
        mistakes={
            "This is the share of all the rest; the core is what is left to 100.": _share(
                34, 5 * heads * seq_len / hidden
            ),
            "You forgot the heads: each of the 96 has a matrix of its own.": _share(5 * seq_len / hidden, 34),
            "You put 5 against 34. Divide both by sbh: 5as²b/sbh is 5as/h, which is 80.": _share(5, 34),
            "This is the core relative to the rest: 5as/h against 34. Asked is its share of both together.": (
                100 * 5 * heads * seq_len / hidden / 34
            ),
            "This is the core relative to the rest, not in per cent: 80/34. Asked is its share of both together, times "
            "100.": 5 * heads * seq_len / hidden / 34,
            "You counted the scores once, 2 bytes each; the mask takes 1 more, the weights after dropout 2.": (
                _share(2 * heads * seq_len / hidden, 34)
            ),
            "This is the share as a fraction; asked are per cent.": _share(5 * heads * seq_len / hidden, 34) / 100,
        },
        hint="Divide 5as²b and 34sbh by sbh: that leaves 5as/h and 34. Put the numbers in.",
    )


def _share(part: float, rest: float) -> float:
    return 100 * part / (part + rest)
