"""What notebook 07 asks: what sharing the weights out does to activations, and how often weights are gathered."""

from __future__ import annotations

from memsave_lib.course.env import Setup
from memsave_lib.course.predictions import Question


def times_fewer_saved() -> Question:
    """Saved bytes of a rank under DDP, in units of those of a rank under FSDP2; two ranks."""
    return Question(
        name="times fewer saved bytes under FSDP2",
        mistakes={
            "You share activations out as well. FSDP2 shares out weights and what belongs to them; activations belong "
            "to a rank's own sequences, which nobody else computes.": 2.0,
            "There are four things to share out, and activations are none of them: parameters, gradients and Adam's "
            "two averages.": 4.0,
            "You expect twice as many bytes. The whole weights that a rank gathers for a block are no activations, and "
            "it lets go of them when the block has run.": 0.5,
            "0 would mean that a rank under DDP saves nothing. Asked is a ratio: 1 if nothing changes.": 0.0,
        },
        hint="Which sequences does a rank compute, and has that changed?",
    )


def all_gathers(here: Setup) -> Question:
    """All-gathers of one step of a stack under FSDP2 with every block checkpointed."""
    blocks = here.n_layers
    return Question(
        name="all-gathers of a checkpointed step",
        mistakes={
            "Three for each block: forward, recomputation, backward? Perhaps. But backward has just gathered a block "
            "when it runs it again. Or you count reduce-scatters, which are not asked for.": 3 * blocks,
            "One for each block is forward alone. The whole weights are let go there, and backward wants them again.": (
                blocks
            ),
            "An all-gather is one operation that both ranks do together. You count it once for each rank.": 4 * blocks,
            "You gather each of a block's 12 tensors by itself. They travel together, as one.": 24 * blocks,
        },
        hint="For each block: when does a rank need its whole weights, and when does it let go of them?",
        within=0.001,
    )
