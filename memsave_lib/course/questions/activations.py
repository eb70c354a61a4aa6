"""The predictions of notebook 01: what a block keeps, and how much meets at the loss."""

from __future__ import annotations

from memsave_lib.course.predictions import Question


def block_saves() -> Question:
    """How many hidden states one block with fused attention keeps for backward."""
    # Sixteen and crumbs, at every size.
    return Question(
        "hidden states that a block saves",
        {
            "That is the input alone, all that a checkpoint would keep: go through the operations, and look up "
            "in the table of section 1 what each of them keeps.": 1,
            "You counted the two wide tensors as one hidden state each; GELU's input and the input of the projection "
            "behind it are four hidden states wide.": 10,
            "Four are missing. Perhaps one of the two wide tensors: GELU keeps its input, and the projection behind it "
            "keeps GELU's output, each four hidden states wide. Or what attention keeps: queries, keys, values and its "
            "output.": 12,
            "Three are missing. Perhaps queries, keys and values: fused attention keeps all three.": 13,
            "Two are missing. Perhaps you counted queries, keys and values, which are three, as one hidden state, or "
            "left out the inputs of both LayerNorms.": 14,
            "You are one short: each LayerNorm keeps its input, and the projection behind each keeps its own.": 15,
            "You are one too high. The output of attention is also the input of the projection behind it, one storage; "
            "and the block's own output belongs to whoever reads it next.": 17,
            "You are two too high. Perhaps you counted the two additions: they keep nothing.": 18,
            "That is Hugging Face's GPT-2: it writes GELU as single operations, which keep twelve more; here it is "
            "one operation.": 28,
            "Those are bytes: papers count 34sbh a block at 2 bytes an element with dropout, of which 24 are what "
            "several GPUs may share. Count tensors, in hidden states.": 24,
            "You counted bytes at 2 an element. The question is about hidden states, whatever their type.": 32,
            "That is Korthikanti's 34sbh: bytes at 2 an element, with 2sbh for masks of dropout. Take these away and "
            "halve the rest.": 34,
            "64sbh are bytes; a hidden state of float32 has 4sbh of them.": 64,
        },
        "Add up the inputs: of two LayerNorms, of four projections, of GELU, and what attention keeps; one storage "
        "counts once.",
    )


def logits_at_the_loss() -> Question:
    """How many tensors of the logits' size are alive when the loss runs backward and ``out`` holds the logits."""
    return Question(
        "tensors of the logits' size at the loss",
        {
            "Those are the logits alone: the loss saves their log-probabilities for backward, and backward makes a "
            "gradient of either.": 1,
            "Two are missing: logits and log-probabilities are there, and backward makes a gradient of either.": 2,
            "One is missing. Is it the logits themselves? Backward does not need them, but out holds them.": 3,
            "One too many: backward makes probabilities from the log-probabilities, and never keeps them beside its "
            "result.": 5,
            "Those are the bytes for each number of the logits: four tensors of 4 bytes an element.": 16,
        },
        "Follow the logits through log_softmax, and back again: what is there on either side of it, in forward and in "
        "backward?",
        within=0.05,
    )
