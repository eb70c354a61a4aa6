"""What notebook 02 asks for: the price of checkpointing, and the tokens from which on it lowers the peak."""

from __future__ import annotations

from memsave_lib.course.env import Setup
from memsave_lib.course.predictions import Question, apart_from


def flops_ratio(here: Setup) -> Question:
    """FLOPs of a step with every block checkpointed, relative to one that keeps all.

    Matrix products with weights are asked for. On a GPU the counter sees fused attention too, so what it finds is a
    little more.
    """
    # In units of sbh*h a block's forward takes 24 in its projections, 8 of them in the last.
    forward, down = 24, 8
    step = 3 * forward
    answer = 1 + (forward - down) / step
    found = answer
    if here.device.type == "cuda":
        # Two products of 2*s a token and channel in forward, five in backward.
        core = 4 * here.seq_len / here.hidden
        found = 1 + (forward - down + core) / (step + 3.5 * core)
    within = 0.015
    mistakes = {
        "You run each block again to its end. PyTorch stops at the last tensor that backward needs: which product "
        "lies behind that?": 1 + forward / step,
        "You leave out one of four matrix products as if they were equal. The down-projection has 8h² of 24h².": (
            1 + 0.75 * forward / step
        ),
        "This is one forward of three, as if it ran to its end, and it comes on top; asked is the whole step, relative "
        "to one that keeps all.": forward / step,
        "This is the price relative to backward. A step has a forward, too: three forwards together.": (
            1 + forward / (step - forward)
        ),
        "You run whole steps twice. Only forward runs again; backward, twice as expensive, runs once.": 2.0,
        "This is what comes on top; asked is the whole step, relative to one that keeps all.": (forward - down) / step,
        "Forward and backward run as before, but each block runs once more in between.": 1.0,
    }
    return Question(
        name="FLOPs of full checkpointing, times",
        mistakes=apart_from(found, within, mistakes),
        hint="Count forwards: keep-all takes three, one of them forward, two backward. What runs again, and how far?",
        within=within,
        answer=answer,
    )


def line_at(here: Setup) -> int:
    """Where the figure of section 5 draws its line: the answer to :func:`moving_tokens`, biases left out."""
    return 3 * here.hidden // 4


def moving_tokens(here: Setup) -> Question:
    """Tokens in a step at which a block's saved activations take as many bytes as its gradients."""
    hidden, batch = here.hidden, here.batch_size
    mistakes = {
        "You took a block's activations for as large as 12 hidden states. It saves sixteen.": float(hidden),
        "Upside down: activations are 16sbh numbers, gradients 12h². Solve 16sbh = 12h² for s·b.": 4 * hidden / 3,
        "You count a checkpoint instead of a block: keep-all holds sixteen hidden states a block.": 12.0 * hidden,
        "You count parameters as well. They are there with either strategy, from the start.": 1.5 * hidden,
        "This is the number in units of h: multiply it by the width.": 0.75,
        "There is an h too many: 12h² divided by 16h leaves one.": 0.75 * hidden**2,
        "The 4 bytes of an element stand on the side of the activations alone: they are on both, and cancel.": (
            0.1875 * hidden
        ),
        "The 4 bytes of an element stand on the side of the gradients alone: they are on both, and cancel.": 3.0
        * hidden,
    }
    if batch > 1:
        mistakes |= {
            "This is the length of one sequence; asked are the tokens of a whole step, s·b.": 0.75 * hidden / batch
        }
    return Question(
        name="tokens from which the peak falls",
        mistakes=mistakes,
        hint="Write both as numbers a block, 16sbh and 12h², set them equal, and solve for s·b.",
        within=0.03,
    )
